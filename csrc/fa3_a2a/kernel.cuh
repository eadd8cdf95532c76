// The kernel: one producer warpgroup (load warp, store warp), two or three consumer warpgroups.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue.cuh"
#include "load.cuh"
#include "mma.cuh"
#include "release.cuh"

namespace fa3 {

template <class Config>
CUTE_DEVICE void set_up_barriers(typename Config::Storage& shared) {
  if (threadIdx.x == 0) {
    int const consumers = Config::kGroups * kGroupWarps;
    for (int g = 0; g < Config::kGroups; ++g) {
      Barrier::init(&shared.q_full[g], 1);
      Barrier::init(&shared.q_empty[g], kGroupWarps);
    }
    for (int s = 0; s < Config::kStages; ++s) {
      Barrier::init(&shared.k_full[s], 1);
      Barrier::init(&shared.v_full[s], 1);
      Barrier::init(&shared.k_empty[s], consumers);
      Barrier::init(&shared.v_empty[s], consumers);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) forward_kernel(Params const __grid_constant__ params) {
  extern __shared__ char memory[];
  auto& shared = *reinterpret_cast<typename Config::Storage*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
  set_up_barriers<Config>(shared);
  int const group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == int(Warp::kLoad)) {
      if (threadIdx.x == 0) { Loader<Config>(params, shared).run(); }
    } else if (warp == int(Warp::kStore)) {
      Output<Config>::store(params, shared);
      end_call(params.release);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Output<Config> output(params, shared, group - 1);
    Consumer<Config>(params, shared, group - 1).run(output);
    output.finish();
  }
}

}  // namespace fa3
