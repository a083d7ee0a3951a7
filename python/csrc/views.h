// Between LibTorch's stable ABI and the core: errors, tensor views, allocation, streams.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "gdn/gdn.h"

namespace gdn_torch {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Thrown as "gdn_kcp: <code>: <message>", which errors.py turns into the typed Python error.
[[noreturn]] void raise(gdn::ErrorCode code, const std::string& message);
void check(const gdn::Status& status);

template <typename T>
T value_of(gdn::Result<T> result) {
  check(result.status());
  return std::move(*result);
}

gdn::Device device_of(const Tensor& tensor, const char* name = "device");
gdn::DType dtype_of(const char* name, const Tensor& tensor);
torch::headeronly::ScalarType scalar_type_of(gdn::DType dtype);

// The tensor as it is, up to four dimensions.
gdn::TensorView view_of(const char* name, const Tensor& tensor);
gdn::TensorView view_of(const char* name, const MaybeTensor& tensor);  // absent: absent

// [B, T, ...] or [T, ...] as [B T, ...] without a copy; `inner` counts the trailing dimensions.
// Refused where the batch stride is not T times the token stride.
gdn::TensorView rows_view(const char* name, const Tensor& tensor, int inner);
// Whether rows_view would take it.
bool has_rows_view(const Tensor& tensor, int inner);

// [N, HV, K, V], or the transposed view of [N, HV, V, K].
gdn::TensorView state_view(const char* name, const MaybeTensor& tensor, bool v_first);

Tensor empty(const std::vector<int64_t>& shape, gdn::DType dtype, gdn::Device device);
Tensor zeros(const std::vector<int64_t>& shape, gdn::DType dtype, gdn::Device device);
Tensor empty_like_shape(const Tensor& tensor);  // its shape, dtype and device, row-major
// Uninitialised bytes that start at a 256-byte boundary.
Tensor aligned_bytes(int64_t bytes, gdn::Device device);
gdn::Memory memory_of(const Tensor& bytes);  // an aligned_bytes tensor, or part of one
Tensor int64_tensor(const std::vector<int64_t>& values, const std::vector<int64_t>& shape);
// Values of an int32 or int64 tensor of one dimension, copied from its device if need be.
std::vector<int64_t> int64_values(const char* name, const Tensor& tensor);

gdn::Stream current_stream(gdn::Device device);
// Launches go to this GPU, whichever is current.
std::optional<torch::stable::accelerator::DeviceGuard> guard_for(gdn::Device device);

}  // namespace gdn_torch
