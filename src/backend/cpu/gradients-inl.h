// run_backward: recomputes a segment's states block by block and walks it in reverse. dq and dk are
// summed over the value heads of the key head in ascending order.
#if defined(GDN_BACKEND_CPU_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GDN_BACKEND_CPU_GRADIENTS_INL_H_
#undef GDN_BACKEND_CPU_GRADIENTS_INL_H_
#else
#define GDN_BACKEND_CPU_GRADIENTS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "backend/cpu/activation.h"
#include "backend/cpu/adjoint-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu {
namespace HWY_NAMESPACE {

// What the forward walk left of one chunk and value head.
template <typename T>
struct Recomputed {
  Mat<T> state_transposed;  // [V, K]: S_in
  Mat<T> e;                 // [64, V]

  Recomputed(T* block, const Dims& d)
      : state_transposed{block, d.ldk}, e{block + d.v * d.ldk, d.ldv} {}
};

// A step of the reverse walk. Its `ends` are those of dS: from_zero at the end of the document.
struct ReverseStep {
  bool first_head = false;     // of the key head: dq and dk begin with it
  bool state_is_zero = false;  // S_in
  Ends ends;
};

// What dg and dbeta are made of, per token of a chunk.
template <typename T>
struct GateParts {
  T straddle[kChunk];    // pairs whose decay contains g_t
  T from_start[kChunk];  // terms with exp(G_t)
  T to_end[kChunk];      // terms with exp(G_C - G_t)
  T through = 0;         // exp(G_C) <dS_out, S_in>
  T dbeta[kChunk];
};

// Gradients of one chunk with respect to the pair weights, from dO, dY and Vd:
//   p <- dP = scale gamma o (dO Vd^T), lower;  n <- N = -gamma o (dY Vd^T), strictly lower
//   pairs <- dP o (Q K^T) + N o (K K^T), strictly lower
template <typename T>
void pair_gradients(int64_t rows, int64_t dim_v, T scale, const BackwardScratch<T>& s) {
  product_lower(rows, dim_v, s.do_dy, s.values_transposed, s.p);
  product_lower(rows, dim_v, s.do_dy.at(rows, 0), s.values_transposed, s.n);
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < rows; ++i) {
    const auto index_i = hn::Set(d, static_cast<T>(i));
    for (int64_t j = 0; j < (i / 16 + 1) * 16; j += lanes<T>()) {
      const auto below = hn::Lt(hn::Iota(d, static_cast<T>(j)), index_i);
      const auto gamma = hn::LoadU(d, s.gamma.row(i) + j);
      const auto dp = hn::Mul(hn::Mul(hn::Set(d, scale), gamma), hn::LoadU(d, s.p.row(i) + j));
      const auto n =
          hn::IfThenElseZero(below, hn::Neg(hn::Mul(gamma, hn::LoadU(d, s.n.row(i) + j))));
      const auto of_q = hn::Mul(dp, hn::LoadU(d, s.qk.row(i) + j));
      const auto pair = hn::MulAdd(n, hn::LoadU(d, s.kk.row(i) + j), of_q);
      hn::StoreU(dp, d, s.p.row(i) + j);
      hn::StoreU(n, d, s.n.row(i) + j);
      hn::StoreU(hn::IfThenElseZero(below, pair), d, s.pairs.row(i) + j);
    }
  }
}

// straddle[t] = sum of pairs[i][j] over i >= t > j: all pairs whose decay contains g_t, and no
// others, so that nothing cancels under strong decay.
template <typename T>
void straddling_sums(int64_t rows, Mat<T> pairs, T* HWY_RESTRICT straddle) {
  const hn::ScalableTag<T> d;
  alignas(64) T column_sums[kChunk] = {};
  for (int64_t t = rows - 1; t >= 0; --t) {
    const auto index_t = hn::Set(d, static_cast<T>(t));
    auto total = hn::Zero(d);
    for (int64_t j = 0; j < (t / 16 + 1) * 16; j += lanes<T>()) {
      const auto sum = hn::Add(hn::Load(d, column_sums + j), hn::LoadU(d, pairs.row(t) + j));
      hn::Store(sum, d, column_sums + j);
      const auto left = hn::Lt(hn::Iota(d, static_cast<T>(j)), index_t);
      total = hn::Add(total, hn::IfThenElseZero(left, sum));
    }
    straddle[t] = hn::GetLane(hn::SumOfLanes(d, total));
  }
}

