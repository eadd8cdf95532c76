"""The layer as one kernel call: both exchanges inside attention. Where it can run, where it pays, and the call.

Steps of a call n, in the words of comm/workspace.py: `arrived` = n says that a rank has begun, and with which
configuration; its q, k, v arrive part by part, each with a word of its own; `ready` = n ends the call as ever. Why that
is safe stands in cute/fa4_a2a/overlap_send.py and overlap_wait.py.

The order of the keys differs from rank to rank (own first), so results equal those of the other paths up to rounding,
not bitwise; `exchange="fused"` keeps the global order. Each rank's own result is the same in every call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..comm.group import Group, world
from ..comm.symmetric import Release
from ..comm.workspace import Workspace
from ..errors import UnsupportedError
from ..layout import ExchangeShape, fingerprint
from ..xstage import load_profile
from ..xstage.burst_gap import drain_us
from ..xstage.overlap import SHARE, OverlapPrediction, predict
from . import serial
from .fused import peer_sink
from .kernels import loadable
from .pace import PROFILE, slice_pace_ns
from .trace import step

if TYPE_CHECKING:
    from fa4_a2a.overlap import Geometry, OverlapForward, Send

    from .plan import Plan
    from .request import Request

MAX_RANKS = 8
HEAD_DIM = 128
_HOPPER = (9, 0)
_MOST_WAVES = 3  # of own tiles first that are tried
_ALIKE_US = 0.5


class Schedule(NamedTuple):
    """What can be chosen at run time; any choice computes the same bits.

    own_first: tiles of the own chunk before the peers'. kv_parts: groups of heads in which K and V are sent.
    queries_first: for so many ranks the queries go before all keys. send_pace_ns: pause of a sending warp behind each
    unit.
    """

    own_first: int
    kv_parts: int
    queries_first: int
    send_pace_ns: int


def problem(request: Request, group: Group, kernel: str, device: torch.device) -> str | None:
    """Why the overlapped form cannot run this, the same on every rank, or None."""
    if kernel != "fa4" or device.type != "cuda" or torch.cuda.get_device_capability(device) != _HOPPER:
        return "the overlapped exchange needs kernel 'fa4' on a GPU of compute capability 9.0"
    if request.head_sharded:
        return "the overlapped exchange takes q, k, v that are sharded over the sequence"
    if request.head_dim != HEAD_DIM or request.batch != 1:
        return f"the overlapped exchange takes batch 1 and head_dim {HEAD_DIM}"
    if group.size > MAX_RANKS or group.size != world().size:
        return f"the overlapped exchange is for the default group, of at most {MAX_RANKS} ranks"
    return None


@lru_cache(maxsize=256)
def schedule(shape: ExchangeShape, tile_rows: int, num_sms: int) -> Schedule:
    """The choice with the least exposure by the model, and with as few own tiles first as that allows: own tiles need
    no peer to begin with, but at the end they store locally while the last remote tiles drain.

    More groups of heads where fewer ranks send, so that the first tiles' keys are not behind all others.
    """
    own = shape.local_heads * -(-shape.local_seq // tile_rows)
    from fa4_a2a.overlap import whole_parts

    kv_parts = whole_parts(shape.local_heads, max(1, 8 // shape.num_ranks))
    counts = sorted({min(own, waves * num_sms) for waves in range(_MOST_WAVES + 1)} | {own})
    pace_ns, ahead = send_pace_ns(num_sms), sorted({0, 1, shape.num_ranks - 1})
    choices = [Schedule(count, kv_parts, first, pace_ns) for count in counts for first in ahead]
    exposed = [prediction(shape, tile_rows, num_sms, choice).exposed_us for choice in choices]
    return next(c for c, us in zip(choices, exposed) if us < min(exposed) + _ALIKE_US)


def send_pace_ns(num_sms: int) -> int:
    """Pause behind each unit, so that all sending warps together store at SHARE of the path's rate."""
    from fa4_a2a.overlap import BATCHES, PIECE_BYTES, SENDERS, UNROLL, WARP

    unit_bytes = WARP * PIECE_BYTES * UNROLL * BATCHES
    at_rate_us = drain_us(
        volume_bytes=num_sms * SENDERS * unit_bytes, rate_gb_s=SHARE * load_profile(PROFILE).rate_gb_s
    )
    return max(0, int(1e3 * (at_rate_us - UNIT_US)))


TILE_ROWS = 128  # of the kernel at HEAD_DIM
SLICE_ROWS = 16  # of O that leave at a time: persistent.Build's
LAUNCH_US = 5.0  # of a kernel of its own with a wait at its end
UNIT_US = 1.6  # what a unit takes without a pause: two round trips to memory


