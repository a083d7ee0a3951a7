#include "model/step_model.h"

#include <fmt/format.h>

#include <algorithm>

#include "gdn/tensor.h"

namespace gdn::model {
namespace {

constexpr int64_t kBF16 = 2, kFP32 = 4;  // bytes

// From docs/performance.md and docs/notes/sm90.md, pre-norm, model gates.
const std::vector<DeviceRates>& all_rates() {
  static const std::vector<DeviceRates> rates = {
      // 2026-11-29. At M (24,672 chunk-heads, 188 chunks in its longest document): prepare 0.42 ms,
      // run 0.77, summary 0.12 over 0.8 of the chunks, fold 0.12 in 4 steps; backward 0.42 + 2 *
      // 1.13 even, 2 * (0.39 + 0.56) walks, summary 0.16. chain_us: N, whose walks are 50 chunks
      // and leave the device idle. Folds since 2026-11-30 as below: one kernel serves both.
      {.name = "cuda-portable",
       .forward = {10, 17, 31, 3.8, 6.1},
       .backward = {10, 112, 77, 8.4, 8.1},
       .fold_us = 8,
       .fold_head_us = 0.27,
       .copy_gb_s = 4250,
       .workers = 132,
       .segments_per_worker = 2,
       .segment_chunks = 32},
      // 2026-11-30, the backward of five warpgroups. even_ns: prepare, 0.114 ms at M, in both
      // passes. walk_ns forward: run is 0.40 ms at M, 16.4, and D, G, H and I take a tenth more of
      // it. walk_ns backward: reverse states and gradients of M, 0.575 + 1.35 ms, are 78; whole
      // backwards of M, H, I and D, less prepare, are 81 to 87, launches included. chain_us: N, 13
      // chunks a walk, 0.033 ms forward and 0.137 backward. summary_chain_us: a walk without
      // outputs, from where what comes before has decayed by e^-17. Of the model gates' 48 heads
      // the slowest takes 60 chunks to that, all take 7 in the mean: its walk is the time. Folds: a
      // step takes 4.5 us at N; the rest is what launches of summary and fold cost there.
      {.name = "cuda-sm90a",
       .forward = {5, 4.6, 18.2, 2.4, 0, 1.5},
       .backward = {10, 4.6, 83, 9.2, 0, 1.8},
       .forget_chunks = 60,
       .fold_us = 8,
       .fold_head_us = 0.27,
       .copy_gb_s = 4250,
       .workers = 132,
       .segments_per_worker = 1,
       .segment_chunks = 32,
       .pack_chunks = 448}};
  return rates;
}

PlanOptions plan_options(const Shape& shape, int64_t heads_v, int world_size,
                         const DeviceRates& rates) {
  PlanOptions options;
  options.heads_v = heads_v;
  options.dim_k = shape.dim_k;
  options.dim_v = shape.dim_v;
  options.workers = rates.workers;
  options.heads_qk = std::min(shape.heads_qk, heads_v);
  options.segments_per_worker = rates.segments_per_worker;
  options.segment_chunks = segment_chunks_over(
      world_size, rates.pack_chunks == 0
                      ? rates.segment_chunks
                      : segment_chunks_of_heads(heads_v, rates.workers, rates.pack_chunks,
                                                rates.segment_chunks));
  return options;
}

std::vector<int64_t> cu_seqlens(const Shape& shape) {
  std::vector<int64_t> cu = {0};
  for (const int64_t length : shape.documents) cu.push_back(cu.back() + length);
  return cu;
}

int64_t longest_chain(const FoldProgram& program) {
  int64_t longest = 0;
  for (int64_t c = 0; c < program.chains(); ++c) {
    longest = std::max(longest, program.chain_begin[c + 1] - program.chain_begin[c]);
  }
  return longest;
}

double collective_ms(int64_t bytes, const Link& link) {
  return link.latency_us * 1e-3 + static_cast<double>(bytes) / link.gb_s * 1e-6;
}

int64_t to_others(const std::vector<int64_t>& counts, int rank) {
  int64_t total = 0;
  for (int p = 0; p < std::ssize(counts); ++p) total += p == rank ? 0 : counts[p];
  return total;
}

}  // namespace

std::span<const DeviceRates> device_rates() { return all_rates(); }

Result<DeviceRates> find_rates(const std::string& name) {
  std::string known;
  for (const DeviceRates& rates : all_rates()) {
    if (rates.name == name) return rates;
    known += (known.empty() ? "" : ", ") + rates.name;
  }
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("rates: expected one of {}, got '{}'", known, name));
}

