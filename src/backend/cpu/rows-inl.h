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

template <typename T>
void zero_matrix(int64_t m, int64_t n, Mat<T> to) {
  for (int64_t i = 0; i < m; ++i) zero_row(to.row(i), n);
}

template <typename T>
void copy_matrix(int64_t m, int64_t n, Mat<T> from, Mat<T> to) {
  for (int64_t i = 0; i < m; ++i) copy_row(from.row(i), to.row(i), n);
}

// Row i of to is factors[i] times row i of from.
template <typename T>
void scale_rows(int64_t m, int64_t n, Mat<T> from, const T* factors, Mat<T> to) {
  for (int64_t i = 0; i < m; ++i) scale_row(from.row(i), factors[i], to.row(i), n);
}

// ---- Transposes -------------------------------------------------------------------------------
#if HWY_TARGET != HWY_SCALAR
// 16 bytes of row i of a matrix, of row i + step in the next block of the vector, and so on.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> load_blocks(D d, const T* HWY_RESTRICT from, int64_t step) {
  if constexpr (hn::MaxLanes(d) * sizeof(T) == 16) {
    return hn::LoadU(d, from);
  } else {
    const hn::Half<D> half;
    const int64_t upper = step * static_cast<int64_t>(hn::MaxLanes(half) * sizeof(T) / 16);
    return hn::Combine(d, load_blocks(half, from + upper, step), load_blocks(half, from, step));
  }
}
#endif

// to [n, m] = from [m, n] transposed; m and n are multiples of 16. Square tiles of 16 bytes, one
// per block of a vector, so that every store is a whole vector.
template <typename T>
void transpose(int64_t m, int64_t n, Mat<T> from, Mat<T> to) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) to.row(j)[i] = from.row(i)[j];
  }
#else
  const hn::ScalableTag<T> d;
  constexpr int64_t kSide = 16 / sizeof(T);
  const int64_t step = kSide * from.ld;
  for (int64_t i = 0; i < m; i += lanes<T>()) {
    for (int64_t j = 0; j < n; j += kSide) {
      const T* HWY_RESTRICT at = from.row(i) + j;
      const auto r0 = load_blocks(d, at, step);
      const auto r1 = load_blocks(d, at + from.ld, step);
      if constexpr (kSide == 2) {
        hn::StoreU(hn::InterleaveLower(d, r0, r1), d, to.row(j) + i);
        hn::StoreU(hn::InterleaveUpper(d, r0, r1), d, to.row(j + 1) + i);
      } else {
        const hn::RepartitionToWide<decltype(d)> pairs;
        const auto r2 = load_blocks(d, at + 2 * from.ld, step);
        const auto r3 = load_blocks(d, at + 3 * from.ld, step);
        const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, r0, r1));
        const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, r2, r3));
        const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, r0, r1));
        const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, r2, r3));
        const auto store = [&](auto column, int64_t c) {
          hn::StoreU(hn::BitCast(d, column), d, to.row(j + c) + i);
        };
        store(hn::InterleaveLower(pairs, low01, low23), 0);
        store(hn::InterleaveUpper(pairs, low01, low23), 1);
        store(hn::InterleaveLower(pairs, high01, high23), 2);
        store(hn::InterleaveUpper(pairs, high01, high23), 3);
      }
    }
  }
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#endif  // GDN_BACKEND_CPU_ROWS_INL_H_
