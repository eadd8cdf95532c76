"""The kernels behind litmus.load_litmus. Imports cutlass: only to compile."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from . import ptx
from .litmus import BYTES_PER_CTA, CTAS, Counter
from .toolchain import compile_for, vector

THREADS = 256
WORDS_PER_THREAD = BYTES_PER_CTA // 8 // THREADS  # u64
SLICE_BYTES = 4096  # of one bulk store


@cute.jit
def reached(address: Int64, value: Int64, start: Int64, deadline_ns: Int64) -> Int32:
    """Spins until the word at `address` is at least `value` (acquired: 1), or until the deadline (0). Does not sleep:
    the reader has to look while data may still be under way."""
    found = ptx.load_acquire_sys(address)
    late = Int64(0)
    while found - value < 0 and late <= deadline_ns:
        found = ptx.load_acquire_sys(address)
        late = ptx.globaltimer() - start
    result = Int32(0)
    if found - value >= 0:
        result = Int32(1)
    return result


@cute.jit
def counter(counters: cute.Tensor, which: cutlass.Constexpr[int]) -> Int64:
    return counters.iterator.toint() + 8 * which


@cute.jit
def pattern(value: Int32) -> Int64:
    """The value in both halves of a u64."""
    return (Int64(value) << 32) | Int64(value)


class Writer:
    def __init__(self, variant: str):
        self.variant = variant

    @cute.jit
    def __call__(
        self, data: Int64, flag: Int64, ack: Int64, counters: cute.Tensor, rounds: Int32, deadline_ns: Int64, stream
    ):
        self.kernel(data, flag, ack, counters, rounds, deadline_ns).launch(
            grid=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, data: Int64, flag: Int64, ack: Int64, counters: cute.Tensor, rounds: Int32, deadline_ns: Int64):
        start = ptx.globaltimer()
        thread = cute.arch.thread_idx()[0]
        own = data + Int64(cute.arch.block_idx()[0]) * BYTES_PER_CTA
        smem = SmemAllocator()
        staging = smem.allocate(BYTES_PER_CTA, 128).toint()
        go = cute.make_tensor(smem.allocate_array(Int32, 1), cute.make_layout(1))
        current, alive = Int32(1), Int32(1)
        while alive != 0 and current <= rounds:
            if thread == 0:  # every block acquires the ack itself: the reader is through with the round before
                go[0] = reached(ack, Int64(current - 1), start, deadline_ns)
            cute.arch.sync_threads()
            alive = go[0]
            if alive != 0:
                put(self.variant, own, staging, current, thread)
                if thread == 0:
                    self.arrive(flag, counters, current)
                current += 1
            cute.arch.sync_threads()
        if thread == 0 and alive == 0:
            ptx.store_relaxed_sys(counter(counters, int(Counter.ERROR)), Int64(1))

    @cute.jit
    def arrive(self, flag: Int64, counters: cute.Tensor, current: Int32):
        """The chain under test, by the thread that issued the stores and waited for them (see put)."""
        arrivals = counter(counters, int(Counter.ARRIVALS))
        fenced = const_expr(self.variant in ("release", "read_fence"))
        if const_expr(fenced):
            before = ptx.add_acq_rel_gpu(arrivals, Int64(1))
        else:
            before = ptx.add_relaxed_gpu(arrivals, Int64(1))
        if before + 1 == Int64(current) * CTAS:
            if const_expr(fenced):
                ptx.fence_acq_rel_sys()
            ptx.store_relaxed_sys(flag, Int64(current))
            ptx.store_relaxed_sys(counter(counters, int(Counter.ROUNDS)), Int64(current))


@cute.jit
def put(variant: cutlass.Constexpr[str], own: Int64, staging: Int32, value: Int32, thread: Int32):
    """Fills this block's part of the peer's buffer with `value`."""
    word = pattern(value)
    if const_expr(variant == "st_control"):
        for i in cutlass.range_constexpr(WORDS_PER_THREAD):
            ptx.store_weak(own + 8 * Int64(thread + i * THREADS), word)
        cute.arch.sync_threads()
    else:
        for i in cutlass.range_constexpr(WORDS_PER_THREAD):
            ptx.store_shared(staging + 8 * (thread + i * THREADS), word)
        ptx.fence_proxy_async_shared()
        cute.arch.sync_threads()
        if thread == 0:
            for i in cutlass.range_constexpr(BYTES_PER_CTA // SLICE_BYTES):
                ptx.bulk_store(own + i * SLICE_BYTES, staging + i * SLICE_BYTES, Int32(SLICE_BYTES))
            ptx.bulk_commit()
            if const_expr(variant == "release"):
                ptx.bulk_wait()
            else:
                ptx.bulk_wait_read()  # staging may be filled again; nothing more


class BoundaryWriter:
    @cute.jit
    def __call__(self, data: Int64, value: Int32, counters: cute.Tensor, stream):
        self.kernel(data, value).launch(grid=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, data: Int64, value: Int32):
        own = data + Int64(cute.arch.block_idx()[0]) * BYTES_PER_CTA
        staging = SmemAllocator().allocate(BYTES_PER_CTA, 128).toint()
        put("boundary", own, staging, value, cute.arch.thread_idx()[0])


@cute.jit
def check(own: Int64, value: Int32, counters: cute.Tensor, thread: Int32, noted: cute.Tensor):
    """Counts this thread's words. The last bytes stored are looked at first: they are the likeliest to be late. The
    loads are relaxed at system scope, so they go past L1, and what is late is late on the writer's side."""
    found = [
        ptx.load_relaxed_sys(own + 8 * Int64(thread + (WORDS_PER_THREAD - 1 - i) * THREADS))
        for i in range(WORDS_PER_THREAD)
    ]
    stale, wrong = Int32(0), Int32(0)
    for i in cutlass.range_constexpr(WORDS_PER_THREAD):
        for half in cutlass.range_constexpr(2):
            word = Int32(found[i] >> (32 * half))
            if word == value - 1:
                stale += 1
            elif word != value:
                wrong += 1
    if stale > 0:
        ptx.add_relaxed_gpu(counter(counters, int(Counter.STALE)), Int64(stale))
        noted[0] = value  # all that write it write the same
    if wrong > 0:
        ptx.add_relaxed_gpu(counter(counters, int(Counter.WRONG)), Int64(wrong))


