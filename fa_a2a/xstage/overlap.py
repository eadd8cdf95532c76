"""How much of the exchange before attention shows, if attention starts at once and waits for it part by part.

A fluid model of the overlapped kernel. Every rank sends its parts in order at one rate, each to one peer, so a part has
arrived when all bytes before it and its own have left. Each SM takes its tiles in the kernel's order, and within a tile
the chunks of keys in order, own first; it waits where the next chunk's part, or the tile's queries, are not here yet.
What the sends themselves cost the main loop is not in it: with 24 heads on 2x H200 (2026-11-30) the layer took 3.2, 1.7
and 0.5 % more SM cycles at S = 8192, 16384, 32768 than the fused kernel alone on what had arrived, 1.1, 0.6 and 0.2 of
them also without sends and waits, 1.9, 1.0 and 0 for the sends, 0.1 each at the two shorter for waiting. Sends to its
own memory cost as much as to the peer. No pace, twice the pace and more groups of heads changed nothing beyond 0.4 %.

On 4 and 8 ranks, which two H200s stood for (bench/emulate.py, 2026-11-30), what shows in a graph is the exposure told
here, the cost of the exchange behind attention with its publication (cost.py), and 6 to 15 us more at 4608 and 8192
tokens of 24 heads: at 4608 on 4 ranks 14, 7 and 15 us, on 8, where all tiles are one wave, 18, 14 and 6. Of a dozen
schedules the model's choice was the best to within 3 us in each of five cases; no queries first, or no own tiles first,
cost 20 to 70 us more, as it says. Queries cut into parts would take up to 7 us off the wait for the first ones.

Sources of the sends that were weighed by such figures and left: a scatter kernel on SMs that attention leaves free (at
8192 tokens and 24 heads 12 SMs on 4 ranks: 30 GB/s for each, and the own chunk still to be copied, 10 to 40 us); bulk
copies through O's staging (on 2 ranks they take as long as the first tile, whose epilogue would then wait); the copy
engine (188 to 224 GB/s in such copies on 4x H200, below the 240 to 250 that 4 ranks need).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .burst_gap import drain_us

# From the kernel's start to the first store, and from a part's last store to the load behind the wait. Where every tile
# waits for the last part (P = 2, own tiles last), 81 and 138 us showed at S = 4608 and 8192 (2x H200, 2026-11-30): 8 us
# and a rate of 0.82 of the path's, where SHARE was asked for.
SIGNAL_US = 8.0
SHARE = 0.85  # of the path's rate that the sends use: above it, loads queue behind stores


@dataclass(frozen=True)
class OverlapPrediction:
    """Times in us. alone: the same tiles without waits; makespan: with them; sends: until the last part is out."""

    alone_us: float
    makespan_us: float
    sends_us: float

    @property
    def exposed_us(self) -> float:
        return self.makespan_us - self.alone_us


def predict(
    *,
    num_ranks: int,
    rows: int,
    heads: int,
    head_dim: int,
    tile_rows: int,
    kv_parts: int,
    sends: Sequence[tuple[int, int]],
    own_first: int,
    num_sms: int,
    tile_us: float,
    rate_gb_s: float,
    itemsize: int = 2,
) -> OverlapPrediction:
    """rows, heads: of one rank. sends: (distance, part) in order; part kv_parts is the queries, any other a group of
    heads of keys and values. tile_us: one tile over all keys. rate_gb_s: of the sends."""
    group = -(-heads // kv_parts)
    now, here = SIGNAL_US, {}
    for distance, part in sends:
        if distance:
            count = heads if part == kv_parts else 2 * max(0, min(group, heads - part * group))
            now += drain_us(volume_bytes=count * rows * head_dim * itemsize, rate_gb_s=rate_gb_s)
            here[distance, part] = now
    blocks = -(-rows // tile_rows)
    own = [(0, head) for head in range(heads) for _ in range(blocks)]
    remote = [(chunk, head) for chunk in range(1, num_ranks) for head in range(heads) for _ in range(blocks)]
    order = own[:own_first] + remote + own[own_first:]
    ends, loads = [], []
    for sm in range(min(num_sms, len(order))):
        mine, at = order[sm::num_sms], 0.0
        for chunk, head in mine:
            if chunk:
                at = max(at, here[chunk, kv_parts])
            at += tile_us / num_ranks
            for distance in range(1, num_ranks):
                at = max(at, here[distance, head // group]) + tile_us / num_ranks
        ends.append(at)
        loads.append(tile_us * len(mine))
    return OverlapPrediction(max(loads), max(ends), now - SIGNAL_US)
