// Host: tensor maps for TMA, from plain extents and strides.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstdint>

namespace fa3 {

inline void check(cudaError_t status, char const* what) {
  if (status != cudaSuccess) { TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(status); }
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, so that the object loads on a machine without a driver.
inline EncodeTiled encode_tiled() {
  static EncodeTiled const function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) {
      TVM_FFI_THROW(RuntimeError) << "the driver has no cuTensorMapEncodeTiled; a driver for CUDA 12 or newer is needed";
    }
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

// One mode of a tensor but the innermost, which has stride 1: its extent, and its stride in bytes.
struct Mode {
  int64_t extent;
  int64_t stride_bytes;
};

// A map of 2-byte elements whose boxes are `columns` x `rows` of the first two modes, 128-byte swizzled in shared memory.
template <int kModes>
CUtensorMap tensor_map(void const* address, CUtensorMapDataType type, int64_t columns_extent, Mode const (&modes)[kModes],
                       int columns, int rows) {
  cuuint64_t extents[kModes + 1] = {cuuint64_t(columns_extent)};
  cuuint64_t strides[kModes];
  cuuint32_t box[kModes + 1] = {cuuint32_t(columns), cuuint32_t(rows)}, steps[kModes + 1];
  for (int i = 0; i < kModes; ++i) {
    extents[i + 1] = modes[i].extent;
    // the stride of a mode of extent 1 is never used, and may be anything in a view
    strides[i] = modes[i].extent == 1 ? 16 : modes[i].stride_bytes;
    if (i > 0) { box[i + 1] = 1; }
  }
  std::fill_n(steps, kModes + 1, 1);
  CUtensorMap map;
  CUresult const status = encode_tiled()(
      &map, type, kModes + 1, const_cast<void*>(address), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    TVM_FFI_THROW(ValueError) << "no tensor map for strides that are not multiples of 16 bytes below 2^40 (error "
                              << int(status) << "); make the tensors contiguous";
  }
  return map;
}

}  // namespace fa3
