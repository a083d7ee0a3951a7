// Summaries and outputs: every (segment, value head) is walked on its own, token by token.
#include <algorithm>

#include "backend/reference/stages.h"
#include "base/thread_pool.h"

namespace gdn::reference {
namespace {

int64_t wide(const Problem& problem) { return std::max(problem.dim_k, problem.dim_v); }

// body(segment, value head, worker) over all pairs.
template <typename Body>
void for_each_segment_head(const StageArgs& args, const Body& body) {
  const auto& segments = args.plan.segments;
  const int64_t heads = args.problem.heads_v;
  parallel_for(static_cast<int64_t>(segments.size()) * heads, [&](int64_t item, int worker) {
    body(segments[static_cast<size_t>(item / heads)], item % heads, worker);
  });
}

// M of a segment: the walk of the identity with v = 0, since S_out = M S_in + B is linear in S_in.
void walk_map(const StageArgs& args, const Segment& segment, int64_t head, Scratch scratch) {
  const int64_t k = args.problem.dim_k;
  TokenReader reader(args, head, scratch);
  double* map = scratch.take(k * k);
  double* residual = scratch.take(k);
  std::fill_n(map, k * k, 0.0);
  for (int64_t i = 0; i < k; ++i) map[i * k + i] = 1;
  for (int64_t t = 0; t < segment.length; ++t) {
    Token token = reader.read(segment.row + t);
    token.v = nullptr;
    update_state({k, k}, token, map, residual);
  }
  store_matrix(args.tables[static_cast<int>(Table::kMap)], args.problem.state(), k * k,
               head * args.plan.capacity.map_slots + segment.map_slot, map);
}

// B of a segment: its exit state from 0, or from initial_state where it starts its document.
void walk_part(const StageArgs& args, const TensorView& initial_state, const Segment& segment,
               int64_t head, Scratch scratch) {
  const Dims dims = dims_of(args.problem);
  TokenReader reader(args, head, scratch);
  double* state = scratch.take(dims.state());
  double* residual = scratch.take(dims.v);
  load_state(segment.starts_document() ? initial_state : TensorView{}, segment.doc, head, dims,
             state);
  for (int64_t t = 0; t < segment.length; ++t) {
    update_state(dims, reader.read(segment.row + t), state, residual);
  }
  store_matrix(args.tables[static_cast<int>(Table::kPart)], args.problem.state(), dims.state(),
               head * args.plan.capacity.exit_slots + segment.exit_slot, state);
}

void walk_outputs(const StageArgs& args, const TensorView& initial_state, const TensorView& o,
                  const TensorView& final_state, const Segment& segment, int64_t head,
                  Scratch scratch) {
  const Dims dims = dims_of(args.problem);
  TokenReader reader(args, head, scratch);
  double* state = scratch.take(dims.state());
  double* residual = scratch.take(dims.v);
  double* out = scratch.take(dims.v);
  if (segment.starts_document()) {
    load_state(initial_state, segment.doc, head, dims, state);
  } else {
    load_matrix(args.tables[static_cast<int>(Table::kBoundary)], args.problem.state(), dims.state(),
                head * args.plan.capacity.entry_slots + segment.entry_slot, state);
  }
  for (int64_t t = 0; t < segment.length; ++t) {
    update_state(dims, reader.read(segment.row + t), state, residual);
    read_state(dims, reader.read_q(segment.row + t), args.problem.scale(), state, out);
    store_vector(o, segment.row + t, head, out);
  }
  if (segment.ends_document()) store_state(final_state, segment.doc, head, state);
}

}  // namespace

int64_t forward_scratch_elements(const Problem& problem) {
  const int64_t n = wide(problem);
  const int64_t walk =
      problem.dim_k * n + 2 * problem.dim_k + 3 * n;  // state; q, k; v, residual, o
  const int64_t folds = 3 * problem.dim_k * n;        // map, X, op(map) X
  return std::max(walk, folds);
}

Status summarize(const StageArgs& args, const TensorView& initial_state) {
  const int64_t elements = forward_scratch_elements(args.problem);
  for_each_segment_head(args, [&](const Segment& segment, int64_t head, int worker) {
    const Scratch scratch(args, elements, worker);
    if (segment.exit_slot >= 0) walk_part(args, initial_state, segment, head, scratch);
    if (segment.map_slot >= 0) walk_map(args, segment, head, scratch);
  });
  return Status::ok();
}

Status run(const StageArgs& args, const TensorView& initial_state, const TensorView& o,
           const TensorView& final_state) {
  const int64_t elements = forward_scratch_elements(args.problem);
  for_each_segment_head(args, [&](const Segment& segment, int64_t head, int worker) {
    walk_outputs(args, initial_state, o, final_state, segment, head,
                 Scratch(args, elements, worker));
  });
  const Dims dims = dims_of(args.problem);
  double* state = Scratch(args, elements, 0).take(dims.state());
  for (int64_t doc : args.plan.empty_documents) {
    for (int64_t head = 0; head < args.problem.heads_v; ++head) {
      load_state(initial_state, doc, head, dims, state);
      store_state(final_state, doc, head, state);
    }
  }
  zero_rows(o, args.plan.local_tokens);
  return Status::ok();
}

}  // namespace gdn::reference
