// Attention forward for sm_90a with the all-to-all after it inside: the entry points of one object, for one head dimension
// and one element type (FA3_HEAD_DIM, FA3_HALF). See README.md for the parts.
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <numeric>

#include "kernel.cuh"
#include "tensor_map.h"

#ifndef FA3_HEAD_DIM
#define FA3_HEAD_DIM 128
#endif
#ifndef FA3_HALF
#define FA3_HALF 0
#endif
#ifndef FA3_GROUPS
#define FA3_GROUPS (FA3_HEAD_DIM == 64 ? 3 : 2)
#endif
#ifndef FA3_KEYS
#define FA3_KEYS (FA3_HEAD_DIM == 64 ? 128 : 160)
#endif
#ifndef FA3_STAGED
#define FA3_STAGED 1
#endif

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
    params.o_address[c] = address[c];
    params.o_place[c] = step == 0 ? 0 : int((address[c] - first) / step);
    last = std::max<int64_t>(last, params.o_place[c]);
  }
  if constexpr (Chosen::kStagedOutput) {
    params.o = tensor_map(reinterpret_cast<void*>(first), kMapType, Chosen::kHeadDim,
                          {mode(o, 1), mode(o, 2), {last + 1, step}, mode(o, 0)}, kColumns, kSliceRows);
  }
}

// q (B, chunks, rows, heads, D), k and v (B, keys, K/V heads, D), o (B, rows, heads, D): the strides of a chunk's output;
// addresses: int64 on the CPU [2, chunks], where each chunk's O and LSE begin, in the memory of whichever rank; lse
// (B, heads, rows) float32: the strides of a chunk's log-sum-exp, or None. scale > 0. pace_ns: pause behind each 16-row
// slice of a staged tile. num_sms: the grid's size at most. order: Order. peer_blocks, counter: int64 on the device.
void forward(TensorView q, TensorView k, TensorView v, TensorView o, TensorView addresses, Optional<TensorView> lse,
             double scale, int64_t pace_ns, int64_t order, int64_t num_sms, int64_t clusters, TensorView peer_blocks,
             TensorView counter, int64_t rank, int64_t num_ranks, int64_t flags, int64_t deadline_ns, int64_t record) {
  require_elements(q, 5, "q is (batch, chunks, rows, heads, D) of the kernel's type and D, 16-byte aligned, on a GPU");
  require_elements(k, 4, "k is (batch, keys, K/V heads, D) of the kernel's type and D, 16-byte aligned, on a GPU");
  require_elements(v, 4, "v is (batch, keys, K/V heads, D) of the kernel's type and D, 16-byte aligned, on a GPU");
  require_elements(o, 4, "o is (batch, rows, heads, D) of the kernel's type and D, 16-byte aligned, on a GPU");
  int const batch = q.size(0), chunks = q.size(1), rows = q.size(2), heads = q.size(3), keys = k.size(1);
  int const heads_kv = k.size(2);
  require(chunks >= 1 && chunks <= kMaxChunks, "there are 1 to 32 chunks");
  require(batch >= 1 && rows >= 1 && heads >= 1 && keys >= 1 && heads_kv >= 1, "no extent is 0");
  require(k.size(0) == batch && v.size(0) == batch && o.size(0) == batch, "q, k, v and o have the same batch");
  require(v.size(1) == keys && v.size(2) == heads_kv, "k and v have the same keys and heads");
  require(o.size(1) == rows && o.size(2) == heads, "o has the rows and heads of q");
  require(heads % heads_kv == 0, "the heads of q are a multiple of those of k and v");
  require(scale > 0 && std::isfinite(scale), "the scale is positive and finite");
  require(addresses.ndim() == 2 && addresses.size(0) == 2 && addresses.size(1) == chunks &&
              addresses.dtype().bits == 64 && addresses.device().device_type == kDLCPU,
          "addresses is an int64 tensor (2, chunks) on the CPU");
  int64_t const* address = static_cast<int64_t const*>(addresses.data_ptr());

  Params params;
  params.q = tensor_map(q.data_ptr(), kMapType, Chosen::kHeadDim, {mode(q, 2), mode(q, 3), mode(q, 1), mode(q, 0)},
                        kColumns, kGroupRows);
  params.k = tensor_map(k.data_ptr(), kMapType, Chosen::kHeadDim, {mode(k, 1), mode(k, 2), mode(k, 0)}, kColumns,
                        Chosen::kHalfKeys);
  params.v = tensor_map(v.data_ptr(), kMapType, Chosen::kHeadDim, {mode(v, 1), mode(v, 2), mode(v, 0)}, kColumns,
                        Chosen::kHalfKeys);
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
  params.scale_log2 = float(scale * 1.4426950408889634);
  params.heads_per_kv = cutlass::FastDivmod(heads / heads_kv);
  params.release = {static_cast<uint64_t const*>(peer_blocks.data_ptr()), static_cast<uint64_t*>(counter.data_ptr()),
                    uint64_t(record), deadline_ns, int(rank), int(num_ranks), int(flags)};

  int const row_blocks = (rows + Chosen::kRows - 1) / Chosen::kRows;
  int const cluster = clusters == 2 && row_blocks % 2 == 0 ? 2 : 1;
  params.grid = {cutlass::FastDivmod(row_blocks / cluster), cutlass::FastDivmod(heads), cutlass::FastDivmod(batch),
                 row_blocks / cluster * heads * batch * chunks, chunks, int(order)};
  auto const kernel = forward_kernel<Chosen>;
  static bool const prepared = [&] {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "shared memory");
    return true;
  }();
  (void)prepared;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(std::min(params.grid.tiles, std::max(int(num_sms) / cluster, 1)) * cluster);
  config.blockDim = dim3(Chosen::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, q.device().device_id));
  config.attrs = &attribute, config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, params), "launch");
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, forward);

}  // namespace fa3
