#include "gdn/plan.h"

#include <fmt/format.h>

#include <limits>
#include <optional>
#include <utility>

#include "plan/capacity.h"
#include "plan/exchange.h"
#include "plan/segments.h"

namespace gdn {
namespace {

Status check_options(const Partition& partition, int rank, const PlanOptions& options) {
  const auto invalid = [](const char* name, const std::string& expected, int64_t got) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: expected {}, got {}", name, expected, got));
  };
  if (rank < 0 || rank >= partition.world_size()) {
    return invalid("rank", fmt::format("0 to {}", partition.world_size() - 1), rank);
  }
  if (options.heads_v < 1 || options.heads_v > std::numeric_limits<int>::max()) {
    return invalid("heads_v", "at least 1", options.heads_v);
  }
  if (options.dim_k < 1) return invalid("dim_k", "at least 1", options.dim_k);
  if (options.dim_v < 1) return invalid("dim_v", "at least 1", options.dim_v);
  if (options.workers < 1) return invalid("workers", "at least 1", options.workers);
  if (options.segments_per_worker < 1) {
    return invalid("segments_per_worker", "at least 1", options.segments_per_worker);
  }
  if (options.segment_chunks < 1) {
    return invalid("segment_chunks", "at least 1", options.segment_chunks);
  }
  if (options.tile < 0 || options.tile % kChunk != 0) {
    return invalid("tile", fmt::format("0 or a multiple of {}", kChunk), options.tile);
  }
  GDN_RETURN_IF_ERROR(check_tiles(partition, options.tile));
  return check_capacity(partition, options.max_tokens, options.max_fragments);
}

// How much of each program device copies and launches are made for.
void make_room(const std::optional<Capacity>& capacity, Plan& plan) {
  const Capacity most = capacity.value_or(Capacity{});
  const ProgramRoom maps = maps_are_packed_apart(plan.options) ? most.pack : ProgramRoom{};
  for (ExchangePass* pass : {&plan.forward, &plan.backward}) {
    for (const auto& [program, room] : {std::pair{&pass->pack, most.pack},
                                        {&pass->pack_maps, maps},
                                        {&pass->fold, most.fold},
                                        {&pass->spread, most.spread}}) {
      program->max_steps = capacity ? room.steps : std::ssize(program->steps);
      program->max_chains = capacity ? room.chains : program->chains();
    }
  }
}

}  // namespace

const char* to_string(ExchangeKind kind) {
  switch (kind) {
    case ExchangeKind::kNone:
      return "none";
    case ExchangeKind::kAllGather:
      return "all-gather";
    case ExchangeKind::kAllToAll:
      return "all-to-all";
  }
  return "unknown exchange";
}

Result<ExchangePolicy> parse_exchange(const std::string& name) {
  if (name == "auto") return ExchangePolicy::kAuto;
  if (name == "allgather") return ExchangePolicy::kAllGather;
  if (name == "a2a") return ExchangePolicy::kAllToAll;
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("exchange: expected auto, allgather or a2a, got \"{}\"", name));
}

Result<Plan> Plan::make(const Partition& partition, int rank, const PlanOptions& options) {
  GDN_RETURN_IF_ERROR(check_options(partition, rank, options));
  Plan plan;
  plan.options = options;
  plan.rank = rank;
  plan.world_size = partition.world_size();
  plan.num_documents = partition.num_documents();
  plan.local_tokens = partition.local_tokens(rank);

  std::vector<int64_t> segment_begin;
  cut_segments(partition, plan, segment_begin);
  const auto cu = partition.cu_seqlens();
  for (int64_t doc = 0; rank == 0 && doc < plan.num_documents; ++doc) {
    if (cu[doc] == cu[doc + 1]) plan.empty_documents.push_back(doc);
  }
  UnitTable units = make_units(partition, plan, segment_begin);
  std::optional<Capacity> capacity;
  if (options.has_capacity()) {
    capacity = Capacity::of(partition.layout(), plan.world_size, options);
    for (; plan.num_documents < capacity->documents; ++plan.num_documents) {
      if (rank == 0) plan.empty_documents.push_back(plan.num_documents);
    }
    widen(*capacity, options, units);
  }
  plan.counts.empty_documents = std::ssize(plan.empty_documents);
  plan.capacity = capacity ? capacity->counts : plan.counts;
  if (rank != 0) plan.capacity.empty_documents = 0;
  choose_exchange(units, plan);
  write_pass(units, kForward, plan);
  write_pass(units, kBackward, plan);
  make_room(capacity, plan);
  return plan;
}

int64_t Plan::sent_elements(bool backward_pass) const {
  const ExchangePass& pass = backward_pass ? backward : forward;
  int64_t sent = 0;
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer != rank) sent += pass.send[peer] + pass.return_send[peer];
  }
  return sent;
}

}  // namespace gdn