double pass_compute_ms(const Plan& plan, bool backward, const DeviceRates& rates) {
  const PassRates& r = backward ? rates.backward : rates.forward;
  const ExchangePass& pass = backward ? plan.backward : plan.forward;
  const auto heads = static_cast<double>(plan.options.heads_v);
  int64_t longest = 0, summarised = 0, longest_summarised = 0;
  for (const Segment& s : plan.segments) {
    longest = std::max(longest, s.chunks());
    if (backward ? s.starts_document() : s.ends_document()) continue;
    summarised += s.chunks();
    longest_summarised = std::max(longest_summarised, s.chunks());
  }
  const double chunk_heads = static_cast<double>(plan.counts.chunks) * heads;
  const int64_t steps = longest_chain(pass.pack) + longest_chain(pass.pack_maps) +
                        longest_chain(pass.fold) + longest_chain(pass.spread);
  return r.launch_us * 1e-3 + r.even_ns * chunk_heads * 1e-6 +
         std::max(r.chain_us * static_cast<double>(longest) * 1e-3,
                  r.walk_ns * chunk_heads * 1e-6) +
         r.summary_ns * static_cast<double>(summarised) * heads * 1e-6 +
         r.summary_chain_us *
             static_cast<double>(std::min(longest_summarised, rates.forget_chunks)) * 1e-3 +
         (rates.fold_us + rates.fold_head_us * heads) * static_cast<double>(steps) * 1e-3;
}

PassTime pass_exchange(std::span<const Plan> ranks, bool backward, const Link& link) {
  PassTime time;
  if (ranks[0].exchange == ExchangeKind::kNone) return time;
  int64_t busiest = 0, busiest_return = 0;
  for (const Plan& plan : ranks) {
    const ExchangePass& pass = backward ? plan.backward : plan.forward;
    busiest =
        std::max({busiest, to_others(pass.send, plan.rank), to_others(pass.receive, plan.rank)});
    busiest_return = std::max({busiest_return, to_others(pass.return_send, plan.rank),
                               to_others(pass.return_receive, plan.rank)});
    time.sent_bytes = std::max(time.sent_bytes, plan.sent_elements(backward) * kFP32);
  }
  time.exchange_ms = collective_ms(busiest * kFP32, link);
  if (ranks[0].exchange == ExchangeKind::kAllToAll) {
    time.exchange_ms += collective_ms(busiest_return * kFP32, link);
  }
  return time;
}

Result<StepTime> kcp_step(const Shape& shape, int world_size, Layout layout,
                          const DeviceRates& rates, const Network& network) {
  const auto partition = Partition::make(cu_seqlens(shape), world_size, layout);
  if (!partition) return partition.status();
  std::vector<Plan> plans;
  for (int rank = 0; rank < world_size; ++rank) {
    auto plan = Plan::make(*partition, rank, plan_options(shape, shape.heads_v, world_size, rates));
    if (!plan) return plan.status();
    plans.push_back(std::move(*plan));
  }
  StepTime step;
  step.exchange = plans[0].exchange;
  for (const bool backward : {false, true}) {
    PassTime& pass = backward ? step.backward : step.forward;
    pass = pass_exchange(plans, backward, network.link(world_size));
    for (const Plan& plan : plans) {
      pass.compute_ms = std::max(pass.compute_ms, pass_compute_ms(plan, backward, rates));
    }
  }
  return step;
}

Result<StepTime> head_split_step(const Shape& shape, int world_size, const DeviceRates& rates,
                                 const Network& network) {
  const auto share = [&](int64_t heads) { return (heads + world_size - 1) / world_size; };
  const int64_t heads_v = share(shape.heads_v), heads_qk = share(shape.heads_qk);
  const auto partition = Partition::make(cu_seqlens(shape), 1, Layout::kContiguous);
  if (!partition) return partition.status();
  const auto plan = Plan::make(*partition, 0, plan_options(shape, heads_v, 1, rates));
  if (!plan) return plan.status();

  StepTime step;
  for (const bool backward : {false, true}) {
    (backward ? step.backward : step.forward).compute_ms = pass_compute_ms(*plan, backward, rates);
  }
  if (world_size == 1) return step;
  step.exchange = ExchangeKind::kAllToAll;
  // Of the busiest rank, which gets `share` heads of the tokens that others hold.
  const int64_t foreign = partition->num_tokens() * (world_size - 1) / world_size;
  const int64_t inputs =
      foreign * (2 * heads_qk * shape.dim_k * kBF16 + heads_v * (shape.dim_v * kBF16 + 2 * kFP32));
  const int64_t outputs = foreign * heads_v * shape.dim_v * kBF16;
  const Link& link = network.link(world_size);
  // Rows are cut by heads before they leave and put together when they come: two copies.
  const double copies_ms = 2 * 2 * static_cast<double>(inputs + outputs) / rates.copy_gb_s * 1e-6;
  for (PassTime* pass : {&step.forward, &step.backward}) {
    pass->exchange_ms = collective_ms(inputs, link) + collective_ms(outputs, link) + copies_ms;
    pass->sent_bytes = inputs + outputs;
  }
  return step;
}

}  // namespace gdn::model
