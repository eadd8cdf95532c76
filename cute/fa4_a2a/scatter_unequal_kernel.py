"""The kernel behind scatter_unequal.load_unequal. Imports cutlass: only to compile.

Tiles, order and publication are scatter_kernel.py's. Every tensor and peer has as many tiles as the largest slice could
need; a tile behind the end of its slice costs a ticket.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .scatter import PIECE_BYTES, WARP
from .scatter_kernel import TENSORS, StoreScatter
from .scatter_pieces import loads, piece, registers, stores
from .scatter_unequal import Slice
from .toolchain import DTYPES, bshd, compile_for, vector

ADDRESS, BATCH_BYTES, FIRST_HEAD, HEADS = range(len(Slice._fields))


class UnequalScatter(StoreScatter):
    @cute.jit
    def route(self, sources, rank: Int32, num_ranks: Int32, own_last: Int32):
        """As Scatter.route, for the most heads that a slice can have; they stand in place of the divisors."""
        q, _, _ = sources
        most = q.shape[2] // num_ranks + 1
        units = q.shape[1] * most * self.units_per_head
        return units, cute.ceil_div(units, self.tile_units), rank, num_ranks, own_last, most

    @cute.jit
    def move(self, tile: Int32, sources, destinations, counters, extras, route, lane: Int32) -> Int32:
        peer, which, batch, first = self.locate(tile, sources[0].shape[0], route)
        entry = which * route[3] + peer
        heads = Int32(self.field(destinations, HEADS, entry, route))
        units = sources[0].shape[1] * heads * self.units_per_head
        if first < units:
            self.move_units(first, units, heads, entry, which, batch, sources, destinations, route, lane)
        return self.take(counters, lane)

    @cute.jit
    def move_units(
        self, first: Int32, units: Int32, heads: Int32, entry: Int32, which: Int32, batch: Int32, sources,
        destinations: cute.Tensor, route, lane: Int32,
    ):  # fmt: skip
        source, to_row, to_head, target = self.places(sources, destinations, entry, which, batch, route)
        load, store = loads(self.dtype), stores(self.dtype)
        at, pieces = [], []
        for i in cutlass.range_constexpr(self.unroll):
            at.append(first + i * WARP + lane)
            pieces.append(registers(self.dtype))
            offset = self.offset(cutlass.min(at[i], units - 1), heads, to_row, to_head)
            cute.copy(load, piece(self.dtype, source + offset), pieces[i])
        for i in cutlass.range_constexpr(self.unroll):
            if at[i] < units:
                cute.copy(store, pieces[i], piece(self.dtype, target + PIECE_BYTES * Int64(at[i])))

    @cute.jit
    def places(self, sources, destinations: cute.Tensor, entry: Int32, which: Int32, batch: Int32, route):
        """As Scatter.ends: address of the slice in this batch entry of the source, its strides over rows and heads in
        bytes, and where it goes."""
        source, to_row, to_head = self.entry(sources, which, batch)
        source += self.field(destinations, FIRST_HEAD, entry, route) * to_head
        target = self.field(destinations, ADDRESS, entry, route)
        target += batch * self.field(destinations, BATCH_BYTES, entry, route)
        return source, to_row, to_head, target

    def offset(self, unit: Int32, heads: Int32, to_row: Int64, to_head: Int64) -> Int64:
        """Where a piece lies in the source, in bytes behind the peer's first head."""
        pair = unit // self.units_per_head
        row = pair // heads
        head = pair - row * heads
        return row * to_row + head * to_head + PIECE_BYTES * (unit - pair * self.units_per_head)

    def field(self, destinations: cute.Tensor, which: int, entry: Int32, route: Any) -> Int64:
        return destinations[which * TENSORS * route[3] + entry]


def compile_unequal(head_dim: int, dtype: str, arch: str, threads: int, unroll: int) -> Any:
    element = DTYPES[dtype]
    batch, rows, heads, heads_kv = (cute.sym_int32() for _ in range(4))  # shared: the launch compares equal extents
    qkv = [bshd(element, batch, rows, h, head_dim) for h in (heads, heads_kv, heads_kv)]
    i32, i64, words = Int32(0), Int64(0), [vector(Int64) for _ in range(3)]
    scalars = (Float32(0.0), i32, i32, i32, i32, i32, i64, i64, i64)
    make = lambda: UnequalScatter(element, head_dim, threads, unroll, None)
    return compile_for(arch, make, *qkv, *words, *(None,) * 4, *scalars)
