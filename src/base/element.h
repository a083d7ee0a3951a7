// Elements of host tensors of any floating dtype as doubles, singly and by rows. A store rounds to
// the view's dtype (bf16 through float). Offsets and strides count elements.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "gdn/tensor.h"

namespace gdn {

constexpr bool is_floating(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

// out[i] = data[offset + i * step] for i in [0, n).
inline void load_row(const void* data, DType dtype, int64_t offset, int64_t step, int64_t n,
                     double* out) {
  const auto copy = [&](const auto* from) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<double>(from[offset + i * step]);
  };
  switch (dtype) {
    case DType::kBFloat16:
      return copy(static_cast<const BFloat16*>(data));
    case DType::kFloat32:
      return copy(static_cast<const float*>(data));
    case DType::kFloat64:
      return copy(static_cast<const double*>(data));
    case DType::kInt32:
      return copy(static_cast<const int32_t*>(data));
    case DType::kInt64:
      return copy(static_cast<const int64_t*>(data));
  }
}

// data[offset + i * step] = in[i]. Floating dtypes only; others are left alone.
inline void store_row(void* data, DType dtype, int64_t offset, int64_t step, int64_t n,
                      const double* in) {
  switch (dtype) {
    case DType::kBFloat16:
      for (int64_t i = 0; i < n; ++i) {
        static_cast<BFloat16*>(data)[offset + i * step] = BFloat16(static_cast<float>(in[i]));
      }
      return;
    case DType::kFloat32:
      for (int64_t i = 0; i < n; ++i) {
        static_cast<float*>(data)[offset + i * step] = static_cast<float>(in[i]);
      }
      return;
    case DType::kFloat64:
      for (int64_t i = 0; i < n; ++i) static_cast<double*>(data)[offset + i * step] = in[i];
      return;
    case DType::kInt32:
    case DType::kInt64:
      return;
  }
}

inline double load_element(const TensorView& view, int64_t offset) {
  double value = 0;
  load_row(view.data, view.dtype, offset, 1, 1, &value);
  return value;
}

inline void store_element(const TensorView& view, int64_t offset, double value) {
  store_row(view.data, view.dtype, offset, 1, 1, &value);
}

}  // namespace gdn
