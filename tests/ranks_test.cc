// Context parallelism against one rank: every layout, any W, documents that start and end anywhere,
// both exchanges, saved and recomputed, and the mode that does not depend on W at all.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "check/run_batch.h"
#include "compare_results.h"

namespace gdn {
namespace {

struct Case {
  std::string backend;
  DType operand;
  Layout layout;
  int world_size;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << fmt::format("{} {} {} W{}", c.backend, to_string(c.operand), to_string(c.layout),
                      c.world_size);
}

BatchSpec small_spec(const std::string& backend, DType operand) {
  BatchSpec spec;
  spec.documents = {1, 0, 63, 200, 64, 65, 3, 517, 0, 2};
  spec.operand = operand;
  spec.heads_qk = 2;
  spec.heads_v = 4;
  spec.dim_k = backend == "reference" ? 8 : 64;
  spec.dim_v = backend == "reference" ? 6 : 64;
  spec.initial_state = spec.dfinal_state = true;
  spec.gates = "slow";  // states that matter across cuts
  return spec;
}

BatchResult must_run(const Batch& batch, const RunOptions& options) {
  auto result = run_batch(batch, options);
  EXPECT_TRUE(result) << result.status().message();
  return result ? std::move(*result) : BatchResult{};
}

RunOptions options_for(const Case& c) {
  RunOptions options;
  options.world_size = c.world_size;
  options.layout = c.layout;
  options.context.backend = c.backend;
  return options;
}

class Ranks : public testing::TestWithParam<Case> {};

TEST_P(Ranks, EqualOneReferenceRank) {
  const Case& c = GetParam();
  const Batch batch = *make_batch(small_spec(c.backend, c.operand));
  RunOptions one;
  one.context.backend = "reference";
  const BatchResult want = must_run(widen(batch), one);
  for (auto policy :
       {ExchangePolicy::kAuto, ExchangePolicy::kAllGather, ExchangePolicy::kAllToAll}) {
    RunOptions options = options_for(c);
    options.context.exchange = policy;
    const BatchResult got = must_run(batch, options);
    EXPECT_EQ(got.backend, c.backend);
    expect_results_close(got, want, batch.cu_seqlens, c.operand);
  }
}

TEST_P(Ranks, RecomputedBackwardEqualsSavedBitwise) {
  const Case& c = GetParam();
  const Batch batch = *make_batch(small_spec(c.backend, c.operand));
  RunOptions options = options_for(c);
  const BatchResult saved = must_run(batch, options);
  options.keep_saved = false;
  expect_bitwise_equal(must_run(batch, options), saved);
}

std::vector<Case> cases() {
  std::vector<Case> all;
#ifdef __SANITIZE_THREAD__
  const std::vector<int> world_sizes = {3};  // ten times slower, and races do not need more
#else
  const std::vector<int> world_sizes = {1, 2, 3, 4, 5, 8};
#endif
  for (Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument}) {
    for (int world_size : world_sizes) {
      all.push_back({"reference", DType::kFloat64, layout, world_size});
      all.push_back({"cpu", DType::kFloat64, layout, world_size});
      all.push_back({"cpu", DType::kFloat32, layout, world_size});
      all.push_back({"cpu", DType::kBFloat16, layout, world_size});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Ranks, testing::ValuesIn(cases()));

class Tile : public testing::TestWithParam<std::string> {};

TEST_P(Tile, ResultsAreBitwiseIndependentOfTheWorldSize) {
  BatchSpec spec = small_spec(GetParam(), DType::kFloat32);
  spec.documents = {1024, 0, 128, 640, 100, 384};  // a whole number of tiles but for the ends
  const Batch batch = *make_batch(spec);
  RunOptions options;
  options.context.backend = GetParam();
  options.context.tile = 128;
  const BatchResult one = must_run(batch, options);

  for (int world_size : {2, 3, 4}) {
    for (auto policy : {ExchangePolicy::kAllGather, ExchangePolicy::kAllToAll}) {
      RunOptions many = options;
      many.context.exchange = policy;
      many.layout = Layout::kExplicit;
      many.fragments.assign(world_size, {});
      int64_t piece = 0;  // tiles dealt out to the ranks in a scattered order
      for (int64_t doc = 0; doc < batch.num_documents(); ++doc) {
        const int64_t length = batch.cu_seqlens[doc + 1] - batch.cu_seqlens[doc];
        for (int64_t at = 0; at < length; at += 128, ++piece) {
          many.fragments[(piece * 7 + doc) % world_size].push_back(
              {doc, at, std::min<int64_t>(128, length - at)});
        }
      }
      expect_bitwise_equal(must_run(batch, many), one);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Tile, testing::Values("reference", "cpu"));

TEST(Ranks, RaggedExplicitFragmentsWithEmptyRanks) {
  BatchSpec spec = small_spec("cpu", DType::kFloat32);
  spec.documents = {300, 1, 0, 129};
  const Batch batch = *make_batch(spec);
  RunOptions one;
  one.context.backend = "reference";
  const BatchResult want = must_run(widen(batch), one);
  RunOptions options;
  options.context.backend = "cpu";
  options.layout = Layout::kExplicit;
  // Rank 1 holds nothing; rank 3 holds the tail of 0, all of 1 and the head of 3; ends at -1, 0,
  // +1.
  options.fragments = {{{3, 127, 2}, {0, 0, 1}},
                       {},
                       {{0, 64, 65}, {3, 64, 63}, {0, 1, 63}, {0, 130, 0}},
                       {{0, 129, 171}, {1, 0, 1}, {3, 0, 64}},
                       {{2, 0, 0}}};
  for (auto policy : {ExchangePolicy::kAllGather, ExchangePolicy::kAllToAll}) {
    options.context.exchange = policy;
    expect_results_close(must_run(batch, options), want, batch.cu_seqlens, DType::kFloat32);
  }
}

TEST(Ranks, OneDocumentsChangeLeavesTheOthersBitwise) {
  BatchSpec spec = small_spec("cpu", DType::kFloat32);
  const Batch before = *make_batch(spec);
  Batch after = *make_batch(spec);
  const int64_t doc = 3;
  const auto change = [&](HostTensor& t) {
    for (int64_t i = after.cu_seqlens[doc] * t.view.stride[0];
         i < after.cu_seqlens[doc + 1] * t.view.stride[0]; ++i) {
      t.as<float>()[i] *= 0.5f;
    }
  };
  for (HostTensor* t : {&after.q, &after.k, &after.v, &after.g, &after.d_o}) change(*t);
  for (int world_size : {1, 3}) {
    RunOptions options;
    options.world_size = world_size;
    options.layout = Layout::kZigzag;
    options.context.backend = "cpu";
    const BatchResult a = must_run(before, options), b = must_run(after, options);
    for (const ResultTensor& t : kResultTensors) {
      if (t.rows != ResultTensor::Rows::kTokens) continue;
      const HostTensor &x = a.*t.member, &other = b.*t.member;
      const int64_t row = x.view.stride[0];
      for (int64_t i = 0; i < x.view.numel(); ++i) {
        const int64_t token = i / row;
        if (token >= before.cu_seqlens[doc] && token < before.cu_seqlens[doc + 1]) continue;
        ASSERT_EQ(x.as<float>()[i], other.as<float>()[i]) << t.name << " row " << token;
      }
    }
  }
}

// A rank whose call is wrong: all get the error, none hangs, and the next call works.
TEST(Ranks, OneRanksBadArgumentIsEverybodysError) {
  const std::vector<int64_t> cu = {0, 100};
  auto partition = *Partition::make(cu, 3, Layout::kContiguous);
  auto communicators = make_thread_communicators(3);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      Problem problem{partition.local_tokens(rank), 1, 2, 64, 64, DType::kFloat32, {}, {}};
      Problem wrong = problem;
      if (rank == 1) wrong.heads_v = 3, wrong.heads_qk = 2;
      auto refused = Context::make(partition, *communicators[rank], wrong);
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.status().message(),
                "rank 1: v: expected HV to be a multiple of H=2 (of q and k), got HV=3");
      wrong = problem;
      wrong.options.allow_neg_eigval = rank == 0;
      refused = Context::make(partition, *communicators[rank], wrong);
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.status().message().find("rank 0: allow_neg_eigval: expected only with"),
                0u);
      auto differing = problem;
      if (rank == 2) differing.options.qk_l2norm = true;
      refused = Context::make(partition, *communicators[rank], differing);
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.status().code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(refused.status().message(),
                "options (norm, gate, sigmoid, negative eigenvalues): differs between rank 0 and "
                "rank 2");
      differing = problem;
      if (rank > 0) differing.operand = DType::kBFloat16;
      refused = Context::make(partition, *communicators[rank], differing);
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.status().message(),
                "dtype of q, k, v: differs between rank 0 and rank 1, 2");

      auto context = Context::make(partition, *communicators[rank], problem);
      ASSERT_TRUE(context) << context.status().message();
      const int64_t T = problem.tokens;
      HostTensor q(DType::kFloat32, {T, 1, 64}), v(DType::kFloat32, {T, 2, 64}),
          g(DType::kFloat32, {T, 2}), o(DType::kFloat32, {T, 2, 64});
      HostTensor short_o(DType::kFloat32, {T - 1, 2, 64});
      AlignedBuffer workspace(context->forward_workspace_bytes());
      ForwardArgs args{{q.view, q.view, v.view, g.view, g.view, {}, {}}, {}, o.view, {}};
      const Memory memory{workspace.data(), workspace.bytes()};
      if (rank == 0) args.o = short_o.view;
      Status status = forward(*context, args, memory);
      EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(status.message(), "rank 0: o: expected [T=33, HV=2, V=64], got [32, 2, 64]");
      args.o = o.view;
      status = forward(*context, args, rank == 2 ? Memory{workspace.data(), 1} : memory);
      EXPECT_EQ(status.code(), ErrorCode::kWorkspaceTooSmall);
      status = forward(*context, args, memory);
      EXPECT_TRUE(status) << status.message();
    });
  }
}

