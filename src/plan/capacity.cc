#include "plan/capacity.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "plan/partition_data.h"
#include "plan/segments.h"

namespace gdn {
namespace {

// Intervals of the packed stream that a rank holds; 0: its fragments come from anywhere.
int64_t intervals_of(Layout layout) {
  switch (layout) {
    case Layout::kContiguous:
      return 1;
    case Layout::kZigzag:
      return 2;
    case Layout::kZigzagPerDocument:
    case Layout::kExplicit:
      return 0;
  }
  return 0;
}

}  // namespace

// Let F fragments with tokens hold T tokens, l_i each, T >= F.
Capacity Capacity::of(Layout layout, int world_size, const PlanOptions& options) {
  const int64_t tokens = options.max_tokens;
  const int64_t fragments = std::min(options.max_fragments, tokens);
  // W = 1: every fragment is a document, but for explicit tables.
  const bool whole = world_size == 1 && layout != Layout::kExplicit;
  const int64_t intervals = intervals_of(layout);
  // Fragments that do not start their document, and those that do not end it: of an interval only
  // the first and only the last. And fragments of documents that cross ranks.
  const int64_t open = whole ? 0 : intervals > 0 ? std::min(fragments, intervals) : fragments;
  const int64_t crossing = world_size == 1 ? 0
                           : intervals > 0 ? std::min(fragments, 2 * intervals)
                                           : fragments;
  Capacity capacity;
  PlanCounts& most = capacity.counts;
  most.longest = options.tile > 0 ? std::min(options.tile, tokens) : tokens;
  // sum of ceil(l_i / 64) <= sum of (l_i + 63) / 64
  most.chunks = (tokens + (kChunk - 1) * fragments) / kChunk;

  // Cuts within fragments. Tiles: sum of floor((l_i - 1) / tile) <= (T - 1) / tile. Else a fragment
  // in p >= 2 pieces has p segment_chunks chunks or more, so the p of all cut ones add up to at
  // most chunks / segment_chunks, and each has one cut less than pieces.
  int64_t cuts = 0;
  if (options.tile > 0) {
    cuts = (tokens - 1) / options.tile;
  } else {
    cuts = std::min(fragments * (most_pieces(!whole, options) - 1),
                    std::max<int64_t>(0, most.chunks / options.segment_chunks - 1));
  }
  most.segments = fragments + cuts;
  most.entry_slots = most.exit_slots = cuts + open;
  // A document on its own in p pieces has p - 2 maps; a fragment inside its document p.
  most.map_slots = open > 0 ? cuts + open : std::max<int64_t>(0, cuts - 1);

  capacity.documents = world_size * options.max_fragments;
  most.empty_documents = capacity.documents;

  // A unit is a fragment of a crossing document, or each of its tiles.
  const int64_t tiles = options.tile > 0 && world_size > 1 ? cuts : 0;
  const int64_t units = crossing + tiles;
  capacity.records = world_size > 1 ? open + tiles : 0;
  // States, maps, and chains of the spread, whose every step leaves one boundary state.
  if (world_size > 1) {
    capacity.pack = {2 * (crossing + cuts) + most.entry_slots, 2 * units + most.entry_slots};
  }
  // A chain needs two units, and has a step less than units.
  capacity.fold = {world_size * units, world_size * units / 2};
  capacity.spread = {most.entry_slots, most.entry_slots};
  return capacity;
}

Status check_capacity(const Partition& partition, int64_t max_tokens, int64_t max_fragments) {
  const auto expected = [](const char* name, const std::string& what, int64_t got) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: expected {}, got {}", name, what, got));
  };
  if (max_tokens < 0 || max_tokens > kMaxTokens) {
    return expected("max_tokens", fmt::format("0 to {}", kMaxTokens), max_tokens);
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (max_fragments < 0 || max_fragments > kMost) {
    return expected("max_fragments", fmt::format("0 to {}", kMost), max_fragments);
  }
  if ((max_tokens > 0) != (max_fragments > 0)) {
    return expected(max_tokens > 0 ? "max_fragments" : "max_tokens",
                    "at least 1, as both or neither", 0);
  }
  if (max_tokens == 0) return Status::ok();
  for (int rank = 0; rank < partition.world_size(); ++rank) {
    const int64_t rows = partition.local_tokens(rank);
    if (rows > max_tokens) {
      return expected("max_tokens", fmt::format("at least {}, the rows of rank {}", rows, rank),
                      max_tokens);
    }
    const int64_t fragments = std::ssize(partition.fragments(rank));
    if (fragments > max_fragments) {
      return expected("max_fragments",
                      fmt::format("at least {}, the fragments of rank {}", fragments, rank),
                      max_fragments);
    }
  }
  const int64_t world_size = partition.world_size();
  const int64_t documents = partition.num_documents();
  if (documents > world_size * max_fragments) {
    return expected("max_fragments",
                    fmt::format("at least {}, for {} documents with and without tokens on {} ranks",
                                (documents + world_size - 1) / world_size, documents, world_size),
                    max_fragments);
  }
  return Status::ok();
}

Status check_refill(const Partition& from, const Partition& next, int64_t max_tokens,
                    int64_t max_fragments) {
  if (max_tokens == 0) {
    return {ErrorCode::kInvalidArgument,
            "refill: expected a context with max_tokens and max_fragments, got one for its packing "
            "alone"};
  }
  if (next.world_size() != from.world_size()) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("partition: expected {} ranks, as the context was made for, got {}",
                        from.world_size(), next.world_size())};
  }
  if (next.layout() != from.layout()) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("partition: expected layout {}, as the context was made for, got {}",
                        to_string(from.layout()), to_string(next.layout()))};
  }
  return check_capacity(next, max_tokens, max_fragments);
}

void widen(const Capacity& capacity, const PlanOptions& options, UnitTable& units) {
  const int64_t map = options.dim_k * options.dim_k, state = options.dim_k * options.dim_v;
  for (int64_t& n : units.sent[kForward]) n = capacity.records * (map + state);
  for (int64_t& n : units.sent[kBackward]) n = capacity.records * state;
  for (auto& returned : units.returned) {
    for (int64_t& n : returned) n = capacity.records * state;
  }
}

}  // namespace gdn
