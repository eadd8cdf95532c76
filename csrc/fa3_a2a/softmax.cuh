// The online softmax of the two rows that a thread holds of an accumulator.
#pragma once

#include "config.cuh"

namespace fa3 {

CUTE_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the four threads that hold a row.
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Element e of a wgmma accumulator lies in row (e / 2) % 2 of the thread's two.
template <int kScores>
class Softmax {
 public:
  CUTE_DEVICE explicit Softmax(float scale_log2) : scale_log2_(scale_log2) {}

  // The first key block of a tile: sets the maximum. Replaces the scores by their weights.
  CUTE_DEVICE void begin(float* s) {
    float most[2];
    maxima(s, most);
    for (int r = 0; r < 2; ++r) {
      maximum_[r] = quad_max(most[r]);
      sum_[r] = 0.f;
    }
    weigh(s);
  }

  // A further key block. Returns whether the warp's outputs so far must be multiplied by factor[0..1], once no matrix
  // product works on them: where no row of the warp has met a new maximum, as mostly after some blocks, that is spared.
  // The factor of a row without one is exactly 1, so a row's result does not depend on its neighbours in the tile.
  CUTE_DEVICE bool next(float* s, float factor[2]) {
    float most[2];
    maxima(s, most);
    bool const moved = __any_sync(0xffffffffu, most[0] > maximum_[0] || most[1] > maximum_[1]);
    if (moved) {
      for (int r = 0; r < 2; ++r) {
        float const now = fmaxf(maximum_[r], quad_max(most[r]));
        factor[r] = exp2_fast((maximum_[r] - now) * scale_log2_);
        maximum_[r] = now;
        sum_[r] *= factor[r];
      }
    }
    weigh(s);
    return moved;
  }

  // 1 / sum of the weights of each row, and the log-sum-exp of its scaled scores.
  CUTE_DEVICE void finish(float inverse[2], float lse[2]) {
    for (int r = 0; r < 2; ++r) {
      float const sum = quad_sum(sum_[r]);
      inverse[r] = 1.f / sum;
      lse[r] = (maximum_[r] * scale_log2_ + __log2f(sum)) * 0.6931471805599453f;
    }
  }

 private:
  // Two chains for each row: the latency of one would show, as few warps run on a scheduler.
  CUTE_DEVICE static void maxima(float const* s, float most[2]) {
    float chain[4] = {s[0], s[2], s[4], s[6]};
    CUTE_UNROLL
    for (int e = 0; e < kScores; ++e) {
      int const c = (e / 2) % 4;
      chain[c] = fmaxf(chain[c], s[e]);
    }
    most[0] = fmaxf(chain[0], chain[2]);
    most[1] = fmaxf(chain[1], chain[3]);
  }

  CUTE_DEVICE void weigh(float* s) {
    float const offset[2] = {maximum_[0] * scale_log2_, maximum_[1] * scale_log2_};
    float chain[4] = {sum_[0], sum_[1], 0.f, 0.f};
    CUTE_UNROLL
    for (int e = 0; e < kScores; ++e) {
      s[e] = exp2_fast(fmaf(s[e], scale_log2_, -offset[(e / 2) % 2]));
      chain[(e / 2) % 4] += s[e];
    }
    sum_[0] = chain[0] + chain[2];
    sum_[1] = chain[1] + chain[3];
  }

  float const scale_log2_;
  float maximum_[2], sum_[2];
};

}  // namespace fa3
