// The work tables of cuda-sm90a: every chunk of every chain is walked once and in order, whatever
// the cuts; a hand-over is given before it is needed; both directions mirror each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "backend/cuda/sm90/chains.h"

namespace gdn::sm90 {
namespace {

std::vector<Chain> random_chains(std::mt19937& random, bool reverse) {
  std::vector<Chain> chains(std::uniform_int_distribution<size_t>(1, 9)(random));
  int64_t row = 0, chunk = 0;
  for (Chain& chain : chains) {
    chain.row = row;
    chain.first_chunk = chunk;
    chain.tokens = std::uniform_int_distribution<int64_t>(1, 3000)(random);
    chain.reverse = reverse;
    chain.enter = StateKind::kDocument;
    chain.leave = StateKind::kDocument;
    chain.enter_index = chain.leave_index = &chain - chains.data();
    row += chain.tokens;
    chunk += chain.chunks();
  }
  return chains;
}

// Where a piece stands: its lane group and how many chunks are walked before it there.
struct Place {
  const WalkPiece* piece;
  int lane_group;
  int64_t before;
};

std::vector<Place> places(const Schedule& schedule) {
  std::vector<Place> all;
  for (int g = 0; g < schedule.lane_groups(); ++g) {
    int64_t before = 0;
    for (int i = schedule.piece_begin[g]; i < schedule.piece_begin[g + 1]; ++i) {
      all.push_back({&schedule.pieces[i], g, before});
      before += schedule.pieces[i].chunks;
    }
    EXPECT_LE(before, schedule.makespan);
  }
  return all;
}

// Every chunk of a chain and key head is in one piece, and pieces that follow each other in the
// walk are joined by a hand-over whose giver has no more before it than its taker.
void expect_complete(const std::vector<Chain>& chains, int64_t heads, const Schedule& schedule) {
  std::map<std::pair<int64_t, int>, std::vector<Place>> by_chain;  // by first row and key head
  for (const Place& place : places(schedule)) {
    const auto chain = std::find_if(chains.begin(), chains.end(), [&](const Chain& c) {
      return place.piece->row >= c.row && place.piece->row < c.row + c.tokens;
    });
    ASSERT_NE(chain, chains.end());
    by_chain[{chain->row, place.piece->key_head}].push_back(place);
  }
  ASSERT_EQ(std::ssize(by_chain), std::ssize(chains) * heads);
  for (auto& [key, pieces] : by_chain) {
    const Chain& chain = *std::find_if(chains.begin(), chains.end(),
                                       [&](const Chain& c) { return c.row == key.first; });
    std::sort(pieces.begin(), pieces.end(), [&](const Place& a, const Place& b) {
      return (a.piece->first_chunk < b.piece->first_chunk) != chain.reverse;
    });
    EXPECT_EQ(pieces.front().piece->enter, chain.enter);
    EXPECT_EQ(pieces.back().piece->leave, chain.leave);
    int64_t chunks = 0, tokens = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
      const WalkPiece& piece = *pieces[i].piece;
      const int64_t skipped = chain.reverse ? chain.chunks() - chunks - piece.chunks : chunks;
      EXPECT_EQ(piece.first_chunk, chain.first_chunk + skipped);
      EXPECT_EQ(piece.row, chain.row + skipped * kChunkTokens);
      EXPECT_EQ((piece.tokens + kChunkTokens - 1) / kChunkTokens, piece.chunks);
      chunks += piece.chunks;
      tokens += piece.tokens;
      if (i == 0) continue;
      const WalkPiece& giver = *pieces[i - 1].piece;
      EXPECT_EQ(giver.leave, StateKind::kHandOver);
      EXPECT_EQ(piece.enter, StateKind::kHandOver);
      EXPECT_EQ(giver.leave_index, piece.enter_index);
      EXPECT_LE(pieces[i - 1].before + giver.chunks, pieces[i].before);
    }
    EXPECT_EQ(chunks, chain.chunks());
    EXPECT_EQ(tokens, chain.tokens);
  }
}

TEST(Sm90Schedule, WalksEveryChunkOnce) {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    const auto chains = random_chains(random, round % 2 == 1);
    const int64_t heads = std::uniform_int_distribution<int64_t>(1, 16)(random);
    const int64_t lane_groups = std::uniform_int_distribution<int64_t>(1, 132)(random);
    const Cuts cuts = round % 4 < 2 ? Cuts::kAllowed : Cuts::kNone;
    const Schedule schedule = make_schedule(chains, heads, lane_groups, cuts);
    SCOPED_TRACE(round);
    EXPECT_EQ(schedule.lane_groups(), lane_groups);
    expect_complete(chains, heads, schedule);
    if (HasFatalFailure()) return;
  }
}

