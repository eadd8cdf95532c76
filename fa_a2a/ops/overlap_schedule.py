"""Where the overlapped form of the layer can run, where it pays, and in which order and at which pace it goes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..comm.group import Group, world
from ..layout import ExchangeShape
from ..xstage import load_profile
from ..xstage.burst_gap import drain_us
from ..xstage.overlap import SHARE, OverlapPrediction, predict
from .pace import PROFILES

if TYPE_CHECKING:
    from .request import Request

MAX_RANKS = 8
ARCH = "sm_90a"
HEAD_DIM = 128
TILE_ROWS = 128  # of the kernel at that head_dim
UNIT_US = 1.6  # what a sending warp's unit takes without a pause: two round trips to memory
LAUNCH_US = 5.0  # of a scatter kernel in front of attention, beside what the path takes
# A gain that the model must expect. At S = 1024 (2x H200, 2026-11-30) it expected 1 us and 8 were lost.
MARGIN_US = 10.0
_HOPPER = (9, 0)
_MOST_WAVES = 3  # of own tiles first that are tried
_PARTS_OF_A_WAVE = 4
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
    if not (request.is_plain and request.shape(group.size).is_equal):
        return "the overlapped exchange takes equal shards and heads, as many K/V heads as query heads, and all keys"
    if request.norm_rope:
        return "norm and rotary embedding are applied by the kernel that scatters, which is not overlapped"
    if request.head_dim != HEAD_DIM or request.batch != 1:
        return f"the overlapped exchange takes batch 1 and head_dim {HEAD_DIM}"
    if group.size > MAX_RANKS or group.size != world().size:
        return f"the overlapped exchange is for the default group, of at most {MAX_RANKS} ranks"
    return None


@lru_cache(maxsize=256)
def schedule(shape: ExchangeShape, tile_rows: int, num_sms: int) -> Schedule:
    """The choice with the least exposure by the model, and with as few own tiles first as that allows: own tiles need
    no peer to begin with, but at the end they store locally while the last remote tiles drain.

    More groups of heads where fewer ranks send, so that the first tiles' keys are not behind all others. Where that
    leaves something to see, parts of a wave of own tiles and more groups are tried. By the model that takes 6 us of 19
    off at S = 8192, H = 24 on 8 ranks, whose own tiles fill no wave, and 42 of 57 at S = 32768, H = 40 on 4.
    """
    own = shape.local_heads * -(-shape.local_seq // tile_rows)
    from fa4_a2a.overlap import whole_parts
    from fa4_a2a.signal import MAX_PARTS

    kv_parts = whole_parts(shape.local_heads, max(1, 8 // shape.num_ranks))
    counts = sorted({min(own, waves * num_sms) for waves in range(_MOST_WAVES + 1)} | {own})
    pace_ns, ahead = send_pace_ns(num_sms), sorted({0, 1, shape.num_ranks - 1})
    chosen, exposed_us = _least(
        shape, tile_rows, num_sms, [Schedule(n, kv_parts, a, pace_ns) for n in counts for a in ahead]
    )
    if exposed_us > _ALIKE_US:
        counts = sorted({*counts, *(min(own, num_sms) * part // _PARTS_OF_A_WAVE for part in range(_PARTS_OF_A_WAVE))})
        groups = sorted({whole_parts(shape.local_heads, n) for n in (kv_parts, MAX_PARTS // 2, MAX_PARTS - 1)})
        finer = [Schedule(n, g, a, pace_ns) for g in groups for n in counts for a in range(shape.num_ranks)]
        other, other_us = _least(shape, tile_rows, num_sms, finer)
        if other_us < exposed_us - _ALIKE_US:
            return other
    return chosen


def _least(shape: ExchangeShape, tile_rows: int, num_sms: int, choices: list[Schedule]) -> tuple[Schedule, float]:
    """The first choice of those that show about the least, and what the best one shows in us."""
    exposed = [prediction(shape, tile_rows, num_sms, choice).exposed_us for choice in choices]
    least = min(exposed)
    return next(c for c, us in zip(choices, exposed) if us < least + _ALIKE_US), least


def send_pace_ns(num_sms: int) -> int:
    """Pause behind each unit, so that all sending warps together store at SHARE of the path's rate."""
    from fa4_a2a.overlap import BATCHES, SENDERS, UNROLL
    from fa4_a2a.scatter import PIECE_BYTES, WARP

    unit_bytes = WARP * PIECE_BYTES * UNROLL * BATCHES
    at_rate_us = drain_us(
        volume_bytes=num_sms * SENDERS * unit_bytes, rate_gb_s=SHARE * load_profile(PROFILES[ARCH]).rate_gb_s
    )
    return max(0, int(1e3 * (at_rate_us - UNIT_US)))


def prediction(shape: ExchangeShape, tile_rows: int, num_sms: int, chosen: Schedule) -> OverlapPrediction:
    from fa4_a2a.overlap import send_order

    profile = load_profile(PROFILES[ARCH])
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
    if expected.exposed_us + MARGIN_US < before_us:
        return None
    return f"it would show {expected.exposed_us:.0f} us of it inside attention, and {before_us:.0f} us in front"
