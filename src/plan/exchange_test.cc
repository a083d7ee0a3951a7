// The fold programs of all ranks, run with simulated collectives, against the plain recurrence.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "plan/partition_property.h"
#include "plan/plan_simulator.h"

namespace gdn {
namespace {

std::vector<uint64_t> seeds_for(int64_t documents) {
  std::vector<uint64_t> seeds;
  for (int64_t doc = 0; doc < documents; ++doc) seeds.push_back(100 + doc);
  return seeds;
}

// Sums of n terms of order 1 in fp64, walked in another order: about n * 2^-53 for n <= 40,000.
constexpr double kTolerance = 1e-10;

void expect_close(const std::map<BoundaryKey, std::vector<double>>& got,
                  const std::map<BoundaryKey, std::vector<double>>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [key, values] : got) {
    const auto& wanted = expected.at(key);
    ASSERT_EQ(values.size(), wanted.size());
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_LE(std::abs(values[i] - wanted[i]), kTolerance * (1 + std::abs(wanted[i])))
          << "document " << key.doc << ", token " << key.token << ", element " << i;
    }
  }
}

void expect_recurrence(const Partition& partition, const PlanOptions& options) {
  const auto seeds = seeds_for(partition.num_documents());
  const Boundaries got = simulate(partition, options, seeds);
  ASSERT_EQ(got.error, "");
  const Boundaries expected = recurrence(partition, options, seeds, got);
  expect_close(got.forward, expected.forward);
  expect_close(got.backward, expected.backward);
}

constexpr ExchangePolicy kPolicies[] = {ExchangePolicy::kAllGather, ExchangePolicy::kAllToAll};

// Short documents, every layout, W up to 64, fewer heads than ranks.
TEST(Exchange, ShortDocumentsFollowTheRecurrence) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    const auto partition = make_case(draw_case(seed));
    ASSERT_TRUE(partition.is_ok());
    PlanOptions options;
    options.heads_v = 1 + seed % 5;
    options.dim_k = 1 + seed % 3;
    options.dim_v = 1 + seed / 3 % 3;
    options.exchange = kPolicies[seed % 2];
    expect_recurrence(*partition, options);
  }
}

// Documents long enough to be cut in several segments, whole or crossing.
TEST(Exchange, SegmentedDocumentsFollowTheRecurrence) {
  constexpr int64_t kLengths[] = {0, 1, 64, 65, 2048, 4096, 6000, 9000, 12345};
  constexpr int kWorldSizes[] = {1, 2, 3, 5, 8};
  int64_t cut = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    PartitionCase drawn;
    drawn.cu_seqlens = {0};
    for (int i = 0; i < 3; ++i) {
      drawn.cu_seqlens.push_back(drawn.cu_seqlens.back() +
                                 kLengths[random() % std::size(kLengths)]);
    }
    const auto partition =
        make_case(redraw_case(drawn, random(), kWorldSizes[random() % std::size(kWorldSizes)], 1));
    ASSERT_TRUE(partition.is_ok());
    PlanOptions options;
    options.heads_v = 1 + seed % 3;
    options.dim_k = 2;
    options.dim_v = 1 + seed % 2;
    options.workers = 16;
    options.exchange = kPolicies[seed / 2 % 2];
    expect_recurrence(*partition, options);
    for (int rank = 0; rank < partition->world_size(); ++rank) {
      const auto plan = Plan::make(*partition, rank, options);
      cut += plan->segments.size() > partition->fragments(rank).size();
    }
  }
  EXPECT_GT(cut, 20);  // the case is what it says
}

TEST(Exchange, TileModeIsBitwiseIndependentOfTheRanks) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const int64_t tile = kChunk * (1 + seed % 2);
    PlanOptions options;
    options.heads_v = 1 + seed % 3;
    options.dim_k = 2;
    options.dim_v = 2;
    options.tile = tile;
    PartitionCase drawn = draw_case(seed, tile);
    for (int64_t& token : drawn.cu_seqlens) token = token / 4;
    const auto one = Partition::make(drawn.cu_seqlens, 1, Layout::kContiguous);
    const auto seeds = seeds_for(one->num_documents());
    const Boundaries expected = simulate(*one, options, seeds);
    ASSERT_EQ(expected.error, "");
    for (const int world_size : {2, 3, 8}) {
      const auto many = make_case(redraw_case(drawn, seed * 10 + world_size, world_size, tile));
      ASSERT_TRUE(many.is_ok()) << many.status().message();
      options.exchange = kPolicies[(seed + world_size) % 2];
      const Boundaries got = simulate(*many, options, seeds);
      ASSERT_EQ(got.error, "");
      EXPECT_EQ(got.forward, expected.forward);
      EXPECT_EQ(got.backward, expected.backward);
    }
  }
}

TEST(Exchange, NeighboursInThePackDoNotMatter) {
  PlanOptions options;
  options.dim_k = 2;
  options.dim_v = 2;
  options.heads_v = 2;
  options.workers = 16;
  const int64_t n = 10000, m = 5001;
  const auto alone =
      Partition::make_explicit(std::vector<int64_t>{0, n}, {{{0, 0, m}}, {{0, m, n - m}}});
  const auto packed = Partition::make_explicit(
      std::vector<int64_t>{0, 100, 100 + n, 5000 + n},
      {{{0, 0, 50}, {1, 0, m}, {2, 100, 4800}}, {{2, 0, 100}, {1, m, n - m}, {0, 50, 50}}});
  ASSERT_TRUE(alone.is_ok() && packed.is_ok());
  const Boundaries a = simulate(*alone, options, {7});
  Boundaries b = simulate(*packed, options, {8, 7, 9});
  ASSERT_EQ(a.error + b.error, "");
  ASSERT_GT(a.forward.size(), 2u);
  for (const auto& [key, values] : a.forward) EXPECT_EQ(b.forward.at({1, key.token}), values);
  for (const auto& [key, values] : a.backward) EXPECT_EQ(b.backward.at({1, key.token}), values);
}

}  // namespace
}  // namespace gdn
