"""The exchange before attention on the fused path: stores into the peers' Q, K and V instead of collectives."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..comm.workspace import Workspace
from . import fused
from .kernels import Qkv
from .plan import Plan
from .trace import step


class Prepared:
    """Where this rank's head slices go: (index of q, k or v, heads, rows in the peer's buffer)."""

    def __init__(self, plan: Plan, workspace: Workspace) -> None:
        self.stores = [(index, *slice_) for index in range(3) for slice_ in _slices(workspace, "qkv"[index], plan)]


def _slices(workspace: Workspace, name: str, plan: Plan) -> Iterator[tuple[slice, torch.Tensor]]:
    """(heads of the sender, where they go) for each peer."""
    shape = plan.shape
    for peer in workspace.owners:
        at = workspace.my_chunk_at[peer] if name == "q" else workspace.group.rank
        rows = slice(at * shape.local_seq, (at + 1) * shape.local_seq)
        heads = slice(peer * shape.local_heads, (peer + 1) * shape.local_heads)
        yield heads, workspace.head_sharded(name, peer, shape, plan.request.torch_dtype)[:, rows]


def scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, workspace: Workspace, timeout_s: float
) -> Qkv:
    """Stores each head slice of q, k, v (B, s, H, D) into its owner's buffers, and waits for the peers' slices.

    Returns this rank's Q, K, V (B, S, h, D), views of the workspace; Q's rows are in chunk order, so that the attention
    kernel finds each owner's queries where its strides put them.
    """
    workspace.take_turn("scatter")
    workspace.order_streams()
    prepared = workspace.prepare(Prepared, plan)
    with step("scatter_heads", q.device):
        tensors = (q, k, v)
        for index, heads, there in prepared.stores:
            _store(there, tensors[index][:, :, heads])
        workspace.poison_output()
        workspace.announce(plan.fingerprint, timeout_s)
    return workspace.prepare(fused.Prepared, plan).qkv


def _store(there: torch.Tensor, x: torch.Tensor) -> None:
    """Copies x into a peer's buffer, 16 bytes a step where both sides allow it: a copy of 2-byte elements would send
    eight times as many stores over the links."""
    wide, narrow = torch.complex128, x.dtype
    ratio = wide.itemsize // narrow.itemsize
    if all(_wide(t, ratio) for t in (there, x)):
        there, x = there.view(wide), x.view(wide)
    there.copy_(x, non_blocking=True)


def _wide(t: torch.Tensor, ratio: int) -> bool:
    return (
        t.stride(-1) == 1
        and t.shape[-1] % ratio == 0
        and t.storage_offset() % ratio == 0
        and t.data_ptr() % 16 == 0
        and all(stride % ratio == 0 for stride in t.stride()[:-1])
    )
