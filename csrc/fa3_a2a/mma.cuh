// A consumer warpgroup: S = Q K^T, softmax, O += P V for its 64 rows of each tile.
//
// Two things overlap. Inside a warpgroup the product S of one key block runs while the softmax of the block before is
// still to be multiplied with V: both products are issued together and the softmax follows while P V runs. Between the
// warpgroups a token (named barriers kTurn) lets one issue its products while another computes its softmax. The products
// that close a tile are issued together with the first S of the next one, so no tile begins with idle tensor cores.
#pragma once

#include "ptx.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"

namespace fa3 {

template <bool kZero, class Mma, class A, class B, class C>
CUTE_DEVICE void issue(Mma& mma, A const& a, B const& b, C& c) {
  warpgroup_arrive();
  if constexpr (kZero) { mma.accumulate_ = GMMA::ScaleOut::Zero; }
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, k), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

template <class Config>
class Consumer {
  using Storage = typename Config::Storage;
  using Element = typename Config::Element;

 public:
  CUTE_DEVICE Consumer(Params const& params, Storage& shared, int group)
      : params_(params), shared_(shared), group_(group) {}

  // Epilogue: void operator()(O accumulators, inverse[2], lse[2], tile); called with a product on S in flight.
  template <class Epilogue>
  CUTE_DEVICE void run(Epilogue& epilogue) {
    typename Config::MmaQK mma_qk;
    typename Config::MmaPV mma_pv;
    Tensor sQ = make_tensor(make_smem_ptr(shared_.q), typename Config::LayoutQ{});
    Tensor sK = make_tensor(make_smem_ptr(shared_.k), typename Config::LayoutK{});
    Tensor sV = make_tensor(make_smem_ptr(shared_.v), typename Config::LayoutV{});
    auto qk = mma_qk.get_slice(0);
    auto pv = mma_pv.get_slice(0);
    Tensor q = qk.partition_fragment_A(sQ(_, _, group_));
    Tensor k = qk.partition_fragment_B(sK);
    Tensor v = pv.partition_fragment_B(sV);
    Tensor s = partition_fragment_C(mma_qk, Shape<Int<kGroupRows>, Int<Config::kKeys>>{});
    Tensor o = partition_fragment_C(mma_pv, Shape<Int<kGroupRows>, Int<Config::kHeadDim>>{});
    // P's registers as the A operand of the second product: the accumulators of S pair by pair, in their order.
    Tensor p = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<Config::kKeys / 16>>>{});

    int const last = (params_.keys - 1) / Config::kKeys;
    int const valid = params_.keys - last * Config::kKeys;  // keys of the last block
    Softmax<Config::kScores> softmax(params_.scale_log2);
    Schedule schedule(params_.grid);
    if (!schedule.valid()) { return; }
    if (group_ == Config::kGroups - 1) { pass_turn(); }

    wait(shared_.q_full[group_], q_phase_);
    wait(shared_.k_full[k_.stage], k_.phase);
    issue<true>(mma_qk, q, k(_, _, _, k_.stage), s);
    while (true) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(s);
      free(shared_.k_empty[k_.stage]);
      k_.advance();
      if (last == 0) { free(shared_.q_empty[group_]); }
      if (valid < Config::kKeys) { mask(s, valid); }
      softmax.begin(s.data());
      pack(s, p);
      clear(o);

      CUTE_NO_UNROLL
      for (int block = last; block > 0; --block) {
        wait(shared_.k_full[k_.stage], k_.phase);
        take_turn();
        warpgroup_fence_operand(s);
        issue<true>(mma_qk, q, k(_, _, _, k_.stage), s);
        wait(shared_.v_full[v_.stage], v_.phase);
        warpgroup_fence_operand(o);
        warpgroup_fence_operand(p);
        issue<false>(mma_pv, p, v(_, _, _, v_.stage), o);
        pass_turn();
        warpgroup_wait<1>();
        warpgroup_fence_operand(s);
        free(shared_.k_empty[k_.stage]);
        k_.advance();
        if (block == 1) { free(shared_.q_empty[group_]); }
        float factor[2];
        bool const moved = softmax.next(s.data(), factor);
        warpgroup_wait<0>();
        warpgroup_fence_operand(o);
        warpgroup_fence_operand(p);
        free(shared_.v_empty[v_.stage]);
        v_.advance();
        pack(s, p);
        if (moved) { rescale(o, factor); }  // the same for all threads of a warp
      }

      Tile const tile = schedule.tile();
      schedule.advance();
      bool const more = schedule.valid();
      q_phase_ ^= 1;
      if (more) {
        wait(shared_.q_full[group_], q_phase_);
        wait(shared_.k_full[k_.stage], k_.phase);
      }
      wait(shared_.v_full[v_.stage], v_.phase);
      take_turn();
      warpgroup_fence_operand(o);
      warpgroup_fence_operand(p);
      issue<false>(mma_pv, p, v(_, _, _, v_.stage), o);
      // Behind the last tile this multiplies whatever lies in the buffers and nobody reads S: cheaper than a branch
      // between products, around which the compiler would wait for each of them.
      warpgroup_fence_operand(s);
      issue<true>(mma_qk, q, k(_, _, _, k_.stage), s);
      pass_turn();
      float inverse[2], lse[2];
      softmax.finish(inverse, lse);
      warpgroup_wait<1>();
      warpgroup_fence_operand(o);
      warpgroup_fence_operand(p);
      free(shared_.v_empty[v_.stage]);
      v_.advance();
      epilogue(o, inverse, lse, tile);
      if (!more) { break; }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
  }

 private:
  CUTE_DEVICE void take_turn() { barrier_sync(kTurn + group_, 2 * kGroupThreads); }

  CUTE_DEVICE void pass_turn() {
    int const next = group_ + 1 == Config::kGroups ? 0 : group_ + 1;
    barrier_arrive(kTurn + next, 2 * kGroupThreads);
  }

  // This warp has read a buffer.
  CUTE_DEVICE static void free(uint64_t const& empty) {
    if (threadIdx.x % 32 == 0) { Barrier::arrive(&empty); }
  }

  template <class S>
  CUTE_DEVICE static void mask(S& s, int valid) {
    int const column = 2 * (threadIdx.x % 4);
    CUTE_UNROLL
    for (int e = 0; e < Config::kScores; ++e) {
      if (column + e / 4 * 8 + e % 2 >= valid) { s(e) = -INFINITY; }
    }
  }

  template <class S, class P>
  CUTE_DEVICE static void pack(S const& s, P& p) {
    Tensor pairs = recast<uint32_t>(p);
    CUTE_UNROLL
    for (int i = 0; i < Config::kScores / 2; ++i) { pairs(i) = rounded_pair<Element>(s(2 * i), s(2 * i + 1)); }
  }

  template <class O>
  CUTE_DEVICE static void rescale(O& o, float const factor[2]) {
    CUTE_UNROLL
    for (int e = 0; e < Config::kOutputs; ++e) { o(e) *= factor[(e / 2) % 2]; }
  }

  Params const& params_;
  Storage& shared_;
  int const group_;
  uint32_t q_phase_ = 0;
  Cursor<Config::kStages> k_, v_;
};

}  // namespace fa3
