// Compile-time choices of the kernel: tile, layouts of shared memory, matrix instructions, roles and barriers.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>

namespace fa3 {

using namespace cute;
using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kMaxChunks = 32;  // layout.MAX_RANKS
constexpr int kGroupThreads = 128;
constexpr int kGroupWarps = 4;
constexpr int kGroupRows = 64;   // query rows of one consumer warpgroup: M of wgmma
constexpr int kColumns = 64;     // of one 128-byte swizzled column block
constexpr int kSliceRows = 16;   // of the staged output that one bulk store sends; a multiple of the 8 swizzled rows

// Warps of the producer warpgroup; warps 2 and 3 idle.
enum class Warp : int { kLoad = 0, kStore = 1 };

// Named barriers (0 is __syncthreads). One of each for every consumer warpgroup g:
//   kTurn + g    g may issue its matrix products; arrived at by the group before it
//   kStaged + g  g's rows of O are in the staging (all of g), the store warp waits
//   kFree + g    the staging of g has been read (store warp), g waits
// kDone: all stores a consumer makes itself have been issued (all consumers), the store warp waits.
enum NamedBarrier : int { kTurn = 1, kStaged = 4, kFree = 7, kDone = 10 };

template <class Element_, int kHeadDim_, int kGroups_, int kKeys_, bool kStagedOutput_>
struct Config {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = kGroups_;  // consumer warpgroups
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kKeys = kKeys_;
  static constexpr int kStages = 2;  // of K and of V each
  static constexpr bool kStagedOutput = kStagedOutput_;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kColumnBlocks = kHeadDim / kColumns;
  // All registers of the block are shared out again: 168 * 384 = 40 * 128 + 232 * 256, 128 * 512 = 32 * 128 + 160 * 384.
  static constexpr int kProducerRegisters = kGroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kGroups == 2 ? 232 : 160;
  static_assert(kGroups == 2 || kGroups == 3);
  static_assert(kHeadDim % kColumns == 0 && kKeys % 16 == 0 && kKeys <= 256);


  using AtomK = GMMA::Layout_K_SW128_Atom<Element>;
  using AtomMN = GMMA::Layout_MN_SW128_Atom<Element>;
  using LayoutQ = decltype(tile_to_shape(AtomK{}, Shape<Int<kGroupRows>, Int<kHeadDim>, Int<kGroups>>{}));
  using LayoutK = decltype(tile_to_shape(AtomK{}, Shape<Int<kKeys>, Int<kHeadDim>, Int<kStages>>{}));
  // V lies as K does, key by key; the second product reads it along the keys.
  using LayoutV = decltype(tile_to_shape(AtomMN{}, Shape<Int<kHeadDim>, Int<kKeys>, Int<kStages>>{}, Step<_2, _1, _3>{}));

  using ShapeQK = Shape<Int<kGroupRows>, Int<kKeys>, Int<kHeadDim>>;
  using ShapePV = Shape<Int<kGroupRows>, Int<kHeadDim>, Int<kKeys>>;
  using MmaQK = decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, ShapeQK>()));
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, ShapePV, GMMA::Major::K, GMMA::Major::MN>()));

  static constexpr int kScores = kGroupRows * kKeys / kGroupThreads;    // accumulators of a thread, S
  static constexpr int kOutputs = kGroupRows * kHeadDim / kGroupThreads;  // and O

  static constexpr uint32_t kBytesQ = kGroupRows * kHeadDim * sizeof(Element);  // of one warpgroup
  static constexpr uint32_t kBytesKV = kKeys * kHeadDim * sizeof(Element);      // of one stage of K or V

  struct Storage {
    alignas(1024) Element q[cosize_v<LayoutQ>];
    alignas(1024) Element k[cosize_v<LayoutK>];
    alignas(1024) Element v[cosize_v<LayoutV>];
    // column blocks of 64 rows by group, as the bulk stores read them
    alignas(1024) Element o[kStagedOutput ? kRows * kHeadDim : 8];
    uint64_t q_full[kGroups];
    uint64_t q_empty[kGroups];
    uint64_t k_full[kStages];
    uint64_t k_empty[kStages];
    uint64_t v_full[kStages];
    uint64_t v_empty[kStages];
  };
};

// Position in a ring of stages, and the parity its barriers have there.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t phase = 0;

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

CUTE_DEVICE void wait(uint64_t const& barrier, uint32_t phase) { Barrier::wait(&barrier, phase); }

}  // namespace fa3
