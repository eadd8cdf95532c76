"""Which of a kernel's tiles ends first, and how long attention takes with it.

Tiles run in waves, one tile on each SM, and a last wave that fills few SMs takes as long as a full one. So a kernel
with a smaller tile beside its fastest one takes the smaller where its waves, though slower by the row, end earlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .shape import AttentionShape


class Tile(NamedTuple):
    """rows of queries, keys of a step; speed: rows in a given time while every SM is busy, 1 for a kernel's first."""

    rows: int
    keys: int
    speed: float = 1.0


# By head_dim, the default first. Tiles of one head_dim have the same keys, and so compute the same bits: which one a
# launch takes may depend on anything. Speeds: one H200, 2026-11-30, benchmarks/results/kernel_h200.jsonl.
FA3_TILES: dict[int, tuple[Tile, ...]] = {
    128: (Tile(128, 144),),
    64: (Tile(192, 128), Tile(128, 128, speed=0.82)),
}
# On sm_90, for full attention. Of fa4_a2a.forward's tiles those with the first one's keys.
FA4_TILES: dict[int, tuple[Tile, ...]] = {
    128: (Tile(128, 160),),
    64: (Tile(192, 128), Tile(128, 128, speed=0.844)),
}


def quickest(tiles: Sequence[Tile], *, rows: int, heads: int, num_sms: int) -> Tile:
    """Of tiles, the one whose waves end first; of equals the first. rows: queries of a head in one chunk, which tiles
    do not cross. heads: heads of all chunks and batch entries of the launch."""
    if len(tiles) == 1:
        return tiles[0]
    return min(tiles, key=lambda tile: _waves(rows, heads, tile.rows, num_sms) * tile.rows / tile.speed)


def attention_us(shape: AttentionShape, *, tflops: float, num_sms: int, tile_speed: float = 1.0) -> float:
    """Attention alone, `batch` launches: waves of tiles at a rate of all SMs together while every one is busy."""
    rows, heads = math.ceil(shape.seq_len / shape.num_ranks), shape.num_heads  # a rank's heads in each rank's chunk
    waves = _waves(rows, heads, shape.tile_rows, num_sms)
    flops = 4 * shape.tile_rows * shape.key_tiles * shape.key_tile * shape.head_dim * num_sms
    return shape.batch * waves * flops / (tflops * tile_speed * 1e6)


def _waves(rows: int, heads: int, tile_rows: int, num_sms: int) -> int:
    return math.ceil(math.ceil(rows / tile_rows) * heads / num_sms)
