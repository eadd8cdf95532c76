"""The bulk path of scatter.load_scatter: the copy engine of each SM moves tiles through shared memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from . import ptx
from .scatter import WARP
from .scatter_kernel import Scatter


class BulkScatter(Scatter):
    """Each warp has a ring of `stages` stages of its own: loads of whole runs of heads fill a stage, one store empties
    it. All lanes issue loads; lane 0 issues the stores and does the waiting, since groups of bulk stores are counted
    for each thread."""

    def __init__(self, dtype: Any, head_dim: int, threads: int, stages: int, stage_bytes: int):
        super().__init__(dtype, head_dim, threads // WARP, 1, stage_bytes * 8 // (head_dim * dtype.width))
        self.stages = stages
        self.stage_bytes = self.tile_units * self.head_bytes

    @cute.jit
    def work(self, sources, destinations, counters, extras, route, num_ctas: Int32, warp: Int32, lane: Int32):
        smem = SmemAllocator()
        ring = smem.allocate(self.warps * self.stages * self.stage_bytes, 128).toint()
        ring += warp * (self.stages * self.stage_bytes)
        barriers = smem.allocate_array(Int64, self.warps * self.stages) + warp * self.stages
        if lane == 0:
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(barriers + stage, 1)
        ptx.fence_proxy_async_shared()  # the loads' completions must find the barriers set up
        cute.arch.sync_warp()

        total = self.total(sources, route)
        num_warps = num_ctas * self.warps
        tile = cute.arch.block_idx()[0] * self.warps + warp
        loaded, stored = Int32(0), Int32(0)
        going, size = Int64(0), Int32(0)  # lane i: where the tile in stage i goes, and its bytes
        more = tile < total
        while more or stored < loaded:
            # One stage less than there are is loaded ahead: the next stage to be loaded is then the one whose store is
            # the oldest but one, and the youngest store is never waited for.
            while more and loaded - stored < self.stages - 1:
                stage = loaded % self.stages
                into, barrier = ring + stage * self.stage_bytes, barriers + stage
                there, bytes_ = self.load(tile, into, barrier, sources, destinations, route, lane)
                if lane == stage:
                    going, size = there, bytes_
                loaded += 1
                tile = num_warps + self.take(counters, lane)
                more = tile < total
            stage = stored % self.stages
            there, bytes_ = cute.arch.shuffle_sync(going, stage), cute.arch.shuffle_sync(size, stage)
            if lane == 0:
                # The barrier makes the loaded bytes visible to this lane, and no ordinary access touches them: from
                # the copy engine to the copy engine no proxy fence is due.
                cute.arch.mbarrier_wait(barriers + stage, (stored // self.stages) & 1)
                ptx.bulk_store(there, ring + stage * self.stage_bytes, bytes_)
                ptx.bulk_commit()
            stored += 1
        ptx.bulk_wait()  # lane 0 for its stores: complete, not just read; see the publication's step 1

    @cute.jit
    def load(self, tile: Int32, into: Int32, barrier, sources, destinations, route, lane: Int32):
        """Starts the loads of a tile; returns where in the peer's buffer it belongs, and its bytes."""
        peer, which, batch, first = self.locate(tile, sources[0].shape[0], route)
        source, to_row, to_head, destination = self.ends(sources, destinations, peer, which, batch, route)
        last = cutlass.min(first + self.tile_units, route[0])
        size = (last - first) * self.head_bytes
        if lane == 0:
            ptx.bulk_wait_read(1)  # the store of what was in this stage
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        cute.arch.sync_warp()
        number = lane
        begin, end, offset = self.run(number, first, last, to_row, to_head, route)
        while begin < last:
            at = into + (begin - first) * self.head_bytes
            ptx.bulk_load(at, source + offset, (end - begin) * self.head_bytes, barrier.toint())
            number += WARP
            begin, end, offset = self.run(number, first, last, to_row, to_head, route)
        return destination + self.head_bytes * Int64(first), size

    def run(
        self, number: Int32, first: Int32, last: Int32, to_row: Int64, to_head: Int64, route: Any
    ) -> tuple[Int32, Int32, Int64]:
        """The tile's number-th run of heads that are contiguous in the source: its begin, its end, and where it lies in
        the source, in bytes. No such run: begin is `last` or more."""
        local_heads, length = route[-1]
        index = first // length + number
        begin = cutlass.max(first, index * length.divisor)
        end = cutlass.min(last, (index + 1) * length.divisor)
        row, head = divmod(begin, local_heads)
        return begin, end, row * to_row + head * to_head
