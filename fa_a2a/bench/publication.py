"""The part of `fa-a2a calibrate` that runs attention: its speed, and what telling the peers that a call is done costs.

All stores are local, so nothing of the exchange is in these times. Three methods, us per call, all rounds recorded:
  alone      attention, back to back
  inside     attention whose last block publishes and waits for every peer, call by call
  boundary   attention, then a small kernel that does so
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.group import resolve
from ..errors import ProfileError
from ..ops import fused, kernels, serial
from ..ops.functional import HeadShards
from ..xstage import design
from ..xstage.speeds import PROFILE_HEAD_DIM
from . import record
from .sweep import Case, inputs
from .timing import Method, interleaved, meet

KIND = "publication"
SEQ_LENS = (4608, 8192)  # two: the publication must not depend on it
LOCAL_HEADS, HEAD_DIM, CALLS = 6, PROFILE_HEAD_DIM, 20
METHODS = ("alone", "inside", "boundary")


def body(device: torch.device, rounds: int, out: Path) -> None:
    """What each rank runs, a process for itself. Rank 0 appends the lines. Nothing where the fused kernel does not run
    or does not publish itself: the profile then keeps what it takes over."""
    group = resolve(None)
    if kernels.problem("fa4", device, torch.bfloat16, HEAD_DIM, False) is not None:
        return
    for seq_len in SEQ_LENS:
        heads = LOCAL_HEADS * group.size
        case = Case(seq_len, heads, HEAD_DIM, batch=1, dtype="bfloat16", kernel="fa4", rounds=rounds)
        times = _measure(case, device)
        if times is not None and dist.get_rank() == 0:
            fields = {"seq_len": seq_len, "num_heads": heads, "head_dim": HEAD_DIM, "batch": 1, "dtype": case.dtype}
            found = {f"{name}_us": [round(us, 3) for us in times[name]] for name in METHODS}
            record.append(out, [record.environment(KIND, device, group.size) | fields | found])


def _measure(case: Case, device: torch.device) -> dict[str, list[float]] | None:
    group = resolve(None)
    q, k, v = serial.scatter(*inputs(case, group, device), group)
    shards = HeadShards.from_tensors(q, k, v, kernel=case.kernel, exchange="fused")
    plan, workspace = shards._plan, group.workspace
    assert workspace is not None
    if not plan.adapter.can_release:
        return None
    memory, signals = workspace.memory, workspace.signals
    local, qkv = fused.local_sink(plan.shape, q.dtype, device), (shards._q, shards._k, shards._v)
    alone = fused.launcher(plan, qkv, local, memory.release(signals, 30.0, silent=True))
    inside = fused.launcher(plan, qkv, local, memory.release(signals, 30.0, advance=True))
    barrier = partial(meet, memory, signals)

    def boundary() -> None:
        alone()
        barrier()

    calls: dict[str, Callable[[], None]] = {"alone": alone, "inside": inside, "boundary": boundary}
    methods = {name: Method(call) for name, call in calls.items()}
    return interleaved(methods, rounds=case.rounds, calls=CALLS, device=device, align=barrier)


def _rounds(line: Mapping[str, Any], name: str) -> list[float]:
    values = line.get(f"{name}_us")
    good = isinstance(values, list) and values and all(isinstance(x, (int, float)) and x > 0 for x in values)
    if not good or len(values) != len(line.get("alone_us", ())):  # type: ignore[arg-type]
        rule = f"a line of kind {KIND!r} must hold {', '.join(f'{m}_us' for m in METHODS)}, one positive time a round"
        raise ProfileError(f"calibration samples: {rule}; got {name}_us = {values!r}; calibrate again")
    return list(map(float, values))  # type: ignore[arg-type]


def found(lines: Iterable[Mapping[str, Any]], device: str, num_ranks: int, num_sms: int) -> dict[str, float]:
    """publish_us, publish_inside_us and attention's tflops from this machine's newest lines; empty without any.

    Publication: what a round's calls take longer, median over rounds and lengths. tflops: waves of full tiles over the
    time, as the model counts them, median over lengths.
    """
    newest = {
        line["seq_len"]: line
        for line in lines
        if line.get("kind") == KIND and (line["device"], line["world_size"]) == (device, num_ranks)
    }
    if not newest:
        return {}
    differences: dict[str, list[float]] = {"inside": [], "boundary": []}
    speeds = []
    for line in newest.values():
        alone = _rounds(line, "alone")
        for name, values in differences.items():
            values += [us - base for us, base in zip(_rounds(line, name), alone, strict=True)]
        shape = design("persistent").shape(
            num_ranks=num_ranks, **{name: line[name] for name in ("batch", "seq_len", "num_heads", "head_dim")}
        )
        waves = -(-shape.chunk_tiles * num_ranks // num_sms)
        flops = 4 * shape.tile_rows * shape.key_tiles * shape.key_tile * shape.head_dim * num_sms * waves
        speeds.append(flops / statistics.median(alone) / 1e6)
    return {
        "publish_us": round(max(0.0, statistics.median(differences["boundary"])), 2),
        "publish_inside_us": round(max(0.0, statistics.median(differences["inside"])), 2),
        "tflops": round(statistics.median(speeds), 1),
    }
