#include "backend/reference/by_hand.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "backend/reference/reference.h"

namespace gdn::reference {
namespace {

constexpr int kNaN = 0xff;  // as every byte

class Programs {
 public:
  Programs(const Plan& plan, bool backward) : plan_(plan), backward_(backward) {
    program_.rows = plan.options.dim_k;
    program_.cols = plan.options.dim_v;
    program_.transpose = backward;
    program_.head_end = static_cast<int>(plan.options.heads_v);
    program_.chain_begin = {0};
  }

  // Segments [first, last) are one document's.
  void document(size_t first, size_t last) {
    if (last - first < 2) return;
    if (!backward_) {
      for (size_t i = first; i + 1 < last; ++i) {
        step(i, i == first, plan_.segments[i].exit_slot, plan_.segments[i + 1].entry_slot);
      }
    } else {
      for (size_t i = last - 1; i > first; --i) {
        step(i, i == last - 1, plan_.segments[i].entry_slot, plan_.segments[i - 1].exit_slot);
      }
    }
    program_.chain_begin.push_back(static_cast<int64_t>(program_.steps.size()));
  }

  FoldProgram take() { return std::move(program_); }

 private:
  void step(size_t segment, bool first, int64_t part, int64_t boundary) {
    const int64_t k = program_.rows, state = program_.rows * program_.cols;
    const int64_t parts = backward_ ? plan_.capacity.entry_slots : plan_.capacity.exit_slots;
    const int64_t bounds = backward_ ? plan_.capacity.exit_slots : plan_.capacity.entry_slots;
    FoldStep next;
    if (!first) {
      next.map = {Table::kMap, plan_.segments[segment].map_slot * k * k,
                  plan_.capacity.map_slots * k * k};
    }
    next.add = {Table::kPart, part * state, parts * state};
    next.out = {Table::kBoundary, boundary * state, bounds * state};
    program_.steps.push_back(next);
  }

