// The end of a call: publish `ready` to every peer when all blocks have stored, and wait for theirs, until they come, one
// says that it makes no further step, or the deadline is over.
//
// The words, the epochs, the notices and the record are those of the signal kernel (cute/fa4_a2a/signal.py); a rank's
// signal block is the one of fa_a2a/layout.py. What must come before a peer acquires this rank's READY word: its O and
// LSE, and its reads of Q, K and V. The chain:
//   1. Bulk stores were issued by the lane that waits here, without .read, until they are complete. Plain stores of the
//      consumers come before their arrival at the named barrier that the store warp has waited at (kStaged for the LSE of
//      a staged tile, kDone for everything of a direct one). So do the consumers' last reads of Q, K and V.
//   2. Lane 0 adds to the counter with acq_rel at GPU scope: each addition synchronizes with the next, so what came
//      before any block's addition happens before what the last block does next.
//   3. The last block's warp executes fence.acq_rel.sys in each lane, which is cumulative, then each lane stores the
//      epoch to its peer. No lane waits before all have published: else two ranks could wait for each other.
// That the fence covers bulk stores to a peer, for which the wait of 1 returns too early, is what `fa-a2a litmus` tests
// as its variant `release`; plain stores of a direct epilogue are its `st_release`.
// Only that one warp of the GPU waits, when all other blocks are through: the SMs are free for whatever a peer still needs.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace fa3 {

constexpr int kEpochWord = 0, kToldWord = 1, kReadyWord = 96;
constexpr int kPublish = 2, kWait = 4, kAdvance = 1;  // flags
constexpr int kReady = 1;                             // Word.READY
constexpr uint64_t kDeadline = 1, kTold = 3;          // Failure
constexpr uint64_t kMissed = 2;                       // Told.MISSED
constexpr int kStepShift = 24;                        // of the step in a notice
constexpr int kPollNs = 32;
constexpr int kLooksANotice = 64;  // every so many looks at a peer's word one at TOLD: seldom, it lengthens the look

// Whether a notice says that a step comes no more: by signed difference of the 40 bits it has of its own step. It needs
// no order: a notice is one word, nothing is read on its account, and it is given only for a step never to be made.
__device__ __forceinline__ bool ends(uint64_t notice, uint64_t step) {
  return notice != 0 && int64_t((step << kStepShift) - (notice >> kStepShift << kStepShift)) >= 0;
}

// By one thread: `step` and what follows will not come from this rank, since `missing` did not. Peers that wait for this
// rank need not wait out their own deadlines. `report` ends with a fence for these stores, too.
__device__ __forceinline__ void tell(ReleaseParams const& release, int missing, uint64_t step) {
  uint64_t const notice = kMissed | uint64_t(release.rank) << 8 | uint64_t(missing) << 16 | step << kStepShift;
  // Not unrolled: ptxas would take registers that this warp has given back (setmaxnreg), and the kernel would end by an
  // illegal instruction before `report`. test_compile_fa3.py looks.
#pragma unroll 1
  for (int peer = 0; peer < release.num_ranks; ++peer) {
    store_relaxed_sys(reinterpret_cast<uint64_t*>(release.peer_blocks[peer]) + kToldWord, notice);
  }
}

// The code comes after a fence: a host that sees it sees the rest. The second fence lets the stores leave the GPU before
// the trap ends the kernel. Inline: a function that is called may use any register.
__device__ __forceinline__ void report(ReleaseParams const& release, uint64_t failure, int peer, uint64_t expected,
                                       uint64_t found, uint64_t notice) {
  auto* record = reinterpret_cast<uint64_t*>(release.record);
  store_relaxed_sys(record + 1, kReady);
  store_relaxed_sys(record + 2, release.rank);
  store_relaxed_sys(record + 3, peer);
  store_relaxed_sys(record + 4, expected);
  store_relaxed_sys(record + 5, found);
  store_relaxed_sys(record + 6, 0);
  store_relaxed_sys(record + 7, notice);
  fence_acq_rel_sys();
  store_relaxed_sys(record, failure);
  fence_acq_rel_sys();
  __trap();
}

// For the store warp, behind its last store.
__device__ __forceinline__ void end_call(ReleaseParams const& release) {
  if (release.flags == 0) { return; }
  int const lane = threadIdx.x % 32;
  bulk_wait();
  __syncwarp();
  uint64_t arrived = 0;
  if (lane == 0) { arrived = add_acq_rel_gpu(release.counter, 1) + 1; }
  arrived = __shfl_sync(0xffffffffu, arrived, 0);
  __syncwarp();  // the other lanes come after lane 0's acquire too
  if (arrived != gridDim.x) { return; }
  if (lane == 0) { store_relaxed_sys(release.counter, 0); }

  uint64_t const start = global_time_ns();
  auto* own = reinterpret_cast<uint64_t*>(release.peer_blocks[release.rank]);
  auto* peer = lane < release.num_ranks ? reinterpret_cast<uint64_t*>(release.peer_blocks[lane]) : own;
  uint64_t epoch = load_relaxed_sys(own + kEpochWord);
  if (release.flags & kAdvance) {
    ++epoch;
    __syncwarp();  // all lanes have read it
    if (lane == 0) { store_relaxed_sys(own + kEpochWord, epoch); }
  }
  if (release.flags & kPublish) {
    fence_acq_rel_sys();
    if (lane < release.num_ranks) { store_relaxed_sys(peer + kReadyWord + release.rank, epoch); }
  }
  __syncwarp();
  if (!(release.flags & kWait)) { return; }
  uint64_t const step = 2 * epoch + kReady;
  bool pending = lane < release.num_ranks;
  uint64_t found = epoch, failure = 0, notice = 0;
  // Uniform: a lane that has failed ends it for all at once.
#pragma unroll 1
  for (int looks = 1; __any_sync(0xffffffffu, pending) && !__any_sync(0xffffffffu, failure != 0); ++looks) {
    if (pending) {
      found = load_acquire_sys(own + kReadyWord + lane);
      if (int64_t(found - epoch) >= 0) {  // by signed difference, which wraps
        pending = false;
      } else if (int64_t(global_time_ns() - start) > release.deadline_ns) {
        failure = kDeadline;
      } else if (looks % kLooksANotice == 0) {
        notice = load_relaxed_sys(own + kToldWord);
        if (ends(notice, step)) { failure = kTold; }
      }
    }
    if (__any_sync(0xffffffffu, pending)) { sleep_ns(kPollNs); }
  }
  uint32_t const failed = __ballot_sync(0xffffffffu, failure != 0);
  if (failure != 0 && lane == __ffs(failed) - 1) {
    if (failure == kDeadline) {
      notice = 0;
      tell(release, lane, step + 1);  // this step has been published
    }
    report(release, failure, lane, epoch, found, notice);
  }
}

}  // namespace fa3