// No lane group has more to do than the longest chain or a little over its share.
TEST(Sm90Schedule, BalancesWithHandOvers) {
  std::mt19937 random(8);
  for (int round = 0; round < 200; ++round) {
    const auto chains = random_chains(random, round % 2 == 1);
    const int64_t lane_groups = std::uniform_int_distribution<int64_t>(1, 44)(random);
    int64_t total = 0, longest = 0;
    for (const Chain& chain : chains) {
      total += 16 * chain.chunks();
      longest = std::max(longest, chain.chunks());
    }
    const Schedule schedule = make_schedule(chains, 16, lane_groups);
    if (16 * std::ssize(chains) <= lane_groups) continue;  // whole chains
    EXPECT_LE(schedule.makespan, std::max(longest, (total + lane_groups - 1) / lane_groups) + 8);
  }
}

TEST(Sm90Schedule, ReverseChainsMirrorTheForward) {
  PlanOptions options;
  options.heads_v = 4;
  options.workers = 132;
  options.segment_chunks = 4;
  const std::vector<int64_t> cu = {0, 700, 700, 765, 2000};
  const auto partition = Partition::make(cu, 2, Layout::kZigzag);
  ASSERT_TRUE(partition);
  for (int rank = 0; rank < 2; ++rank) {
    const auto plan = Plan::make(*partition, rank, options);
    ASSERT_TRUE(plan);
    const auto forward = run_chains(*plan, Direction::kForward);
    const auto reverse = run_chains(*plan, Direction::kReverse);
    ASSERT_EQ(std::ssize(forward), std::ssize(plan->segments));
    ASSERT_EQ(forward.size(), reverse.size());
    for (size_t i = 0; i < forward.size(); ++i) {
      const Segment& s = plan->segments[i];
      EXPECT_EQ(forward[i].enter == StateKind::kDocument, s.starts_document());
      EXPECT_EQ(forward[i].enter_index, s.starts_document() ? s.doc : s.entry_slot);
      EXPECT_EQ(reverse[i].enter_index, s.ends_document() ? s.doc : s.exit_slot);
      EXPECT_EQ(reverse[i].leave == StateKind::kDocument, s.starts_document());
      EXPECT_TRUE(reverse[i].reverse && !forward[i].reverse);
    }
    EXPECT_EQ(std::ssize(summary_chains(*plan, Direction::kForward)),
              plan->counts.exit_slots + plan->counts.map_slots);
    EXPECT_EQ(std::ssize(summary_chains(*plan, Direction::kReverse)), plan->counts.entry_slots);
  }
}

// The work tables of every rank of shapes M and H (docs/workloads.md) on 132 multiprocessors: all
// chains whole, and no more pieces than the resident block has room for (ResidentTables).
TEST(Sm90Schedule, TablesOfEveryRankFit) {
  constexpr int64_t kHeadsK = 16, kLaneGroups = 44;
  for (const std::vector<int64_t>& cu : {std::vector<int64_t>{0, 12000, 21000, 27000, 30768, 32768},
                                         std::vector<int64_t>{0, 49152, 81920, 110592, 131072}}) {
    for (const int world_size : {1, 2, 4, 8}) {
      for (Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument}) {
        const auto partition = Partition::make(cu, world_size, layout);
        ASSERT_TRUE(partition);
        for (int rank = 0; rank < world_size; ++rank) {
          PlanOptions options;
          options.heads_v = 48;
          options.heads_qk = kHeadsK;
          options.workers = 132;
          options.segments_per_worker = 1;
          options.segment_chunks = 448 * options.heads_v / options.workers;
          const auto plan = Plan::make(*partition, rank, options);
          ASSERT_TRUE(plan);
          for (Direction direction : {Direction::kForward, Direction::kReverse}) {
            const auto chains = run_chains(*plan, direction);
            const Schedule run = make_schedule(chains, kHeadsK, kLaneGroups);
            expect_complete(chains, kHeadsK, run);
            EXPECT_LE(std::ssize(run.pieces), plan->capacity.segments * kHeadsK + kLaneGroups);
            EXPECT_EQ(run.lane_groups(), kLaneGroups);
            const Schedule summary =
                make_schedule(summary_chains(*plan, direction), kHeadsK, kLaneGroups, Cuts::kNone);
            const int64_t summaries = direction == Direction::kForward
                                          ? plan->capacity.exit_slots + plan->capacity.map_slots
                                          : plan->capacity.entry_slots;
            EXPECT_EQ(std::ssize(summary.pieces), summaries * kHeadsK);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace gdn::sm90
