"""flash-attn-4's sm_90 forward as a persistent kernel whose finished tiles leave while the next ones are computed.

What differs from forward.load_forward's kernel, which computes the same bits with the same key tile:
  staging    O has shared memory of its own, so no CTA waits for its store before it goes on;
  paced      a staged tile leaves in slices with a pause between them, so that all CTAs together stay below the rate of
             the path and no load queues behind a blocked store; a CTA's last tile leaves at once;
  order      the own chunk comes last, so that the end of the kernel stores locally while the last remote tiles drain;
  release    if asked for, the last CTA to finish publishes `ready` itself, in place of a signal kernel behind this one.

For sm_100a the same is made of flash-attn-4's sm_100 forward, which has staging of its own (persistent_sm100.py). That
form is compiled and its instructions are checked; it has not run.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from .cache import load_or_compile
from .checks import check_dtype
from .forward import FORWARD_TILES, Tile, pick_tile

if TYPE_CHECKING:
    import torch

ARCHS = ("sm_90a", "sm_100a")  # sm_100a: compiled, not run; persistent_sm100.py
SHARED_BYTES = 226 * 1024  # of the 227 KiB of a CTA of sm_90a: the barriers need room too


def shared_bytes(head_dim: int, tile: Tile) -> int:
    """Q and O take a row tile each, K and V two stages of a key tile each: 224 KiB for 128 x 160 at D = 128."""
    return 2 * head_dim * (2 * tile.rows + 2 * 2 * tile.keys)


# Of sm_90a: the stock kernel's that leave room for O, 128 x 176 at D = 128 does not. sm_100a has all of FORWARD_TILES.
PERSISTENT_TILES: dict[int, tuple[Tile, ...]] = {
    d: tuple(tile for tile in FORWARD_TILES["sm_90a", d] if shared_bytes(d, tile) <= SHARED_BYTES) for d in (128, 64)
}
STORES = ("warp", "step", "consumer")
BARRIERS = ("group", "tile")
PACES = ("sleep", "clock")


class Order(IntEnum):
    """The sequence of tiles, at run time. Row blocks change fastest in all of them; chunk 0 is the own one."""

    OWN_FIRST = 0  # chunk by chunk from 0 on: the stock kernel's
    OWN_LAST = 1  # chunk by chunk, 1, 2, ..., 0: layout.tile_order
    OWN_LAST_BY_HEAD = 2  # head by head through all chunks but the own, then that: fewer heads' K and V in L2 at a time


class Build(NamedTuple):
    """Compile-time choices; all compute the same bits.

    store      warp: an idle warp of the producer group sends the slices, pace_ns apart. step: the load warp sends one
               behind each of its K loads (pace_ns is not used). consumer: a consumer warp sends the whole tile at once;
               the control that has no store warp.
    barriers   group: each consumer warpgroup hands over its 64 rows by itself. tile: all of them together.
    pace       sleep: nanosleep(pace_ns), which the hardware may make anything from 0 to twice as long. clock: slice i
               leaves i * pace_ns after the tile was staged, by the global timer.
    slice_rows rows of a slice: a multiple of 8 that divides 64. 16 rows are 4 KiB at D = 128.
    registers  (a consumer thread's, a producer thread's) in place of upstream's (240, 24), or (160, 32) for 192 rows.
    stamps     record times, see Stamp. For measurements: it may cost some itself.
    release    the kernel can publish.

    sm_100a leaves pace, slice_rows and release open.
    """

    store: str = "warp"
    barriers: str = "group"
    pace: str = "sleep"
    slice_rows: int = 16
    registers: tuple[int, int] | None = None
    stamps: bool = False
    release: bool = False


DEFAULT_BUILD = Build()
STAMP_WORDS = 16  # int64, for each tile


class Stamp(IntEnum):
    """Words of a tile's record, global times in ns but for CTA. Tile number: (chunk * heads + head) * blocks + block.
    WANTED and GOT are the first of three: one for each consumer warpgroup."""

    CTA = 0
    FULL = 1  # the store warp found the first rows staged
    FIRST = 2  # it had issued the first slice
    LAST = 3  # it had issued the last slice
    READ = 4  # the staging could be written again
    WANTED = 5  # the warpgroup reached the epilogue
    GOT = 8  # it could write to the staging; GOT - WANTED is the stall


NO_PUBLICATION = (None,) * 7


class Forward:
    """A loaded kernel, launched on torch's current stream.

    Tensors and scale: as for forward.load_forward. pace_ns: pause behind each slice, 0 for none; the rate of all CTAs
    is num_sms * slice_rows * D * itemsize / pace_ns, and a tile's slices must have left within the next tile's time, or
    the kernel waits for them. num_sms: the grid's size at most; by default what load_persistent was given. stamps:
    int64 CUDA tensor of stamp_words() words in a build with stamps, else None.

    publication: in a build with the release (peer_blocks, counter, rank, num_ranks, flags, deadline_ns, record), by
    which the kernel publishes `ready` when all its stores are done. peer_blocks, rank, num_ranks, record: as for
    signal.load_signal. counter: int64 CUDA tensor [1], zeroed once and left at zero by each launch; not shared by
    launches that may run at the same time. flags: PUBLISH, with WAIT if the kernel is to end only when every peer has
    published too; 0 where another launch of the same call follows. The epoch is the one in this rank's signal block.
    deadline_ns counts from the time when the last CTA has finished.
    """

    def __init__(self, kernel: Callable[..., None], tile: Tile, num_sms: int, build: Build):
        self._kernel, self.tile, self.num_sms, self.build = kernel, tile, num_sms, build

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
        pace_ns: int = 0,
        publication: tuple[Any, ...] = NO_PUBLICATION,
        *,
        order: int = Order.OWN_LAST,
        num_sms: int | None = None,
        stamps: torch.Tensor | None = None,
    ) -> None:
        sms = self.num_sms if num_sms is None else num_sms
        self._kernel(q, k, v, o, lse, scale, pace_ns, int(order), sms, stamps, *publication)

    def stamp_words(self, chunks: int, rows: int, heads: int) -> int:
        return STAMP_WORDS * chunks * heads * -(-rows // self.tile.rows)


def persistent_tile(head_dim: int, arch: str, tile: tuple[int, int] | None = None) -> Tile:
    """The tile that load_persistent compiles: the table's first, or `tile` if the table has it."""
    tiles = PERSISTENT_TILES.get(head_dim) if arch == "sm_90a" else FORWARD_TILES.get((arch, head_dim))
    if tiles is None or arch not in ARCHS:
        there = f"{' and '.join(ARCHS)} have {[*PERSISTENT_TILES]}"
        raise ValueError(f"no persistent kernel for {arch} with head_dim {head_dim}; {there}")
    return pick_tile(tiles, tile, f"persistent kernel for {arch} with head_dim {head_dim}")


