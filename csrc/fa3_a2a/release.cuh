// The end of a call: publish `ready` to every peer when all blocks have stored, and wait for theirs.
//
// The words, the epochs and the record are those of the signal kernel (cute/fa4_a2a/signal.py); a rank's signal block is
// the one of fa_a2a/layout.py. What must come before a peer acquires this rank's READY word: its O and LSE, and its reads
// of Q, K and V. The chain:
//   1. Bulk stores were issued by the lane that waits here, without .read, until they are complete. Plain stores of the
//      consumers come before their arrival at the named barrier that the store warp has waited at (kStaged for the LSE of
//      a staged tile, kDone for everything of a direct one). So do the consumers' last reads of Q, K and V.
//   2. Lane 0 adds to the counter with acq_rel at GPU scope: each addition synchronizes with the next, so what came
//      before any block's addition happens before what the last block does next.
//   3. The last block's warp executes fence.acq_rel.sys in each lane, which is cumulative, then each lane stores the
//      epoch to its peer. No lane waits before all have published: else two ranks could wait for each other.
// That the fence covers bulk stores to a peer, for which the wait of 1 returns too early, is shown by `fa-a2a litmus`.
// Only that one warp of the GPU waits, when all other blocks are through: the SMs are free for whatever a peer still needs.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace fa3 {

constexpr int kEpochWord = 0, kReadyWord = 96;
constexpr int kPublish = 2, kWait = 4, kAdvance = 1;  // flags
constexpr int kReady = 1, kDeadline = 1;              // Word.READY, Failure.DEADLINE
constexpr int kPollNs = 32;

// The code comes after a fence: a host that sees it sees the rest. The second fence lets the stores leave the GPU before
// the trap ends the kernel.
__device__ __noinline__ void report(ReleaseParams const& release, int peer, uint64_t expected, uint64_t found) {
  auto* record = reinterpret_cast<uint64_t*>(release.record);
  uint64_t const fields[7] = {kReady, uint64_t(release.rank), uint64_t(peer), expected, found, 0, 0};
  for (int i = 0; i < 7; ++i) { store_relaxed_sys(record + 1 + i, fields[i]); }
  fence_acq_rel_sys();
  store_relaxed_sys(record, kDeadline);
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
  bool pending = lane < release.num_ranks, late = false;
  uint64_t found = epoch;
  // Uniform: a lane that is late ends it for all at once.
  while (__any_sync(0xffffffffu, pending) && !__any_sync(0xffffffffu, late)) {
    if (pending) {
      found = load_acquire_sys(own + kReadyWord + lane);
      pending = int64_t(found - epoch) < 0;  // by signed difference, which wraps
      late = pending && int64_t(global_time_ns() - start) > release.deadline_ns;
    }
    if (__any_sync(0xffffffffu, pending)) { sleep_ns(kPollNs); }
  }
  uint32_t const failed = __ballot_sync(0xffffffffu, late);
  if (late && lane == __ffs(failed) - 1) { report(release, lane, epoch, found); }
}

}  // namespace fa3
