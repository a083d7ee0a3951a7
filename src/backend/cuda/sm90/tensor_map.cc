#include "backend/cuda/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <string>

namespace gdn::sm90 {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, looked up so that the library links without libcuda.
EncodeFunction find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<EncodeFunction>(function);
}

}  // namespace

Status make_tensor_map(const void* data, int64_t tokens, int64_t heads, int64_t token_stride,
                       int halves, CUtensorMap* map) {
  static const EncodeFunction encode = find_encoder();
  if (encode == nullptr) {
    return Status(ErrorCode::kDevice, "cuTensorMapEncodeTiled: not found in the CUDA driver");
  }
  constexpr cuuint64_t kElement = 2, kHalf = 64, kHead = 128;
  const cuuint64_t sizes[4] = {kHalf, static_cast<cuuint64_t>(tokens), 2,
                               static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(token_stride) * kElement, kHalf * kElement,
                                 kHead * kElement};
  const cuuint32_t box[4] = {kHalf, 64, static_cast<cuuint32_t>(halves), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status(ErrorCode::kDevice, "cuTensorMapEncodeTiled: error " +
                                          std::to_string(static_cast<int>(result)) + " for [" +
                                          std::to_string(tokens) + ", " + std::to_string(heads) +
                                          ", 128], token stride " + std::to_string(token_stride));
  }
  return Status::ok();
}

}  // namespace gdn::sm90
