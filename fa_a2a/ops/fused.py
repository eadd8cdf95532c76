"""The fused path: stores into the peers' buffers instead of collectives. See comm/workspace.py for why it is safe."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..comm.workspace import Workspace
from ..layout import ExchangeShape
from .kernels import Qkv, Sink
from .plan import Plan
from .trace import step


class Prepared:
    """What does not change from call to call of one plan on one workspace: views of the peers' buffers, launches."""

    def __init__(self, plan: Plan, workspace: Workspace) -> None:
        shape, dtype, rank = plan.shape, plan.request.torch_dtype, workspace.group.rank
        q, k, v = (workspace.head_sharded(name, rank, shape, dtype) for name in "qkv")
        self.qkv: Qkv = (q, k, v)
        self.sink = peer_sink(workspace, shape, dtype)
        self.out, self.lse = workspace.output(rank, shape, dtype), workspace.lse(rank, shape)
        self.stores = [
            (index, heads, there)
            for index in range(3)
            for heads, there in _slices(workspace, "qkv"[index], shape, dtype)
        ]
        self.attend = launcher(plan, self.qkv, self.sink)

    @classmethod
    def of(cls, plan: Plan, workspace: Workspace) -> Prepared:
        found: Prepared | None = workspace.prepared.get(plan.fingerprint)
        if found is None:
            with torch.inference_mode(False):
                found = cls(plan, workspace)
            while len(workspace.prepared) >= _MAX_PREPARED:
                workspace.prepared.pop(next(iter(workspace.prepared)))
            workspace.prepared[plan.fingerprint] = found
        return found


_MAX_PREPARED = 64


def launcher(plan: Plan, qkv: Qkv, sink: Sink) -> Callable[[], None]:
    """One call of the plan's kernel on fixed tensors; views and launches are made once where the adapter can."""
    request = plan.request
    prepare = getattr(plan.adapter, "launches", None)
    if prepare is None:
        return lambda: plan.adapter.fused(*qkv, request.scale, sink, request.with_lse)
    launches = prepare(*qkv, request.scale, sink, request.with_lse)

    def call() -> None:
        for launch in launches:
            launch()

    return call


def _slices(
    workspace: Workspace, name: str, shape: ExchangeShape, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(heads of the sender, where they go) for each peer."""
    for peer in workspace.owners:
        at = workspace.my_chunk_at[peer] if name == "q" else workspace.group.rank
        rows = slice(at * shape.local_seq, (at + 1) * shape.local_seq)
        heads = slice(peer * shape.local_heads, (peer + 1) * shape.local_heads)
        yield heads, workspace.head_sharded(name, peer, shape, dtype)[:, rows]


def scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, workspace: Workspace, timeout_s: float
) -> Qkv:
    """Stores each head slice of q, k, v (B, s, H, D) into its owner's buffers, and waits for the peers' slices.

    Returns this rank's Q, K, V (B, S, h, D), views of the workspace; Q's rows are in chunk order, so that the attention
    kernel finds each owner's queries where its strides put them.
    """
    workspace.take_turn("scatter")
    workspace.order_streams()
    prepared = Prepared.of(plan, workspace)
    with step("scatter_heads", q.device):
        tensors = (q, k, v)
        for index, heads, there in prepared.stores:
            _store(there, tensors[index][:, :, heads])
        workspace.poison_output()
        workspace.announce(plan.fingerprint, timeout_s)
    return prepared.qkv


def announce(plan: Plan, workspace: Workspace, timeout_s: float) -> None:
    """Opens a call whose q, k, v did not come through `scatter`: the peers' outputs may be written after it."""
    workspace.take_turn("scatter")
    workspace.order_streams()
    workspace.poison_output()
    workspace.announce(plan.fingerprint, timeout_s)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, workspace: Workspace, timeout_s: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over (B, S, h, D), Q in chunk order, each tile stored to its owner as it is done; returns when (on
    GPUs: the stream goes on when) every peer's tiles are here.

    O (B, s, H, D) and LSE (B, H, s) are views of the workspace, valid until the next call on it.
    """
    workspace.take_turn("attention")
    workspace.order_streams()
    prepared, request = Prepared.of(plan, workspace), plan.request
    try:
        with step("attention", q.device):
            if q is prepared.qkv[0]:
                prepared.attend()
            else:
                plan.adapter.fused(q, k, v, request.scale, prepared.sink, request.with_lse)
    except Exception as error:
        workspace.group.poisoned = f"attention failed: {error}"
        raise
    with step("finish", q.device):
        workspace.finish(timeout_s)
    workspace.check_guards()
    return prepared.out.view_as(prepared.out), prepared.lse.view_as(prepared.lse) if request.with_lse else None


def peer_sink(workspace: Workspace, shape: ExchangeShape, dtype: torch.dtype) -> Sink:
    """This rank's heads in every owner's output, chunk by chunk."""
    heads = slice(workspace.group.rank * shape.local_heads, (workspace.group.rank + 1) * shape.local_heads)
    return Sink(
        tuple(workspace.output(owner, shape, dtype)[:, :, heads] for owner in workspace.owners),
        tuple(workspace.lse(owner, shape)[:, heads] for owner in workspace.owners),
    )


def local_sink(shape: ExchangeShape, dtype: torch.dtype, device: torch.device) -> Sink:
    """The same views over local memory: what the kernel costs when no store leaves the GPU."""
    o = torch.empty(
        shape.num_ranks, shape.batch, shape.local_seq, shape.num_heads, shape.head_dim, dtype=dtype, device=device
    )
    lse = torch.empty(shape.num_ranks, shape.batch, shape.num_heads, shape.local_seq, device=device)
    heads = slice(0, shape.local_heads)
    return Sink(tuple(x[:, :, heads] for x in o), tuple(x[:, heads] for x in lse))


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