// The gradients that go through S_in and dS_out: dq_dk = [scale exp(G) dO; -exp(G) dY] S_in^T,
// dk_end = (to_end o Vd) dS_out^T, their dots with q and k, all added to dq and dk.
template <typename T>
void state_gradients(int64_t rows, const Dims& dims, const ReverseStep& step,
                     const Recomputed<T>& kept, const BackwardScratch<T>& s, GateParts<T>& parts) {
  if (step.state_is_zero) {
    zero_matrix(2 * rows, dims.k, s.dq_dk);
  } else {
    gemm<Init::kZero>(2 * rows, dims.k, dims.v, s.weighted.left(), kept.state_transposed, s.dq_dk);
  }
  if (step.ends.from_zero) {
    zero_matrix(rows, dims.k, s.dk_end);
  } else {
    gemm<Init::kZero>(rows, dims.k, dims.v, s.values.left(), s.ds_transposed, s.dk_end);
  }
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < rows; ++i) {
    auto start = hn::Zero(d);
    auto end = hn::Zero(d);
    for (int64_t j = 0; j < dims.k; j += lanes<T>()) {
      const auto k = hn::LoadU(d, s.qk_rows.row(rows + i) + j);
      const auto dq1 = hn::LoadU(d, s.dq_dk.row(i) + j);
      const auto dk2 = hn::LoadU(d, s.dq_dk.row(rows + i) + j);
      const auto dk1 = hn::LoadU(d, s.dk_end.row(i) + j);
      start = hn::MulAdd(hn::LoadU(d, s.qk_rows.row(i) + j), dq1, start);
      start = hn::MulAdd(k, dk2, start);
      end = hn::MulAdd(k, dk1, end);
      auto dq = dq1;
      auto dk = hn::Add(dk1, dk2);
      if (!step.first_head) {
        dq = hn::Add(dq, hn::LoadU(d, s.dq.row(i) + j));
        dk = hn::Add(dk, hn::LoadU(d, s.dk.row(i) + j));
      }
      hn::StoreU(dq, d, s.dq.row(i) + j);
      hn::StoreU(dk, d, s.dk.row(i) + j);
    }
    parts.from_start[i] = hn::GetLane(hn::SumOfLanes(d, start));
    parts.to_end[i] = hn::GetLane(hn::SumOfLanes(d, end));
  }
}

