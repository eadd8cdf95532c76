"""What `auto` learns from the X-Stage model, and how the plan words it.

Runs when a group meets a configuration for the first time; plans are kept, so a call in steady state never comes here.
The answer follows from the request, the number of ranks and the name of the GPUs, so every rank gives the same one; in
a group of different GPUs no profile fits, and nothing is advised. The model knows plain attention of all queries to all
keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import FaA2AError
from ..xstage import CostPrediction, PlatformProfile, design_of, predict_cost, shipped_profile
from ..xstage.burst_gap import drain_us
from ..xstage.speeds import alone_us, shipped_speeds
from .request import Request

GPU = "gpu"  # key of a rank's report: name and compute capability
Reports = Sequence[Mapping[str, str | None]]


def gpu_of(device: torch.device) -> str | None:
    """As it stands in a rank's report; None on a CPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}/{major}.{minor}"


def exchange(request: Request, kernel: str, reports: Reports) -> tuple[str, str] | None:
    """'fused' or 'collective' with the reason, for a kernel that could store to its peers; None without a model of it.

    The collective is given the best it could have: its bytes at the path's full rate behind attention, and one
    publication. NCCL's all-to-all alone takes 1.4 to 3.3 times those bytes' time (4x H200, 2026-11-29).
    """
    found = _predict(request, kernel, reports)
    if found is None:
        return None
    cost, profile = found
    ready_us, publish_us = cost.ready_us, profile.publish_us
    if ready_us is None or publish_us is None:
        return None
    moved_bytes = request.batch * cost.audit.remote_tiles * cost.audit.shape.tile_bytes
    collective_us = drain_us(volume_bytes=moved_bytes, rate_gb_s=profile.rate_gb_s) + publish_us
    numbers = (
        f"X-Stage ({profile.name}, kernel design '{cost.design.name}') expects {cost.sender_us:.1f} us sender-visible "
        f"and {ready_us:.1f} us until ready of the fused exchange, {collective_us:.0f} us or more of a collective"
    )
    if ready_us <= collective_us:
        return "fused", numbers
    return "collective", f"exchange falls back to 'collective': {numbers}"


def kernel(candidates: Sequence[str], request: Request, reports: Reports) -> tuple[str, str]:
    """Of kernels that could run the fused exchange, best known first, the one that is expected to be ready first: its
    attention, from measured speeds, and what its stores cost. With the reason. The first one where the model or the
    speeds do not know all of them, or where another gains less than the speeds are known to."""
    first = candidates[0]
    expected: dict[str, float] = {}
    doubt_us = 0.0
    for name in candidates if len(candidates) > 1 else ():
        found = _predict(request, name, reports)
        if found is None or (ready_us := found[0].ready_us) is None:
            return first, ""
        cost, profile = found
        speed = shipped_speeds(profile.device).get((name, request.head_dim))
        if speed is None:
            return first, ""
        attention_us = alone_us(cost.audit.shape, cost.design, speed, profile.num_sms)
        expected[name] = attention_us + ready_us
        doubt_us = max(doubt_us, speed.scatter * attention_us)
    if not expected:
        return first, ""
    best = min(candidates, key=lambda name: expected[name])
    numbers = ", ".join(f"'{name}' {expected[name]:.1f}" for name in candidates)
    told = f"X-Stage expects attention and exchange to take {numbers} us until ready"
    if best != first and expected[first] - expected[best] <= doubt_us:
        return first, f"kernel '{first}': {told}, and knows their speeds to {doubt_us:.1f} us"
    return best, f"kernel '{best}': {told}"


def _predict(request: Request, kernel: str, reports: Reports) -> tuple[CostPrediction, PlatformProfile] | None:
    gpus = {report.get(GPU) for report in reports}
    gpu = gpus.pop() if len(gpus) == 1 else None
    if gpu is None:
        return None
    name, _, capability = gpu.rpartition("/")
    major, _, minor = capability.partition(".")
    profile, design = shipped_profile(len(reports), name), design_of(kernel, (int(major), int(minor)))
    if profile is None or design is None:
        return None
    try:
        shape = design.shape(
            batch=request.batch,
            seq_len=request.seq_len,
            num_heads=request.num_heads,
            head_dim=request.head_dim,
            num_ranks=len(reports),
            bytes_per_element=request.torch_dtype.itemsize,
            num_sms=profile.num_sms,
        )
        return predict_cost(shape, profile, design), profile
    except FaA2AError:  # a shape that the model does not know is not an error of the call
        return None
