// The load warp: brings Q, K and V into shared memory by TMA, in the order in which the consumers use them.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "scheduler.cuh"

namespace fa3 {

// K and V come round again for every row block and stay in L2 if they can; Q is read once.
constexpr uint64_t kKeep = uint64_t(TMA::CacheHintSm90::EVICT_LAST);
constexpr uint64_t kPass = uint64_t(TMA::CacheHintSm90::EVICT_FIRST);

template <class Config>
class Loader {
  using Storage = typename Config::Storage;
  using Element = typename Config::Element;

 public:
  CUTE_DEVICE Loader(Params const& params, Storage& shared) : params_(params), shared_(shared) {}

  // For one thread. A tile's key blocks go from last to first. K of a block is needed one step before its V; the V that
  // closes a tile follows the K that opens the next one.
  CUTE_DEVICE void run() {
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params_.q));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params_.k));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params_.v));
    int const last = (params_.keys - 1) / Config::kKeys;
    bool first = true;
    Source before{};
    CUTE_NO_UNROLL
    for (Schedule schedule(params_.grid); schedule.valid(); schedule.advance()) {
      Tile const tile = schedule.tile();
      Source const here{kv_head(tile.head), tile.batch};
      load_k(last, here);
      if (!first) { load_v(0, before); }
      load_q(tile);
      CUTE_NO_UNROLL
      for (int block = last; block > 0; --block) {
        load_k(block - 1, here);
        load_v(block, here);
      }
      before = here;
      first = false;
    }
    if (!first) { load_v(0, before); }
  }

 private:
  struct Source {
    int head, batch;  // of K and V
  };

  CUTE_DEVICE int kv_head(int head) const {
    int quotient, remainder;
    params_.heads_per_kv(quotient, remainder, head);
    return quotient;
  }

  CUTE_DEVICE void load_q(Tile const& tile) {
    CUTE_NO_UNROLL
    for (int group = 0; group < Config::kGroups; ++group) {
      wait(shared_.q_empty[group], q_phase_ ^ 1);
      TransactionBarrier::arrive_and_expect_tx(&shared_.q_full[group], Config::kBytesQ);
      for (int column = 0; column < Config::kColumnBlocks; ++column) {
        Element* to = shared_.q + group * kGroupRows * Config::kHeadDim + column * kGroupRows * kColumns;
        SM90_TMA_LOAD_5D::copy(&params_.q, &shared_.q_full[group], kPass, to, column * kColumns,
                               tile.block * Config::kRows + group * kGroupRows, tile.head, tile.chunk, tile.batch);
      }
    }
    q_phase_ ^= 1;
  }

  CUTE_DEVICE void load_k(int block, Source const& source) {
    load_kv(params_.k, shared_.k, shared_.k_full, shared_.k_empty, k_, block, source);
  }

  CUTE_DEVICE void load_v(int block, Source const& source) {
    load_kv(params_.v, shared_.v, shared_.v_full, shared_.v_empty, v_, block, source);
  }

  CUTE_DEVICE void load_kv(CUtensorMap const& map, Element* base, uint64_t* full, uint64_t* empty,
                           Cursor<Config::kStages>& at, int block, Source const& source) {
    wait(empty[at.stage], at.phase ^ 1);
    TransactionBarrier::arrive_and_expect_tx(&full[at.stage], Config::kBytesKV);
    CUTE_UNROLL
    for (int column = 0; column < Config::kColumnBlocks; ++column) {
      Element* to = base + (at.stage * Config::kHeadDim + column * kColumns) * Config::kKeys;
      SM90_TMA_LOAD_4D::copy(&map, &full[at.stage], kKeep, to, column * kColumns, block * Config::kKeys, source.head,
                             source.batch);
    }
    at.advance();
  }

  Params const& params_;
  Storage& shared_;
  uint32_t q_phase_ = 0;
  Cursor<Config::kStages> k_, v_;
};

}  // namespace fa3
