"""How staged tiles leave: who sends their slices, and when. Mixed into PersistentForward (persistent_kernels.py)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

from . import ptx
from .persistent import STAMP_WORDS, Stamp
from .persistent_release import publish
from .persistent_schedule import Params, scheduler
from .persistent_slices import COLUMNS, Slices

FULL, EMPTY = 7, 10  # named barriers; the table stands in persistent_kernels.py
WARP, GROUP = 32, 128  # threads
GROUP_ROWS = 64  # rows of a tile that one consumer warpgroup computes


class Stores(Slices):
    load_warp, store_warp = 0, 1  # of the producer warpgroup; warps 2 and 3 idle
    consumer_store_warp = 4

    # -- barriers ------------------------------------------------------------------------------------------------------

    def group_sync(self, barrier: int, group: Int32) -> None:
        number, threads = self.group_barrier(barrier, group)
        cute.arch.barrier(barrier_id=number, number_of_threads=threads)

    def group_arrive(self, barrier: int, group: Int32) -> None:
        number, threads = self.group_barrier(barrier, group)
        cute.arch.barrier_arrive(barrier_id=number, number_of_threads=threads)

    def group_barrier(self, barrier: int, group: Any) -> tuple[Any, int]:
        if self.build.barriers == "group":
            return barrier + group, GROUP + WARP
        return barrier, self.num_mma_threads + WARP

    def consumers_sync(self, barrier: int) -> None:
        cute.arch.barrier(barrier_id=barrier, number_of_threads=self.num_mma_threads)

    @property
    def handovers(self) -> int:
        """Parts of a tile that are handed over by themselves."""
        return self.tile_m // GROUP_ROWS if self.build.barriers == "group" else 1

    @cute.jit
    def arrive_empty(self):
        for part in cutlass.range_constexpr(self.handovers):
            self.group_arrive(EMPTY, part)

    # -- slices --------------------------------------------------------------------------------------------------------

    @property
    def num_slices(self) -> int:
        return self.tile_m // self.build.slice_rows

    def slices_of(self, sQ: cute.Tensor) -> cute.Tensor:
        """The staging as (rows of a slice, columns of a slice, slice, column block). O is staged as column blocks of
        tile_m rows, each row 128 bytes, so a slice is contiguous and begins on a swizzle atom (8 rows)."""
        rows = self.build.slice_rows
        beside = cute.make_layout(
            (self.num_slices, self.tile_hdimv // COLUMNS), stride=(rows * COLUMNS, self.tile_m * COLUMNS)
        )
        layout = cute.append(self.slice_layout().outer, cute.get(beside, mode=[0]))
        return cute.make_tensor(sQ.iterator + self.staging_at, cute.append(layout, cute.get(beside, mode=[1])))

    @cute.jit
    def send(self, params: Params, staged: cute.Tensor, place, number: Int32):
        """Bulk stores of one slice, as one group."""
        m_block, head, chunk = place
        target = params.o_slices[None, None, head, chunk]
        for column in cutlass.range_constexpr(self.tile_hdimv // COLUMNS):
            at = (m_block * self.num_slices + number, column)
            there = cute.local_tile(target, self.slice_shape, at)
            self.store_slice(params, staged[None, None, number, column], there)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def filled(self, params: Params, m_block: Int32) -> Int32:
        """Slices of the tile that hold rows of the chunk."""
        left = cute.ceil_div(params.rows - m_block * self.tile_m, self.build.slice_rows)
        return cutlass.min(left, self.num_slices)

    @cute.jit
    def send_all(self, params: Params, staged: cute.Tensor, place):
        for number in cutlass.range(self.filled(params, place[0]), unroll=1):
            self.send(params, staged, place, number)

    # -- who sends them ------------------------------------------------------------------------------------------------

    def load(self, *arguments: Any) -> None:
        make_scheduler, sQ = scheduler(arguments), arguments[3]
        if self.build.store == "step":
            self.begin_steps(sQ, make_scheduler)
        FlashAttentionForwardSm90.load(self, *arguments)  # the load warp's; the others fall through
        if self.build.store != "consumer":
            self.after_load(sQ, make_scheduler)

    @cute.jit
    def after_load(self, sQ: cute.Tensor, TileSchedulerCls):
        storing = self.store_warp if const_expr(self.build.store == "warp") else self.load_warp
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == storing:
            if const_expr(self.build.store == "warp"):
                self.store_tiles(TileSchedulerCls, self.slices_of(sQ))
            else:
                self.end_steps()

    @cute.jit
    def store_tiles(self, TileSchedulerCls, staged: cute.Tensor):
        """The store warp: lets each staged tile out, slice by slice, while the next one is computed."""
        scheduler = TileSchedulerCls()
        params = scheduler.params
        cpasync.prefetch_descriptor(params.o_atom)
        work = scheduler.initial_work_tile_info()
        self.arrive_empty()
        while work.is_valid_tile:
            m_block, head, chunk, _ = work.tile_idx
            place = (m_block, head, chunk)
            scheduler.advance_to_next_work()
            work = scheduler.get_current_work()
            pace_ns = params.pace_ns
            if not work.is_valid_tile:  # nothing is computed behind the last tile: let it go at once
                pace_ns = Int32(0)
            filled = self.filled(params, m_block)
            begin = Int64(0)
            for number in cutlass.range(self.num_slices, unroll=1):
                if number % (self.num_slices // self.handovers) == 0:
                    self.group_sync(FULL, number // (self.num_slices // self.handovers))
                    if number == 0:
                        self.stamp(Stamp.FULL, params, place)
                        if const_expr(self.build.pace == "clock"):
                            begin = ptx.globaltimer()
                if number < filled:
                    self.send(params, staged, place, number)
                    if number == 0:
                        self.stamp(Stamp.FIRST, params, place)
                    if number == filled - 1:
                        self.stamp(Stamp.LAST, params, place)
                    elif pace_ns > 0:
                        self.pause(begin, number, pace_ns)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.stamp(Stamp.READ, params, place)
            if work.is_valid_tile:
                self.arrive_empty()
        self.finish(params)

    @cute.jit
    def finish(self, params: Params):
        """The end of the storing warp's work."""
        if const_expr(self.build.release):
            publish(params.release)

    # -- times ---------------------------------------------------------------------------------------------------------

    def stamp(self, which: Stamp, params: Params, place: Any) -> None:
        """The time now, into word `which` of the tile's record, in builds with stamps. For a whole warp."""
        if self.build.stamps:
            self.note(self.stamp_address(params, place) + 8 * int(which), cute.arch.lane_idx() == 0, ptx.globaltimer())

    def stamp_of_group(self, which: Stamp, place: Any, group: Int32, tidx: Int32) -> None:
        """The same for a consumer warpgroup."""
        if self.build.stamps:
            record = self.stamp_address(self.params, place)
            self.note(record + 8 * (int(which) + Int64(group)), tidx % GROUP == 0, ptx.globaltimer())
            if which == Stamp.WANTED:
                self.note(record + 8 * int(Stamp.CTA), tidx == 0, Int64(cute.arch.block_idx()[0]))

    @cute.jit
    def note(self, address: Int64, mine, value: Int64):
        if mine:
            ptx.store_relaxed_sys(address, value)

    def stamp_address(self, params: Params, place: Any) -> Int64:
        m_block, head, chunk = place
        tile = (Int64(chunk) * params.num_heads + head) * params.num_blocks + m_block
        return params.stamps.iterator.toint() + 8 * STAMP_WORDS * tile