template <typename T>
T matrix_dot(int64_t m, int64_t n, Mat<T> a, Mat<T> b) {
  const hn::ScalableTag<T> d;
  auto sum = hn::Zero(d);
  for (int64_t i = 0; i < m; ++i) {
    auto row = hn::Zero(d);
    for (int64_t j = 0; j < n; j += lanes<T>()) {
      row = hn::MulAdd(hn::LoadU(d, a.row(i) + j), hn::LoadU(d, b.row(i) + j), row);
    }
    sum = hn::Add(sum, row);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// dg and dbeta of the chunk through their activations; adds this chunk's share of dA_log and
// ddt_bias to sums[0], sums[1].
//   dg_t = straddle_t + sum_{i >= t} from_start_i + sum_{j < t} to_end_j + through
template <typename T>
void store_gate_gradients(const HeadChunk<T>& x, const GateParts<T>& parts, double* sums) {
  const Activation activation(x.call.args->problem, x.call.args->in, x.head);
  const TensorView& dg = x.call.grads->dg;
  const TensorView& db = x.call.grads->dbeta;
  double right[kChunk + 1] = {};
  for (int64_t t = x.chunk.tokens - 1; t >= 0; --t) right[t] = right[t + 1] + parts.from_start[t];
  double left = parts.through;
  for (int64_t t = 0; t < x.chunk.tokens; ++t) {
    const int64_t row = x.chunk.row + t;
    const double gate = parts.straddle[t] + right[t] + left;
    const double da = activation.gate_gradient(row, gate);
    store_element(dg, row * dg.stride[0] + x.head * dg.stride[1], da);
    store_element(db, row * db.stride[0] + x.head * db.stride[1],
                  activation.beta_gradient(row, parts.dbeta[t]));
    if (sums) {
      sums[0] += gate * activation.gate(row);
      sums[1] += da;
    }
    left += parts.to_end[t];
  }
}

// All gradients of one chunk and value head; ds goes from dS_out to dS_in.
template <typename T>
void chunk_gradients(const HeadChunk<T>& x, const ReverseStep& step, const Recomputed<T>& kept,
                     Mat<T> ds, double* sums, const BackwardScratch<T>& s) {
  const Dims& d = x.call.dims;
  const int64_t rows = x.chunk.rows;
  adjoint_values(x, ds, step.ends, s);

  GateParts<T> parts;
  for (int64_t i = 0; i < rows; ++i) parts.dbeta[i] = dot(s.u.row(i), kept.e.row(i), d.v);
  for (int64_t i = 0; i < x.chunk.tokens; ++i) {
    store_row(x.call.grads->dv, x.chunk.row + i, x.head, s.do_dy.row(rows + i), d.v);
  }
  scale_rows(rows, d.v, kept.e, x.gates.beta, s.values);
  transpose(rows, d.v, s.values, s.values_transposed);
  scale_rows(rows, d.v, s.values, x.gates.to_end, s.values);
  if (!step.ends.from_zero) transpose(d.k, d.v, ds, s.ds_transposed);

  state_gradients(rows, d, step, kept, s, parts);
  pair_gradients(rows, d.v, x.scale, s);
  straddling_sums(rows, s.pairs, parts.straddle);
  if (!step.state_is_zero && !step.ends.from_zero) {
    parts.through = x.gates.decay[0] * matrix_dot(d.v, d.k, s.ds_transposed, kept.state_transposed);
  }
  store_gate_gradients(x, parts, sums);

  const Mat<T> k = s.qk_rows.at(rows, 0);
  lower_times<Init::kAdd>(rows, d.k, s.p, k, s.dq);
  lower_times<Init::kAdd>(rows, d.k, s.n, k, s.dk);
  lower_transposed_times<Init::kAdd>(rows, d.k, s.p, s.qk_rows, s.dk);
  lower_transposed_times<Init::kAdd>(rows, d.k, s.n, k, s.dk);
  if (!step.ends.last) adjoint_state(x, ds, s);
}

// dx = (dxn - xn (xn . dxn)) / |x| of a row xn = x / |x|, in place; then to the operand's dtype.
template <typename T>
void store_key_gradients(const TensorView& to, const Chunk& chunk, int64_t head, int64_t dim,
                         Mat<T> x, const T* norms, Mat<T> dx) {
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    T* HWY_RESTRICT row = dx.row(i);
    if (norms) {
      const auto along = hn::Set(d, dot(x.row(i), dx.row(i), dim));
      const auto factor = hn::Set(d, norms[i]);
      for (int64_t j = 0; j < dim; j += lanes<T>()) {
        const auto across = hn::NegMulAdd(along, hn::LoadU(d, x.row(i) + j), hn::LoadU(d, row + j));
        hn::StoreU(hn::Mul(factor, across), d, row + j);
      }
    }
    store_row(to, chunk.row + i, head, row, dim);
  }
}

// Walks chunks [begin, end) forward from s.state; with `keep` their entry states and E are kept.
template <typename T>
void recompute_block(const StageCall& call, const HeadItem& item, int64_t begin, int64_t end,
                     bool keep, const BackwardScratch<T>& s) {
  const Dims& d = call.dims;
  T norms[kChunk];
  for (int64_t c = begin; c < end; ++c) {
    const Chunk chunk(item.segment, c);
    const Ends ends{item.enters_at_zero(call.grads->initial_state, c),
                    c == item.segment.chunks() - 1};
    load_keys(call.args->in.k, chunk, item.head_k, d.k, s.qk_rows,
              call.args->problem.options.qk_l2norm ? norms : nullptr);
    for (int64_t j = 0; j < d.group; ++j) {
      const Mat<T> state = s.state.at(j * d.k, 0);
      const Recomputed<T> kept(s.blocks + ((c - begin) * d.group + j) * call.blocks.elements, d);
      if (keep && !ends.from_zero) transpose(d.k, d.v, state, kept.state_transposed);
      advance_state(
          HeadChunk<T>(call, chunk, item.begin + j),
          StateWalk<T>{s.qk_rows, call.args->in.v, d.v, state, keep ? kept.e : s.u, s.values},
          ends);
    }
  }
}

// Walks chunks [begin, end) in reverse over what recompute_block kept of them.
template <typename T>
void reverse_block(const StageCall& call, const HeadItem& item, int64_t begin, int64_t end,
                   double* sums, const BackwardScratch<T>& s) {
  const Dims& d = call.dims;
  const Segment& segment = item.segment;
  T norms_q[kChunk], norms_k[kChunk];
  const bool normed = call.args->problem.options.qk_l2norm;
  T* const of_q = normed ? norms_q : nullptr;
  T* const of_k = normed ? norms_k : nullptr;
  for (int64_t c = end - 1; c >= begin; --c) {
    const Chunk chunk(segment, c);
    const Mat<T> k = s.qk_rows.at(chunk.rows, 0);
    load_chunk_keys(call, chunk, item.head_k, of_q, of_k, s);
    product_lower(chunk.rows, d.k, k, s.k_transposed, s.kk);
    ReverseStep step;
    step.state_is_zero = item.enters_at_zero(call.grads->initial_state, c);
    step.ends.from_zero =
        c == segment.chunks() - 1 && segment.ends_document() && !call.grads->dfinal_state.present();
    step.ends.last = c == 0 && !item.wants_initial_gradient(call);
    for (int64_t j = 0; j < d.group; ++j) {
      step.first_head = j == 0;
      const Recomputed<T> kept(s.blocks + ((c - begin) * d.group + j) * call.blocks.elements, d);
      chunk_gradients(HeadChunk<T>(call, chunk, item.begin + j), step, kept, s.ds.at(j * d.k, 0),
                      sums ? sums + 2 * j : nullptr, s);
    }
    store_key_gradients(call.grads->dq, chunk, item.head_k, d.k, s.qk_rows, of_q, s.dq);
    store_key_gradients(call.grads->dk, chunk, item.head_k, d.k, k, of_k, s.dk);
  }
}

template <typename T>
void run_backward_item_t(const StageCall& call, int64_t index, int worker) {
  const Dims& d = call.dims;
  const HeadItem item(call, index);
  const Segment& segment = item.segment;
  Arena arena(call.worker_scratch(worker));
  const BackwardScratch<T> s(arena, d, call.blocks);
  double* sums =
      call.gate_sums ? call.gate_sums + 2 * (index / d.heads_qk * d.heads_v + item.begin) : nullptr;
  if (sums) std::fill_n(sums, 2 * d.group, 0.0);

  // Checkpoints at every block's beginning; the last block is kept on the way.
  const int64_t state_elements = d.group * d.k * d.ldv;
  const int64_t length = call.blocks.chunks;
  const int64_t blocks = (segment.chunks() + length - 1) / length;
  enter_segment(call, item, call.grads->initial_state, call.entry, s.state);
  for (int64_t b = 0; b < blocks; ++b) {
    std::copy_n(s.state.data, state_elements, s.checkpoints + b * state_elements);
    recompute_block(call, item, b * length, std::min((b + 1) * length, segment.chunks()),
                    b == blocks - 1, s);
  }
  enter_segment_backward<T>(call, item, call.args->tables[static_cast<int>(Table::kBoundary)],
                            s.ds);
  for (int64_t b = blocks - 1; b >= 0; --b) {
    const int64_t begin = b * length;
    const int64_t end = std::min(begin + length, segment.chunks());
    if (b < blocks - 1) {
      std::copy_n(s.checkpoints + b * state_elements, state_elements, s.state.data);
      recompute_block(call, item, begin, end, true, s);
    }
    reverse_block(call, item, begin, end, sums, s);
  }
  if (item.wants_initial_gradient(call)) {
    for (int64_t j = 0; j < d.group; ++j) {
      store_state(s.ds.at(j * d.k, 0), call.grads->dinitial_state, segment.doc, item.begin + j, d);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#endif  // GDN_BACKEND_CPU_GRADIENTS_INL_H_
