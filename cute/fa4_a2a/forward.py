"""flash-attn-4's forward with every extent and stride left open, so that a chunk of O may lie in a peer's memory.

The kernels are upstream's, non-causal and without GQA packing. A chunk is the queries of one owner: the batch mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .cache import load_or_compile
from .checks import check_dtype


class Tile(NamedTuple):
    rows: int
    keys: int


# (arch, head_dim) -> tiles, the default first. H200, 2026-11-29: at D = 128 times differ by up to 5 % between 128 and
# 176 keys, and none is best at every length; D = 64 with 192 keys spills. sm_100 computes two row tiles of 128 per CTA.
FORWARD_TILES: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("sm_90a", 128): (Tile(128, 160), Tile(128, 176), Tile(128, 144), Tile(128, 128)),
    ("sm_90a", 64): (Tile(192, 128), Tile(128, 128)),
    ("sm_90a", 96): (Tile(192, 144),),
    ("sm_90a", 256): (Tile(128, 80),),
    ("sm_100a", 128): (Tile(128, 128),),
    ("sm_100a", 64): (Tile(128, 128),),
}
SM100_ROW_TILES = 2


def forward_tile(head_dim: int, arch: str, tile: tuple[int, int] | None = None) -> Tile:
    """The tile that load_forward compiles: the table's first, or `tile` if the table has it."""
    tiles = FORWARD_TILES.get((arch, head_dim))
    if tiles is None:
        raise ValueError(f"no forward kernel for {arch} with head_dim {head_dim}; there are {sorted(FORWARD_TILES)}")
    return pick_tile(tiles, tile, f"forward kernel for {arch} with head_dim {head_dim}")


def pick_tile(tiles: Sequence[Tile], tile: tuple[int, int] | None, kernel: str) -> Tile:
    """The first, or `tile` if it is among them; `kernel` says in an error what they are for."""
    if tile is not None and Tile(*tile) not in tiles:
        there = ", ".join(f"{t.rows}x{t.keys}" for t in tiles)
        raise ValueError(f"no {tile[0]}x{tile[1]} tile of a {kernel}; there are {there}")
    return tiles[0] if tile is None else Tile(*tile)


def alike_tiles(head_dim: int, arch: str) -> tuple[Tile, ...]:
    """The table's first tile and those with as many keys, which compute the same bits: a launch may take any."""
    first = forward_tile(head_dim, arch)
    return tuple(tile for tile in FORWARD_TILES[arch, head_dim] if tile.keys == first.keys)


def forward_tile_rows(head_dim: int, arch: str, tile: tuple[int, int] | None = None) -> int:
    """Query rows that one CTA finishes, and stores, together: the unit of an audit. On sm_100a with D = 128 two CTAs
    work as a pair, so a head's rows in a chunk take an even number of such tiles."""
    return forward_tile(head_dim, arch, tile).rows * (SM100_ROW_TILES if arch == "sm_100a" else 1)


def load_forward(
    head_dim: int,
    dtype: str,
    arch: str,
    num_sms: int,
    tile: tuple[int, int] | None = None,
    with_lse: bool = False,
    heads_per_kv: int = 1,
    causal: bool = False,
) -> Callable[..., None]:
    """A callable (q, k, v, o, lse, scale) on torch's current stream.

    q, o: (chunks, rows, heads, D); k, v: (chunks, keys, heads_kv, D), a chunk stride of 0 (expand) allowed; lse:
    (chunks, heads, rows) fp32 with contiguous rows, or None as with_lse says. heads = heads_kv * heads_per_kv. The last
    mode is contiguous, all other strides are multiples of 8 elements, addresses of 16 bytes. At least one tensor must
    be torch's own: the stream is taken from it. The launch checks types and extents and raises on a mismatch.
    num_sms bounds sm_100's persistent grid; sm_90 launches one CTA per tile and ignores it.
    causal (sm_90a): the last row sees all keys, each row before it one key less.
    """
    chosen = forward_tile(head_dim, arch, tile)
    check_dtype(dtype)
    key = {"arch": arch, "head_dim": head_dim, "dtype": dtype, "tile": list(chosen)}
    key |= {"with_lse": with_lse, "heads_per_kv": heads_per_kv}
    if causal:
        if arch != "sm_90a":
            raise ValueError(f"causal attention is built for sm_90a, not {arch}")
        key["causal"] = True
    if arch == "sm_100a":
        key["num_sms"] = num_sms

    def build() -> Any:
        from .forward_kernels import compile_forward

        return compile_forward(head_dim, dtype, arch, num_sms, chosen, with_lse, heads_per_kv, causal)

    return load_or_compile(f"forward-{arch}-d{head_dim}-{dtype}", key, build)
