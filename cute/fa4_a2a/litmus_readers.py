"""The reading kernels behind litmus.load_litmus. Imports cutlass: only to compile."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from . import ptx
from .litmus import BYTES_PER_CTA, CTAS, Counter
from .litmus_kernels import SLICE_BYTES, THREADS, WORDS_PER_THREAD, counter, reached
from .toolchain import compile_for, vector


@cute.jit
def check(found: list[Int64], value: Int32, counters: cute.Tensor, noted: cute.Tensor):
    """Counts this thread's words."""
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
    """path: "" loads of threads, "bulk" copies to shared memory behind a proxy fence, "bare" such copies without it."""

    def __init__(self, path: str):
        self.path = path

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
        staging, barrier = Int32(0), smem.allocate_array(Int64, 1)
        if const_expr(self.path):
            staging = smem.allocate(BYTES_PER_CTA, 128).toint()
            if thread == 0:
                cute.arch.mbarrier_init(barrier, 1)
                ptx.fence_proxy_async_shared()
            cute.arch.sync_threads()
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
                if const_expr(self.path):
                    if thread == 0:
                        self.fetch(own, staging, barrier)
                    cute.arch.mbarrier_wait(barrier, done & 1)
                    check(self.staged(staging, thread), value + done, counters, noted)
                else:
                    check(self.loaded(own, thread), value + done, counters, noted)
                done += 1
            # every load of the block is over before thread 0 arrives
            cute.arch.sync_threads()
            if thread == 0 and alive != 0:
                if noted[0] != 0:
                    ptx.add_relaxed_gpu(counter(counters, int(Counter.STALE_BLOCKS)), Int64(1))
                self.arrive(ack, counters, done)
        if thread == 0 and alive == 0:
            ptx.store_relaxed_sys(counter(counters, int(Counter.ERROR)), Int64(1))

    def loaded(self, own: Int64, thread: Int32) -> list[Int64]:
        """The last bytes stored are looked at first: they are the likeliest to be late. The loads are relaxed at system
        scope, so they go past L1, and what is late is late on the writer's side."""
        indices = [thread + (WORDS_PER_THREAD - 1 - i) * THREADS for i in range(WORDS_PER_THREAD)]
        return [ptx.load_relaxed_sys(own + 8 * Int64(index)) for index in indices]

    def staged(self, staging: Int32, thread: Int32) -> list[Int64]:
        return [ptx.load_shared(staging + 8 * (thread + i * THREADS)) for i in range(WORDS_PER_THREAD)]

    @cute.jit
    def fetch(self, own: Int64, staging: Int32, barrier):
        """By the thread that acquired the flag. Its acquire orders the generic proxy, in which the peer's stores came;
        bulk copies read through the async proxy, and the fence orders that one behind."""
        if const_expr(self.path == "bulk"):
            ptx.fence_proxy_async()
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, BYTES_PER_CTA)
        for i in reversed(range(BYTES_PER_CTA // SLICE_BYTES)):
            at = i * SLICE_BYTES
            ptx.bulk_load(staging + at, own + at, Int32(SLICE_BYTES), barrier.toint())

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
    """One round, as one launch."""

    @cute.jit
    def __call__(
        self, data: Int64, flag: Int64, epoch: Int64, value: Int32, counters: cute.Tensor, deadline_ns: Int64, stream
    ):
        self.kernel(data, flag, Int64(0), counters, epoch, value, Int32(1), deadline_ns).launch(
            grid=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream
        )


def compile_reader(arch: str, reader: str) -> Any:
    """reader: "rounds" or "boundary", and behind "-" a path of Reader."""
    i32, i64 = Int32(0), Int64(0)
    loop, _, path = reader.partition("-")
    if loop == "boundary":
        return compile_for(arch, lambda: BoundaryReader(path), i64, i64, i64, i32, vector(Int64), i64)
    return compile_for(arch, lambda: Reader(path), i64, i64, i64, vector(Int64), i32, i64)
