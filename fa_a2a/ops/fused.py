"""Attention with the exchange after it inside: each tile goes straight into its owner's memory.

Why that is safe, and what the calls on a workspace must look like, is said in comm/workspace.py.

Unequal shards take chunks of the rank that holds most, padded: rows behind a shorter shard are computed from whatever
lies there and stored to rows of O that their owner's view leaves out. Replicated text is part of every chunk: each
owner needs its output, and so its rows are computed P times, in place of a second exchange. Per layer, 24 heads of 128,
P = 2 (2x H200, 2026-11-30, in a CUDA graph): 276.7 us for 4480 tokens, 283.0 for 4481, 283.0 with 512 of 4480 as text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..comm.symmetric import Release
from ..comm.workspace import Workspace
from ..layout import ExchangeShape
from . import pieces
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
        rows = shape.rows(rank)
        self.out, self.lse = workspace.output(rank, shape, dtype)[:, :rows], workspace.lse(rank, shape)[:, :, :rows]
        self._plan, self._workspace = plan, workspace
        self._calls: dict[float, Callable[[], None]] = {}

    def attend(self, timeout_s: float) -> None:
        """The kernel on the workspace's own Q, K and V."""
        if timeout_s not in self._calls:
            self._calls.clear()  # a kernel that ends the call itself has the deadline among its arguments
            self._calls[timeout_s] = self.launcher(self.qkv, timeout_s)
        self._calls[timeout_s]()

    def launcher(self, qkv: Qkv, timeout_s: float) -> Callable[[], None]:
        return launcher(self._plan, qkv, self.sink, self.release(timeout_s), self._workspace)

    def output(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """O and LSE as new tensors: what a caller does to their shapes leaves ours alone."""
        return self.out.view_as(self.out), self.lse.view_as(self.lse) if self._plan.request.with_lse else None

    def release(self, timeout_s: float) -> Release | None:
        """For a kernel that ends the call itself; None for one that a signal follows."""
        memory = self._workspace.memory
        return memory.release(self._workspace.signals, timeout_s) if self._plan.adapter.can_release else None


def launcher(
    plan: Plan, qkv: Qkv, sink: Sink, release: Release | None, workspace: Workspace | None = None
) -> Callable[[], None]:
    """One call of the plan's kernel on fixed tensors, Q in chunk order; views and launches are made once where the
    adapter can. workspace: whose chunks they are; None for a dense call."""
    request = plan.request
    work = [pieces.Piece(pieces.ALL, pieces.ALL, pieces.ALL, plan.shape.seq_len)]
    if workspace is not None:
        work = list(pieces.cut(plan.shape, workspace.group.rank, plan.adapter, request.key_lengths))
    parts = [(piece.of(*qkv), piece.into(sink)) for piece in work]
    prepare = getattr(plan.adapter, "launches", None)
    calls: list[Callable[[], None]]
    if request.causal:
        assert workspace is not None
        spans = list(pieces.causal_spans(plan.shape, workspace.owners))
        calls = [partial(_causal_span, plan, x, to, *span) for x, to in parts for span in spans]
    elif prepare is None:
        calls = [partial(plan.adapter.fused, *x, request.scale, to, request.with_lse) for x, to in parts]
    else:
        silent = None if release is None else release._replace(flags=0)
        ends = [silent] * (len(parts) - 1) + [release]  # the last piece ends the call
        made = (prepare(*x, request.scale, to, request.with_lse, end) for (x, to), end in zip(parts, ends))
        calls = [launch for launches in made for launch in launches]

    def call() -> None:
        for launch in calls:
            launch()

    return call


def _causal_span(plan: Plan, qkv: Qkv, sink: Sink, chunk: int, rows: slice, first: int) -> None:
    """A causal call for some rows of one chunk, which begin at place `first` of the sequence."""
    q, k, v = qkv
    at = chunk * plan.shape.local_seq
    part = q[:, at + rows.start : at + rows.stop]
    target = pieces.narrowed(sink, chunk, rows)
    plan.adapter.fused(part, k, v, plan.request.scale, target, plan.request.with_lse, causal_from=first)  # type: ignore[call-arg]


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
    try:
        workspace.order_streams()
        prepared = workspace.prepare(Prepared, plan)
        with step("attention", q.device):
            if q is prepared.qkv[0]:
                prepared.attend(timeout_s)
            else:
                prepared.launcher((q, k, v), timeout_s)()
    except BaseException as error:
        workspace.poison(error)
        raise
    if not plan.adapter.can_release:
        with step("finish", q.device):
            workspace.finish(timeout_s)
    workspace.check_guards()
    workspace.end_turn()
    return prepared.output()


def peer_sink(workspace: Workspace, shape: ExchangeShape, dtype: torch.dtype) -> Sink:
    """This rank's heads in every owner's output, chunk by chunk."""
    mine = shape.head_ranges[workspace.group.rank]
    heads = slice(mine.start, mine.stop)
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
