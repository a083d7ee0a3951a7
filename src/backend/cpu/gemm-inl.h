// Small matrix products on scratch memory: C [m, n] = init(C) + A [m, depth] B [depth, n].
// Rows of B and C are contiguous, A has any strides (one of them 1), m and n are multiples of 16.
// Every element of C is one chain of fused multiply-adds over depth in ascending order, so results
// do not depend on how a product is cut into tiles, columns or rows.
#if defined(GDN_BACKEND_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GDN_BACKEND_CPU_GEMM_INL_H_
#undef GDN_BACKEND_CPU_GEMM_INL_H_
#else
#define GDN_BACKEND_CPU_GEMM_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "backend/cpu/matrix.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

enum class Init { kZero, kAdd, kScale };  // C starts as 0, C, or row_scale[m] * C

// Accumulators of a tile: 8 x 2 of 32 registers, 4 x 2 of 16. Either keeps two FMA ports of latency
// 4 busy, and rows divide every m.
#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kTileRows = 8;
#else
inline constexpr int kTileRows = 4;
#endif

template <Init init, int NV, bool kUnitDepth, typename T>
HWY_INLINE void gemm_tile(int64_t depth, Left<T> a, const T* HWY_RESTRICT b, int64_t ldb,
                          T* HWY_RESTRICT c, int64_t ldc, const T* HWY_RESTRICT row_scale) {
  const hn::ScalableTag<T> d;
  using Vec = hn::Vec<decltype(d)>;
  constexpr int64_t kLanes = hn::MaxLanes(d);
  constexpr int R = kTileRows;
  const int64_t row = kUnitDepth ? a.row : 1;
  const int64_t step = kUnitDepth ? 1 : a.depth;

  Vec acc[R][NV];
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(2)
    for (int j = 0; j < NV; ++j) {
      if constexpr (init == Init::kZero) {
        acc[r][j] = hn::Zero(d);
      } else {
        acc[r][j] = hn::LoadU(d, c + r * ldc + j * kLanes);
        if constexpr (init == Init::kScale) {
          acc[r][j] = hn::Mul(acc[r][j], hn::Set(d, row_scale[r]));
        }
      }
    }
  }
  const T* HWY_RESTRICT pa = a.data;
  for (int64_t k = 0; k < depth; ++k, pa += step, b += ldb) {
    Vec vb[NV];
    HWY_UNROLL(2)
    for (int j = 0; j < NV; ++j) vb[j] = hn::LoadU(d, b + j * kLanes);
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      const Vec va = hn::Set(d, pa[r * row]);
      HWY_UNROLL(2)
      for (int j = 0; j < NV; ++j) acc[r][j] = hn::MulAdd(va, vb[j], acc[r][j]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(2)
    for (int j = 0; j < NV; ++j) hn::StoreU(acc[r][j], d, c + r * ldc + j * kLanes);
  }
}

// Strips of two vectors of columns outside, so that a strip of B stays in the L1 cache.
template <Init init, bool kUnitDepth, typename T>
HWY_NOINLINE void gemm_strided(int64_t m, int64_t n, int64_t depth, Left<T> a, const T* b,
                               int64_t ldb, T* c, int64_t ldc, const T* row_scale) {
  constexpr int64_t kLanes = hn::MaxLanes(hn::ScalableTag<T>());
  int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    for (int64_t i = 0; i < m; i += kTileRows) {
      gemm_tile<init, 2, kUnitDepth>(depth, Left<T>{a.data + i * a.row, a.row, a.depth}, b + j, ldb,
                                     c + i * ldc + j, ldc, row_scale + i);
    }
  }
  for (; j < n; j += kLanes) {
    for (int64_t i = 0; i < m; i += kTileRows) {
      gemm_tile<init, 1, kUnitDepth>(depth, Left<T>{a.data + i * a.row, a.row, a.depth}, b + j, ldb,
                                     c + i * ldc + j, ldc, row_scale + i);
    }
  }
}

// row_scale: [m], read with Init::kScale only.
template <Init init, typename T>
void gemm(int64_t m, int64_t n, int64_t depth, Left<T> a, Mat<T> b, Mat<T> c,
          const T* row_scale = nullptr) {
  if (a.depth == 1) {
    gemm_strided<init, true>(m, n, depth, a, b.data, b.ld, c.data, c.ld, row_scale);
  } else {
    gemm_strided<init, false>(m, n, depth, a, b.data, b.ld, c.data, c.ld, row_scale);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#endif  // GDN_BACKEND_CPU_GEMM_INL_H_
