// summarize and run: the forward walk of one segment for the value heads of one key head, or for a
// part of them; fold: chains of small products, one item per (chain, head, column block).
#if defined(GDN_BACKEND_CPU_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GDN_BACKEND_CPU_FORWARD_INL_H_
#undef GDN_BACKEND_CPU_FORWARD_INL_H_
#else
#define GDN_BACKEND_CPU_FORWARD_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "backend/cpu/chunk-inl.h"
#include "backend/cpu/scratch.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu {
namespace HWY_NAMESPACE {

// Value heads [begin, end) of one key head over one segment.
struct HeadItem {
  const Segment& segment;
  int64_t head_k;
  int64_t begin;
  int64_t end;

  HeadItem(const StageCall& call, int64_t item)
      : segment(call.args->plan.segments[item / (call.dims.heads_qk * call.head_parts)]),
        head_k(item / call.head_parts % call.dims.heads_qk) {
    const int64_t heads = call.dims.group / call.head_parts;
    begin = head_k * call.dims.group + item % call.head_parts * heads;
    end = begin + heads;
  }

  // At chunk c of the forward walk: does it start from no state?
  bool enters_at_zero(const TensorView& initial_state, int64_t c) const {
    return c == 0 && segment.starts_document() && !initial_state.present();
  }

  bool wants_initial_gradient(const StageCall& call) const {
    return segment.starts_document() && call.grads->dinitial_state.present();
  }
};

template <typename T>
void enter_segment(const StageCall& call, const HeadItem& item, const TensorView& initial_state,
                   const void* boundary, Mat<T> state) {
  const Dims& d = call.dims;
  for (int64_t head = item.begin; head < item.end; ++head) {
    const Mat<T> to = state.at((head - item.begin) * d.k, 0);
    if (item.segment.starts_document()) {
      load_state(initial_state, item.segment.doc, head, d, to);
    } else {
      copy_matrix(d.k, d.v,
                  table_slot<T>(boundary, head, call.args->plan.capacity.entry_slots,
                                item.segment.entry_slot, d.k, d.v),
                  to);
    }
  }
}

// p [rows, rows] = scale (Q K^T) o gamma, lower with whole diagonal blocks.
template <typename T>
void attention_weights(int64_t rows, T scale, Mat<T> qk, Mat<T> gamma, Mat<T> p) {
  const hn::ScalableTag<T> d;
  const auto s = hn::Set(d, scale);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < (i / 16 + 1) * 16; j += lanes<T>()) {
      const auto x = hn::Mul(s, hn::LoadU(d, qk.row(i) + j));
      hn::StoreU(hn::Mul(x, hn::LoadU(d, gamma.row(i) + j)), d, p.row(i) + j);
    }
  }
}

// ---- run --------------------------------------------------------------------------------------
template <typename T>
void run_chunk(const HeadChunk<T>& x, Mat<T> state, Ends ends, const ForwardScratch<T>& s) {
  const Dims& d = x.call.dims;
  const int64_t rows = x.chunk.rows;
  const Mat<T> e = s.rows.at(rows, 0);

  if (ends.from_zero) {
    zero_matrix(2 * rows, d.v, s.rows);
  } else {
    gemm<Init::kZero>(2 * rows, d.v, d.k, s.qk_rows.left(), state, s.rows);
  }
  solve_values(x, x.call.args->in.v, d.v, e, s.values);
  gamma_lower(x.gates.high, x.gates.low, rows, s.gamma);
  attention_weights(rows, x.scale, s.qk, s.gamma, s.p);
  scale_rows(rows, d.v, e, x.gates.beta, e);
  lower_times<Init::kScale>(rows, d.v, s.p, e, s.rows, x.gates.scaled_from_start);
  for (int64_t i = 0; i < x.chunk.tokens; ++i) {
    store_row(x.call.o, x.chunk.row + i, x.head, s.rows.row(i), d.v);
  }
  if (ends.last) return;
  scale_rows(rows, d.v, e, x.gates.to_end, e);
  gemm<Init::kScale>(d.k, d.v, rows, s.qk_rows.at(rows, 0).transposed(), e, state, x.gates.decay);
}

template <typename T>
void run_item_t(const StageCall& call, int64_t index, int worker) {
  const Dims& d = call.dims;
  const HeadItem item(call, index);
  Arena arena(call.worker_scratch(worker));
  const ForwardScratch<T> s(arena, d);
  const Operands& in = call.args->in;
  T norms[kChunk];
  T* const norms_or_null = call.args->problem.options.qk_l2norm ? norms : nullptr;

  enter_segment(call, item, call.initial_state,
                call.args->tables[static_cast<int>(Table::kBoundary)], s.state);
  const bool want_final = item.segment.ends_document() && call.final_state.present();
  for (int64_t c = 0; c < item.segment.chunks(); ++c) {
    const Chunk chunk(item.segment, c);
    const Ends ends{item.enters_at_zero(call.initial_state, c),
                    c == item.segment.chunks() - 1 && !want_final};
    const Mat<T> k = s.qk_rows.at(chunk.rows, 0);
    load_keys(in.q, chunk, item.head_k, d.k, s.qk_rows, norms_or_null);
    load_keys(in.k, chunk, item.head_k, d.k, k, norms_or_null);
    transpose(chunk.rows, d.k, k, s.k_transposed);
    product_lower(chunk.rows, d.k, s.qk_rows, s.k_transposed, s.qk);
    for (int64_t head = item.begin; head < item.end; ++head) {
      run_chunk(HeadChunk<T>(call, chunk, head), s.state.at((head - item.begin) * d.k, 0), ends, s);
    }
  }
  if (want_final) {
    for (int64_t head = item.begin; head < item.end; ++head) {
      store_state(s.state.at((head - item.begin) * d.k, 0), call.final_state, item.segment.doc,
                  head, d);
    }
  }
}

