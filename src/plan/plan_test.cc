// Segments and slots against their rules, the choice of the exchange, counts between ranks, errors.
#include "gdn/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "plan/partition_property.h"

namespace gdn {
namespace {

using Rows = std::vector<int64_t>;

Plan planned(const Partition& partition, int rank, const PlanOptions& options) {
  auto plan = Plan::make(partition, rank, options);
  EXPECT_TRUE(plan.is_ok()) << plan.status().message();
  return *plan;
}

Plan one_document(int64_t length, const PlanOptions& options) {
  return planned(*Partition::make(Rows{0, length}, 1, Layout::kContiguous), 0, options);
}

PlanOptions with(int64_t heads_v, int64_t workers) {
  PlanOptions options;
  options.heads_v = heads_v;
  options.workers = workers;
  return options;
}

Rows lengths(const Plan& plan) {
  Rows out;
  for (const Segment& s : plan.segments) out.push_back(s.length);
  return out;
}

// Everything that holds of the segments of any plan.
void expect_segments(const Partition& partition, const Plan& plan) {
  const auto fragments = partition.fragments(plan.rank);
  const auto cu = partition.cu_seqlens();
  int64_t row = 0, chunk = 0, entry = 0, exit = 0, map = 0, fragment = -1;
  for (const Segment& s : plan.segments) {
    const Fragment& f = fragments[s.fragment];
    const int64_t fragment_row = partition.local_cu_seqlens(plan.rank)[s.fragment];
    const int64_t offset = f.offset + s.row - fragment_row;
    const int64_t end = offset + s.length;
    ASSERT_GE(s.fragment, fragment);
    fragment = s.fragment;
    EXPECT_EQ(s.doc, f.doc);
    EXPECT_EQ(s.row, row);
    EXPECT_EQ(s.first_chunk, chunk);
    ASSERT_GT(s.length, 0);
    if (end != f.offset + f.length) {
      EXPECT_EQ(s.length % kChunk, 0);
    }
    const bool starts = offset == 0, ends = end == cu[s.doc + 1] - cu[s.doc];
    EXPECT_EQ(s.entry_slot, starts ? -1 : entry++);
    EXPECT_EQ(s.exit_slot, ends ? -1 : exit++);
    EXPECT_EQ(s.map_slot, starts || ends ? -1 : map++);
    if (plan.options.tile > 0) {
      EXPECT_EQ(offset % plan.options.tile, 0);
      EXPECT_LE(s.length, plan.options.tile);
    }
    row += s.length;
    chunk += s.chunks();
  }
  EXPECT_EQ(row, plan.local_tokens);
  EXPECT_EQ(row, partition.local_tokens(plan.rank));
  EXPECT_EQ(chunk, plan.counts.chunks);
  EXPECT_EQ(entry, plan.counts.entry_slots);
  EXPECT_EQ(exit, plan.counts.exit_slots);
  EXPECT_EQ(map, plan.counts.map_slots);
}

TEST(Segments, KeepTheirRulesOnRandomCases) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const bool tiled = seed % 3 == 0;
    const auto partition = make_case(draw_case(seed, tiled ? kChunk : 1));
    ASSERT_TRUE(partition.is_ok());
    PlanOptions options = with(1 + seed % 4, 1 + seed % 40);
    options.tile = tiled ? kChunk : 0;
    for (int rank = 0; rank < partition->world_size(); ++rank) {
      expect_segments(*partition, planned(*partition, rank, options));
    }
  }
}

TEST(Segments, CutOnlyWhereWorkersWouldIdle) {
  const int64_t n = 64 * 400;
  EXPECT_EQ(lengths(one_document(n, with(48, 1))), Rows{n});
  EXPECT_EQ(lengths(one_document(n, with(2, 2))), Rows{n});
  EXPECT_EQ(lengths(one_document(n, with(48, 96))), Rows{n});     // twice the work, no gain
  EXPECT_EQ(one_document(n, with(48, 132)).segments.size(), 6u);  // ceil(2 * 132 / 48)
  EXPECT_EQ(one_document(n, with(1, 132)).segments.size(), 12u);  // 400 / 32 chunks
  EXPECT_EQ(lengths(one_document(64 * 63 + 1, with(1, 8))), (Rows{2048, 1985}));
  EXPECT_EQ(lengths(one_document(64 * 63, with(1, 8))), Rows{64 * 63});
  EXPECT_EQ(lengths(one_document(64 * 97, with(1, 8))), (Rows{2048, 2048, 2112}));
}

