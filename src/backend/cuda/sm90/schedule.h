// Which blocks walk what. Chains (a segment and a key head) are laid one after another over lane
// groups of G blocks and wrapped at the makespan max(longest chain, work / lane groups): the part
// of a chain that does not fit at the end of one lane group is its last part; its first part opens
// the next lane group, so it is done in time, and the state passes through memory bit by bit.
// Results do not depend on the cuts.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/cuda/sm90/pieces.h"

namespace gdn::sm90 {

// One segment as a walk sees it.
struct Chain {
  int64_t row = 0;
  int64_t first_chunk = 0;
  int64_t tokens = 0;  // > 0
  StateKind enter = StateKind::kNone;
  int64_t enter_index = 0;
  StateKind leave = StateKind::kNone;
  int64_t leave_index = 0;
  bool reverse = false;  // walked from its end

  int64_t chunks() const { return (tokens + kChunkTokens - 1) / kChunkTokens; }
};

struct Schedule {
  std::vector<WalkPiece> pieces;
  std::vector<int32_t> piece_begin;  // [lane groups + 1]
  int32_t hand_overs = 0;            // buffers of G states, and G * 2 flags, each
  int64_t makespan = 0;              // chunks of the busiest lane group

  int lane_groups() const { return static_cast<int>(piece_begin.size()) - 1; }
};

enum class Cuts {
  kAllowed,
  kNone
};  // kNone: whole chains, each to the lane group with the least work

// `lane_groups`: blocks that run at once / G, at least 1. Lane groups without work are kept, empty.
Schedule make_schedule(const std::vector<Chain>& chains, int64_t heads_k, int64_t lane_groups,
                       Cuts cuts = Cuts::kAllowed);

}  // namespace gdn::sm90
