"""The layer as one kernel call: both exchanges inside attention.

Steps of a call n, in the words of comm/workspace.py: `arrived` = n says that a rank has begun, and with which
configuration; its q, k, v arrive part by part, each with a word of its own; `ready` = n ends the call as ever. Why that
is safe stands in cute/fa4_a2a/overlap_send.py and overlap_wait.py.

The order of the keys differs from rank to rank (own first), so results equal those of the other paths up to rounding,
not bitwise; `exchange="fused"` keeps the global order. Each rank's own result is the same in every call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..comm.symmetric import Release
from ..comm.workspace import Workspace
from ..errors import UnsupportedError
from ..layout import FINGERPRINT_WORD, MAX_PARTS, PARTS_WORD, ExchangeShape, fingerprint
from . import serial
from .fused import peer_sink
from .kernels import Qkv, Sink, loadable
from .overlap_schedule import ARCH, Schedule, schedule
from .pace import slice_pace_ns
from .trace import step

if TYPE_CHECKING:
    from fa4_a2a.overlap import Geometry, OverlapForward, Send

    from .plan import Plan

SLICE_ROWS = 16  # of O that leave at a time: persistent.Build's


@lru_cache(maxsize=32)
def load(device: torch.device, dtype: str, head_dim: int, with_lse: bool) -> OverlapForward:
    """The kernel; compiles it, or takes it from the cache, before it returns."""
    from fa4_a2a.overlap import load_overlap

    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return load_overlap(head_dim, dtype, ARCH, num_sms, with_lse=with_lse)


def geometry(shape: ExchangeShape, kernel: OverlapForward, chosen: Schedule) -> Geometry:
    from fa4_a2a.overlap import Geometry

    sizes = (shape.local_seq, shape.local_heads, shape.head_dim, shape.num_ranks)
    return Geometry(*sizes, kernel.tile.keys, chosen.kv_parts, shape.itemsize)


def sends(shape: ExchangeShape, kernel: OverlapForward, chosen: Schedule) -> list[Send]:
    """What a rank sends, in order."""
    from fa4_a2a.overlap import send_order

    own = geometry(shape, kernel, chosen).own_rows > 0
    order: list[Send] = send_order(shape.num_ranks, chosen.kv_parts, chosen.queries_first, own=own)
    return order


def words(block: int, rank: int) -> tuple[int, int]:
    """Where `rank` tells the owner of a signal block that its part 0 is there, and its configuration."""
    return block + 8 * (PARTS_WORD + MAX_PARTS * rank), block + 8 * (FINGERPRINT_WORD + rank)


def attention(
    shape: ExchangeShape, kernel: OverlapForward, chosen: Schedule, qkv: Qkv, sink: Sink, scale: float, with_lse: bool
) -> tuple[Any, ...]:
    """The kernel's arguments up to num_sms. qkv: (1, S, h, D) each, Q in chunk order."""
    if len(sink.by_run) != 1:
        raise UnsupportedError("the peers' memory does not lie at equal strides; use exchange='fused'")
    ((_, o, lse),) = sink.by_run
    q, k, v = qkv
    chunks = (shape.num_ranks, shape.local_seq, shape.local_heads, shape.head_dim)
    rest = (shape.seq_len, shape.head_dim, shape.itemsize, kernel.num_sms)
    return (
        q.view(chunks),
        *(x.expand(shape.num_ranks, -1, -1, -1) for x in (k, v)),
        o[0],
        lse[0] if with_lse else None,
        scale,
        slice_pace_ns(kernel.tile.rows, *rest, SLICE_ROWS),
        chosen.own_first,
        kernel.num_sms,
    )


class Prepared:
    """What does not change from call to call of one plan on one workspace."""

    def __init__(self, plan: Plan, workspace: Workspace, chosen: Schedule | None = None) -> None:
        from fa4_a2a.overlap import OverlapPlan

        from ..comm.nvshmem import Nvshmem

        shape, request, rank, memory = plan.shape, plan.request, workspace.group.rank, workspace.memory
        assert isinstance(memory, Nvshmem)
        kernel = load(memory.device, request.dtype, shape.head_dim, request.with_lse)
        if chosen is None:
            chosen = schedule(shape, kernel.tile.rows, kernel.num_sms)
        self._launch = OverlapPlan(
            kernel,
            geometry(shape, kernel, chosen),
            sends(shape, kernel, chosen),
            workspace.owners,
            workspace.my_chunk_at,
            [[workspace.address(name, peer) for peer in range(shape.num_ranks)] for name in "qkv"],
            [words(block, rank) for block in workspace.signals.addresses],
            memory.device,
        )
        dtype = request.torch_dtype
        q, k, v = (workspace.head_sharded(name, rank, shape, dtype) for name in "qkv")
        sink = peer_sink(workspace, shape, dtype)
        self._attention = attention(shape, kernel, chosen, (q, k, v), sink, request.scale, request.with_lse)
        self._send_pace_ns = chosen.send_pace_ns
        self._fingerprint = mark(plan)
        self._workspace = workspace
        self._releases: dict[float, Release] = {}
        self.out, self.lse = workspace.output(rank, shape, dtype), workspace.lse(rank, shape)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, timeout_s: float) -> None:
        if timeout_s not in self._releases:
            self._releases.clear()
            memory = self._workspace.memory
            self._releases[timeout_s] = memory.release(self._workspace.signals, timeout_s, advance=True)
        inputs = (self._apart(loadable(q)), self._apart(loadable(k)), self._apart(loadable(v)))
        self._launch(self._attention, inputs, self._send_pace_ns, self._fingerprint, self._releases[timeout_s])

    def _apart(self, t: torch.Tensor) -> torch.Tensor:
        """A copy of what lies in the workspace, as an earlier call's output does: it is read until the kernel's end,
        and peers store their tiles there before."""
        block = self._workspace.block
        assert block is not None
        begin = block.addresses[self._workspace.group.rank]
        return t.clone() if begin <= t.data_ptr() < begin + block.nbytes else t


def mark(plan: Plan) -> int:
    """The configuration that peers compare. A call through `scatter_heads` with the same arguments is another one."""
    return fingerprint(f"overlapped {plan.fingerprint}")


def attend(qkv: Qkv, plan: Plan, workspace: Workspace, timeout_s: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The whole layer on q, k, v (1, s, H, D). O (1, s, H, D) and LSE (1, H, s) are views of the workspace, valid until
    the next call on it. The workspace has been checked."""
    workspace.take_turn("scatter")
    try:
        workspace.order_streams()
        prepared = workspace.prepare(Prepared, plan)
        with step("layer", qkv[0].device):
            workspace.poison_output()
            workspace.take_turn("attention")
            prepared(*qkv, timeout_s)
    except BaseException as error:
        workspace.poison(error)
        raise
    workspace.check_guards()
    workspace.end_turn()
    return prepared.out.view_as(prepared.out), prepared.lse.view_as(prepared.lse) if plan.request.with_lse else None


def serial_form(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, workspace: Workspace
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same layer by collectives and the plan's kernel, with the keys in the order of the overlapped one: bitwise
    what it computes. For checks."""
    group = workspace.group
    whole = serial.scatter(q, k, v, group)
    order = workspace.owners[::-1]
    k, v = (torch.cat([x.chunk(group.size, dim=1)[owner] for owner in order], dim=1) for x in whole[1:])
    return serial.attend(whole[0], k, v, plan, group)