TEST(Segments, FragmentsInsideADocumentAreCutEarlier) {
  const int64_t n = 64 * 400;
  const auto p = Partition::make(Rows{0, 3 * n}, 3, Layout::kContiguous);
  EXPECT_EQ(planned(*p, 0, with(48, 90)).segments.size(), 1u);
  EXPECT_EQ(planned(*p, 1, with(48, 90)).segments.size(), 4u);
  EXPECT_EQ(planned(*p, 2, with(48, 90)).segments.size(), 1u);
}

TEST(Segments, DoNotDependOnNeighbours) {
  const int64_t n = 64 * 400 + 5;
  const Rows alone = lengths(one_document(n, with(4, 64)));
  const auto packed = Partition::make(Rows{0, 7, 7 + n, 9007 + n}, 1, Layout::kContiguous);
  Rows among;
  for (const Segment& s : planned(*packed, 0, with(4, 64)).segments) {
    if (s.doc == 1) among.push_back(s.length);
  }
  EXPECT_EQ(among, alone);
}

TEST(Plan, EmptyDocumentsBelongToRankZero) {
  const auto p = Partition::make(Rows{0, 0, 5, 5, 9}, 2, Layout::kContiguous);
  EXPECT_EQ(planned(*p, 0, {}).empty_documents, (Rows{0, 2}));
  EXPECT_TRUE(planned(*p, 1, {}).empty_documents.empty());
}

TEST(Plan, NoExchangeWhereNothingCrosses) {
  PlanOptions options;
  options.exchange = ExchangePolicy::kAllToAll;
  const auto p = Partition::make(Rows{0, 10, 20}, 2, Layout::kContiguous);
  const Plan plan = planned(*p, 1, options);
  EXPECT_EQ(plan.exchange, ExchangeKind::kNone);
  EXPECT_EQ(plan.exchange_reason, "no document spans two ranks");
  EXPECT_EQ(plan.sent_elements(false) + plan.sent_elements(true), 0);
  EXPECT_EQ(plan.forward.send, (Rows{0, 0}));
  EXPECT_TRUE(plan.forward.spread.empty() && plan.forward.fold.empty());
}

TEST(Plan, ChoosesTheExchangeByBytes) {
  // One cut: forward, rank 0 hands over B; backward, rank 1 hands over C. Both ways equal.
  const auto two = Partition::make(Rows{0, 100}, 2, Layout::kContiguous);
  const Plan tie = planned(*two, 0, with(4, 1));
  EXPECT_EQ(tie.exchange, ExchangeKind::kAllGather);
  EXPECT_EQ(tie.sent_elements(false), 4 * 128 * 128);
  EXPECT_EQ(tie.sent_elements(true), 0);
  EXPECT_EQ(tie.exchange_reason,
            "all-gather (equal bytes, one collective less): all-gather moves 512.0 KiB, all-to-all "
            "512.0 KiB, over all ranks, forward and backward, in fp32");
  const auto four = Partition::make(Rows{0, 100}, 4, Layout::kContiguous);
  const Plan many = planned(*four, 1, with(4, 1));
  EXPECT_EQ(many.exchange, ExchangeKind::kAllToAll);
  // Three of four heads of M and B (or C); the folded states of one head for two other ranks.
  EXPECT_EQ(many.sent_elements(false), (3 * 2 + 2) * 128 * 128);
  EXPECT_EQ(many.sent_elements(true), (3 + 2) * 128 * 128);
}

