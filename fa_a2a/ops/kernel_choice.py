"""Which attention kernel a call takes: the one it names, or by `auto` the one that is ready first by what is known.

Every rank gives the same answer: it follows from the request and from what all ranks have reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..comm.group import Group
from ..errors import UnsupportedError
from . import advice, kernels
from .request import Request

Reports = Sequence[Mapping[str, str | None]]
BEST_KNOWN = ("fa4", "fa3")  # of the kernels that store to their peers, in the order in which `auto` prefers equals


def uncompiled_key(name: str) -> str:
    """Under which a rank reports why a kernel that can run would first have to be compiled by the minute."""
    return f"{name} uncompiled"


def choose(group: Group, request: Request, reports: Reports, device: torch.device) -> tuple[str, str]:
    """(kernel, reason). A named kernel, or the fastest that every rank can run at once."""
    if request.kernel != "auto":
        if trouble := _first(reports, request.kernel):
            raise UnsupportedError(f"{trouble}; use kernel='auto'")
        return request.kernel, ""
    if request.device == "cpu":
        return "cpu" if request.exchange != "collective" or request.with_lse else "torch", ""
    candidates = [n for n in BEST_KNOWN if not _first(reports, n) and kernels.verified(n, device)]
    late = {n: why for n in candidates if (why := _first(reports, uncompiled_key(n)))}
    ready = [n for n in candidates if n not in late]
    if ready:
        if len(candidates) > 1 and _is_fused(group, request, device):
            return _preferred(candidates, ready, late, request, reports)
        return ready[0], ""
    why = _first(reports, "fa4") or "kernel 'fa4' compiles for this GPU but has not been run on one; name it to use it"
    why = "; ".join((why, *(f"kernel '{name}' on {text}" for name, text in late.items())))
    if trouble := _first(reports, "torch"):
        raise UnsupportedError(f"no kernel runs this: {why}; {trouble}")
    return "torch", f"kernel falls back to 'torch': {why}"


def _preferred(
    candidates: Sequence[str], ready: Sequence[str], late: Mapping[str, str], request: Request, reports: Reports
) -> tuple[str, str]:
    best, reason = advice.kernel(candidates, request, reports)
    if best in late:  # a first call does not wait for it unasked
        return ready[0], f"kernel '{ready[0]}', though {reason.removeprefix('kernel ')}: on {late[best]}"
    return best, reason


def _is_fused(group: Group, request: Request, device: torch.device) -> bool:
    """Whether the call is one whose kernels can be compared by their stores: fused, and not one that 'fa4', which alone
    does so, is expected to overlap with the exchange before attention."""
    from . import overlap_schedule as overlap

    if group.size == 1 or request.exchange not in ("fused", "auto"):
        return False
    shape = request.shape(group.size)
    if not (request.is_plain and shape.is_equal):
        return False
    if request.exchange == "fused" or overlap.problem(request, group, "fa4", device) is not None:
        return True
    return overlap.loss(shape, device) is not None


def _first(reports: Reports, key: str) -> str | None:
    """What the first rank that has an objection says."""
    return next((f"rank {r}: {x[key]}" for r, x in enumerate(reports) if x[key]), None)
