"""The kernels behind burst.load_burst. Imports cutlass: only to compile."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from . import burst_ptx, ptx
from .burst import LOAD_BYTES, MAX_BURST_BYTES, PIECE_BYTES, SUMMARY_WORDS, THREADS, Failure, Flags, Summary
from .toolchain import compile_for, vector

LEAD_NS = 4000  # between the last block's arrival and the common start: longer than a poll and a tick of globaltimer
LOAD_LIMIT_CLOCKS = 200_000_000  # 0.1 s
SMEM_BYTES = MAX_BURST_BYTES + LOAD_BYTES + 1024  # said at the launch: what a variant leaves unused would not count


@cute.jit
def pause(clocks: Int64):
    begin = burst_ptx.clock()
    now = begin
    while now - begin < clocks:
        now = burst_ptx.clock()


@cute.jit
def release(control: Int64, num_ctas: Int32, count: Int32, before: Int64, start_ns: Int64, deadline_ns: Int64) -> Int64:
    """Arrives for the `count`-th common start (from 1) and spins until it. The start is a point of globaltimer that
    the last block to arrive chooses: all SMs see that clock's tick at once, but a polled flag up to 1 us apart.
    Returns that point, or 0 if the deadline comes first. Nothing is ordered by it: relaxed throughout."""
    arrived = ptx.add_relaxed_gpu(control, Int64(1)) + 1
    if arrived == Int64(count) * num_ctas:
        ptx.store_relaxed_sys(control + 8, ptx.globaltimer() + LEAD_NS)
    found = ptx.load_relaxed_sys(control + 8)
    now = ptx.globaltimer()
    while (found <= before or now < found) and now - start_ns <= deadline_ns:
        found = ptx.load_relaxed_sys(control + 8)
        now = ptx.globaltimer()
        while found > before and now < found and now - start_ns <= deadline_ns:
            now = ptx.globaltimer()
    if found <= before or now < found:
        found = Int64(0)
    return found


@cute.jit
def load(landing: Int32, source: Int64, barrier: Int32, parity: Int32) -> Int64:
    """Clocks from the load's issue until it has landed; -1 if it does not."""
    begin = burst_ptx.clock()
    burst_ptx.mbarrier_expect(barrier, Int32(LOAD_BYTES))
    ptx.bulk_load(landing, source, Int32(LOAD_BYTES), barrier)
    passed, took = Int32(0), Int64(0)
    while passed == 0 and took < LOAD_LIMIT_CLOCKS:
        passed = burst_ptx.mbarrier_passed(barrier, parity)
        took = burst_ptx.clock() - begin
    if passed == 0:
        took = Int64(-1)
    return took


