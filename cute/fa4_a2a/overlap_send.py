"""The sending warps of the overlapped kernel: two idle warps of each CTA's producer group. Mixed into OverlapForward.

16-byte loads and stores, no shared memory: they run beside the loads, the mathematics and the stores of O, and a store
that waits in the path does not hold up the copy engine, through which K and V are loaded. A pause behind each unit of
work keeps all of them together below the path's rate.

Units are handed out by a counter in the order of the steps, to whichever warp asks. Each warp counts what it did of a
step; who completes the count publishes.

Release side:
  1. each lane's stores of a step come before the warp's barrier, and so before what lane 0 does next;
  2. lane 0 adds the warp's units to the step's count with acq_rel at GPU scope. The additions to one word form a chain,
     in which each synchronizes with the next: all units' stores happen before what the one that completes the count
     does next;
  3. that lane executes fence.acq_rel.sys and stores the epoch to the peer's word of the part. The fence is cumulative:
     all of the above comes before that store for any observer in the system that acquires it.
It is the chain of scatter_kernel.py, step by step, with the fingerprint before the fence as there; litmus.py tests it
as its variant `st_release`.

Storing may begin at once: nobody reads the Q, K and V of the call before any more, since this rank acquired every
peer's `ready` of that call in an earlier kernel of this stream. Its own K and V it read in that kernel itself.
`arrived` is published first, with the configuration, so that a peer that makes another call fails at once.

The epoch is advanced by the last CTA at the kernel's end: it arrives there after this CTA's senders (barrier SENT), and
after its load warp, which has read all keys. So whoever reads the epoch here or there reads that of the call before.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from . import ptx
from .overlap import BATCHES, SENDERS, UNROLL, Counter, Step
from .overlap_schedule import Overlap, OverlapParams
from .persistent_release import publish
from .persistent_schedule import Release
from .persistent_slices import sleep
from .persistent_stores import Stores
from .scatter import PIECE_BYTES, WARP
from .scatter_pieces import loads, piece, registers, stores, take
from .signal import ARRIVED, EPOCH, FINGERPRINT

SENT = 13  # named barrier, the senders and the storing warp: this CTA's senders have read the epoch and are done


class Sends(Stores):
    @cute.jit
    def after_load(self, sQ: cute.Tensor, TileSchedulerCls):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.store_warp:
            self.store_tiles(TileSchedulerCls, self.slices_of(sQ))
        if warp > self.store_warp:
            self.send_inputs(TileSchedulerCls().params, warp)
            cute.arch.barrier_arrive(barrier_id=SENT, number_of_threads=(SENDERS + 1) * WARP)

    @cute.jit
    def finish(self, params: OverlapParams):
        cute.arch.barrier(barrier_id=SENT, number_of_threads=(SENDERS + 1) * WARP)
        publish(params.release)

    @cute.jit
    def send_inputs(self, params: OverlapParams, warp: Int32):
        overlap, release = params.overlap, params.release
        lane = cute.arch.lane_idx()
        if cute.arch.block_idx()[0] == 0 and warp == self.store_warp + 1:
            self.open_call(overlap, release, lane)
        counters = overlap.counters.iterator.toint()
        row_bytes = params.num_heads * self.head_bytes
        ticket = self.take(counters, lane)
        for number in cutlass.range(overlap.steps.shape[0] // int(Step.WORDS), unroll=1):
            step = overlap.steps.iterator.toint() + 8 * int(Step.WORDS) * number
            done = Int32(0)
            while ticket < word(step, Step.END):
                ticket = self.move(overlap, step, ticket, row_bytes, counters, lane)
                done += 1
                if overlap.send_pace_ns > 0:
                    sleep(overlap.send_pace_ns)
            if done > 0:
                self.sent(overlap, release, step, counters + 8 * (int(Counter.SENT) + number), done, lane)
        self.reset(counters, overlap, lane)

    @cute.jit
    def open_call(self, overlap: Overlap, release: Release, lane: Int32):
        """Publishes `arrived` with the configuration. Twice does no harm: the values are the same."""
        if lane < release.num_ranks:
            peer = release.peer_blocks[lane]
            ptx.store_relaxed_sys(peer + 8 * (FINGERPRINT + Int64(release.rank)), overlap.fingerprint)
            ptx.fence_acq_rel_sys()
            ptx.store_relaxed_sys(peer + 8 * (ARRIVED + Int64(release.rank)), self.epoch(release))

    def take(self, counters: Int64, lane: Int32) -> Int32:
        return take(counters + 8 * int(Counter.TICKET), lane)

    @cute.jit
    def move(
        self, overlap: Overlap, step: Int64, taken: Int32, row_bytes: Int32, counters: Int64, lane: Int32
    ) -> Int32:
        """Stores a unit, some rows of one head of one tensor; returns the next ticket."""
        unit = taken - word(step, Step.BEGIN)
        heads, tensors, rows = word(step, Step.HEADS), word(step, Step.TENSORS), word(step, Step.ROWS)
        rest = unit // heads
        head = unit - rest * heads + word(step, Step.HEAD)
        block = rest // tensors
        tensor = word(step, Step.FIRST) + rest - block * tensors
        at, by_row, by_head = overlap.at_q, overlap.row_q, overlap.head_q
        if tensor == 1:
            at, by_row, by_head = overlap.at_k, overlap.row_k, overlap.head_k
        if tensor == 2:
            at, by_row, by_head = overlap.at_v, overlap.row_v, overlap.head_v
        row = block * self.unit_rows + lane // self.head_pieces
        shift = Int64(PIECE_BYTES * (lane % self.head_pieces))
        source = at + (word(step, Step.PEER) * (row_bytes // self.head_bytes) + head) * by_head + shift
        target = ptx.load_weak(step + 8 * (int(Step.TO) + tensor)) + head * self.head_bytes + shift
        load, store = loads(self.dtype), stores(self.dtype)
        ticket = Int32(0)
        for batch in cutlass.range_constexpr(BATCHES):
            pieces = [registers(self.dtype) for _ in range(UNROLL)]
            for i in cutlass.range_constexpr(UNROLL):
                # past the end the last row is loaded again and not stored: no load is behind a branch
                here = cutlass.min(row + i * self.warp_rows, rows - 1)
                cute.copy(load, piece(self.dtype, source + here * by_row), pieces[i])
            if const_expr(batch == BATCHES - 1):
                ticket = self.take(counters, lane)
            for i in cutlass.range_constexpr(UNROLL):
                there = row + i * self.warp_rows
                if there < rows:
                    cute.copy(store, pieces[i], piece(self.dtype, target + Int64(there) * row_bytes))
            row += UNROLL * self.warp_rows
        return ticket

    @cute.jit
    def sent(self, overlap: Overlap, release: Release, step: Int64, count: Int64, done: Int32, lane: Int32):
        cute.arch.sync_warp()
        if lane == 0:
            before = Int32(ptx.add_acq_rel_gpu(count, Int64(done)))
            if before + done == word(step, Step.END) - word(step, Step.BEGIN):
                ptx.store_relaxed_sys(ptx.load_weak(step + 8 * int(Step.FINGERPRINT)), overlap.fingerprint)
                ptx.fence_acq_rel_sys()
                ptx.store_relaxed_sys(ptx.load_weak(step + 8 * int(Step.WORD)), self.epoch(release))

    def epoch(self, release: Release) -> Int64:
        """This call's. Read anew each time: registers are scarce here."""
        return ptx.load_relaxed_sys(release.peer_blocks[release.rank] + 8 * EPOCH) + 1

    @cute.jit
    def reset(self, counters: Int64, overlap: Overlap, lane: Int32):
        """By the last sender that found no unit left: nobody touches the counters any more, until the next launch."""
        if lane == 0:
            before = Int32(ptx.add_acq_rel_gpu(counters + 8 * int(Counter.DONE), Int64(1)))
            if before + 1 == SENDERS * cute.arch.grid_dim()[0]:
                for number in cutlass.range(overlap.counters.shape[0], unroll=1):
                    if number != int(Counter.FAULT):
                        ptx.store_relaxed_sys(counters + 8 * number, Int64(0))

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def itemsize(self) -> int:
        return self.dtype.width // 8

    @property
    def head_bytes(self) -> int:
        return self.tile_hdim * self.itemsize

    @property
    def head_pieces(self) -> int:
        return self.head_bytes // PIECE_BYTES

    @property
    def warp_rows(self) -> int:
        """Rows of a head that a warp loads at a time."""
        return WARP // self.head_pieces

    @property
    def unit_rows(self) -> int:
        return self.warp_rows * UNROLL * BATCHES


def word(step: Int64, which: Step) -> Int32:
    return Int32(ptx.load_weak(step + 8 * int(which)))
