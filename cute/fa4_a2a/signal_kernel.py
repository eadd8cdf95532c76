"""The kernel behind signal.load_signal. Imports cutlass: only to compile."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from . import ptx
from .signal import ARRIVED, EPOCH, FINGERPRINT, MAX_RANKS, READY, TOLD, Failure, Flags, Record, Told, Word
from .toolchain import compile_for, vector

POLL_NS = 32  # between two looks, each of which goes past L1
STEP_SHIFT = 24  # of the step in a notice
LOOKS_A_NOTICE = 64  # every so many looks at a peer's word one at TOLD: seldom, since it lengthens the look


@cute.jit
def reached(found: Int64, epoch: Int64) -> Boolean:
    """By signed difference, which wraps: right also where the counters pass 2^63 and 2^64."""
    return found - epoch >= 0


@cute.jit
def ends(notice: Int64, step: Int64) -> Boolean:
    """Whether a step comes no more, by signed difference of the 40 bits that a notice has of its own step."""
    return (step << STEP_SHIFT) - ((notice >> STEP_SHIFT) << STEP_SHIFT) >= 0


@cute.jit
def arrive(counters: cute.Tensor, which: int, lane: Int32) -> Int32:
    """Counts this warp in; returns how many have arrived with it. By acq_rel at GPU scope: all that came before those
    arrivals happens before what follows here, in all lanes."""
    arrived = Int32(0)
    if lane == 0:
        arrived = Int32(ptx.add_acq_rel_gpu(counters.iterator.toint() + 8 * which, Int64(1))) + 1
    arrived = cute.arch.shuffle_sync(arrived, 0)
    cute.arch.sync_warp()  # the other lanes come after lane 0's acquire too
    return arrived


class Signal:
    """One warp; lane p deals with peer p. Lanes past num_ranks take part in votes only."""

    @cute.jit
    def __call__(
        self,
        peer_blocks: cute.Tensor,
        rank: Int32,
        num_ranks: Int32,
        word: Int32,
        flags: Int32,
        fingerprint: Int64,
        deadline_ns: Int64,
        record: Int64,
        stream,
    ):
        self.kernel(peer_blocks, rank, num_ranks, word, flags, fingerprint, deadline_ns, record).launch(
            grid=(1, 1, 1), block=(MAX_RANKS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        peer_blocks: cute.Tensor,
        rank: Int32,
        num_ranks: Int32,
        word: Int32,
        flags: Int32,
        fingerprint: Int64,
        deadline_ns: Int64,
        record: Int64,
    ):
        lane = cute.arch.thread_idx()[0]
        start = ptx.globaltimer()
        self.steps(peer_blocks, lane, rank, num_ranks, word, flags, fingerprint, start, deadline_ns, record)

    @cute.jit
    def steps(
        self,
        peer_blocks: cute.Tensor,
        lane: Int32,
        rank: Int32,
        num_ranks: Int32,
        word: Int32,
        flags: Int32,
        fingerprint: Int64,
        start: Int64,
        deadline_ns: Int64,
        record: Int64,
    ):
        """For one whole warp; also the end of kernels that publish their own stores (scatter_kernel.py)."""
        own = peer_blocks[rank]
        peer = own
        if lane < num_ranks:
            peer = peer_blocks[lane]

        # The epoch word is touched by these steps alone, and the launches that take them on a workspace follow each
        # other in stream order. All lanes read it before lane 0 writes it: the warp barrier is in between.
        epoch = ptx.load_relaxed_sys(own + 8 * EPOCH)
        if flags & int(Flags.ADVANCE) != 0:
            epoch += 1  # wraps; epochs are compared by signed difference
            cute.arch.sync_warp()
            if lane == 0:
                ptx.store_relaxed_sys(own + 8 * EPOCH, epoch)

        if flags & int(Flags.PUBLISH) != 0:
            self.publish(peer, lane, rank, num_ranks, word, epoch, fingerprint)
        # No lane waits before all have published: else two ranks could wait for each other's unpublished lanes.
        cute.arch.sync_warp()
        if flags & int(Flags.WAIT) != 0:
            self.wait(peer_blocks, own, lane, rank, num_ranks, word, epoch, fingerprint, start, deadline_ns, record)

    @cute.jit
    def publish(
        self, peer: Int64, lane: Int32, rank: Int32, num_ranks: Int32, word: Int32, epoch: Int64, fingerprint: Int64
    ):
        """Order: everything that earlier kernels of this stream wrote or read, then the fingerprint, then the word.

        Release side. Earlier kernels' accesses happen before this kernel's first instruction: the kernel boundary
        completes their stores, bulk ones included, and their reads, which is what READY promises beside (src has
        stopped reading). The fence is cumulative: what happens before it, in whichever thread and to whichever GPU, is
        ordered before this lane's store below for any observer in the system. That this holds for bulk stores to a
        peer is the boundary variant of litmus.py. Each lane executes the fence itself, since a fence releases only
        through a later store of the same thread; one warp instruction does it for all 32.
        The fingerprint goes before that same fence, so whoever acquires the word sees it. It cannot overwrite one that
        the peer has yet to compare: the peer compared call n-1's before it published READY of n-1, and this rank waited
        for that READY before its call n.
        """
        if lane < num_ranks and word == int(Word.ARRIVED):
            ptx.store_relaxed_sys(peer + 8 * (FINGERPRINT + Int64(rank)), fingerprint)
        ptx.fence_acq_rel_sys()
        if lane < num_ranks:
            ptx.store_relaxed_sys(peer + 8 * (self.first_word(word) + rank), epoch)

    @cute.jit
    def wait(
        self,
        peer_blocks: cute.Tensor,
        own: Int64,
        lane: Int32,
        rank: Int32,
        num_ranks: Int32,
        word: Int32,
        epoch: Int64,
        fingerprint: Int64,
        start: Int64,
        deadline_ns: Int64,
        record: Int64,
    ):
        """Acquire side. Lane p's ld.acquire.sys that finds peer p's relaxed store (or a later one of p's, which is
        released no earlier) synchronizes with p's fence: all that p released happens before what follows this lane's
        load. Later kernels of this stream come after all lanes by kernel boundary, so they read, also by TMA, what
        every peer released (variant `call` of litmus.py). The protocol never lets a word run past the expected epoch;
        if one does, it has certainly arrived.

        The loop is uniform: a lane that has failed ends it for all at once, however long the others would have to wait.

        TOLD needs no order: a notice is one word, nothing is read on its account, and one that comes late is found at a
        later look. It ends a wait only for a step that its writer will never make, so it cannot overtake an arrival.
        """
        found, found_fingerprint, code, looks = epoch, fingerprint, Int32(0), Int32(0)
        step = 2 * epoch + Int64(word)
        pending = lane < num_ranks
        while cute.arch.vote_any_sync(pending) and not cute.arch.vote_any_sync(code != 0):
            if pending:
                found = ptx.load_acquire_sys(own + 8 * (self.first_word(word) + lane))
                if reached(found, epoch):
                    pending = False
                    if word == int(Word.ARRIVED):
                        # after the acquire above, so it is the one that was released before that word
                        found_fingerprint = ptx.load_relaxed_sys(own + 8 * (FINGERPRINT + Int64(lane)))
                        if found_fingerprint != fingerprint:
                            code = Int32(int(Failure.FINGERPRINT))
                elif ptx.globaltimer() - start > deadline_ns:
                    code = Int32(int(Failure.DEADLINE))
                elif looks % LOOKS_A_NOTICE == LOOKS_A_NOTICE - 1:
                    notice = ptx.load_relaxed_sys(own + 8 * TOLD)
                    if notice != 0 and ends(notice, step):
                        code, found_fingerprint = Int32(int(Failure.TOLD)), notice
            looks += 1
            if cute.arch.vote_any_sync(pending):
                ptx.nanosleep(POLL_NS)

        failed = cute.arch.vote_ballot_sync(code != 0)
        if code != 0 and (failed & ((Int32(1) << lane) - 1)) == 0:  # the lowest failed lane reports
            if code == int(Failure.DEADLINE):
                found_fingerprint = Int64(0)
                self.tell(peer_blocks, rank, num_ranks, lane, step + 1)
            self.report(record, code, word, rank, lane, epoch, found, fingerprint, found_fingerprint)

    @cute.jit
    def tell(self, peer_blocks: cute.Tensor, rank: Int32, num_ranks: Int32, missing: Int32, step: Int64):
        """By one thread: `step` and what follows will not come from this rank, since `missing` did not. Peers that wait
        for this rank need not wait out their own deadlines. `report` ends with a fence for these stores, too."""
        notice = Int64(int(Told.MISSED)) | (Int64(rank) << 8) | (Int64(missing) << 16) | (step << STEP_SHIFT)
        # Not unrolled: ptxas would take registers that a producer warp has given back (setmaxnreg), and the kernel
        # would end by an illegal instruction before `report`.
        for peer in cutlass.range(num_ranks, unroll=1):
            ptx.store_relaxed_sys(peer_blocks[peer] + 8 * TOLD, notice)

    @cute.jit
    def report(
        self,
        record: Int64,
        code: Int32,
        word: Int32,
        rank: Int32,
        peer: Int32,
        epoch: Int64,
        found: Int64,
        fingerprint: Int64,
        found_fingerprint: Int64,
    ):
        """The code comes after a fence: a host that sees it sees the rest. The second fence has the stores leave the
        GPU before the trap ends the kernel."""
        ptx.store_relaxed_sys(record + 8 * int(Record.WORD), Int64(word))
        ptx.store_relaxed_sys(record + 8 * int(Record.RANK), Int64(rank))
        ptx.store_relaxed_sys(record + 8 * int(Record.PEER), Int64(peer))
        ptx.store_relaxed_sys(record + 8 * int(Record.EXPECTED_EPOCH), epoch)
        ptx.store_relaxed_sys(record + 8 * int(Record.FOUND_EPOCH), found)
        ptx.store_relaxed_sys(record + 8 * int(Record.EXPECTED_FINGERPRINT), fingerprint)
        ptx.store_relaxed_sys(record + 8 * int(Record.FOUND_FINGERPRINT), found_fingerprint)
        ptx.fence_acq_rel_sys()
        ptx.store_relaxed_sys(record + 8 * int(Record.CODE), Int64(code))
        ptx.fence_acq_rel_sys()
        ptx.trap()

    def first_word(self, word: Int32) -> Int64:
        return Int64(ARRIVED) + Int64(word) * (READY - ARRIVED)


def compile_signal(arch: str) -> Any:
    i32, i64 = Int32(0), Int64(0)
    return compile_for(arch, Signal, vector(Int64), i32, i32, i32, i32, i64, i64, i64)