class Burst:
    def __init__(self, store: str):
        self.store = store

    @cute.jit
    def __call__(
        self,
        targets: cute.Tensor,
        summary: cute.Tensor,
        issue: cute.Tensor,
        behind: cute.Tensor,
        control: cute.Tensor,
        source: Int64,
        num_ctas: Int32,
        num_targets: Int32,
        bursts: Int32,
        slices: Int32,
        slice_bytes: Int32,
        slots: Int32,
        slot_bytes: Int64,
        gap_clocks: Int64,
        pace_clocks: Int64,
        flags: Int32,
        deadline_ns: Int64,
        stream,
    ):
        self.kernel(
            targets, summary, issue, behind, control, source, num_ctas, num_targets, bursts, slices, slice_bytes,
            slots, slot_bytes, gap_clocks, pace_clocks, flags, deadline_ns,
        ).launch(grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), smem=SMEM_BYTES, stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        targets: cute.Tensor,
        summary: cute.Tensor,
        issue: cute.Tensor,
        behind: cute.Tensor,
        control: cute.Tensor,
        source: Int64,
        num_ctas: Int32,
        num_targets: Int32,
        bursts: Int32,
        slices: Int32,
        slice_bytes: Int32,
        slots: Int32,
        slot_bytes: Int64,
        gap_clocks: Int64,
        pace_clocks: Int64,
        flags: Int32,
        deadline_ns: Int64,
    ):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = SmemAllocator()
        staging = smem.allocate(MAX_BURST_BYTES, 128).toint()
        landing = smem.allocate(LOAD_BYTES, 128).toint()
        barrier = smem.allocate(8, 8).toint()
        # two words in turn, so that thread 0 writes one only when all have passed a barrier since reading it
        go = cute.make_tensor(smem.allocate_array(Int32, 2), cute.make_layout(2))
        if thread == 0:
            burst_ptx.mbarrier_init(barrier, Int32(1))
        if const_expr(self.store == "bulk"):
            for i in range(MAX_BURST_BYTES // 8 // THREADS):
                ptx.store_shared(staging + 8 * (thread + i * THREADS), Int64(cta) << 32)
            ptx.fence_proxy_async_shared()
        cute.arch.sync_threads()

        start_ns, start_clock = ptx.globaltimer(), burst_ptx.clock()
        current, alive, parity, failure = Int32(0), Int32(1), Int32(0), Int32(0)
        released, total = Int64(0), Int64(0)
        while alive != 0 and current < bursts:
            if flags & int(Flags.RELEASE_EACH) != 0 or (flags & int(Flags.RELEASE_FIRST) != 0 and current == 0):
                if thread == 0:
                    start = control.iterator.toint()
                    released = release(start, num_ctas, current + 1, released, start_ns, deadline_ns)
                    go[0] = Int32(released != 0)
                    if released == 0:
                        failure = Int32(int(Failure.RELEASE))
                cute.arch.sync_threads()
                alive = go[0]
            if alive != 0:
                own = targets[(cta + current) % num_targets] + Int64(current % slots) * slot_bytes
                own += Int64(cta) * slices * slice_bytes
                near = source + Int64(cta) * LOAD_BYTES
                issued, waited, parity = self.burst(
                    own, staging, landing, near, barrier, parity, slices, slice_bytes, pace_clocks, flags, thread
                )
                if thread == 0:
                    end = burst_ptx.clock()
                    total += issued
                    issue[current * num_ctas + cta] = issued
                    behind[current * num_ctas + cta] = waited
                    if waited < 0:
                        failure = Int32(int(Failure.LOAD))
                    elif ptx.globaltimer() - start_ns > deadline_ns:
                        failure = Int32(int(Failure.DEADLINE))
                    go[1] = Int32(failure == 0)
                    pause(gap_clocks - (burst_ptx.clock() - end))  # the gap begins where the burst ended
                cute.arch.sync_threads()
                alive = go[1]
                current += 1

        if thread == 0:
            first = cta * SUMMARY_WORDS
            summary[first + int(Summary.END_CLOCK)] = burst_ptx.clock()
            summary[first + int(Summary.END_NS)] = ptx.globaltimer()
            summary[first + int(Summary.START_NS)] = start_ns
            summary[first + int(Summary.START_CLOCK)] = start_clock
            summary[first + int(Summary.ISSUE_CLOCKS)] = total
            summary[first + int(Summary.BURSTS)] = Int64(current)
            summary[first + int(Summary.ERROR)] = Int64(failure)

    @cute.jit
    def burst(
        self,
        own: Int64,
        staging: Int32,
        landing: Int32,
        near: Int64,
        barrier: Int32,
        parity: Int32,
        slices: Int32,
        slice_bytes: Int32,
        pace_clocks: Int64,
        flags: Int32,
        thread: Int32,
    ):
        """(clocks of issuing, clocks waited behind it, the mbarrier's next parity), right in thread 0. With slices:
        issue time is their sum without the pauses, the wait that of the slowest load."""
        issued, waited, done = Int64(0), Int64(0), Int32(0)
        with_load = flags & int(Flags.LOAD) != 0
        while done < slices:
            cute.arch.sync_threads()
            begin = burst_ptx.clock()
            took = Int64(0)
            self.put(own + Int64(done) * slice_bytes, staging + done * slice_bytes, slice_bytes, thread)
            if const_expr(self.store == "bulk"):
                if thread == 0:
                    if with_load:  # the store is not waited for: its queue is what the load may stand behind
                        took = load(landing, near, barrier, parity)
                    ptx.bulk_wait_read()
                issued += burst_ptx.clock() - begin
            else:
                cute.arch.sync_threads()  # all warps' stores have been accepted
                issued += burst_ptx.clock() - begin
                if thread == 0 and with_load:
                    took = load(landing, near, barrier, parity)
            if with_load:
                parity = parity ^ 1
            if waited >= 0 and (took < 0 or took > waited):
                waited = took
            done += 1
            if thread == 0 and done < slices:
                pause(pace_clocks)
        if thread == 0 and flags & int(Flags.FENCE) != 0:
            # Thread 0's fence covers what the others stored before the barrier above (cumulativity), as in
            # cooperative groups' grid barrier.
            begin = burst_ptx.clock()
            if const_expr(self.store == "bulk"):
                ptx.bulk_wait()
            ptx.fence_acq_rel_sys()
            waited = burst_ptx.clock() - begin
        return issued, waited, parity

    @cute.jit
    def put(self, own: Int64, staging: Int32, size_bytes: Int32, thread: Int32):
        if const_expr(self.store == "bulk"):
            if thread == 0:
                at = Int32(0)
                while at < size_bytes:
                    piece = size_bytes - at
                    if piece > PIECE_BYTES:
                        piece = Int32(PIECE_BYTES)
                    ptx.bulk_store(own + at, staging + at, piece)
                    at += piece
                ptx.bulk_commit()
        else:
            at = thread * 16
            while at < size_bytes:
                burst_ptx.store_weak_16(own + at, Int64(at), own)
                at += 16 * THREADS


def compile_burst(arch: str, store: str) -> Any:
    i32, i64 = Int32(0), Int64(0)
    numbers = (i64, i32, i32, i32, i32, i32, i32, i64, i64, i64, i32, i64)
    return compile_for(arch, lambda: Burst(store), *(vector(Int64) for _ in range(5)), *numbers)
