"""Attention as the model sees it: tiles of queries, dealt to the SMs in waves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigurationError, ShapeError

OwnChunk = Literal["first", "last"]
"""When the tiles whose output stays on this rank are computed."""


@dataclass(frozen=True)
class AttentionShape:
    """One call, the same on every rank: `seq_len` and `num_heads` count the whole sequence and all heads.

    A tile is `tile_rows` queries of one head; the Q-loop walks the keys `key_tile` at a time. A sequence that does
    not divide over the ranks is counted with the largest shard.
    """

    batch: int
    seq_len: int
    num_heads: int
    head_dim: int
    num_ranks: int
    bytes_per_element: int = 2
    tile_rows: int = 128
    key_tile: int = 128

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} must be at least 1, got {getattr(self, name)}; pass the global shape")
        if self.num_heads % self.num_ranks:
            got = f"{self.num_heads} heads over {self.num_ranks} ranks"
            raise ShapeError(f"heads must divide over the ranks, got {got}; use a number of ranks that divides them")

    @property
    def tile_bytes(self) -> int:
        return self.tile_rows * self.head_dim * self.bytes_per_element

    @property
    def chunk_tiles(self) -> int:
        """Tiles of one owner on one rank: rows past its shard are clipped, so each chunk rounds up."""
        chunk_rows = math.ceil(self.seq_len / self.num_ranks)
        return math.ceil(chunk_rows / self.tile_rows) * (self.num_heads // self.num_ranks)

    @property
    def key_tiles(self) -> int:
        return math.ceil(self.seq_len / self.key_tile)


def remote_tiles_per_wave(shape: AttentionShape, num_sms: int, own_chunk: OwnChunk) -> tuple[tuple[int, int], ...]:
    """(tiles, remote tiles) of each wave when the own chunk's tiles come first or last."""
    if own_chunk not in ("first", "last"):
        raise ConfigurationError(f'own_chunk must be "first" or "last", got {own_chunk!r}; name one of them')
    own, total = shape.chunk_tiles, shape.chunk_tiles * shape.num_ranks
    own_begin = 0 if own_chunk == "first" else total - own
    waves = []
    for begin in range(0, total, num_sms):
        end = min(begin + num_sms, total)
        own_here = max(0, min(end, own_begin + own) - max(begin, own_begin))
        waves.append((end - begin, end - begin - own_here))
    return tuple(waves)