// Options of a run that differ on one rank: an error on all that names the option, before they hand
// each other anything.
TEST(Ranks, OneRanksOtherOptionIsNamedOnAll) {
  const BatchSpec spec = small_spec("cpu", DType::kFloat32);
  const Batch batch = *make_batch(spec);
  BatchSpec forward_spec = spec;
  forward_spec.backward = forward_spec.dfinal_state = false;
  const Batch forward_only = *make_batch(forward_spec);
  RunOptions options = options_for({"cpu", DType::kFloat32, Layout::kContiguous, 3});
  auto communicators = make_thread_communicators(3);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator& comm = *communicators[rank];
      const auto place = make_host_place();
      const auto run = [&](const Batch& mine, const RunOptions& how) {
        return run_batch(mine, how, comm, comm, *place).status();
      };
      const bool odd = rank == 1;
      const auto expect_named = [&](const Status& status, const std::string& what) {
        EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
        EXPECT_EQ(status.message(), what + ": differs between rank 0 and rank 1");
        EXPECT_EQ(comm.bytes_sent(), 0);
      };
      RunOptions other = options;
      if (odd) other.context.backend = "reference";
      expect_named(run(batch, other), "backend");
      other = options;
      other.keep_saved = !odd;
      expect_named(run(batch, other), "backward from a saved set (--recompute)");
      expect_named(run(odd ? forward_only : batch, options),
                   "forward alone or also backward (--forward-only)");
      const Status same = run(batch, options);
      EXPECT_TRUE(same) << same.message();
      EXPECT_TRUE(run(forward_only, other)) << "no backward, so no saved set to differ in";
    });
  }
}

