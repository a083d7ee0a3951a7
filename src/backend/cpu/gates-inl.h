// Decay factors of a chunk from its gate sums G (docs/math.md). G is kept as an unevaluated sum of
// two T, so that differences after a spike keep the small gates; exp is only ever taken of
// differences <= 0, selected before it.
#if defined(GDN_BACKEND_CPU_GATES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GDN_BACKEND_CPU_GATES_INL_H_
#undef GDN_BACKEND_CPU_GATES_INL_H_
#else
#define GDN_BACKEND_CPU_GATES_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "backend/cpu/layout.h"
#include "backend/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Sums of g in double-double, rounded to high + low in T.
class GateSum {
 public:
  // exp(-1000) is 0 in fp64 and fp32, so gates below count as -1000; -inf then gives no NaN.
  static constexpr double kLowest = -1000;

  void add(double g) {
    g = std::max(g, kLowest);
    const double sum = high_ + g;
    const double part = sum - high_;
    low_ += (high_ - (sum - part)) + (g - part);
    high_ = sum;
  }
  template <typename T>
  void store(T& high, T& low) const {
    high = static_cast<T>(high_);
    low = static_cast<T>((high_ - static_cast<double>(high)) + low_);
  }

 private:
  double high_ = 0;
  double low_ = 0;
};

// exp(x), of NaN NaN: Highway's is 0 there, which would hide it.
template <class D, class V>
HWY_INLINE V exp_or_nan(D d, V x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

// gamma [rows, rows]: exp(G_i - G_j) for j <= i, 0 in the rest of each row's diagonal 16-block;
// blocks above are not written.
template <typename T>
void gamma_lower(const T* HWY_RESTRICT high, const T* HWY_RESTRICT low, int64_t rows,
                 Mat<T> gamma) {
  const hn::ScalableTag<T> d;
  const auto lowest = hn::Set(d, static_cast<T>(GateSum::kLowest));
  for (int64_t i = 0; i < rows; ++i) {
    const auto high_i = hn::Set(d, high[i]);
    const auto low_i = hn::Set(d, low[i]);
    const auto index_i = hn::Set(d, static_cast<T>(i));
    const int64_t columns = (i / 16 + 1) * 16;
    for (int64_t j = 0; j < columns; j += lanes<T>()) {
      const auto keep = hn::Le(hn::Iota(d, static_cast<T>(j)), index_i);
      const auto difference =
          hn::Add(hn::Sub(high_i, hn::LoadU(d, high + j)), hn::Sub(low_i, hn::LoadU(d, low + j)));
      const auto e = exp_or_nan(d, hn::IfThenElse(keep, difference, lowest));
      hn::StoreU(hn::IfThenElseZero(keep, e), d, gamma.row(i) + j);
    }
  }
}

// Per-token factors of one chunk and value head; G_C is the last token's sum.
template <typename T>
struct ChunkGates {
  const T* high;  // in the prepared record
  const T* low;
  const T* beta;
  alignas(64) T from_start[kChunk];         // exp(G_i)
  alignas(64) T scaled_from_start[kChunk];  // scale exp(G_i)
  alignas(64) T to_end[kChunk];             // exp(G_C - G_i)
  alignas(64) T decay[kMaxDim];             // exp(G_C), repeated: the row scale of a state

  ChunkGates(const T* record, T scale, int64_t rows_of_state) {
    high = record + PreparedRecord::kGateHigh;
    low = record + PreparedRecord::kGateLow;
    beta = record + PreparedRecord::kBeta;
    const hn::ScalableTag<T> d;
    const auto high_end = hn::Set(d, high[kChunk - 1]);
    const auto low_end = hn::Set(d, low[kChunk - 1]);
    for (int64_t i = 0; i < kChunk; i += lanes<T>()) {
      const auto h = hn::LoadU(d, high + i);
      const auto l = hn::LoadU(d, low + i);
      const auto e = exp_or_nan(d, hn::Add(h, l));
      hn::StoreU(e, d, from_start + i);
      hn::StoreU(hn::Mul(e, hn::Set(d, scale)), d, scaled_from_start + i);
      const auto left = hn::Add(hn::Sub(high_end, h), hn::Sub(low_end, l));
      hn::StoreU(exp_or_nan(d, left), d, to_end + i);
    }
    std::fill_n(decay, rows_of_state, from_start[kChunk - 1]);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#endif  // GDN_BACKEND_CPU_GATES_INL_H_
