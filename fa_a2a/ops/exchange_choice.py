"""Which exchange a call takes: the one it names, or by `auto` the best that kernel and machine allow.

Every rank gives the same answer: it follows from the request, from what all ranks have reported, and from what they
find out together while they make the workspace.
"""

from __future__ import annotations

import torch

from ..comm.group import Group
from ..comm.symmetric import SymmetricMemory
from ..comm.workspace import Workspace
from ..errors import UnsupportedError
from .request import Request


def choose_exchange(
    group: Group, request: Request, kernel: str, device: torch.device, timeout_s: float
) -> tuple[str, str]:
    """A named exchange, or 'fused' where kernel and machine allow it. Makes the workspace for it."""
    if group.size == 1:
        return "collective", "a group of one rank exchanges nothing"
    if request.whole_kv:
        return "collective", "k and v are whole on every rank: nothing is exchanged"
    if request.exchange == "collective":
        return "collective", ""
    if kernel == "torch":
        if request.exchange in ("fused", "overlapped"):
            raise UnsupportedError(
                "kernel 'torch' cannot store into other ranks; use exchange='collective' or another kernel"
            )
        return "collective", "exchange falls back to 'collective': kernel 'torch' cannot store into other ranks"
    try:
        if group.workspace is None or group.workspace.closed:
            group.workspace = Workspace(group, _provider(group, device, timeout_s), timeout_s)
    except UnsupportedError as error:
        if request.exchange in ("fused", "overlapped"):
            raise
        return "collective", f"exchange falls back to 'collective': {error}"
    return "fused", ""


def choose_overlap(
    group: Group, request: Request, kernel: str, exchange: str, device: torch.device
) -> tuple[bool, str]:
    """Whether the exchange before attention goes into the attention kernel, too."""
    from . import overlap_schedule as overlap

    if exchange != "fused" or request.exchange not in ("overlapped", "auto"):
        return False, ""
    if request.exchange == "auto" and device.type != "cuda":
        return False, ""
    why = overlap.problem(request, group, kernel, device)
    if request.exchange == "overlapped":
        if why:
            raise UnsupportedError(f"{why}; use exchange='fused' or 'auto'")
        return True, ""
    if why is None:
        why = overlap.loss(request.shape(group.size), device)
    return why is None, f"the exchange before attention is not overlapped: {why}" if why else ""


def _provider(group: Group, device: torch.device, timeout_s: float) -> SymmetricMemory:
    if device.type == "cuda":
        from ..comm.nvshmem import Nvshmem

        return Nvshmem(group, device, timeout_s)
    from ..comm.shared_memory import SharedMemory

    return SharedMemory(group, timeout_s)
