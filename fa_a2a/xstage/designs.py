"""The fused attention kernels as the model sees them: what a kernel does that changes what its stores cost.

A kernel of this project is one entry of DESIGNS. Its cost is predicted from the entry, the shape and the platform's
profile (cost.py); nothing in an entry is fitted to a measured cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigurationError, UnsupportedError
from .shape import AttentionShape, OwnChunk
from .tiles import FA3_TILES, FA4_TILES, Tile, quickest

Publication = Literal["boundary", "inside"]
"""Who tells the peers that a call's tiles are there: a small kernel behind attention, or attention's last block."""

H200_SMS = 132

PACE_HEADROOM = 2.0
"""A paced wave leaves in this multiple of the time in which the path could drain it. As in ops/pace.py."""


@dataclass(frozen=True)
class KernelDesign:
    """One fused kernel. `tiles`: (query rows, keys) of a tile by head_dim, as it is built by default."""

    name: str
    tiles: Mapping[int, tuple[int, int]]
    own_chunk: OwnChunk
    staged: bool
    """O has shared memory of its own, so that no block waits for its store before it goes on."""
    headroom: float | None
    """A staged tile leaves in this multiple of V/R, but within half of the next tile's time; None: at once."""
    publication: Publication
    words: str
    one_launch: bool = False
    """One launch does all batch entries, whose heads then follow each other as those of one entry do."""
    kernel: str = "fa4"
    """Of the library, in whose name its attention's speeds are measured."""
    choices: Mapping[int, tuple[Tile, ...]] = field(default_factory=dict)
    """By head_dim the tiles of which a launch takes the quickest, where there is more than one."""

    def shape(
        self,
        *,
        batch: int,
        seq_len: int,
        num_heads: int,
        head_dim: int,
        num_ranks: int,
        bytes_per_element: int = 2,
        num_sms: int = H200_SMS,
    ) -> AttentionShape:
        """The call as this kernel tiles it on so many SMs. UnsupportedError for a head_dim that it is not built for."""
        if head_dim not in self.tiles:
            built = ", ".join(map(str, self.tiles))
            raise UnsupportedError(f"kernel design {self.name!r} is for head_dim {built}, got {head_dim}; name another")
        rows, keys = self.tiles[head_dim]
        if self.one_launch:
            batch, num_heads = 1, batch * num_heads
        if head_dim in self.choices:
            chunk_rows = math.ceil(seq_len / num_ranks)
            chosen = quickest(self.choices[head_dim], rows=chunk_rows, heads=num_heads, num_sms=num_sms)
            rows, keys = chosen.rows, chosen.keys
        return AttentionShape(batch, seq_len, num_heads, head_dim, num_ranks, bytes_per_element, rows, keys)

    def tile_speed(self, shape: AttentionShape) -> float:
        """Of the shape's tile, relative to the kernel's first one."""
        tiles = self.choices.get(shape.head_dim, ())
        return next((t.speed for t in tiles if (t.rows, t.keys) == (shape.tile_rows, shape.key_tile)), 1.0)


_FA4_SM90 = {head_dim: (tiles[0].rows, tiles[0].keys) for head_dim, tiles in FA4_TILES.items()}
_FA3_SM90 = {head_dim: (tiles[0].rows, tiles[0].keys) for head_dim, tiles in FA3_TILES.items()}

DESIGNS: dict[str, KernelDesign] = {
    design.name: design
    for design in (
        KernelDesign(
            "stock",
            _FA4_SM90,
            own_chunk="first",
            staged=False,
            headroom=None,
            publication="boundary",
            words="one tile for each block, which leaves when its store has been accepted; chunk by chunk, the own one "
            "first; a signal kernel follows",
            choices=FA4_TILES,
        ),
        KernelDesign(
            "persistent",
            _FA4_SM90,
            own_chunk="last",
            staged=True,
            headroom=PACE_HEADROOM,
            publication="inside",
            words="one block for each SM; a finished tile leaves in slices from staging of its own while the next is "
            "computed; the own chunk last; the last block publishes",
            choices=FA4_TILES,
        ),
        KernelDesign(
            "unpaced",
            _FA4_SM90,
            own_chunk="last",
            staged=True,
            headroom=None,
            publication="inside",
            words="as persistent, but a finished tile leaves at once: the control that shows what pacing is for",
            choices=FA4_TILES,
        ),
        KernelDesign(
            "fa3",
            _FA3_SM90,
            own_chunk="last",
            staged=True,
            headroom=PACE_HEADROOM,
            publication="inside",
            words="the C++ kernel: as persistent, with tiles of its own, and one launch for all batch entries",
            one_launch=True,
            kernel="fa3",
            choices=FA3_TILES,
        ),
    )
}


def design(name: str) -> KernelDesign:
    """By name; ConfigurationError for one that is not known."""
    if name not in DESIGNS:
        raise ConfigurationError(f"a kernel design is one of {', '.join(DESIGNS)}; got {name!r}")
    return DESIGNS[name]


def design_of(kernel: str, capability: tuple[int, int]) -> KernelDesign | None:
    """Of a kernel of the library on a GPU of this compute capability, when it stores to its peers; None if the model
    does not know it there."""
    return {("fa4", (9, 0)): DESIGNS["persistent"], ("fa3", (9, 0)): DESIGNS["fa3"]}.get((kernel, capability))
