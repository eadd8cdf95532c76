"""What the X-Stage model expects of a sweep's rows, written down before anything is measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import FaA2AError
from ..xstage import (
    KernelDesign,
    PlatformProfile,
    design,
    design_of,
    load_profile,
    predict_cost,
    profile_hash,
    shipped_profile,
)
from ..xstage.attention_run import simulate_attention
from .record import append, device_name, environment

if TYPE_CHECKING:
    from .sweep import Case

KIND = "prediction"
PREVIEW_DESIGNS = ("stock", "persistent")
PREVIEW_LENGTHS = (4608, 8192, 16384, 32768)
PREVIEW_HEADS = 24


def profile_for(asked: str | None, num_ranks: int, device: str | None) -> PlatformProfile | str:
    """The profile asked for, or the shipped one of this device and number of ranks; in words why there is none."""
    if asked is None:
        found = shipped_profile(num_ranks, device)
        return found or f"no profile of {device or 'a GPU'} x {num_ranks} is shipped; make one with fa-a2a calibrate"
    try:
        profile = load_profile(asked)
        profile.check_fits(num_ranks=num_ranks, device=device)
    except FaA2AError as error:
        return str(error)
    return profile


def predict(case: Case, num_ranks: int, device: torch.device, measured_with: int | None = None) -> dict[str, Any]:
    """The row's fields of prediction: costs in us, term by term (one launch each), the profile and its hash, the time.
    measured_with: GPUs that measure, if not as many as ranks; the profile is then theirs, as the links are.
    Without a profile that fits, or a kernel that the model knows: None each, and why in `prediction_note`. CPU
    processes: nothing, as a profile is of GPUs."""
    empty: dict[str, Any] = {"predicted_sender_us": None, "predicted_ready_us": None}
    if device.type != "cuda":
        return empty
    chosen = design_of(case.kernel, torch.cuda.get_device_capability(device))
    if chosen is None:
        return empty | {"prediction_note": f"the model does not know kernel {case.kernel!r} on this GPU"}
    profile = profile_for(case.profile, measured_with or num_ranks, device_name(device))
    if isinstance(profile, str):
        return empty | {"prediction_note": profile}
    if case.head_dim not in chosen.tiles:
        return empty | {"prediction_note": f"the model knows no tiles of kernel {case.kernel!r} for this head_dim"}
    return fields(case, num_ranks, chosen, profile)


def written_down(
    case: Case, num_ranks: int, device: torch.device, out: Path | None, measured_with: int | None = None
) -> dict[str, Any]:
    """`predict`; what it expects is a line of `out`, if there is one, before anything is measured."""
    prediction = predict(case, num_ranks, device, measured_with)
    if out is not None and prediction["predicted_sender_us"] is not None:
        line = environment(KIND, device, measured_with or num_ranks) | asdict(case) | prediction
        append(out, [line if measured_with is None else line | {"num_ranks": num_ranks}])
    return prediction


def fields(case: Case, num_ranks: int, chosen: KernelDesign, profile: PlatformProfile) -> dict[str, Any]:
    shape = chosen.shape(
        batch=case.batch,
        seq_len=case.seq_len,
        num_heads=case.num_heads,
        head_dim=case.head_dim,
        num_ranks=num_ranks,
        bytes_per_element=getattr(torch, case.dtype).itemsize,
        num_sms=profile.num_sms,
    )
    cost = predict_cost(shape, replace(profile, num_ranks=num_ranks), chosen)
    return {
        "predicted_sender_us": round(cost.sender_us, 2),
        "predicted_ready_us": None if cost.ready_us is None else round(cost.ready_us, 2),
        "predicted_terms_us": {term.name: round(term.us, 2) for term in cost.terms},
        "predicted_design": chosen.name,
        "predicted_attention": cost.audit.rate_in_words,
        "predicted_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "profile": profile.name,
        "profile_hash": profile_hash(profile),
    }


def preview(rank_counts: Iterable[int], asked: str | None = None) -> list[str]:
    """For a machine without GPUs: what the model and its simulation expect of a GPU sweep with so many ranks."""
    text = []
    for ranks in rank_counts:
        profile = profile_for(asked, ranks, None)
        if isinstance(profile, str):
            text += ["", f"X-Stage, {ranks} ranks: {profile}"]
            continue
        text += [
            "",
            f"X-Stage for {profile.device} x {ranks} (profile {profile.name}), {PREVIEW_HEADS} heads of 128, bfloat16; "
            "predicted, not measured.",
            "Cost of remote stores in us by the closed forms, and by simulation of every tile with all SMs in step:",
            "      S      kernel    sender   ready | simulated  a tile's stores wait  path holds  last byte late by",
        ]
        text += [_row(seq_len, ranks, name, profile) for seq_len in PREVIEW_LENGTHS for name in PREVIEW_DESIGNS]
    return text


def _row(seq_len: int, ranks: int, name: str, profile: PlatformProfile) -> str:
    chosen = design(name)
    shape = chosen.shape(batch=1, seq_len=seq_len, num_heads=PREVIEW_HEADS, head_dim=128, num_ranks=ranks)
    cost, run = predict_cost(shape, profile, chosen), simulate_attention(shape, profile, chosen)
    ready = "-" if cost.ready_us is None else f"{cost.ready_us:.1f}"
    held = f"{run.peak_bytes / 1024**2:.2f} MiB"
    return (
        f"{seq_len:7d}  {name:>10}  {cost.sender_us:8.1f}  {ready:>6} | {run.cost_us:9.1f}  {run.longest_wait_us:20.1f}"
        f"  {held:>10}  {run.tail_us:17.1f}"
    )
