// What a launch hands to the kernel.
#pragma once

#include <cuda.h>
#include <cutlass/fast_math.h>

#include "config.cuh"

namespace fa3 {

// The sequence of tiles; kOwnLast walks the chunks 1, 2, ..., 0, so that the kernel ends on local stores.
enum Order : int { kOwnFirst = 0, kOwnLast = 1 };

struct TileGrid {
  cutlass::FastDivmod blocks{1};  // row blocks of a head in a chunk
  cutlass::FastDivmod heads{1};
  cutlass::FastDivmod batch{1};
  int tiles = 0;  // of all chunks
  int chunks = 1;
  int order = kOwnLast;
};

// How the call ends: the fields of the signal kernel (see release.cuh).
struct ReleaseParams {
  uint64_t const* peer_blocks = nullptr;
  uint64_t* counter = nullptr;
  uint64_t record = 0;
  int64_t deadline_ns = 0;
  int rank = 0;
  int num_ranks = 0;
  int flags = 0;  // 0: something else ends the call
};

struct Params {
  CUtensorMap q;  // (D, rows, heads, chunks, batch)
  CUtensorMap k;  // (D, keys, K/V heads, batch)
  CUtensorMap v;
  CUtensorMap o;  // (D, rows, heads, places, batch), staged output only
  TileGrid grid;
  cutlass::FastDivmod heads_per_kv{1};
  int rows = 0;  // of a chunk
  int keys = 0;
  float scale_log2 = 0.f;  // the scale, times log2(e); positive
  int pace_ns = 0;         // pause between two slices of a staged tile
  // Where chunk c's output begins: its index along the map's places, and its address for plain stores.
  int o_place[kMaxChunks];
  int64_t o_address[kMaxChunks];
  int64_t o_stride_batch = 0, o_stride_row = 0, o_stride_head = 0;  // elements
  int64_t lse_address[kMaxChunks];  // only with_lse
  int64_t lse_stride_batch = 0, lse_stride_head = 0;
  bool with_lse = false;
  ReleaseParams release;
};

}  // namespace fa3
