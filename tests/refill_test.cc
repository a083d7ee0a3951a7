// Contexts of a capacity on the CPU: other packings by refilling, bit for bit as contexts of these
// packings alone; over ranks; what does not fit is everybody's error and changes nothing.
#include <gtest/gtest.h>

#include <thread>

#include "check/run_batch.h"
#include "compare_results.h"

namespace gdn {
namespace {

constexpr int64_t kTokens = 420, kDocuments = 6;

const std::vector<std::vector<int64_t>> kPackings = {
    {420}, {100, 1, 0, 150, 64, 105}, {0, 0, 33}, {}, {64, 64, 128}};

std::vector<int64_t> cu_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> cu{0};
  for (int64_t n : lengths) cu.push_back(cu.back() + n);
  return cu;
}

// The packing with all rows and states of the capacity.
Batch batch_of(const std::vector<int64_t>& lengths, int64_t documents, DType operand) {
  BatchSpec spec;
  spec.documents = lengths;
  spec.documents.resize(static_cast<size_t>(documents), 0);
  spec.slack = kTokens - cu_of(lengths).back();
  spec.heads_qk = 1;
  spec.heads_v = 2;
  spec.dim_k = spec.dim_v = 32;
  spec.operand = operand;
  spec.gates = "slow";
  spec.options.qk_l2norm = true;
  spec.options.gate_in_kernel = true;
  spec.options.beta_sigmoid = true;
  spec.initial_state = spec.dfinal_state = true;
  auto batch = make_batch(spec);
  EXPECT_TRUE(batch.is_ok()) << batch.status().message();
  return std::move(*batch);
}

BatchResult ran(const Batch& batch, const RunOptions& options) {
  auto result = run_batch(batch, options);
  EXPECT_TRUE(result.is_ok()) << result.status().message();
  return result ? std::move(*result) : BatchResult{};
}

class Refill : public testing::TestWithParam<const char*> {};

TEST_P(Refill, ServesOtherPackingsBitwise) {
  for (const int64_t tile : {0, 64}) {
    for (size_t i = 0; i < kPackings.size(); ++i) {
      SCOPED_TRACE(i);
      const Batch batch = batch_of(kPackings[i], kDocuments, DType::kFloat32);
      RunOptions options;
      options.context.backend = GetParam();
      options.context.tile = tile;
      options.keep_saved = i % 2 == 0;
      const BatchResult exact = ran(batch, options);
      options.context.max_tokens = kTokens;
      options.context.max_fragments = kDocuments;
      expect_bitwise_equal(ran(batch, options), exact);
      for (size_t first = 0; first < kPackings.size(); ++first) {
        options.made_with = cu_of(kPackings[first]);
        expect_bitwise_equal(ran(batch, options), exact);
      }
    }
  }
}

TEST_P(Refill, ServesOtherPackingsOverRanks) {
  constexpr int kRanks = 3;
  for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument}) {
    for (const auto policy : {ExchangePolicy::kAllGather, ExchangePolicy::kAllToAll}) {
      for (size_t i = 0; i < kPackings.size(); ++i) {
        SCOPED_TRACE(testing::Message() << to_string(layout) << " " << i);
        RunOptions options;
        options.context.backend = GetParam();
        options.context.exchange = policy;
        options.context.max_fragments = 2 * kDocuments;
        options.world_size = kRanks;
        options.layout = layout;
        options.keep_saved = i % 2 == 0;
        const Batch batch =
            batch_of(kPackings[i], kRanks * options.context.max_fragments, DType::kFloat32);
        RunOptions alone = options;
        alone.context.max_fragments = 0;
        const BatchResult exact = ran(batch, alone);
        options.context.max_tokens = kTokens / kRanks + 10;
        options.made_with = cu_of(kPackings[(i + 1) % kPackings.size()]);
        expect_bitwise_equal(ran(batch, options), exact);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Refill, testing::Values("cpu", "reference"),
                         [](const auto& one) { return std::string(one.param); });

Problem problem_of(int64_t tokens) {
  Problem problem;
  problem.tokens = tokens;
  problem.heads_qk = problem.heads_v = 1;
  problem.dim_k = problem.dim_v = 16;
  return problem;
}

struct Bytes {
  int64_t resident, forward, backward, recompute, saved, sent;
  bool operator==(const Bytes&) const = default;
};

Bytes bytes_of(const Context& c) {
  return {c.resident_bytes(),
          c.forward_workspace_bytes(),
          c.backward_workspace_bytes(true),
          c.backward_workspace_bytes(false),
          c.saved_bytes(),
          c.comm_bytes(false) + c.comm_bytes(true)};
}

TEST(RefillBytes, DoNotDependOnThePacking) {
  ContextOptions options;
  options.max_tokens = 300;
  options.max_fragments = 4;
  for (const int64_t tile : {0, 64}) {
    options.tile = tile;
    const auto first = *Partition::make(std::vector<int64_t>{0, 300}, 1, Layout::kContiguous);
    auto context = Context::make(first, 0, problem_of(300), options);
    ASSERT_TRUE(context) << context.status().message();
    const Bytes bytes = bytes_of(*context);
    for (const auto& cu : {std::vector<int64_t>{0, 0, 1}, {0}, {0, 100, 200, 299, 300}}) {
      ASSERT_TRUE(context->refill(*Partition::make(cu, 1, Layout::kContiguous)));
      EXPECT_EQ(bytes_of(*context), bytes);
      EXPECT_EQ(context->documents(), 4);
    }
  }
}

TEST(RefillErrors, NameTheArgumentAndChangeNothing) {
  const auto at = [](std::vector<int64_t> cu, int ranks, Layout layout) {
    return *Partition::make(cu, ranks, layout);
  };
  ContextOptions options;
  options.max_tokens = 100;
  options.max_fragments = 2;
  const auto first = at({0, 60}, 1, Layout::kContiguous);
  auto context = *Context::make(first, 0, problem_of(100), options);
  const uint64_t digest = context.digest();
  const auto message = [&](const Partition& partition) {
    const Status status = context.refill(partition);
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(context.digest(), digest);
    return status.message();
  };
  EXPECT_EQ(message(at({0, 101}, 1, Layout::kContiguous)),
            "max_tokens: expected at least 101, the rows of rank 0, got 100");
  EXPECT_EQ(message(at({0, 1, 2, 3}, 1, Layout::kContiguous)),
            "max_fragments: expected at least 3, the fragments of rank 0, got 2");
  EXPECT_EQ(message(at({0, 60}, 2, Layout::kContiguous)),
            "partition: expected 1 ranks, as the context was made for, got 2");
  EXPECT_EQ(message(at({0, 60}, 1, Layout::kZigzag)),
            "partition: expected layout contiguous, as the context was made for, got zigzag");
  EXPECT_EQ(Context::make(first, 0, problem_of(99), options).status().message(),
            "q, k, v: expected at least max_tokens = 100 rows, got 99");
  auto fixed = *Context::make(first, 0, problem_of(100));
  EXPECT_EQ(fixed.refill(first).message(),
            "refill: expected a context with max_tokens and max_fragments, got one for its packing "
            "alone");
}

// Ranks that bring different packings, or one that does not fit: an error on all, and the next
// refill works.
TEST(RefillErrors, AreEverybodys) {
  auto communicators = make_thread_communicators(2);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto at = [](int64_t length) {
        return *Partition::make(std::vector<int64_t>{0, length}, 2, Layout::kContiguous);
      };
      ContextOptions options;
      options.max_tokens = 50;
      options.max_fragments = 1;
      auto context = Context::make(at(80), *communicators[rank], problem_of(50), options);
      ASSERT_TRUE(context) << context.status().message();
      const uint64_t digest = context->digest();
      EXPECT_EQ(context->refill(at(rank == 0 ? 90 : 70)).code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(context->digest(), digest);
      EXPECT_EQ(context->refill(at(rank == 0 ? 90 : 101)).message(),
                "rank 1: max_tokens: expected at least 51, the rows of rank 1, got 50");
      EXPECT_EQ(context->digest(), digest);
      EXPECT_TRUE(context->refill(at(100)));
      EXPECT_NE(context->digest(), digest);
    });
  }
}

}  // namespace
}  // namespace gdn
