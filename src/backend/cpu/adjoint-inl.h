// One chunk of the reverse walk for one value head: the adjoint of the state, and of the values
// where it needs them (docs/math.md). All gradients of a chunk build on AdjointStep.
#if defined(GDN_BACKEND_CPU_ADJOINT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GDN_BACKEND_CPU_ADJOINT_INL_H_
#undef GDN_BACKEND_CPU_ADJOINT_INL_H_
#else
#define GDN_BACKEND_CPU_ADJOINT_INL_H_
#endif

#include <cstdint>

#include "backend/cpu/chunk-inl.h"
#include "backend/cpu/forward-inl.h"
#include "backend/cpu/scratch.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu {
namespace HWY_NAMESPACE {

// q and k rows of the chunk and Q K^T (lower).
template <typename T>
void load_chunk_keys(const StageCall& call, const Chunk& chunk, int64_t head_k, T* norms_q,
                     T* norms_k, const BackwardScratch<T>& s) {
  const Dims& d = call.dims;
  const Mat<T> k = s.qk_rows.at(chunk.rows, 0);
  load_keys(call.args->in.q, chunk, head_k, d.k, s.qk_rows, norms_q);
  load_keys(call.args->in.k, chunk, head_k, d.k, k, norms_k);
  transpose(chunk.rows, d.k, k, s.k_transposed);
  product_lower(chunk.rows, d.k, s.qk_rows, s.k_transposed, s.qk);
}

// From ds = dS_out: fills gamma, p, do_dy, weighted and u.
//   dVd = to_end o (K dS) + P^T dO;  U = dVd + Z^T (beta o dVd);  dY = beta o U
template <typename T>
void adjoint_values(const HeadChunk<T>& x, Mat<T> ds, Ends ends, const BackwardScratch<T>& s) {
  const Dims& d = x.call.dims;
  const int64_t rows = x.chunk.rows;
  const TensorView& d_o = x.call.grads->d_o;
  const Mat<T> dy = s.do_dy.at(rows, 0);
  gamma_lower(x.gates.high, x.gates.low, rows, s.gamma);
  attention_weights(rows, x.scale, s.qk, s.gamma, s.p);
  for (int64_t i = 0; i < rows; ++i) {
    if (d_o.present() && i < x.chunk.tokens) {
      load_row(d_o, x.chunk.row + i, x.head, s.do_dy.row(i), d.v);
    } else {
      zero_row(s.do_dy.row(i), d.v);
    }
  }
  scale_rows(rows, d.v, s.do_dy, x.gates.scaled_from_start, s.weighted);
  if (ends.from_zero) {
    zero_matrix(rows, d.v, s.u);
  } else {
    gemm<Init::kZero>(rows, d.v, d.k, s.qk_rows.at(rows, 0).left(), ds, s.u);
  }
  lower_transposed_times<Init::kScale>(rows, d.v, s.p, s.do_dy, s.u, x.gates.to_end);
  scale_rows(rows, d.v, s.u, x.gates.beta, s.values);
  lower_transposed_times<Init::kAdd>(rows, d.v, x.z, s.values, s.u);
  scale_rows(rows, d.v, s.u, x.gates.beta, dy);
  for (int64_t i = 0; i < rows; ++i) {
    scale_row(dy.row(i), -x.gates.from_start[i], s.weighted.row(rows + i), d.v);
  }
}

// dS_in = exp(G_C) dS_out + Q^T (scale exp(G) o dO) - K^T (exp(G) o dY), in place.
template <typename T>
void adjoint_state(const HeadChunk<T>& x, Mat<T> ds, const BackwardScratch<T>& s) {
  gemm<Init::kScale>(x.call.dims.k, x.call.dims.v, 2 * x.chunk.rows, s.qk_rows.transposed(),
                     s.weighted, ds, x.gates.decay);
}

// Where the reverse walk of an item starts: dfinal_state, or with `boundary` dS_out, or 0.
template <typename T>
void enter_segment_backward(const StageCall& call, const HeadItem& item, const void* boundary,
                            Mat<T> ds) {
  const Dims& d = call.dims;
  const Segment& segment = item.segment;
  for (int64_t head = item.begin; head < item.end; ++head) {
    const Mat<T> to = ds.at((head - item.begin) * d.k, 0);
    if (boundary && !segment.ends_document()) {
      copy_matrix(d.k, d.v,
                  table_slot<T>(boundary, head, call.args->plan.capacity.exit_slots,
                                segment.exit_slot, d.k, d.v),
                  to);
    } else {
      load_state(segment.ends_document() ? call.grads->dfinal_state : TensorView{}, segment.doc,
                 head, d, to);
    }
  }
}

// ---- summarize_backward -------------------------------------------------------------------------
template <typename T>
void summarize_backward_item_t(const StageCall& call, int64_t index, int worker) {
  const Dims& d = call.dims;
  const HeadItem item(call, index);
  const Segment& segment = item.segment;
  if (segment.entry_slot < 0) return;
  Arena arena(call.worker_scratch(worker));
  const BackwardScratch<T> s(arena, d, call.blocks);
  T norms[kChunk];
  T* const norms_or_null = call.args->problem.options.qk_l2norm ? norms : nullptr;

  enter_segment_backward<T>(call, item, nullptr, s.ds);
  for (int64_t c = segment.chunks() - 1; c >= 0; --c) {
    const Chunk chunk(segment, c);
    load_chunk_keys(call, chunk, item.head_k, norms_or_null, norms_or_null, s);
    for (int64_t head = item.begin; head < item.end; ++head) {
      const Mat<T> ds = s.ds.at((head - item.begin) * d.k, 0);
      const HeadChunk<T> x(call, chunk, head);
      adjoint_values(x, ds, Ends{}, s);
      adjoint_state(x, ds, s);
    }
  }
  for (int64_t head = item.begin; head < item.end; ++head) {
    copy_matrix(d.k, d.v, s.ds.at((head - item.begin) * d.k, 0),
                table_slot<T>(call.args->tables[static_cast<int>(Table::kPart)], head,
                              call.args->plan.capacity.entry_slots, segment.entry_slot, d.k, d.v));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#endif  // GDN_BACKEND_CPU_ADJOINT_INL_H_
