"""Attention with the exchange after it inside: each tile goes straight into its owner's memory.

Why that is safe, and what the calls on a workspace must look like, is said in comm/workspace.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..comm.symmetric import Release
from ..comm.workspace import Workspace
from ..layout import ExchangeShape
from .kernels import Qkv, Sink
from .plan import Plan
from .trace import step


class Prepared:
    """What does not change from call to call of one plan on one workspace: views of buffers, launches."""

    def __init__(self, plan: Plan, workspace: Workspace) -> None:
        shape, dtype, rank = plan.shape, plan.request.torch_dtype, workspace.group.rank
        q, k, v = (workspace.head_sharded(name, rank, shape, dtype) for name in "qkv")
        self.qkv: Qkv = (q, k, v)
        self.sink = peer_sink(workspace, shape, dtype)
        self.out, self.lse = workspace.output(rank, shape, dtype), workspace.lse(rank, shape)
        self._plan, self._workspace = plan, workspace
        self._calls: dict[float, Callable[[], None]] = {}

    def attend(self, timeout_s: float) -> None:
        """The kernel on the workspace's own Q, K and V."""
        if timeout_s not in self._calls:
            self._calls.clear()  # a kernel that ends the call itself has the deadline among its arguments
            self._calls[timeout_s] = launcher(self._plan, self.qkv, self.sink, self.release(timeout_s))
        self._calls[timeout_s]()

    def output(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """O and LSE as new tensors: what a caller does to their shapes leaves ours alone."""
        return self.out.view_as(self.out), self.lse.view_as(self.lse) if self._plan.request.with_lse else None

    def release(self, timeout_s: float) -> Release | None:
        """For a kernel that ends the call itself; None for one that a signal follows."""
        memory = self._workspace.memory
        return memory.release(self._workspace.signals, timeout_s) if self._plan.adapter.can_release else None


def launcher(plan: Plan, qkv: Qkv, sink: Sink, release: Release | None) -> Callable[[], None]:
    """One call of the plan's kernel on fixed tensors; views and launches are made once where the adapter can."""
    request = plan.request
    prepare = getattr(plan.adapter, "launches", None)
    if prepare is None:
        return lambda: plan.adapter.fused(*qkv, request.scale, sink, request.with_lse)
    launches = prepare(*qkv, request.scale, sink, request.with_lse, release)

    def call() -> None:
        for launch in launches:
            launch()

    return call


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
    prepared = workspace.prepare(Prepared, plan)
    with step("attention", q.device):
        try:
            if q is prepared.qkv[0]:
                prepared.attend(timeout_s)
            else:
                launcher(plan, (q, k, v), prepared.sink, prepared.release(timeout_s))()
        except BaseException as error:
            workspace.poison(error)
            raise
    if not plan.adapter.can_release:
        with step("finish", q.device):
            workspace.finish(timeout_s)
    workspace.check_guards()
    return prepared.output()


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
