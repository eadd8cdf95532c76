// Attention forward for sm_90a with the all-to-all after it inside: the entry point of one object, for one head dimension
// and one element type. Compile with -DFA3_HEAD_DIM, FA3_HALF, FA3_GROUPS (of 64 query rows), FA3_KEYS, FA3_STAGED.
// README.md says what is where.
//
// Versions, one H200, bfloat16, D = 128 unless said, TFLOP/s (best of the rounds / median under load), 2026-11-30:
//   1  two consumer warpgroups, 128 rows, P in registers, both overlaps, closing P V issued with the next tile's S.
//      Predicted 700-740 at (8192, 6). Measured by keys, staged output: 128: 713 / 665, 144: 720 / 677, 160: 725 / 672;
//      direct output: 144: 714 / 671, 160: 722 / 670, 176: 730 / 678. At (4608, 6) (best): 599, 612, 605; 608, 602, 592:
//      32 key tiles of 144 divide 4608. D = 64, 192 x 128: 579 / 563; two warpgroups, 128 x 192: 485 / 463.
//      In all of these the maximum was followed loosely, outputs rescaled only past 2^8 (predicted +0.5 %).
//   2  K and V shared by clusters of two blocks (multicast), against none. Predicted +1 to 3 % (half the reads of L2).
//      Measured -0.3 to +0.1 %: L2 does not limit. Dropped, and with it the rule of an even number of row blocks.
//   3  the exact maximum, since with the loose one the largest weight is not exactly 1: D = 64, one shape, error 2.6
//      times torch's. The rescaling is skipped where no row of a warp has a new maximum, which changes no bit.
//      Predicted: within 0.5 % of 1. Measured beside flash-attn-4's better tile, paired: 1.004, 1.006, 1.004, 0.999 at
//      (4608, 6), (8192, 6), (8192, 12), (16384, 6); D = 64: 0.763, 0.967, 0.985, 0.989.
//   4  a second tile for D = 64, 128 rows with two warpgroups, where its waves end first: (4608, 6) has 144 tiles of
//      192 rows for 132 SMs, two waves of which the second is nearly empty, or 216 of 128. Predicted 0.98 x
//      flash-attn-4, from its own two tiles. Measured: 128 x 128 0.953, 128 x 192 0.988; by the row 0.82 and 0.84 of
//      the speed of 192 x 128. Taken: 128 keys, which compute the bits of the large tile, so that the tile of a launch
//      does not show in its output. D = 128, 192 x 96 for (8192, 3), one wave instead of two: predicted 1.15 x,
//      measured 0.73 x, and 0.4 to 0.5 elsewhere.
//      Epilogues in one run, direct over staged, paired, at the four shapes: D = 128, 128 x 144: 0.991, 0.973, 0.989,
//      0.990; D = 64, 192 x 128: 1.006, 1.002, 1.002, 0.999. 128 x 176, direct only, over 128 x 144: 0.971, 1.000,
//      1.003, 0.984. Staged stays: as fast, and it can be paced.
//   5  the exponentials in front of the wait for P V: ptxas puts that wait before them (in flash-attn-4, too), but not
//      across a branch, so a branch that is always taken. Predicted +3 to 6 % at D = 64, +1 to 3 % at 128. Measured -1
//      to -2 % with 192 x 128, -4 to -5 % with 128 x 128 and at D = 128; other numbers of keys no better. Dropped.
//   6  a negative scale is left to the caller, who negates q: a branch less in the loop, taken around 64 or 72
//      negations. Predicted +1 to 2 % at D = 64, +0.5 % at 128. Measured beside 4, the same launches, paired: D = 64,
//      128 x 128 at (4608, 6) 1.006, 192 x 128 at (8192, 6) 1.007; D = 128 1.002, 1.003, 1.003; the same bits.
//      Beside flash-attn-4's better tile: D = 128: 1.002, 1.006, 1.012, 1.000; D = 64: 0.948, 0.967, 0.991, 0.993. The
//      0.948 counts a call that makes its arguments; the fused form, whose launch is made before, has 0.967 there.
//      Fused beside flash-attn-4 made persistent: D = 128: 0.991, 0.999, 0.999, 0.996; D = 64: 1.202, 0.959, 0.965,
//      0.996.
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernel.cuh"
#include "tensor_map.h"