// ---- summarize --------------------------------------------------------------------------------
template <typename T>
void summarize_item_t(const StageCall& call, int64_t index, int worker) {
  const Dims& d = call.dims;
  const HeadItem item(call, index);
  const Segment& segment = item.segment;
  if (segment.exit_slot < 0) return;
  const bool want_map = segment.map_slot >= 0;
  Arena arena(call.worker_scratch(worker));
  const ForwardScratch<T> s(arena, d);
  T norms[kChunk];

  const TensorView none;
  for (int64_t head = item.begin; head < item.end; ++head) {
    const int64_t at = (head - item.begin) * d.k;
    load_state(segment.starts_document() ? call.initial_state : none, segment.doc, head, d,
               s.state.at(at, 0));
    for (int64_t i = 0; want_map && i < d.k; ++i) {
      zero_row(s.map.row(at + i), d.k);
      s.map.row(at + i)[i] = 1;
    }
  }
  for (int64_t c = 0; c < segment.chunks(); ++c) {
    const Chunk chunk(segment, c);
    load_keys(call.args->in.k, chunk, item.head_k, d.k, s.qk_rows,
              call.args->problem.options.qk_l2norm ? norms : nullptr);
    for (int64_t head = item.begin; head < item.end; ++head) {
      const int64_t at = (head - item.begin) * d.k;
      const HeadChunk<T> x(call, chunk, head);
      advance_state(
          x, StateWalk<T>{s.qk_rows, call.args->in.v, d.v, s.state.at(at, 0), s.rows, s.values},
          Ends{});
      if (want_map) {
        advance_state(x, StateWalk<T>{s.qk_rows, none, d.k, s.map.at(at, 0), s.rows, s.values},
                      Ends{});
      }
    }
  }
  const Plan& plan = call.args->plan;
  for (int64_t head = item.begin; head < item.end; ++head) {
    const int64_t at = (head - item.begin) * d.k;
    copy_matrix(d.k, d.v, s.state.at(at, 0),
                table_slot<T>(call.args->tables[static_cast<int>(Table::kPart)], head,
                              plan.capacity.exit_slots, segment.exit_slot, d.k, d.v));
    if (want_map) {
      copy_matrix(d.k, d.k, s.map.at(at, 0),
                  table_slot<T>(call.args->tables[static_cast<int>(Table::kMap)], head,
                                plan.capacity.map_slots, segment.map_slot, d.k, d.k));
    }
  }
}

// ---- fold -------------------------------------------------------------------------------------
template <typename T>
void fold_item_t(const StageCall& call, int64_t item, int worker) {
  const FoldProgram& program = *call.program;
  const int64_t blocks = (program.cols + kFoldColumns - 1) / kFoldColumns;
  const int64_t heads = program.head_end - program.head_begin;
  const int64_t column = item % blocks * kFoldColumns;
  const int64_t columns = std::min(kFoldColumns, program.cols - column);
  const int64_t head = item / blocks % heads;
  const int64_t chain = item / blocks / heads;
  const int64_t rows = program.rows;
  const auto matrix = [&](const FoldRef& ref, int64_t ld, int64_t first) {
    T* base = static_cast<T*>(call.args->tables[static_cast<int>(ref.table)]);
    return Mat<T>{base + ref.offset + head * ref.head_stride + first, ld};
  };

  Arena arena(call.worker_scratch(worker));
  const FoldScratch<T> s(arena, call.dims);
  Mat<T> x = s.x;
  Mat<T> next = s.next;
  for (int64_t i = program.chain_begin[chain]; i < program.chain_begin[chain + 1]; ++i) {
    const FoldStep& step = program.steps[i];
    if (step.add.present()) {
      copy_matrix(rows, columns, matrix(step.add, program.cols, column), next);
    } else {
      for (int64_t r = 0; r < rows; ++r) zero_row(next.row(r), columns);
    }
    if (step.map.present()) {
      const Mat<T> map = matrix(step.map, rows, 0);
      gemm<Init::kAdd>(rows, columns, rows, program.transpose ? map.transposed() : map.left(), x,
                       next);
    }
    std::swap(x, next);
    if (step.out.present()) {
      copy_matrix(rows, columns, x, matrix(step.out, program.cols, column));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#endif  // GDN_BACKEND_CPU_FORWARD_INL_H_
