#include "backend/cuda/sm90/schedule.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace gdn::sm90 {
namespace {

// A chain is not cut closer than this to either end: a hand-over costs about one chunk.
constexpr int64_t kShortestPiece = 4;

struct Job {
  const Chain* chain;
  int32_t key_head;
};

// Chunks [begin, end) of a chain, counted as it is walked.
WalkPiece make_piece(const Job& job, int64_t begin, int64_t end) {
  const Chain& chain = *job.chain;
  if (chain.reverse) {
    begin = chain.chunks() - std::exchange(end, chain.chunks() - begin);
  }
  WalkPiece piece{};
  piece.row = chain.row + begin * kChunkTokens;
  piece.first_chunk = static_cast<int32_t>(chain.first_chunk + begin);
  piece.chunks = static_cast<int32_t>(end - begin);
  piece.tokens =
      static_cast<int32_t>(std::min(chain.tokens, end * kChunkTokens) - begin * kChunkTokens);
  piece.key_head = job.key_head;
  piece.enter = chain.enter;
  piece.enter_index = static_cast<int32_t>(chain.enter_index);
  piece.leave = chain.leave;
  piece.leave_index = static_cast<int32_t>(chain.leave_index);
  return piece;
}

// Fills lane groups up to `makespan`; more lane groups than wanted means that it was too small.
Schedule wrap(const std::vector<Job>& jobs, int64_t makespan) {
  Schedule schedule;
  schedule.makespan = makespan;
  schedule.piece_begin.push_back(0);
  int64_t used = 0;
  const auto next_lane_group = [&] {
    schedule.piece_begin.push_back(static_cast<int32_t>(schedule.pieces.size()));
    used = 0;
  };
  for (const Job& job : jobs) {
    const int64_t chunks = job.chain->chunks(), room = makespan - used;
    if (chunks <= room) {
      schedule.pieces.push_back(make_piece(job, 0, chunks));
      used += chunks;
    } else if (room < kShortestPiece || chunks - room < kShortestPiece) {
      next_lane_group();
      schedule.pieces.push_back(make_piece(job, 0, chunks));
      used = chunks;
    } else {
      WalkPiece last = make_piece(job, chunks - room, chunks);
      last.enter = StateKind::kHandOver;
      last.enter_index = schedule.hand_overs;
      schedule.pieces.push_back(last);
      next_lane_group();
      WalkPiece first = make_piece(job, 0, chunks - room);
      first.leave = StateKind::kHandOver;
      first.leave_index = schedule.hand_overs++;
      schedule.pieces.push_back(first);
      used = chunks - room;
    }
    if (used == makespan) next_lane_group();
  }
  if (used > 0) next_lane_group();
  return schedule;
}

// Longest first, each to the lane group with the least work so far.
Schedule deal(const std::vector<Job>& jobs, int64_t lane_groups) {
  std::vector<std::vector<const Job*>> hands(static_cast<size_t>(lane_groups));
  using Load = std::pair<int64_t, size_t>;  // chunks, lane group: ties go to the lower one
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (size_t i = 0; i < hands.size(); ++i) loads.push({0, i});
  Schedule schedule;
  for (const Job& job : jobs) {
    const auto [chunks, index] = loads.top();
    loads.pop();
    hands[index].push_back(&job);
    loads.push({chunks + job.chain->chunks(), index});
    schedule.makespan = std::max(schedule.makespan, chunks + job.chain->chunks());
  }
  schedule.piece_begin.push_back(0);
  for (const auto& hand : hands) {
    for (const Job* job : hand) {
      schedule.pieces.push_back(make_piece(*job, 0, job->chain->chunks()));
    }
    schedule.piece_begin.push_back(static_cast<int32_t>(schedule.pieces.size()));
  }
  return schedule;
}

}  // namespace

Schedule make_schedule(const std::vector<Chain>& chains, int64_t heads_k, int64_t lane_groups,
                       Cuts cuts) {
  std::vector<size_t> order(chains.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return chains[a].chunks() > chains[b].chunks(); });
  std::vector<Job> jobs;
  int64_t longest = 0, total = 0;
  for (const size_t index : order) {
    for (int64_t head = 0; head < heads_k; ++head) {
      jobs.push_back({&chains[index], static_cast<int32_t>(head)});
      longest = std::max(longest, chains[index].chunks());
      total += chains[index].chunks();
    }
  }
  if (cuts == Cuts::kNone || static_cast<int64_t>(jobs.size()) <= lane_groups) {
    return deal(jobs, lane_groups);
  }
  int64_t makespan = std::max(longest, (total + lane_groups - 1) / lane_groups);
  Schedule schedule = wrap(jobs, makespan);
  while (schedule.lane_groups() > lane_groups) schedule = wrap(jobs, ++makespan);
  schedule.piece_begin.resize(static_cast<size_t>(lane_groups) + 1, schedule.piece_begin.back());
  return schedule;
}

}  // namespace gdn::sm90
