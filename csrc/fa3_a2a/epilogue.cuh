// What becomes of a finished tile. Two policies with one interface:
//   DirectOutput  16-byte stores straight from registers, by the consumers
//   StagedOutput  into shared memory of its own; the store warp lets it out in paced slices while the next tile is computed
// Rows past the end of a chunk are not stored.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "ptx.cuh"
#include "scheduler.cuh"

namespace fa3 {

// A thread's outputs, normalised and rounded: pair i holds columns 8 * (i / 2) + 2 * (lane % 4) and the next of row
// lane / 4 (i even) or lane / 4 + 8 (i odd) of the warp's 16.
template <class Config, class O>
CUTE_DEVICE void round_output(O const& o, float const inverse[2], uint32_t* pairs) {
  CUTE_UNROLL
  for (int i = 0; i < Config::kOutputs / 2; ++i) {
    float const factor = inverse[i % 2];
    pairs[i] = rounded_pair<typename Config::Element>(o(2 * i) * factor, o(2 * i + 1) * factor);
  }
}

// Row of the chunk that the thread holds first.
template <class Config>
CUTE_DEVICE int first_row(Tile const& tile, int group) {
  return tile.block * Config::kRows + group * kGroupRows + (threadIdx.x % kGroupThreads) / 32 * 16 + threadIdx.x % 32 / 4;
}

template <class Config>
CUTE_DEVICE void store_lse(Params const& params, float const lse[2], Tile const& tile, int group) {
  if (!params.with_lse || threadIdx.x % 4 != 0) { return; }
  int64_t const place = tile.batch * params.lse_stride_batch + tile.head * params.lse_stride_head;
  float* base = reinterpret_cast<float*>(params.lse_address[tile.chunk]) + place;
  int const row = first_row<Config>(tile, group);
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r < params.rows) { base[row + 8 * r] = lse[r]; }
  }
}

template <class Config>
class DirectOutput {
 public:
  CUTE_DEVICE DirectOutput(Params const& params, typename Config::Storage&, int group) : params_(params), group_(group) {}

  template <class O>
  CUTE_DEVICE void operator()(O const& o, float const inverse[2], float const lse[2], Tile const& tile) {
    using Element = typename Config::Element;
    uint32_t pairs[Config::kOutputs / 2];
    round_output<Config>(o, inverse, pairs);
    int64_t const place = tile.batch * params_.o_stride_batch + tile.head * params_.o_stride_head;
    Element* base = reinterpret_cast<Element*>(params_.o_address[tile.chunk]) + place;
    int const row = first_row<Config>(tile, group_), quarter = threadIdx.x % 4;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int column = 0; column < Config::kHeadDim; column += 32) {
        uint32_t word[4];
        for (int i = 0; i < 4; ++i) { word[i] = pairs[column / 4 + 2 * i + r]; }
        transpose(word, quarter);
        if (row + 8 * r < params_.rows) {
          Element* to = base + (row + 8 * r) * params_.o_stride_row + column + 8 * quarter;
          store_16_bytes(to, make_uint4(word[0], word[1], word[2], word[3]));
        }
      }
    }
    store_lse<Config>(params_, lse, tile, group_);
  }

  // All of this thread's stores are issued; the store warp may go on to the release.
  CUTE_DEVICE void finish() {
    barrier_arrive(kDone, Config::kGroups * kGroupThreads + 32);
  }

  // The store warp's part.
  CUTE_DEVICE static void store(Params const&, typename Config::Storage&) {
    barrier_sync(kDone, Config::kGroups * kGroupThreads + 32);
  }

 private:
  // A 4 x 4 transpose among the four threads of a row: word i of thread t becomes word t of thread i, so that each
  // thread holds 8 neighbouring columns.
  CUTE_DEVICE static void transpose(uint32_t word[4], int thread) {
    CUTE_UNROLL
    for (int step = 1; step <= 2; step *= 2) {
      bool const upper = thread & step;
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (i & step) { continue; }
        uint32_t const sent = upper ? word[i] : word[i + step];
        uint32_t const got = __shfl_xor_sync(0xffffffffu, sent, step);
        (upper ? word[i] : word[i + step]) = got;
      }
    }
  }

  Params const& params_;
  int const group_;
};

