// Rows of operands and of scratch: loading with conversion, storing with rounding to nearest even,
// dots, transposes. T is the compute type; lengths are multiples of 16.
#if defined(GDN_BACKEND_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GDN_BACKEND_CPU_ROWS_INL_H_
#undef GDN_BACKEND_CPU_ROWS_INL_H_
#else
#define GDN_BACKEND_CPU_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <type_traits>

#include "backend/cpu/matrix.h"
#include "base/element.h"
#include "gdn/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
HWY_INLINE constexpr int64_t lanes() {
  return hn::MaxLanes(hn::ScalableTag<T>());
}

// ---- bf16 <-> fp32 ----------------------------------------------------------------------------
inline void widen_bf16(const uint16_t* HWY_RESTRICT from, float* HWY_RESTRICT to, int64_t n) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<uint16_t, decltype(df)> dh;
  for (int64_t i = 0; i < n; i += lanes<float>()) {
    const auto wide = hn::PromoteTo(du, hn::LoadU(dh, from + i));
    hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(wide)), df, to + i);
  }
}

inline void narrow_bf16(const float* HWY_RESTRICT from, uint16_t* HWY_RESTRICT to, int64_t n) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<uint16_t, decltype(df)> dh;
  const auto half = hn::Set(du, 0x7fffu);
  const auto one = hn::Set(du, 1u);
  const auto quiet = hn::Set(du, 0x7fc0u);
  for (int64_t i = 0; i < n; i += lanes<float>()) {
    const auto x = hn::LoadU(df, from + i);
    const auto u = hn::BitCast(du, x);
    const auto odd = hn::And(hn::ShiftRight<16>(u), one);
    const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(half, odd)));
    const auto safe = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), quiet, rounded);
    hn::StoreU(hn::DemoteTo(dh, hn::BitCast(di, safe)), dh, to + i);
  }
}

template <typename T>
constexpr DType dtype_of() {
  return std::is_same_v<T, float> ? DType::kFloat32 : DType::kFloat64;
}

// ---- Operand rows -----------------------------------------------------------------------------
// x [rows, heads, n] of any strides.
template <typename T>
void load_row(const TensorView& x, int64_t row, int64_t head, T* HWY_RESTRICT to, int64_t n) {
  const int64_t at = row * x.stride[0] + head * x.stride[1];
  if (x.stride[2] == 1) {
    if (x.dtype == dtype_of<T>()) {
      const hn::ScalableTag<T> d;
      const T* HWY_RESTRICT from = x.as<const T>() + at;
      for (int64_t i = 0; i < n; i += lanes<T>()) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
      return;
    }
    if constexpr (std::is_same_v<T, float>) {
      if (x.dtype == DType::kBFloat16) return widen_bf16(x.as<const uint16_t>() + at, to, n);
    }
  }
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(load_element(x, at + i * x.stride[2]));
}

template <typename T>
void store_row(const TensorView& x, int64_t row, int64_t head, const T* HWY_RESTRICT from,
               int64_t n) {
  const int64_t at = row * x.stride[0] + head * x.stride[1];
  if (x.stride[2] == 1) {
    if (x.dtype == dtype_of<T>()) {
      const hn::ScalableTag<T> d;
      T* HWY_RESTRICT to = x.as<T>() + at;
      for (int64_t i = 0; i < n; i += lanes<T>()) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
      return;
    }
    if constexpr (std::is_same_v<T, float>) {
      if (x.dtype == DType::kBFloat16) return narrow_bf16(from, x.as<uint16_t>() + at, n);
    }
  }
  for (int64_t i = 0; i < n; ++i) store_element(x, at + i * x.stride[2], from[i]);
}

// ---- Scratch rows -----------------------------------------------------------------------------
template <typename T>
HWY_INLINE void zero_row(T* HWY_RESTRICT to, int64_t n) {
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < n; i += lanes<T>()) hn::StoreU(hn::Zero(d), d, to + i);
}

template <typename T>
HWY_INLINE void copy_row(const T* from, T* to, int64_t n) {
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < n; i += lanes<T>()) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
}

template <typename T>
HWY_INLINE void scale_row(const T* from, T factor, T* to, int64_t n) {
  const hn::ScalableTag<T> d;
  const auto f = hn::Set(d, factor);
  for (int64_t i = 0; i < n; i += lanes<T>()) {
    hn::StoreU(hn::Mul(f, hn::LoadU(d, from + i)), d, to + i);
  }
}

template <typename T>
HWY_INLINE T dot(const T* HWY_RESTRICT a, const T* HWY_RESTRICT b, int64_t n) {
  const hn::ScalableTag<T> d;
  auto sum = hn::Zero(d);
  for (int64_t i = 0; i < n; i += lanes<T>()) {
    sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// to [n, m] = from [m, n] transposed; m and n are multiples of 4.
template <typename T>
void transpose(int64_t m, int64_t n, Mat<T> from, Mat<T> to) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) to.row(j)[i] = from.row(i)[j];
  }
#else
  if constexpr (std::is_same_v<T, float>) {
    const hn::FixedTag<float, 4> d;
    const hn::RepartitionToWide<decltype(d)> dw;
    for (int64_t j = 0; j < n; j += 4) {
      for (int64_t i = 0; i < m; i += 4) {
        const auto r0 = hn::LoadU(d, from.row(i) + j);
        const auto r1 = hn::LoadU(d, from.row(i + 1) + j);
        const auto r2 = hn::LoadU(d, from.row(i + 2) + j);
        const auto r3 = hn::LoadU(d, from.row(i + 3) + j);
        const auto a = hn::BitCast(dw, hn::InterleaveLower(d, r0, r1));  // 00 10 01 11
        const auto b = hn::BitCast(dw, hn::InterleaveLower(d, r2, r3));
        const auto e = hn::BitCast(dw, hn::InterleaveUpper(d, r0, r1));
        const auto f = hn::BitCast(dw, hn::InterleaveUpper(d, r2, r3));
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, a, b)), d, to.row(j) + i);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, a, b)), d, to.row(j + 1) + i);
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, e, f)), d, to.row(j + 2) + i);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, e, f)), d, to.row(j + 3) + i);
      }
    }
  } else {
    const hn::FixedTag<T, 2> d;
    for (int64_t j = 0; j < n; j += 2) {
      for (int64_t i = 0; i < m; i += 2) {
        const auto r0 = hn::LoadU(d, from.row(i) + j);
        const auto r1 = hn::LoadU(d, from.row(i + 1) + j);
        hn::StoreU(hn::InterleaveLower(d, r0, r1), d, to.row(j) + i);
        hn::StoreU(hn::InterleaveUpper(d, r0, r1), d, to.row(j + 1) + i);
      }
    }
  }
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#endif  // GDN_BACKEND_CPU_ROWS_INL_H_