def load_persistent(
    head_dim: int,
    dtype: str,
    arch: str,
    num_sms: int,
    tile: tuple[int, int] | None = None,
    with_lse: bool = False,
    heads_per_kv: int = 1,
    build: Build = DEFAULT_BUILD,
) -> Forward:
    """num_sms is no part of the compiled kernel."""
    chosen = persistent_tile(head_dim, arch, tile)
    check_dtype(dtype)
    _check(build, arch)
    key: dict[str, Any] = {"arch": arch, "head_dim": head_dim, "dtype": dtype, "tile": list(chosen)}
    key |= {"with_lse": with_lse, "heads_per_kv": heads_per_kv, "build": list(build)}

    def make() -> Any:
        from .persistent_kernels import compile_persistent

        return compile_persistent(head_dim, dtype, arch, chosen, with_lse, heads_per_kv, build)

    kernel = load_or_compile(f"persistent-{arch}-d{head_dim}-{dtype}", key, make)
    return Forward(kernel, chosen, num_sms, build)


def _check(build: Build, arch: str) -> None:
    for name, value, allowed in (
        ("store", build.store, STORES),
        ("barriers", build.barriers, BARRIERS),
        ("pace", build.pace, PACES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
    if build.slice_rows < 8 or build.slice_rows % 8 or 64 % build.slice_rows:
        raise ValueError(f"slice_rows is a multiple of 8 that divides 64, not {build.slice_rows}")
    if build.release and build.store == "consumer":
        raise ValueError("the release needs the stores of a producer warp: store='warp' or 'step'")
    if arch == "sm_100a" and build != Build(pace=build.pace, slice_rows=build.slice_rows, release=build.release):
        raise ValueError(f"sm_100a leaves pace, slice_rows and release open, the rest at its default; got {build}")