template <class Config>
class StagedOutput {
  static constexpr int kSlices = kGroupRows / kSliceRows;  // of a warpgroup's rows
  using Storage = typename Config::Storage;

 public:
  CUTE_DEVICE StagedOutput(Params const& params, Storage& shared, int group)
      : params_(params), shared_(shared), group_(group) {}

  template <class O>
  CUTE_DEVICE void operator()(O const& o, float const inverse[2], float const lse[2], Tile const& tile) {
    uint32_t pairs[Config::kOutputs / 2];
    round_output<Config>(o, inverse, pairs);
    barrier_sync(kFree + group_, kGroupThreads + 32);
    // stmatrix: lane l names the 16 bytes of row l % 16 (of the warp's) in the first or second 8 columns of each pair.
    int const lane = threadIdx.x % 32, row = (threadIdx.x % kGroupThreads) / 32 * 16 + lane % 16;
    auto* base = reinterpret_cast<char*>(shared_.o) + group_ * Config::kBytesQ;
    CUTE_UNROLL
    for (int i = 0; i < Config::kHeadDim / 16; ++i) {
      int const chunk = 2 * (i % 4) + lane / 16;  // of 16 bytes in the row's 128, where swizzling exchanges them
      char* to = base + (i / 4 * kGroupRows + row) * 128 + ((chunk ^ (row % 8)) << 4);
      SM90_U32x4_STSM_N::copy(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3],
                              *reinterpret_cast<uint128_t*>(to));
    }
    store_lse<Config>(params_, lse, tile, group_);
    tma_store_fence();
    barrier_arrive(kStaged + group_, kGroupThreads + 32);
  }

  CUTE_DEVICE void finish() {}

  // The store warp: lets each staged tile out, slice by slice, with a pause behind each that keeps all blocks together
  // below the rate of the path. Nothing is computed behind a block's last tile: that one leaves at once.
  CUTE_DEVICE static void store(Params const& params, Storage& shared) {
    bool const sender = threadIdx.x % 32 == 0;
    Schedule schedule(params.grid);
    if (schedule.valid()) {
      for (int group = 0; group < Config::kGroups; ++group) { hand_back(group); }
    }
    CUTE_NO_UNROLL
    while (schedule.valid()) {
      Tile const tile = schedule.tile();
      schedule.advance();
      bool const more = schedule.valid();
      CUTE_NO_UNROLL
      for (int group = 0; group < Config::kGroups; ++group) {
        barrier_sync(kStaged + group, kGroupThreads + 32);
        int const row = tile.block * Config::kRows + group * kGroupRows;
        CUTE_NO_UNROLL
        for (int slice = 0; slice < kSlices && row + slice * kSliceRows < params.rows; ++slice) {
          if (sender) { send(params, shared, tile, group, slice, row + slice * kSliceRows); }
          if (more && params.pace_ns > 0) { sleep_ns(params.pace_ns); }
        }
        if (!more) { continue; }
        if (sender) { bulk_wait_read(); }
        __syncwarp();
        hand_back(group);
      }
    }
    if (sender) { bulk_wait_read(); }
    __syncwarp();
  }

 private:
  CUTE_DEVICE static void hand_back(int group) {
    barrier_arrive(kFree + group, kGroupThreads + 32);
  }

  CUTE_DEVICE static void send(Params const& params, Storage& shared, Tile const& tile, int group, int slice, int row) {
    for (int column = 0; column < Config::kColumnBlocks; ++column) {
      auto* from = shared.o + group * kGroupRows * Config::kHeadDim +
                   (column * kGroupRows + slice * kSliceRows) * kColumns;
      SM90_TMA_STORE_5D::copy(&params.o, from, column * kColumns, row, tile.head, params.o_place[tile.chunk], tile.batch);
    }
    bulk_commit();
  }

  Params const& params_;
  Storage& shared_;
  int const group_;
};

template <class Config>
using Output = std::conditional_t<Config::kStagedOutput, StagedOutput<Config>, DirectOutput<Config>>;

}  // namespace fa3