def prediction(shape: ExchangeShape, tile_rows: int, num_sms: int, chosen: Schedule) -> OverlapPrediction:
    from fa4_a2a.overlap import send_order

    profile = load_profile(PROFILE)
    tile_us = profile.attention.key_tile_us(
        tile_rows=tile_rows, key_tile=shape.seq_len, head_dim=shape.head_dim, num_sms=num_sms
    )
    return predict(
        num_ranks=shape.num_ranks,
        rows=shape.local_seq,
        heads=shape.local_heads,
        head_dim=shape.head_dim,
        tile_rows=tile_rows,
        kv_parts=chosen.kv_parts,
        sends=send_order(shape.num_ranks, chosen.kv_parts, chosen.queries_first, own=False),
        own_first=chosen.own_first,
        num_sms=num_sms,
        tile_us=tile_us,
        rate_gb_s=SHARE * profile.rate_gb_s,
        itemsize=shape.itemsize,
    )


def loss(shape: ExchangeShape, device: torch.device) -> str | None:
    """Why overlapping would not pay for this shape, by the model, or None."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    expected = prediction(shape, TILE_ROWS, num_sms, schedule(shape, TILE_ROWS, num_sms))
    before_us = expected.sends_us * SHARE + LAUNCH_US
    if expected.exposed_us < before_us:
        return None
    return f"it would show {expected.exposed_us:.0f} us of it inside attention, and {before_us:.0f} us in front"


@lru_cache(maxsize=32)
def load(device: torch.device, dtype: str, head_dim: int, with_lse: bool) -> OverlapForward:
    """The kernel; compiles it, or takes it from the cache, before it returns."""
    from fa4_a2a.overlap import load_overlap

    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return load_overlap(head_dim, dtype, "sm_90a", num_sms, with_lse=with_lse)


class Prepared:
    """What does not change from call to call of one plan on one workspace."""

    def __init__(self, plan: Plan, workspace: Workspace, chosen: Schedule | None = None) -> None:
        from fa4_a2a.overlap import Geometry, OverlapPlan, send_order

        from ..comm.nvshmem import Nvshmem

        shape, request, rank, memory = plan.shape, plan.request, workspace.group.rank, workspace.memory
        assert isinstance(memory, Nvshmem)
        kernel = load(memory.device, request.dtype, shape.head_dim, request.with_lse)
        if chosen is None:
            chosen = schedule(shape, kernel.tile.rows, kernel.num_sms)
        geometry: Geometry = Geometry(
            shape.local_seq,
            shape.local_heads,
            shape.head_dim,
            shape.num_ranks,
            kernel.tile.keys,
            chosen.kv_parts,
            shape.itemsize,
        )
        sends: list[Send] = send_order(
            shape.num_ranks, chosen.kv_parts, chosen.queries_first, own=geometry.own_rows > 0
        )
        self._launch = OverlapPlan(
            kernel,
            geometry,
            sends,
            rank,
            workspace.owners,
            workspace.my_chunk_at,
            [[workspace.address(name, peer) for peer in range(shape.num_ranks)] for name in "qkv"],
            workspace.signals.addresses,
            memory.device,
        )
        dtype = request.torch_dtype
        q, k, v = (workspace.head_sharded(name, rank, shape, dtype) for name in "qkv")
        sink = peer_sink(workspace, shape, dtype)
        if len(sink.by_run) != 1:
            raise UnsupportedError("the peers' memory does not lie at equal strides; use exchange='fused'")
        ((_, o, lse),) = sink.by_run
        chunks = (shape.num_ranks, shape.local_seq, shape.local_heads, shape.head_dim)
        pace_ns = slice_pace_ns(
            kernel.tile.rows, shape.seq_len, shape.head_dim, shape.itemsize, kernel.num_sms, SLICE_ROWS
        )
        self._attention: tuple[Any, ...] = (
            q.view(chunks),
            *(x.expand(shape.num_ranks, -1, -1, -1) for x in (k, v)),
            o[0],
            lse[0] if request.with_lse else None,
            request.scale,
            pace_ns,
            chosen.own_first,
            kernel.num_sms,
        )
        self._send_pace_ns = chosen.send_pace_ns
        self._fingerprint = mark(plan)
        self._workspace = workspace
        self._releases: dict[float, tuple[object, ...]] = {}
        self.out, self.lse = workspace.output(rank, shape, dtype), workspace.lse(rank, shape)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, timeout_s: float) -> None:
        if timeout_s not in self._releases:
            self._releases.clear()
            memory = self._workspace.memory
            self._releases[timeout_s] = _arguments(memory.release(self._workspace.signals, timeout_s, advance=True))
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


def _arguments(release: Release) -> tuple[object, ...]:
    """In the kernel's order."""
    r = release
    return r.peer_blocks, r.rank, r.num_ranks, r.flags, r.deadline_ns, r.record, r.counter


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, workspace: Workspace, timeout_s: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The whole layer on q, k, v (1, s, H, D). O (1, s, H, D) and LSE (1, H, s) are views of the workspace, valid until
    the next call on it."""
    workspace.take_turn("scatter")
    workspace.order_streams()
    prepared = workspace.prepare(Prepared, plan)
    workspace.poison_output()
    workspace.take_turn("attention")
    with step("layer", q.device):
        try:
            prepared(q, k, v, timeout_s)
        except BaseException as error:
            workspace.poison(error)
            raise
    workspace.check_guards()
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
