// Tensor views as kernels take them.
#pragma once

#include "backend/cuda/common/types.h"

namespace gdn::cuda {

// Strides of axes of length 1 mean nothing.
inline int64_t stride_of(const TensorView& view, int axis) {
  return view.shape[axis] > 1 ? view.stride[axis] : 0;
}

// 16-byte pieces can be moved whole: aligned base, rows and heads, unit element stride.
inline bool pieces_aligned(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && stride_of(view, 0) % 8 == 0 &&
         stride_of(view, 1) % 8 == 0 && stride_of(view, 2) == 1;
}

// [T, heads, dim] bf16 whose pieces are aligned.
inline RowView row_view(const TensorView& view) {
  return {view.as<const uint16_t>(), stride_of(view, 0)};
}

inline ElementView element_view(const TensorView& view) {
  if (!view.present() || view.numel() == 0) return {nullptr, 0, 0, 0, false};
  return {view.as<uint16_t>(), stride_of(view, 0), stride_of(view, 1), stride_of(view, 2),
          pieces_aligned(view)};
}

// [T, heads], or [heads] as one row.
inline ScalarView scalar_view(const TensorView& view) {
  if (!view.present()) return {nullptr, 0, 0, DType::kFloat32};
  if (view.rank == 1) return {view.data, 0, stride_of(view, 0), view.dtype};
  return {view.data, stride_of(view, 0), stride_of(view, 1), view.dtype};
}

inline StateView state_view(const TensorView& view) {
  if (!view.present() || view.numel() == 0) return {nullptr, 0, 0, 0, 0};
  return {view.as<float>(), stride_of(view, 0), stride_of(view, 1), stride_of(view, 2),
          stride_of(view, 3)};
}

}  // namespace gdn::cuda
