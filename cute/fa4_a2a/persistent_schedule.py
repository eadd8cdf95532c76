"""Which tile a CTA of the persistent kernel takes next, and what travels into the kernel beside the tensors.

Upstream's kernel takes its scheduler and the scheduler's params as arguments, so a launch can be given others. Whatever
else a warp of ours needs rides in the params: upstream hands the load warps no O, and the epilogue nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import FastDivmodDivisorV2
from flash_attn.cute.tile_scheduler import StaticPersistentTileScheduler, WorkTileInfo
from quack.cute_dsl_utils import ParamsBase

from .persistent import Order


@dataclass
class Release(ParamsBase):
    """Arguments of the publication at the kernel's end; as for signal.load_signal."""

    peer_blocks: cute.Tensor
    counter: cute.Tensor
    rank: Int32
    num_ranks: Int32
    flags: Int32
    deadline_ns: Int64
    record: Int64


@dataclass
class Params(ParamsBase):
    """The tile grid, O as the store warp sees it, and what only some builds have (None in the others)."""

    blocks: FastDivmodDivisorV2  # row tiles of a head in a chunk
    minor: FastDivmodDivisorV2  # of the pair (chunk, head), the one that changes faster
    tiles: Int32
    num_blocks: Int32
    num_heads: Int32
    num_chunks: Int32
    order: Int32
    pace_ns: Int32
    rows: Int32  # of a chunk
    o_slices: cute.Tensor
    o_atom: cute.CopyAtom
    stamps: cute.Tensor | None
    release: Release | None

    @staticmethod
    def create(grid: Any, order: Int32, pace_ns: Int32, rows: Int32, o: Any, stamps: Any, release: Any) -> Params:
        """grid: the params of upstream's scheduler of one tile a CTA. o: (slices, atom)."""
        blocks, heads, chunks = grid.num_block, grid.num_head, grid.num_batch
        return Params(
            FastDivmodDivisorV2(blocks),
            FastDivmodDivisorV2(minor_extent(order, heads, chunks)),
            blocks * heads * chunks,
            blocks,
            heads,
            chunks,
            order,
            pace_ns,
            rows,
            *o,
            stamps,
            release,
        )


class TileOrder(StaticPersistentTileScheduler):
    """CTA i takes tiles i, i + CTAs, ... of the sequence that Order names; chunk 0 is the own one."""

    @classmethod
    def create(cls, params: Params, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> TileOrder:
        return cls(params, cute.arch.block_idx()[0], loc=loc, ip=ip)

    def get_current_work(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        block, head, chunk = locate(self.params, self._tile_idx)
        return WorkTileInfo((block, head, chunk, Int32(0)), self._tile_idx < self.params.tiles)

    def advance_to_next_work(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        self._tile_idx += cute.arch.grid_dim()[0]
        return self.get_current_work()

    def __new_from_mlir_values__(self, values: Any) -> TileOrder:
        other = super().__new_from_mlir_values__(values)  # upstream names its own class there
        return type(self)(other.params, other._tile_idx, loc=self._loc)


@cute.jit
def minor_extent(order: Int32, heads: Int32, chunks: Int32):
    extent = heads
    if order == int(Order.OWN_LAST_BY_HEAD):
        extent = cutlass.max(chunks - 1, 1)
    return extent


@cute.jit
def locate(params: Params, tile: Int32):
    """(row block, head, chunk) of a place in the sequence; layout.tile_order lists the same for OWN_LAST."""
    pair, block = divmod(tile, params.blocks)
    slow, fast = divmod(pair, params.minor)
    chunk, head = Int32(slow), Int32(fast)
    if params.order != int(Order.OWN_FIRST):
        chunk += 1
    if params.order == int(Order.OWN_LAST_BY_HEAD):
        remote = (params.num_chunks - 1) * params.num_heads
        chunk, head = Int32(fast) + 1, Int32(slow)
        if pair >= remote:
            chunk, head = params.num_chunks, pair - remote
    if chunk >= params.num_chunks:
        chunk -= params.num_chunks
    return Int32(block), head, chunk


def scheduler(arguments: Any) -> Any:
    """What makes a TileOrder, among the arguments that upstream's kernel hands to `load` and `mma`."""
    return next(a for a in arguments if isinstance(a, partial) and _is_order(getattr(a.func, "__self__", None)))


def _is_order(maker: Any) -> bool:
    return isinstance(maker, type) and issubclass(maker, TileOrder)


class Launch:
    """Stands in for the kernel's launcher and replaces the grid of one CTA for each tile."""

    def __init__(self, kernel: Any, grid: Any):
        self._kernel, self._grid = kernel, grid

    def launch(self, **options: Any) -> Any:
        return self._kernel.launch(**{**options, "grid": self._grid})