class Reader:
    @cute.jit
    def __call__(
        self, data: Int64, flag: Int64, ack: Int64, counters: cute.Tensor, rounds: Int32, deadline_ns: Int64, stream
    ):
        self.kernel(data, flag, ack, counters, Int64(1), Int32(1), rounds, deadline_ns).launch(
            grid=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        data: Int64,
        flag: Int64,
        ack: Int64,
        counters: cute.Tensor,
        epoch: Int64,
        value: Int32,
        rounds: Int32,
        deadline_ns: Int64,
    ):
        """`rounds` rounds, the first awaiting `epoch` at the flag and then finding `value`. flag or ack 0: none."""
        start = ptx.globaltimer()
        thread = cute.arch.thread_idx()[0]
        own = data + Int64(cute.arch.block_idx()[0]) * BYTES_PER_CTA
        smem = SmemAllocator()
        go = cute.make_tensor(smem.allocate_array(Int32, 1), cute.make_layout(1))
        noted = cute.make_tensor(smem.allocate_array(Int32, 1), cute.make_layout(1))
        done, alive = Int32(0), Int32(1)
        while alive != 0 and done < rounds:
            if thread == 0:
                noted[0] = Int32(0)
                go[0] = Int32(1)
                if flag != 0:
                    go[0] = reached(flag, epoch + done, start, deadline_ns)
            # extends thread 0's acquire to the block
            cute.arch.sync_threads()
            alive = go[0]
            if alive != 0:
                check(own, value + done, counters, thread, noted)
                done += 1
            # every load of the block is over before thread 0 arrives
            cute.arch.sync_threads()
            if thread == 0 and alive != 0:
                if noted[0] != 0:
                    ptx.add_relaxed_gpu(counter(counters, int(Counter.STALE_BLOCKS)), Int64(1))
                self.arrive(ack, counters, done)
        if thread == 0 and alive == 0:
            ptx.store_relaxed_sys(counter(counters, int(Counter.ERROR)), Int64(1))

    @cute.jit
    def arrive(self, ack: Int64, counters: cute.Tensor, done: Int32):
        """Lets the writer overwrite: arrivals chain the blocks' reads, the fence puts them before the ack for the
        writer's GPU too, which acquires it."""
        arrivals = counter(counters, int(Counter.ARRIVALS))
        if (ptx.add_acq_rel_gpu(arrivals, Int64(1)) + 1) % CTAS == 0:
            ptx.add_relaxed_gpu(counter(counters, int(Counter.ROUNDS)), Int64(1))
            if ack != 0:
                ptx.fence_acq_rel_sys()
                ptx.store_relaxed_sys(ack, Int64(done))


class BoundaryReader(Reader):
    @cute.jit
    def __call__(
        self, data: Int64, flag: Int64, epoch: Int64, value: Int32, counters: cute.Tensor, deadline_ns: Int64, stream
    ):
        self.kernel(data, flag, Int64(0), counters, epoch, value, Int32(1), deadline_ns).launch(
            grid=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream
        )


def compile_writer(arch: str, variant: str) -> Any:
    i32, i64 = Int32(0), Int64(0)
    if variant == "boundary":
        return compile_for(arch, BoundaryWriter, i64, i32, vector(Int64))
    return compile_for(arch, lambda: Writer(variant), i64, i64, i64, vector(Int64), i32, i64)


def compile_reader(arch: str, reader: str) -> Any:
    i32, i64 = Int32(0), Int64(0)
    if reader == "boundary":
        return compile_for(arch, BoundaryReader, i64, i64, i64, i32, vector(Int64), i64)
    return compile_for(arch, Reader, i64, i64, i64, vector(Int64), i32, i64)
