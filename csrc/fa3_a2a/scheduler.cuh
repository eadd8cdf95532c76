// Which tile a block takes next. The grid is persistent: cluster i takes places i, i + clusters, ... of a fixed sequence.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "params.cuh"

namespace fa3 {

struct Tile {
  int block;  // of kRows query rows in the chunk
  int head;
  int batch;
  int chunk;
};

// Row blocks change fastest, then heads, batch entries, chunks. The blocks of a cluster take neighbouring row blocks of
// one head, so that they can share its K and V; where a head has an odd number of row blocks the launch uses clusters of
// one (forward.cu).
class Schedule {
 public:
  CUTE_DEVICE explicit Schedule(TileGrid const& grid)
      : grid_(grid), size_(cute::cluster_shape().x), place_(blockIdx.x / size_) {}

  CUTE_DEVICE bool valid() const { return place_ < grid_.tiles; }

  CUTE_DEVICE void advance() { place_ += gridDim.x / size_; }

  CUTE_DEVICE Tile tile() const {
    int rest, block, head, batch, chunk;
    grid_.blocks(rest, block, place_);
    grid_.heads(rest, head, rest);
    grid_.batch(chunk, batch, rest);
    if (grid_.order == kOwnLast) { chunk = chunk + 1 == grid_.chunks ? 0 : chunk + 1; }
    return {block * size_ + int(blockIdx.x) % size_, head, batch, chunk};
  }

 private:
  TileGrid const& grid_;
  int size_, place_;
};

}  // namespace fa3
