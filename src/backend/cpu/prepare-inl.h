// prepare: gates, beta and the chunk inverse, one item per (chunk, key head). With A strictly
// lower, A_ij = k_i.k_j exp(G_i - G_j), and B = diag(beta), Z = -A - A B Z is found by blocked
// forward substitution (16 rows at a time), so that I + Z B inverts I + A B and I + B Z inverts I +
// B A.
#if defined(GDN_BACKEND_CPU_PREPARE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GDN_BACKEND_CPU_PREPARE_INL_H_
#undef GDN_BACKEND_CPU_PREPARE_INL_H_
#else
#define GDN_BACKEND_CPU_PREPARE_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "backend/cpu/activation.h"
#include "backend/cpu/chunk-inl.h"
#include "backend/cpu/scratch.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu {
namespace HWY_NAMESPACE {

template <typename T>
void prepare_gates(const Activation& activation, const Chunk& chunk, T* record) {
  GateSum sum;
  for (int64_t i = 0; i < kChunk; ++i) {
    const bool inside = i < chunk.tokens;
    if (inside) sum.add(activation.gate(chunk.row + i));
    sum.store(record[PreparedRecord::kGateHigh + i], record[PreparedRecord::kGateLow + i]);
    record[PreparedRecord::kBeta + i] =
        inside ? static_cast<T>(activation.beta(chunk.row + i)) : T{0};
  }
}

// z [rows, rows] from kk = K K^T (lower) and gamma. ab [rows, rows] is scratch: -A B.
template <typename T>
void solve_inverse(int64_t rows, Mat<T> kk, Mat<T> gamma, const T* beta, Mat<T> ab, Mat<T> z) {
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < rows; ++i) {
    const auto index_i = hn::Set(d, static_cast<T>(i));
    const int64_t columns = (i / 16 + 1) * 16;
    for (int64_t j = 0; j < columns; j += lanes<T>()) {
      const auto below = hn::Lt(hn::Iota(d, static_cast<T>(j)), index_i);
      const auto a = hn::Mul(hn::LoadU(d, kk.row(i) + j), hn::LoadU(d, gamma.row(i) + j));
      const auto minus_a = hn::IfThenElseZero(below, hn::Neg(a));
      hn::StoreU(minus_a, d, z.row(i) + j);
      hn::StoreU(hn::Mul(minus_a, hn::LoadU(d, beta + j)), d, ab.row(i) + j);
    }
    for (int64_t j = columns; j < rows; j += lanes<T>()) hn::StoreU(hn::Zero(d), d, z.row(i) + j);
  }
  for (int64_t block = 0; block < rows; block += 16) {
    if (block > 0) gemm<Init::kAdd>(16, block, block, ab.at(block, 0).left(), z, z.at(block, 0));
    for (int64_t r = 1; r < 16; ++r) {
      const T* HWY_RESTRICT factors = ab.row(block + r) + block;
      for (int64_t c = 0; c < block + 16; c += lanes<T>()) {
        auto sum = hn::LoadU(d, z.row(block + r) + c);
        for (int64_t j = 0; j < r; ++j) {
          sum = hn::MulAdd(hn::Set(d, factors[j]), hn::LoadU(d, z.row(block + j) + c), sum);
        }
        hn::StoreU(sum, d, z.row(block + r) + c);
      }
    }
  }
}

template <typename T>
void prepare_item_t(const StageCall& call, int64_t item, int worker) {
  const Dims& dims = call.dims;
  const auto& segments = call.args->plan.segments;
  const int64_t index = item / dims.heads_qk;
  const int64_t head_k = item % dims.heads_qk;
  const auto after = std::upper_bound(
      segments.begin(), segments.end(), index,
      [](int64_t chunk, const Segment& segment) { return chunk < segment.first_chunk; });
  const Segment& segment = *(after - 1);
  const Chunk chunk(segment, index - segment.first_chunk);

  Arena arena(call.worker_scratch(worker));
  const PrepareScratch<T> s(arena, dims);
  T norms[kChunk];
  load_keys(call.args->in.k, chunk, head_k, dims.k, s.k,
            call.args->problem.options.qk_l2norm ? norms : nullptr);
  transpose(chunk.rows, dims.k, s.k, s.k_transposed);
  product_lower(chunk.rows, dims.k, s.k, s.k_transposed, s.kk);
  for (int64_t head = head_k * dims.group; head < (head_k + 1) * dims.group; ++head) {
    T* record = prepared_record<T>(call, chunk, head);
    prepare_gates(Activation(call.args->problem, call.args->in, head), chunk, record);
    gamma_lower(record + PreparedRecord::kGateHigh, record + PreparedRecord::kGateLow, chunk.rows,
                s.gamma);
    solve_inverse(chunk.rows, s.kk, s.gamma, record + PreparedRecord::kBeta, s.ab,
                  Mat<T>{record + PreparedRecord::kZ, kChunk});
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#endif  // GDN_BACKEND_CPU_PREPARE_INL_H_
