"""The kernels behind scatter.load_scatter. Imports cutlass: only to compile.

Every warp takes tiles until none is left: the first by its number, the others from a counter in device memory, since
the path serves the SMs unevenly and equal shares would leave the slowest working alone at the end. A tile is a run of
the rows of one tensor, for one peer and batch entry; in the peer's memory it is contiguous, whatever lies between the
rows and heads of the source. Consecutive tiles go to different peers, from rank + 1 on, so that at any time every link
out of a GPU is busy, and no GPU is the target of all others.

Stores begin at once: nobody reads the Q, K and V of the call before any more, since this rank acquired every peer's
`ready` of that call in an earlier kernel of this stream.

Publication, and why whoever sees it sees the data:
  1. each thread's stores (for bulk stores: its wait until they are complete) come before the CTA's barrier, and so
     before what thread 0 of the CTA does next;
  2. thread 0's arrival is acq_rel at GPU scope. The arrivals on one counter form a chain, in which each synchronizes
     with the next, so all CTAs' stores happen before what the last arriver does next;
  3. the last arriver's warp executes fence.acq_rel.sys and then stores the epoch to each peer (Signal.publish). The
     fence is cumulative: what happens before it, in whichever CTA and to whichever GPU, comes before the epoch for any
     observer that acquires it.
litmus.py tests this chain as its variants `release` for bulk stores and `st_release` for the threads' own. An observer
that reads the data by TMA does so in a later kernel, as attention does (variant `call`), or puts fence.proxy.async
behind its acquire (`bulk_read`).
Only the last CTA's warp 0 waits, when every other CTA has stored its part: the SMs are free for whoever is waited for.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from . import ptx
from .scatter import PIECE_BYTES, WARP, Counter, NormRope
from .scatter_norm import Transform
from .scatter_pieces import loads, piece, registers, stores, take
from .signal import Word
from .signal_kernel import Signal, arrive

TENSORS = 3  # q, k, v


class Scatter(Signal):
    """What the data paths have in common. A unit is what a path indexes by: `units_per_head` of them are one head of
    one row, `tile_units` a tile."""

    def __init__(self, dtype: Any, head_dim: int, warps: int, units_per_head: int, tile_units: int):
        self.dtype, self.warps = dtype, warps
        self.units_per_head, self.tile_units = units_per_head, tile_units
        self.itemsize = dtype.width // 8
        self.head_bytes = head_dim * self.itemsize
        self.unit_bytes = self.head_bytes // units_per_head

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        destinations: cute.Tensor,
        peer_blocks: cute.Tensor,
        counters: cute.Tensor,
        q_weight,
        k_weight,
        cos,
        sin,
        eps: Float32,
        rank: Int32,
        num_ranks: Int32,
        num_ctas: Int32,
        own_last: Int32,
        flags: Int32,
        fingerprint: Int64,
        deadline_ns: Int64,
        record: Int64,
        stream,
    ):
        sources = (q, k, v)
        route = self.route(sources, rank, num_ranks, own_last)
        extras = (q_weight, k_weight, cos, sin, eps)
        publication = (peer_blocks, num_ctas, flags, fingerprint, deadline_ns, record)
        self.kernel(sources, destinations, counters, extras, route, publication).launch(
            grid=(num_ctas, 1, 1), block=(WARP * self.warps, 1, 1), stream=stream
        )

    @cute.jit
    def route(self, sources, rank: Int32, num_ranks: Int32, own_last: Int32):
        """What tiles are found by: (units of one tensor, peer and batch entry; tiles of these; rank; num_ranks;
        own_last; divisors by the local heads, and by the heads that lie beside each other in all three sources)."""
        q, k, v = sources
        local_heads = q.shape[2] // num_ranks
        units = q.shape[1] * local_heads * self.units_per_head
        tiles = cute.ceil_div(units, self.tile_units)
        run, head = Int32(1), self.head_bytes // self.itemsize
        if q.stride[2] == head and k.stride[2] == head and v.stride[2] == head:
            run = local_heads
        divisors = (cute.FastDivmodDivisorV2(local_heads), cute.FastDivmodDivisorV2(run))
        return units, tiles, rank, num_ranks, own_last, divisors

    @cute.kernel
    def kernel(
        self,
        sources,
        destinations: cute.Tensor,
        counters: cute.Tensor,
        extras,
        route,
        publication,
    ):
        start = ptx.globaltimer()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        peer_blocks, num_ctas, flags, fingerprint, deadline_ns, record = publication
        rank, num_ranks = route[2:4]
        self.work(sources, destinations, counters, extras, route, num_ctas, warp, lane)
        # All stores of this CTA are issued, bulk ones complete: step 1 above.
        cute.arch.sync_threads()
        if warp == 0:
            arrived = arrive(counters, int(Counter.ARRIVALS), lane)
            if arrived == num_ctas:
                if lane == 0:  # for the next launch; every other CTA has done with the counters
                    ptx.store_relaxed_sys(address(counters, Counter.TICKET), Int64(0))
                    ptx.store_relaxed_sys(address(counters, Counter.ARRIVALS), Int64(0))
                word = Int32(int(Word.ARRIVED))
                self.steps(peer_blocks, lane, rank, num_ranks, word, flags, fingerprint, start, deadline_ns, record)

    def total(self, sources: Any, route: Any) -> Int32:
        """Tiles of all tensors, peers and batch entries."""
        return TENSORS * sources[0].shape[0] * route[1] * route[3]

    def take(self, counters: cute.Tensor, lane: Int32) -> Int32:
        return take(address(counters, Counter.TICKET), lane)

    @cute.jit
    def locate(self, tile: Int32, batches: Int32, route):
        """(peer, tensor, batch entry, first unit) of a tile."""
        _, tiles, rank, num_ranks, own_last, _ = route
        peer, number = tile % num_ranks, tile // num_ranks
        if own_last != 0:
            others = num_ranks - 1
            remote = others * TENSORS * batches * tiles
            peer, number = others, tile - remote
            if tile < remote:
                peer, number = tile % others, tile // others
        peer += rank + 1
        if peer >= num_ranks:
            peer -= num_ranks
        part = number // tiles
        return peer, part % TENSORS, part // TENSORS, (number % tiles) * self.tile_units

    @cute.jit
    def entry(self, sources, which: Int32, batch: Int32):
        """Address of a batch entry of a tensor, and its strides over rows and heads in bytes."""
        q, k, v = sources
        base, strides = q.iterator.toint(), (q.stride[0], q.stride[1], q.stride[2])
        if which == 1:
            base, strides = k.iterator.toint(), (k.stride[0], k.stride[1], k.stride[2])
        if which == 2:
            base, strides = v.iterator.toint(), (v.stride[0], v.stride[1], v.stride[2])
        to_batch, to_row, to_head = (self.itemsize * Int64(stride) for stride in strides)
        return base + batch * to_batch, to_row, to_head

    @cute.jit
    def ends(self, sources, destinations: cute.Tensor, peer: Int32, which: Int32, batch: Int32, route):
        """Address of the peer's first head in this batch entry of the source, its strides over rows and heads in
        bytes, and the address of this rank's first row in the peer's buffer."""
        units, _, _, num_ranks, _, _ = route
        local_heads = sources[0].shape[2] // num_ranks
        entry, to_row, to_head = self.entry(sources, which, batch)
        source = entry + peer * local_heads * to_head
        whole = Int64(units) * self.unit_bytes * num_ranks  # bytes of a batch entry in the peer's buffer
        return source, to_row, to_head, destinations[which * num_ranks + peer] + batch * whole


class StoreScatter(Scatter):
    """16 bytes a thread: `unroll` loads, then as many stores. A warp writes 512 contiguous bytes at a time, in whole
    128-byte lines where a row of the slice is a multiple of that."""

    def __init__(self, dtype: Any, head_dim: int, threads: int, unroll: int, norm_rope: NormRope | None):
        pieces = head_dim * dtype.width // 8 // PIECE_BYTES
        super().__init__(dtype, head_dim, threads // WARP, pieces, WARP * unroll)
        self.unroll = unroll
        self.transform = None if norm_rope is None else Transform(norm_rope, head_dim, pieces)

    @cute.jit
    def work(self, sources, destinations, counters, extras, route, num_ctas: Int32, warp: Int32, lane: Int32):
        total = self.total(sources, route)
        num_warps = num_ctas * self.warps
        tile = cute.arch.block_idx()[0] * self.warps + warp
        while tile < total:
            tile = num_warps + self.move(tile, sources, destinations, counters, extras, route, lane)

    @cute.jit
    def move(self, tile: Int32, sources, destinations, counters, extras, route, lane: Int32) -> Int32:
        """Moves a tile; returns the next ticket."""
        units = route[0]
        peer, which, batch, first = self.locate(tile, sources[0].shape[0], route)
        source, to_row, to_head, destination = self.ends(sources, destinations, peer, which, batch, route)
        load, store = loads(self.dtype), stores(self.dtype)
        at, rows, pieces = [], [], []
        for i in cutlass.range_constexpr(self.unroll):
            at.append(first + i * WARP + lane)
            # past the end the last piece is loaded again and not stored: no load is behind a branch
            row, offset = self.inside(cutlass.min(at[i], units - 1), to_row, to_head, route)
            rows.append(row)
            pieces.append(registers(self.dtype))
            cute.copy(load, piece(self.dtype, source + offset), pieces[i])
        ticket = self.take(counters, lane)
        if const_expr(self.transform is not None):
            self.transform.apply(pieces, rows, which, extras, lane)
        for i in cutlass.range_constexpr(self.unroll):
            if at[i] < units:
                cute.copy(store, pieces[i], piece(self.dtype, destination + PIECE_BYTES * Int64(at[i])))
        return ticket

    def inside(self, unit: Int32, to_row: Int64, to_head: Int64, route: Any) -> tuple[Int32, Int64]:
        """Row of a piece, and its offset in the source in bytes."""
        local_heads = route[-1][0]
        row, head = divmod(unit // self.units_per_head, local_heads)
        return row, row * to_row + head * to_head + PIECE_BYTES * (unit % self.units_per_head)


def address(counters: cute.Tensor, which: Counter) -> Int64:
    return counters.iterator.toint() + 8 * int(which)