  const Plan& plan_;
  const bool backward_;
  FoldProgram program_;
};

HostTensor like(const HostTensor& tensor) {
  HostTensor result;
  if (!tensor.present()) return result;
  result.view = tensor.view;
  result.buffer = AlignedBuffer(tensor.buffer.bytes());
  result.view.data = result.buffer.data();
  if (result.buffer.bytes() > 0) {
    std::memset(result.view.data, kNaN, static_cast<size_t>(result.buffer.bytes()));
  }
  return result;
}

HostTensor table(const Problem& problem, int64_t slots, int64_t cols) {
  return HostTensor(problem.state(), {problem.heads_v, slots, problem.dim_k, cols}, kNaN);
}

}  // namespace

Plan plan_by_hand(const Batch& batch, const std::vector<std::vector<int64_t>>& cuts) {
  Plan plan;
  plan.options.heads_v = batch.problem.heads_v;
  plan.options.dim_k = batch.problem.dim_k;
  plan.options.dim_v = batch.problem.dim_v;
  plan.num_documents = batch.num_documents();
  plan.local_tokens = batch.cu_seqlens.back();
  PlanCounts& counts = plan.counts;
  std::vector<size_t> ends;
  for (int64_t doc = 0; doc < plan.num_documents; ++doc) {
    const auto& lengths = cuts[static_cast<size_t>(doc)];
    int64_t row = batch.cu_seqlens[static_cast<size_t>(doc)];
    for (size_t i = 0; i < lengths.size(); ++i) {
      Segment segment{.doc = doc, .fragment = doc, .row = row, .length = lengths[i]};
      const bool starts = i == 0, finishes = i + 1 == lengths.size();
      if (!starts) segment.entry_slot = counts.entry_slots++;
      if (!finishes) segment.exit_slot = counts.exit_slots++;
      if (!starts && !finishes) segment.map_slot = counts.map_slots++;
      segment.first_chunk = counts.chunks;
      counts.chunks += segment.chunks();
      counts.longest = std::max(counts.longest, segment.length);
      ++counts.segments;
      plan.segments.push_back(segment);
      row += lengths[i];
    }
    if (lengths.empty()) plan.empty_documents.push_back(doc);
    EXPECT_EQ(row, batch.cu_seqlens[static_cast<size_t>(doc) + 1]);
    ends.push_back(plan.segments.size());
  }
  counts.empty_documents = std::ssize(plan.empty_documents);
  plan.capacity = counts;
  Programs forward(plan, false), backward(plan, true);
  size_t first = 0;
  for (size_t last : ends) {
    forward.document(first, last);
    backward.document(first, last);
    first = last;
  }
  plan.forward.spread = forward.take();
  plan.backward.spread = backward.take();
  return plan;
}

Plan plan_uncut(const Batch& batch) {
  std::vector<std::vector<int64_t>> cuts;
  for (size_t doc = 0; doc + 1 < batch.cu_seqlens.size(); ++doc) {
    const int64_t length = batch.cu_seqlens[doc + 1] - batch.cu_seqlens[doc];
    cuts.push_back(length > 0 ? std::vector<int64_t>{length} : std::vector<int64_t>{});
  }
  return plan_by_hand(batch, cuts);
}

BatchResult run_by_hand(const Batch& batch, const Plan& plan, Boundaries* boundaries,
                        const std::function<void(Views&)>& views, const Backend* chosen,
                        bool backward) {
  const Backend& backend = chosen ? *chosen : reference_backend();
  const Problem& problem = batch.problem;
  const HostTensor states(problem.state(),
                          {batch.num_documents(), problem.heads_v, problem.dim_k, problem.dim_v});
  BatchResult out;
  out.o = like(batch.v);
  out.final_state = like(states);
  out.dq = like(batch.q);
  out.dk = like(batch.k);
  out.dv = like(batch.v);
  out.dg = like(batch.g);
  out.dbeta = like(batch.beta);
  out.dA_log = like(batch.A_log);
  out.ddt_bias = like(batch.dt_bias);
  out.dinitial_state = like(states);

  const Operands in = batch.operands();
  Views call;
  call.forward = {in, batch.initial_state.view, out.o.view, out.final_state.view};
  call.backward = {in,
                   batch.initial_state.view,
                   batch.d_o.view,
                   batch.dfinal_state.view,
                   out.dq.view,
                   out.dk.view,
                   out.dv.view,
                   out.dg.view,
                   out.dbeta.view,
                   out.dA_log.view,
                   out.ddt_bias.view,
                   out.dinitial_state.view};
  if (views) views(call);

  Boundaries own;
  Boundaries& tables = boundaries ? *boundaries : own;
  tables.maps = table(problem, plan.capacity.map_slots, problem.dim_k);
  tables.entry_states = table(problem, plan.capacity.entry_slots, problem.dim_v);
  tables.exit_gradients = table(problem, plan.capacity.exit_slots, problem.dim_v);
  const HostTensor parts = table(problem, plan.capacity.exit_slots, problem.dim_v);
  const HostTensor parts_backward = table(problem, plan.capacity.entry_slots, problem.dim_v);
  const AlignedBuffer scratch(std::max(backend.forward_scratch_bytes(problem, plan),
                                       backend.backward_scratch_bytes(problem, plan)));
  std::memset(scratch.data(), kNaN, static_cast<size_t>(scratch.bytes()));

  const AlignedBuffer prepared(backend.prepared_bytes(problem, plan));
  if (prepared.bytes() > 0) {
    std::memset(prepared.data(), kNaN, static_cast<size_t>(prepared.bytes()));
  }

  StageArgs args{problem, plan, call.forward.in};
  args.prepared = prepared.data();
  args.scratch = scratch.data();
  args.tables[static_cast<int>(Table::kMap)] = tables.maps.view.data;
  args.tables[static_cast<int>(Table::kPart)] = parts.view.data;
  args.tables[static_cast<int>(Table::kBoundary)] = tables.entry_states.view.data;
  EXPECT_TRUE(backend.prepare(args));
  EXPECT_TRUE(backend.summarize(args, call.forward.initial_state));
  EXPECT_TRUE(backend.fold(args, plan.forward.spread));
  EXPECT_TRUE(
      backend.run(args, call.forward.initial_state, call.forward.o, call.forward.final_state));
  if (!backward || (!batch.d_o.present() && !batch.dfinal_state.present())) return out;

  args.tables[static_cast<int>(Table::kPart)] = parts_backward.view.data;
  args.tables[static_cast<int>(Table::kBoundary)] = tables.exit_gradients.view.data;
  EXPECT_TRUE(backend.summarize_backward(args, call.backward));
  EXPECT_TRUE(backend.fold(args, plan.backward.spread));
  EXPECT_TRUE(backend.run_backward(args, call.backward, tables.entry_states.view.data));
  return out;
}

}  // namespace gdn::reference
