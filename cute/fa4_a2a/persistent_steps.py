"""Slices sent by the load warp, one behind each of its K loads: paced by the key loop itself, no second warp, no sleep.

Upstream's load loop calls `load_KV` for each block, so that is where a slice goes; the loop stays as it is. What has to
be known from one call to the next lies in registers of the load warp (`state`), since the loop carries nothing of ours.

A tile's blocks come in the order n-1, ..., 0. The K load of the step after num_stages others had to wait for the
consumers to be through with the first K block of this tile, so they have left the epilogue of the tile before: from
there on FULL is passed without waiting. With fewer steps than that the load warp waits at FULL at block 0, when all
loads of the tile before are done, so the consumers get there. At block 0 whatever is left over leaves, and behind the V
load of block 0, the tile's last load, the staging is handed back.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

from .persistent import Stamp
from .persistent_release import publish
from .persistent_schedule import locate
from .persistent_stores import FULL, Stores

STAGED, CURRENT, SENT, STEP = range(
    4
)  # of state: tile that is staged (-1: none), tile being loaded, slices sent, steps


class Steps(Stores):
    def begin_steps(self, sQ: cute.Tensor, TileSchedulerCls: Any) -> None:
        self.load_params, self.staged = TileSchedulerCls().params, self.slices_of(sQ)
        self.state = cute.make_rmem_tensor(4, Int32)
        for at, value in ((STAGED, Int32(-1)), (CURRENT, cute.arch.block_idx()[0]), (SENT, Int32(0)), (STEP, Int32(0))):
            self.state[at] = value

    @cute.jit
    def load_KV(self, tma_load_fn, paged_kv_manager, sX, block, pipeline_kv, producer_state, K_or_V, page_idx=None):
        FlashAttentionForwardSm90.load_KV(
            self, tma_load_fn, paged_kv_manager, sX, block, pipeline_kv, producer_state, K_or_V, page_idx
        )
        if const_expr(self.build.store == "step"):
            if const_expr(K_or_V == "K"):
                self.step(block)
            else:
                self.end_of_tile(block)

    @cute.jit
    def step(self, block):
        state = self.state
        state[STEP] = state[STEP] + 1
        staged = state[STAGED]
        if staged >= 0 and (state[STEP] > self.num_stages or block == 0):
            first = state[SENT]
            last = cutlass.min(first + 1, self.num_slices)
            if block == 0:
                last = Int32(self.num_slices)
            self.send_some(staged, first, last)
            state[SENT] = last

    @cute.jit
    def send_some(self, tile: Int32, first: Int32, last: Int32):
        params = self.load_params
        place = locate(params, tile)
        if first == 0:
            for part in cutlass.range_constexpr(self.handovers):
                self.group_sync(FULL, part)
            self.stamp(Stamp.FULL, params, place)
        filled = self.filled(params, place[0])
        for number in cutlass.range(first, cutlass.min(last, filled), unroll=1):
            self.send(params, self.staged, place, number)
            if number == 0:
                self.stamp(Stamp.FIRST, params, place)
            if number == filled - 1:
                self.stamp(Stamp.LAST, params, place)

    @cute.jit
    def end_of_tile(self, block):
        state = self.state
        if block == 0:
            if state[STAGED] >= 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.stamp(Stamp.READ, self.load_params, locate(self.load_params, state[STAGED]))
            self.arrive_empty()
            state[STAGED] = state[CURRENT]
            state[CURRENT] = state[CURRENT] + cute.arch.grid_dim()[0]
            state[SENT] = Int32(0)
            state[STEP] = Int32(0)

    @cute.jit
    def end_steps(self):
        """The CTA's last tile: nothing is computed behind it, it leaves at once."""
        self.send_some(self.state[STAGED], Int32(0), Int32(self.num_slices))
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.stamp(Stamp.READ, self.load_params, locate(self.load_params, self.state[STAGED]))
        if const_expr(self.build.release):
            publish(self.load_params.release)