TEST(Plan, SentElementsAddUpToTheBytesOfTheReason) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto partition = make_case(draw_case(seed));
    PlanOptions options = with(1 + seed % 5, 1);
    options.dim_k = options.dim_v = 1;
    const ExchangeKind chosen = planned(*partition, 0, options).exchange;
    int64_t moved[2] = {0, 0};
    const ExchangePolicy policies[2] = {ExchangePolicy::kAllGather, ExchangePolicy::kAllToAll};
    for (int kind = 0; kind < 2; ++kind) {
      options.exchange = policies[kind];
      for (int rank = 0; rank < partition->world_size(); ++rank) {
        const Plan plan = planned(*partition, rank, options);
        moved[kind] += plan.sent_elements(false) + plan.sent_elements(true);
      }
    }
    if (!partition->has_crossing()) {
      EXPECT_EQ(chosen, ExchangeKind::kNone);
      EXPECT_EQ(moved[0] + moved[1], 0);
    } else {
      EXPECT_EQ(chosen, moved[1] < moved[0] ? ExchangeKind::kAllToAll : ExchangeKind::kAllGather)
          << "seed " << seed << ": " << moved[0] << " against " << moved[1];
    }
  }
}

TEST(Plan, FoldsCoverEveryHeadOnce) {
  const auto p = Partition::make(Rows{0, 1000}, 5, Layout::kContiguous);
  PlanOptions options = with(3, 1);  // fewer heads than ranks
  options.exchange = ExchangePolicy::kAllToAll;
  int head = 0;
  for (int rank = 0; rank < 5; ++rank) {
    const Plan plan = planned(*p, rank, options);
    EXPECT_EQ(plan.forward.fold.head_begin, head);
    EXPECT_EQ(plan.backward.fold.head_begin, head);
    head = plan.forward.fold.head_end;
    EXPECT_EQ(plan.forward.fold.empty(), plan.forward.fold.head_begin == head);
    EXPECT_EQ(plan.forward.spread.head_begin, 0);
    EXPECT_EQ(plan.forward.spread.head_end, 3);
  }
  EXPECT_EQ(head, 3);
  options.exchange = ExchangePolicy::kAllGather;
  const Plan gathered = planned(*p, 3, options);
  EXPECT_EQ(gathered.forward.fold.head_begin, 0);
  EXPECT_EQ(gathered.forward.fold.head_end, 3);
}

TEST(Plan, SegmentsOfFewHeadsAreShort) {
  EXPECT_EQ(segment_chunks_of_heads(48, 132, 448), 162);
  EXPECT_EQ(segment_chunks_of_heads(9, 132, 448), 32);
  EXPECT_EQ(segment_chunks_of_heads(8, 132, 448), 11);
  EXPECT_EQ(segment_chunks_of_heads(8, 132, 448, 1), 1);
}

TEST(Plan, SegmentsOfManyRanksAreShorter) {
  EXPECT_EQ(segment_chunks_over(1, 163), 163);
  EXPECT_EQ(segment_chunks_over(2, 163), 65);
  EXPECT_EQ(segment_chunks_over(4, 163), 64);
  EXPECT_EQ(segment_chunks_over(8, 163), 21);
  EXPECT_EQ(segment_chunks_over(8, 11), 11);
  EXPECT_EQ(segment_chunks_over(1, 32), 32);
  EXPECT_EQ(segment_chunks_over(8, 32), 32);
}

