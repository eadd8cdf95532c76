// Which tile a block takes next. The grid is persistent: block i takes places i, i + blocks, ... of a fixed sequence.
#pragma once

#include "params.cuh"

namespace fa3 {

struct Tile {
  int block;  // of kRows query rows in the chunk
  int head;
  int batch;
  int chunk;
};

// Row blocks change fastest, then heads, batch entries, chunks: the blocks that run at one time share few heads' K and V.
class Schedule {
 public:
  CUTE_DEVICE explicit Schedule(TileGrid const& grid) : grid_(grid), place_(blockIdx.x) {}

  CUTE_DEVICE bool valid() const { return place_ < grid_.tiles; }

  CUTE_DEVICE void advance() { place_ += gridDim.x; }

  CUTE_DEVICE Tile tile() const {
    Tile tile;
    int rest;
    grid_.blocks(rest, tile.block, place_);
    grid_.heads(rest, tile.head, rest);
    grid_.batch(tile.chunk, tile.batch, rest);
    if (grid_.order == kOwnLast) { tile.chunk = tile.chunk + 1 == grid_.chunks ? 0 : tile.chunk + 1; }
    return tile;
  }

 private:
  TileGrid const& grid_;
  int place_;
};

}  // namespace fa3