namespace fa3 {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using Element = std::conditional_t<FA3_HALF, cutlass::half_t, cutlass::bfloat16_t>;
using Chosen = Config<Element, FA3_HEAD_DIM, FA3_GROUPS, FA3_KEYS, bool(FA3_STAGED)>;
constexpr CUtensorMapDataType kMapType = FA3_HALF ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
constexpr int kSharedBytes = sizeof(typename Chosen::Storage) + 1023;  // with room to align

void require(bool condition, char const* rule) {
  if (!condition) { TVM_FFI_THROW(ValueError) << rule; }
}

void require_elements(TensorView const& t, int modes, char const* rule) {
  DLDataType const type = t.dtype();
  require(t.ndim() == modes && type.bits == 16 && type.lanes == 1 && type.code == (FA3_HALF ? kDLFloat : kDLBfloat), rule);
  require(t.size(modes - 1) == Chosen::kHeadDim && t.stride(modes - 1) == 1 && t.device().device_type == kDLCUDA, rule);
  require(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0, rule);
}

Mode mode(TensorView const& t, int at) { return {t.size(at), t.stride(at) * int64_t(sizeof(Element))}; }

// Places of the chunks' outputs along one mode of a tensor map: every address is first + index * step.
void set_places(Params& params, TensorView const& o, int64_t const* address, int chunks) {
  int64_t const first = *std::min_element(address, address + chunks);
  int64_t step = 0, last = 0;
  for (int c = 0; c < chunks; ++c) { step = std::gcd(step, address[c] - first); }
  // any divisor of the distances will do; a map holds strides below 2^40
  while (step >= (int64_t(1) << 40) && step % 32 == 0) { step /= 2; }
  for (int c = 0; c < chunks; ++c) {
    int64_t const place = step == 0 ? 0 : (address[c] - first) / step;
    params.o_address[c] = address[c];
    params.o_place[c] = int(place);
    last = std::max(last, place);
  }
  require(last < std::numeric_limits<int>::max(), "the chunks' outputs lie at distances that no tensor map covers");
  if constexpr (Chosen::kStagedOutput) {
    params.o = tensor_map(reinterpret_cast<void*>(first), kMapType, Chosen::kHeadDim,
                          {mode(o, 1), mode(o, 2), {last + 1, step}, mode(o, 0)}, kColumns, kSliceRows);
  }
}

// q (B, chunks, rows, heads, D), k and v (B, keys, K/V heads, D), o (B, rows, heads, D): the strides of a chunk's output;
// addresses: int64 on the CPU [2, chunks], where each chunk's O and LSE begin, in the memory of whichever rank; lse
// (B, heads, rows) float32: the strides of a chunk's log-sum-exp, or None. pace_ns: pause behind each 16-row
// slice of a staged tile. num_sms: the grid's size at most. order: Order. peer_blocks, counter: int64 on the device.
void forward(TensorView q, TensorView k, TensorView v, TensorView o, TensorView addresses, Optional<TensorView> lse,
             double scale, int64_t pace_ns, int64_t order, int64_t num_sms, TensorView peer_blocks,
             TensorView counter, int64_t rank, int64_t num_ranks, int64_t flags, int64_t deadline_ns, int64_t record) {
  require_elements(q, 5, "q is (batch, chunks, rows, heads, D) of the kernel's type and D, 16-byte aligned, on a GPU");
  require_elements(k, 4, "k is (batch, keys, K/V heads, D) of the kernel's type and D, 16-byte aligned, on a GPU");
  require_elements(v, 4, "v is (batch, keys, K/V heads, D) of the kernel's type and D, 16-byte aligned, on a GPU");
  require_elements(o, 4, "o is (batch, rows, heads, D) of the kernel's type and D, 16-byte aligned, on a GPU");
  int const batch = q.size(0), chunks = q.size(1), rows = q.size(2), heads = q.size(3), keys = k.size(1);
  int const heads_kv = k.size(2);
  int device;
  check(cudaGetDevice(&device), "current device");
  require(device == q.device().device_id, "the tensors lie on the current device");
  require(chunks >= 1 && chunks <= kMaxChunks, "there are 1 to 32 chunks");
  require(batch >= 1 && rows >= 1 && heads >= 1 && keys >= 1 && heads_kv >= 1, "no extent is 0");
  require(k.size(0) == batch && v.size(0) == batch && o.size(0) == batch, "q, k, v and o have the same batch");
  require(v.size(1) == keys && v.size(2) == heads_kv, "k and v have the same keys and heads");
  require(o.size(1) == rows && o.size(2) == heads, "o has the rows and heads of q");
  require(heads % heads_kv == 0, "the heads of q are a multiple of those of k and v");
  // A branch for the others inside the loop over the keys would cost more than their caller's negating q.
  require(std::isfinite(scale) && scale >= 0, "the scale is finite and not negative; for a negative one negate q");
  require(addresses.ndim() == 2 && addresses.size(0) == 2 && addresses.size(1) == chunks &&
              addresses.dtype().bits == 64 && addresses.device().device_type == kDLCPU,
          "addresses is an int64 tensor (2, chunks) on the CPU");
  int64_t const* address = static_cast<int64_t const*>(addresses.data_ptr());

  Params params;
  params.q = tensor_map(q.data_ptr(), kMapType, Chosen::kHeadDim, {mode(q, 2), mode(q, 3), mode(q, 1), mode(q, 0)},
                        kColumns, kGroupRows);
  params.k = tensor_map(k.data_ptr(), kMapType, Chosen::kHeadDim, {mode(k, 1), mode(k, 2), mode(k, 0)}, kColumns,
                        Chosen::kKeys);
  params.v = tensor_map(v.data_ptr(), kMapType, Chosen::kHeadDim, {mode(v, 1), mode(v, 2), mode(v, 0)}, kColumns,
                        Chosen::kKeys);
  set_places(params, o, address, chunks);
  params.o_stride_batch = o.stride(0), params.o_stride_row = o.stride(1), params.o_stride_head = o.stride(2);
  if (lse.has_value()) {
    TensorView const view = lse.value();
    require(view.ndim() == 3 && view.size(0) == batch && view.size(1) == heads && view.size(2) == rows &&
                view.stride(2) == 1 && view.dtype().bits == 32,
            "lse is (batch, heads, rows) float32 with contiguous rows");
    params.with_lse = true;
    params.lse_stride_batch = view.stride(0), params.lse_stride_head = view.stride(1);
    std::copy_n(address + chunks, chunks, params.lse_address);
  }
  params.rows = rows, params.keys = keys, params.pace_ns = int(pace_ns);
  // The softmax follows the maximum of what it multiplies with a positive number; 0 is taken as next to nothing.
  params.scale_log2 = std::max(float(scale * 1.4426950408889634), 1e-30f);
  params.heads_per_kv = cutlass::FastDivmod(heads / heads_kv);
  params.release = {static_cast<uint64_t const*>(peer_blocks.data_ptr()), static_cast<uint64_t*>(counter.data_ptr()),
                    uint64_t(record), deadline_ns, int(rank), int(num_ranks), int(flags)};

  int const row_blocks = (rows + Chosen::kRows - 1) / Chosen::kRows;
  params.grid = {cutlass::FastDivmod(row_blocks), cutlass::FastDivmod(heads), cutlass::FastDivmod(batch),
                 row_blocks * heads * batch * chunks, chunks, int(order)};
  auto const kernel = forward_kernel<Chosen>;
  static std::atomic<uint64_t> prepared{0};  // one bit for each device
  uint64_t const bit = uint64_t(1) << (device % 64);
  if (!(prepared.load() & bit)) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "shared memory");
    prepared |= bit;
  }
  auto const stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, q.device().device_id));
  int const grid = std::min(params.grid.tiles, std::max(int(num_sms), 1));
  kernel<<<grid, Chosen::kThreads, kSharedBytes, stream>>>(params);
  check(cudaGetLastError(), "launch");
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, forward);

}  // namespace fa3
