// Where cuda-sm90a keeps its tables on the device, and what prepare writes, as offsets; pure
// functions of problem and plan. With C chunks (T / 64 and a few) and B blocks that run at once:
//   prepared         C * (HV * 5,120 + H * 512) bytes: 3.98 KiB per token at 16/48 heads
//   forward scratch  B * (64 KiB + 12 bytes) at most
//   backward scratch C * HV * 32,768 (dS of every chunk: 24 KiB per token at 48 heads), and that
// Walks only read what is prepared, so that calls at once may share it; the flags and counters by
// which blocks wait for each other lie in the scratch.
#pragma once

#include <algorithm>

#include "backend/cuda/common/tables.h"
#include "backend/cuda/sm90/params.h"
#include "base/memory.h"
#include "gdn/problem.h"

namespace gdn::sm90 {

// How a launch's blocks are grouped.
struct Grid {
  int64_t group = 1;        // G: blocks of a lane group
  int64_t lane_groups = 1;  // that run at once

  static Grid of(const Plan& plan) {
    const int64_t heads_v = plan.options.heads_v;
    const int64_t heads_k = plan.options.heads_qk > 0 ? plan.options.heads_qk : heads_v;
    Grid grid;
    grid.group = heads_v / heads_k;
    grid.lane_groups = std::max<int64_t>(1, plan.options.workers / grid.group);
    return grid;
  }
  int64_t blocks() const { return group * lane_groups; }
};

// The common tables first, then the work tables: pieces, and where those of each lane group begin.
struct ResidentTables {
  int64_t run = 0, run_begin = 0, summary = 0, summary_begin = 0;
  int64_t reverse = 0, reverse_begin = 0, reverse_summary = 0, reverse_summary_begin = 0;
  int64_t bytes = 0;

  static ResidentTables of(const Plan& plan) {
    const Grid grid = Grid::of(plan);
    const int64_t heads_k = plan.options.heads_v / grid.group;
    // A hand-over makes one piece more, and every lane group but the last can end in one.
    const int64_t run_pieces = plan.capacity.segments * heads_k + grid.lane_groups;
    const int64_t summary_pieces = (plan.capacity.exit_slots + plan.capacity.map_slots) * heads_k;
    const int64_t begin_bytes = (grid.lane_groups + 1) * static_cast<int64_t>(sizeof(int32_t));
    const int64_t reverse_summary_pieces = plan.capacity.entry_slots * heads_k;
    ResidentTables tables;
    BlockLayout block;
    const auto take = [&](int64_t pieces, int64_t* table, int64_t* begin) {
      *table = block.take(pieces * static_cast<int64_t>(sizeof(WalkPiece)));
      *begin = block.take(begin_bytes);
    };
    block.take(cuda::ResidentLayout::of(plan).bytes);
    take(run_pieces, &tables.run, &tables.run_begin);
    take(summary_pieces, &tables.summary, &tables.summary_begin);
    take(run_pieces, &tables.reverse, &tables.reverse_begin);
    take(reverse_summary_pieces, &tables.reverse_summary, &tables.reverse_summary_begin);
    tables.bytes = block.bytes();
    return tables;
  }
};

struct PreparedLayout {
  int64_t tiles = 0, gates = 0, norms = 0, bytes = 0;

  static PreparedLayout of(const Problem& problem, const Plan& plan) {
    const int64_t values = plan.capacity.chunks * problem.heads_v;
    PreparedLayout layout;
    BlockLayout block;
    layout.tiles = block.take(values * kRecordElements * 2);
    layout.gates = block.take(values * 2 * kChunkTokens * 4);
    layout.norms = block.take(plan.capacity.chunks * problem.heads_qk * 2 * kChunkTokens * 4);
    layout.bytes = block.bytes();
    return layout;
  }
};

// What both scratches begin with: the states that blocks hand over, [B, 128, 128] fp32, then zeros
// before a pass: a flag for each half of these, [B, 2], and the counters of the sums of dq and dk,
// [lane groups, G - 1].
struct HandOvers {
  int64_t flags = 0, row_counters = 0, zeros_bytes = 0, bytes = 0;

  static HandOvers of(const Plan& plan) {
    const Grid grid = Grid::of(plan);
    const int64_t flags_bytes = 2 * grid.blocks() * 4;
    HandOvers layout;
    BlockLayout block;
    block.take(grid.blocks() * kDim * kDim * 4);
    layout.zeros_bytes = flags_bytes + grid.lane_groups * (grid.group - 1) * 4;
    layout.flags = block.take(layout.zeros_bytes);
    layout.row_counters = layout.flags + flags_bytes;
    layout.bytes = block.bytes();
    return layout;
  }
};

struct BackwardScratch {
  int64_t states = 0, sums = 0, bytes = 0;

  static BackwardScratch of(const Problem& problem, const Plan& plan) {
    const int64_t values = plan.capacity.chunks * problem.heads_v;
    BackwardScratch scratch;
    BlockLayout block;
    block.take(HandOvers::of(plan).bytes);
    scratch.states = block.take(values * kDim * kDim * 2);
    scratch.sums = block.take(problem.options.gate_in_kernel ? values * 8 : 0);
    scratch.bytes = block.bytes();
    return scratch;
  }
};

}  // namespace gdn::sm90