// What waits for nobody is computed before the exchange, beside the records.
TEST(Plan, OwnDocumentsAreSpreadBesideThePacking) {
  const auto longest = [](const FoldProgram& program) {
    int64_t steps = 0;
    for (int64_t c = 0; c < program.chains(); ++c) {
      steps = std::max(steps, program.chain_begin[c + 1] - program.chain_begin[c]);
    }
    return steps;
  };
  // Four segments of rank 0 alone, then six that cross: three on rank 0, three on rank 1.
  PlanOptions options = with(2, 100);
  options.segment_chunks = 1;
  options.segments_per_worker = 1;
  for (const int64_t own : {256, 64 * 40}) {
    const auto p = Partition::make_explicit(Rows{0, own, own + 384},
                                            {{{0, 0, own}, {1, 0, 192}}, {{1, 192, 192}}});
    ASSERT_TRUE(p);
    const Plan first = planned(*p, 0, options), second = planned(*p, 1, options);
    ASSERT_EQ(std::ssize(first.segments), own / 64 + 3);
    const bool early = own == 256;  // 3 steps beside 3; 39 would hold the exchange up
    EXPECT_EQ(longest(first.forward.pack), 3);
    // The record, the document that is cut off here (2 steps) and the one that is here alone.
    EXPECT_EQ(first.forward.pack.chains(), early ? 3 : 2);
    EXPECT_EQ(longest(first.forward.spread), early ? 0 : own / 64 - 1);
    EXPECT_EQ(longest(second.forward.spread), 3);
    EXPECT_TRUE(second.forward.pack.empty());
  }
  // Inner fragments pack B and M in one program where they have one width.
  const auto p = Partition::make(Rows{0, 768}, 3, Layout::kContiguous);
  for (const int64_t dim_v : {128, 64}) {
    options.dim_v = dim_v;
    const Plan inner = planned(*p, 1, options);
    EXPECT_EQ(inner.forward.pack.chains(), dim_v == 128 ? 2 : 1);
    EXPECT_EQ(inner.forward.pack_maps.chains(), dim_v == 128 ? 0 : 1);
  }
}

TEST(Plan, BytesDoNotGrowWithTheSequence) {
  const auto sent = [](int64_t length) {
    const auto p = Partition::make(Rows{0, length}, 8, Layout::kZigzag);
    return planned(*p, 3, with(48, 132)).sent_elements(false);
  };
  EXPECT_EQ(sent(100'000), sent(1'000'000'000));
}

TEST(Plan, ExchangeNamesRoundTrip) {
  EXPECT_EQ(*parse_exchange("auto"), ExchangePolicy::kAuto);
  EXPECT_EQ(*parse_exchange("allgather"), ExchangePolicy::kAllGather);
  EXPECT_EQ(*parse_exchange("a2a"), ExchangePolicy::kAllToAll);
  EXPECT_EQ(parse_exchange("ring").status().message(),
            "exchange: expected auto, allgather or a2a, got \"ring\"");
}

TEST(PlanErrors, NameTheArgument) {
  const auto p = Partition::make(Rows{0, 100, 300}, 2, Layout::kContiguous);
  const auto message = [&](int rank, auto change) {
    PlanOptions options;
    change(options);
    return Plan::make(*p, rank, options).status().message();
  };
  const auto none = [](PlanOptions&) {};
  EXPECT_EQ(message(2, none), "rank: expected 0 to 1, got 2");
  EXPECT_EQ(message(-1, none), "rank: expected 0 to 1, got -1");
  EXPECT_EQ(message(0, [](auto& o) { o.heads_v = 0; }), "heads_v: expected at least 1, got 0");
  EXPECT_EQ(message(0, [](auto& o) { o.dim_k = 0; }), "dim_k: expected at least 1, got 0");
  EXPECT_EQ(message(0, [](auto& o) { o.dim_v = -1; }), "dim_v: expected at least 1, got -1");
  EXPECT_EQ(message(0, [](auto& o) { o.workers = 0; }), "workers: expected at least 1, got 0");
  EXPECT_EQ(message(0, [](auto& o) { o.tile = 65; }),
            "tile: expected 0 or a multiple of 64, got 65");
  // Every rank says the same, also the one whose own fragments fit.
  for (const int rank : {0, 1}) {
    EXPECT_EQ(message(rank, [](auto& o) { o.tile = 64; }),
              "tile: expected every fragment to start at a multiple of 64 tokens of its document, "
              "got offset 50 of document 1 in fragments[1][0]");
  }
}

TEST(PlanSpeed, HundredThousandDocumentsOver64Ranks) {
  Rows cu{0};
  for (int64_t i = 0; i < 100'000; ++i) cu.push_back(cu.back() + 100 + i % 700);
  const auto p = Partition::make(cu, 64, Layout::kZigzag);
  const auto start = std::chrono::steady_clock::now();
  const Plan plan = planned(*p, 5, with(48, 132));
  const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
  RecordProperty("ms", std::to_string(ms.count()));
  EXPECT_LT(ms.count(), 5'000);  // a bound against quadratic work, not a benchmark
}

}  // namespace
}  // namespace gdn
