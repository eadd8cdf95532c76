"""The writing kernels behind litmus.load_litmus. Imports cutlass: only to compile."""

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
        fenced = const_expr(self.variant in ("release", "read_fence", "st_release"))
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
    if const_expr(variant in ("st_control", "st_release")):
        for i in cutlass.range_constexpr(WORDS_PER_THREAD):
            ptx.store_weak(own + 8 * Int64(thread + i * THREADS), word)
        cute.arch.sync_threads()  # chains every thread's stores to thread 0, which arrives for them
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


def compile_writer(arch: str, writer: str) -> Any:
    i32, i64 = Int32(0), Int64(0)
    if writer == "boundary":
        return compile_for(arch, BoundaryWriter, i64, i32, vector(Int64))
    return compile_for(arch, lambda: Writer(writer), i64, i64, i64, vector(Int64), i32, i64)
