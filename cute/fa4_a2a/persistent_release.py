"""The publication of `ready` at the end of the persistent kernel, by the storing warp of the last CTA to finish.

What must come before a peer acquires this rank's READY word: this rank's O (bulk stores, into its memory) and LSE
(ordinary stores), and this rank's reads of Q, K and V. The chain, for each CTA:
  1. The storing warp issued all bulk stores itself and waits, without .read, until they are complete: their writes
     happen before what the issuing lane does next. sync_warp extends that to the other lanes.
  2. A consumer's LSE stores come before its arrival at FULL of the same tile, and every barrier arrival happens before
     what the warps that wait there do next: the storing warp waits at FULL for every tile. The consumers' reads of
     shared memory come before it as well, and those come after the loads that filled it (mbarriers): no read of Q, K or
     V is left over when the last FULL is passed.
  3. Lane 0 adds to the counter with acq_rel at GPU scope. Such additions to one word form a chain, in which each
     synchronizes with the next: what came before any CTA's addition happens before what the last arriver does next.
  4. The last arriver's warp executes fence.acq_rel.sys, then stores the epoch to each peer (Signal.publish). The fence
     is cumulative, so all of the above comes before that store for any observer in the system that acquires it.
That the chain holds for bulk stores to a peer, for which the wait of 1 was seen to return before the peer has them, is
the variant `release` of litmus.py; its control without the fence is beside it. For sm_100 persistent_sm100.py says what
stands in the place of 2.

The counter is set back to zero by the last arriver, when all others have added; the next launch on the stream comes
after this kernel's end. Only that one warp ever waits for a peer, when all other CTAs are done: the SMs are free for
whatever the peer may still need from this GPU.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from . import ptx
from .persistent_schedule import Release
from .signal import Word
from .signal_kernel import Signal, arrive


@cute.jit
def publish(release: Release):
    """For one whole warp, the one that issued the CTA's bulk stores."""
    if release.flags != 0:
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if arrive(release.counter, 0, lane) == cute.arch.grid_dim()[0]:
            if lane == 0:
                ptx.store_relaxed_sys(release.counter.iterator.toint(), Int64(0))
            Signal().steps(
                release.peer_blocks,
                lane,
                release.rank,
                release.num_ranks,
                Int32(int(Word.READY)),
                release.flags,
                Int64(0),
                ptx.globaltimer(),
                release.deadline_ns,
                release.record,
            )