// The same bits from ranks that have places of their own, `through_host` or over NCCL's calls (a
// stand-in of the library on host memory).
void expect_bits_of_threads(bool through_host) {
  ::setenv("GDN_NCCL_LIBRARY", FAKE_NCCL, 1);
  const Batch batch = *make_batch(small_spec("cpu", DType::kBFloat16));
  for (Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument}) {
    for (auto policy : {ExchangePolicy::kAllGather, ExchangePolicy::kAllToAll}) {
      RunOptions options = options_for({"cpu", DType::kBFloat16, layout, 3});
      options.through_host = through_host;
      options.context.exchange = policy;
      const BatchResult want = must_run(batch, options);
      options.place = [](int) -> Result<std::unique_ptr<Place>> { return make_host_place(); };
      expect_bitwise_equal(must_run(batch, options), want);
      options.place = [](int rank) -> Result<std::unique_ptr<Place>> {
        if (rank == 1) return Status(ErrorCode::kDevice, "no such device");
        return make_host_place();
      };
      const auto refused = run_batch(batch, options);
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.status().message(), "rank 1: no such device");
    }
  }
}
TEST(Ranks, NcclRanksEqualThreadRanksBitwise) { expect_bits_of_threads(false); }
TEST(Ranks, RanksThroughHostMemoryEqualThreadRanksBitwise) { expect_bits_of_threads(true); }

// What a pass hands to other ranks is what comm_bytes says.
TEST(Ranks, CommBytesAreExact) {
  for (auto policy : {ExchangePolicy::kAllGather, ExchangePolicy::kAllToAll}) {
    const Batch batch = *make_batch(small_spec("cpu", DType::kFloat32));
    auto partition = *Partition::make(batch.cu_seqlens, 3, Layout::kZigzag);
    auto communicators = make_thread_communicators(3);
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        Problem problem = batch.problem;
        problem.tokens = partition.local_tokens(rank);
        ContextOptions options;
        options.exchange = policy;
        auto context = Context::make(partition, *communicators[rank], problem, options);
        ASSERT_TRUE(context) << context.status().message();
        const int64_t T = problem.tokens;
        HostTensor q(DType::kFloat32, {T, 2, 64}), v(DType::kFloat32, {T, 4, 64}),
            g(DType::kFloat32, {T, 4}), o(DType::kFloat32, {T, 4, 64});
        AlignedBuffer workspace(context->forward_workspace_bytes());
        ForwardArgs args{{q.view, q.view, v.view, g.view, g.view, {}, {}}, {}, o.view, {}};
        ASSERT_TRUE(forward(*context, args, {workspace.data(), workspace.bytes()}));
        EXPECT_EQ(communicators[rank]->bytes_sent(), context->comm_bytes(false));
      });
    }
  }
}

}  // namespace
}  // namespace gdn
