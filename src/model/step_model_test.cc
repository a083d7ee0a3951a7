// The model's arithmetic by hand on small cases, its limits, and against measured runs.
#include "model/step_model.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace gdn::model {
namespace {

DeviceRates plain() {
  DeviceRates rates;
  rates.name = "plain";
  rates.forward = {
      .launch_us = 1000, .even_ns = 1e6, .walk_ns = 2e6, .chain_us = 5e3, .summary_ns = 0};
  rates.backward = rates.forward;
  rates.copy_gb_s = 1000;
  return rates;  // one worker: fragments stay whole
}
Network even(double gb_s, double latency_us) {
  Network network;
  network.host = network.between = {gb_s, latency_us};
  return network;
}

TEST(StepModel, OneRankByHand) {
  // 3 + 1 chunks, 2 heads: 8 chunk-heads; launch 1, even 8, walks max(3 * 5, 8 * 2) = 16.
  const Shape shape{{192, 10}, 1, 2, 128, 128};
  const auto step = kcp_step(shape, 1, Layout::kContiguous, plain(), even(1, 1));
  ASSERT_TRUE(step) << step.status().message();
  EXPECT_DOUBLE_EQ(step->forward.compute_ms, 1 + 8 + 16);
  EXPECT_EQ(step->forward.exchange_ms, 0);
  EXPECT_EQ(step->exchange, ExchangeKind::kNone);
  // One long walk: 10 chunks of one head, 10 * 5 above 10 * 2.
  const auto chain = kcp_step({{640}, 1, 1, 128, 128}, 1, Layout::kContiguous, plain(), even(1, 1));
  EXPECT_DOUBLE_EQ(chain->forward.compute_ms, 1 + 10 + 50);
}

TEST(StepModel, SummariesFoldsAndBytesByHand) {
  // One document over two ranks, one head of 128 x 128: 2 chunks each. Rank 0 summarises its two
  // and sends one state of 64 KiB; rank 1 folds it into its first segment.
  DeviceRates rates = plain();
  rates.forward.summary_ns = 3e6;
  rates.fold_us = 1e3;
  const Shape shape{{256}, 1, 1, 128, 128};
  Network network = even(1, 7000);
  const auto step = kcp_step(shape, 2, Layout::kContiguous, rates, network);
  ASSERT_TRUE(step) << step.status().message();
  // Forward, rank 0: 1 + 2 + max(2 * 5, 2 * 2) + 2 * 3 + folds (pack 1).
  EXPECT_DOUBLE_EQ(step->forward.compute_ms, 1 + 2 + 10 + 6 + 1);
  const double bytes_ms = 128 * 128 * 4 * 1e-6;  // at 1 GB/s
  // Either kind moves one state each way; the all-gather is one collective less.
  EXPECT_EQ(step->exchange, ExchangeKind::kAllGather);
  EXPECT_DOUBLE_EQ(step->forward.exchange_ms, 7 + bytes_ms);
  EXPECT_EQ(step->forward.sent_bytes, 128 * 128 * 4);
}

TEST(StepModel, AllToAllIsTwoCollectivesOfTheBusiestRank) {
  // Three ranks, three heads: rank 0 sends B (1 state a head), rank 1 B and M (2), rank 2 nothing;
  // one state a head comes back to ranks 1 and 2. Of a head each: rank 1 sends 2 heads * 2 states.
  const Shape shape{{192}, 3, 3, 128, 128};
  const auto step = kcp_step(shape, 3, Layout::kContiguous, plain(), even(1, 7000));
  ASSERT_TRUE(step);
  EXPECT_EQ(step->exchange, ExchangeKind::kAllToAll);
  const double state_ms = 128 * 128 * 4 * 1e-6;
  EXPECT_DOUBLE_EQ(step->forward.exchange_ms, 7 + 4 * state_ms + 7 + 2 * state_ms);
}

TEST(StepModel, NothingCrossesNothingTravels) {
  const Shape shape{{640, 640}, 1, 2, 128, 128};
  const auto two = kcp_step(shape, 2, Layout::kContiguous, plain(), even(1e-3, 1e6));
  ASSERT_TRUE(two);
  EXPECT_EQ(two->exchange, ExchangeKind::kNone);
  EXPECT_EQ(two->forward.exchange_ms, 0);
}

TEST(StepModel, HeadSplitByHand) {
  // 4 of 8 value heads, 1 of 2 key heads, half of 1,000 tokens from the other rank.
  const Shape shape{{1000}, 2, 8, 64, 64};
  DeviceRates rates = plain();
  const auto step = head_split_step(shape, 2, rates, even(10, 100));
  ASSERT_TRUE(step);
  const double in = 500.0 * (2 * 64 * 2 + 4 * (64 * 2 + 8)), out = 500.0 * 4 * 64 * 2;
  EXPECT_DOUBLE_EQ(step->forward.exchange_ms,
                   0.2 + (in + out) / 10 * 1e-6 + 4 * (in + out) / 1000 * 1e-6);
  EXPECT_EQ(step->backward.sent_bytes, static_cast<int64_t>(in + out));
  EXPECT_DOUBLE_EQ(step->forward.compute_ms, 1 + 16 * 4 + 2 * 16 * 4);
  // More ranks than heads do not help.
  const auto eight = head_split_step(shape, 8, rates, even(10, 100));
  const auto many = head_split_step(shape, 64, rates, even(10, 100));
  EXPECT_DOUBLE_EQ(many->forward.compute_ms, eight->forward.compute_ms);
}

TEST(StepModel, BeyondOneHostTheSlowerLinkCounts) {
  Network network;
  EXPECT_EQ(&network.link(8), &network.host);
  EXPECT_EQ(&network.link(9), &network.between);
}

TEST(StepModel, ZigzagSharesEvenlyWhatContiguousDoesNot) {
  // Equal tokens, but the longest walk of a contiguous rank is twice that of a zigzag rank.
  DeviceRates rates = *find_rates("cuda-portable");
  const Shape shape{{65536}, 16, 48, 128, 128};
  const auto c = kcp_step(shape, 4, Layout::kContiguous, rates, Network{});
  const auto z = kcp_step(shape, 4, Layout::kZigzag, rates, Network{});
  ASSERT_TRUE(c && z);
  EXPECT_GT(z->forward.sent_bytes, c->forward.sent_bytes);
  EXPECT_NEAR(z->total_ms() / c->total_ms(), 1, 0.1);
}

TEST(StepModel, UnknownRatesAreRefused) {
  EXPECT_EQ(find_rates("gpu").status().message(),
            "rates: expected one of cuda-portable, cuda-sm90a, got 'gpu'");
}

TEST(StepModel, SummariesThatForgetAndFoldsPerHeadByHand) {
  // One document of three heads over two ranks, 5 chunks each: rank 0 walks the last 3 of its 5
  // for a summary, 3 * 4 ms, and a fold step takes 1 + 3 * 2 ms.
  DeviceRates rates = plain();
  rates.forward.summary_chain_us = 4e3;
  rates.forget_chunks = 3;
  rates.fold_us = 1e3;
  rates.fold_head_us = 2e3;
  const Shape shape{{640}, 3, 3, 128, 128};
  const auto step = kcp_step(shape, 2, Layout::kContiguous, rates, even(1, 1));
  ASSERT_TRUE(step) << step.status().message();
  EXPECT_DOUBLE_EQ(step->forward.compute_ms, 1 + 15 + 30 + 12 + 7);
}

TEST(StepModel, AWorkersShareOfAPackIsTheLeastSegment) {
  // 8 workers, one head: pieces of at least 16 / 8 chunks, so 12 chunks are six segments, not 12.
  DeviceRates rates = plain();
  rates.workers = 8;
  rates.segments_per_worker = 1;
  rates.segment_chunks = 1;
  rates.pack_chunks = 16;
  const Shape shape{{768}, 1, 1, 128, 128};
  const auto step = kcp_step(shape, 1, Layout::kContiguous, rates, Network{});
  ASSERT_TRUE(step);
  EXPECT_DOUBLE_EQ(step->forward.compute_ms, 1 + 12 + std::max(2 * 5, 12 * 2));
}

const std::vector<int64_t> kM = {12000, 9000, 6000, 3768, 2000}, kN = {2049, 3001, 3142};
const std::vector<int64_t> kH = {49152, 32768, 28672, 20480}, kI = {24576, 16384, 14336, 10240};
const std::vector<int64_t> kD = {254976};

// docs/performance.md: one H200, cold L2, pre-norm, model gates. 0: not noted, or an earlier
// kernel.
TEST(StepModel, ReproducesMeasuredRunsOfOneGpu) {
  struct Measured {
    const char* rates;
    std::vector<int64_t> documents;
    int64_t heads_qk, heads_v;
    double forward_ms, both_ms, share;
  };
  for (const Measured& run : {Measured{"cuda-portable", kM, 16, 48, 1.435, 6.233, 0.15},
                              Measured{"cuda-portable", kN, 2, 6, 0.211, 0.722, 0.15},
                              Measured{"cuda-portable", kD, 16, 48, 0, 53.5, 0.15},
                              Measured{"cuda-sm90a", kM, 16, 48, 0.545, 2.690, 0.05},
                              Measured{"cuda-sm90a", kN, 2, 6, 0.091, 0.286, 0.05},
                              Measured{"cuda-sm90a", kH, 16, 48, 2.457, 11.350, 0.05},
                              Measured{"cuda-sm90a", kI, 16, 48, 1.266, 5.657, 0.05},
                              Measured{"cuda-sm90a", kD, 16, 48, 4.45, 20.9, 0.05}}) {
    const auto step = kcp_step({run.documents, run.heads_qk, run.heads_v, 128, 128}, 1,
                               Layout::kContiguous, *find_rates(run.rates), Network{});
    ASSERT_TRUE(step);
    if (run.forward_ms > 0) {
      EXPECT_NEAR(step->forward.total_ms() / run.forward_ms, 1, run.share) << run.rates;
    }
    if (run.both_ms > 0) {
      EXPECT_NEAR(step->total_ms() / run.both_ms, 1, run.share) << run.rates << " " << run.both_ms;
    }
  }
}

// docs/performance.md: two H200s of one host over NCCL. Zigzag per document at M is slower by a
// fifth than the model says (docs/scaling.md).
TEST(StepModel, ReproducesMeasuredRunsOfTwoGpus) {
  struct Measured {
    std::vector<int64_t> documents;
    int64_t heads_qk, heads_v;
    Layout layout;
    double forward_ms, both_ms, share;
  };
  for (const Measured& run : {Measured{kM, 16, 48, Layout::kContiguous, 0.466, 1.695, 0.12},
                              Measured{kM, 16, 48, Layout::kZigzag, 0.459, 1.769, 0.1},
                              Measured{kM, 16, 48, Layout::kZigzagPerDocument, 0.687, 2.230, 0.22},
                              Measured{kN, 2, 6, Layout::kContiguous, 0.116, 0.350, 0.1},
                              Measured{kN, 2, 6, Layout::kZigzag, 0.117, 0.351, 0.17},
                              Measured{kN, 2, 6, Layout::kZigzagPerDocument, 0.144, 0.391, 0.17}}) {
    const auto step = kcp_step({run.documents, run.heads_qk, run.heads_v, 128, 128}, 2, run.layout,
                               *find_rates("cuda-sm90a"), Network{});
    ASSERT_TRUE(step);
    EXPECT_NEAR(step->forward.total_ms() / run.forward_ms, 1, run.share) << run.both_ms;
    EXPECT_NEAR(step->total_ms() / run.both_ms, 1, run.share) << run.both_ms;
  }
}

}  // namespace
}  // namespace gdn::model
