// Saved sets with what `prepare` made: the bits of a backward that prepares again, from memory that
// the backward only reads, so that several may have it at once.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "check/run_batch.h"
#include "compare_results.h"

namespace gdn {
namespace {

BatchSpec small_spec(const std::string& backend) {
  BatchSpec spec;
  spec.documents = {1, 0, 63, 200, 65, 517};
  spec.heads_qk = 2;
  spec.heads_v = 4;
  spec.dim_k = spec.dim_v = backend == "reference" ? 8 : 32;
  spec.operand = DType::kFloat32;
  spec.gates = "slow";
  spec.initial_state = spec.dfinal_state = true;
  return spec;
}

BatchResult must_run(const Batch& batch, const RunOptions& options) {
  auto result = run_batch(batch, options);
  EXPECT_TRUE(result) << result.status().message();
  return result ? std::move(*result) : BatchResult{};
}

class KeepPrepared : public testing::TestWithParam<const char*> {};

TEST_P(KeepPrepared, GivesTheSameBits) {
  for (const bool inside : {false, true}) {  // norm, gate and sigmoid
    BatchSpec spec = small_spec(GetParam());
    spec.options.qk_l2norm = spec.options.gate_in_kernel = spec.options.beta_sigmoid = inside;
    const Batch batch = *make_batch(spec);
    for (const auto& [world_size, tile] : {std::pair{1, 0}, {1, 64}, {3, 0}}) {
      SCOPED_TRACE(testing::Message() << inside << " W" << world_size << " tile " << tile);
      RunOptions options;
      options.context.backend = GetParam();
      options.context.tile = tile;
      options.world_size = world_size;
      options.layout = Layout::kZigzag;
      const BatchResult prepared_again = must_run(batch, options);
      options.context.keep_prepared = true;
      expect_bitwise_equal(must_run(batch, options), prepared_again);
      options.keep_saved = false;
      expect_bitwise_equal(must_run(batch, options), prepared_again);
    }
  }
}

TEST_P(KeepPrepared, ServesOtherPackings) {
  BatchSpec spec = small_spec(GetParam());
  spec.slack = 40;
  const Batch batch = *make_batch(spec);
  RunOptions options;
  options.context.backend = GetParam();
  const BatchResult exact = must_run(batch, options);
  options.context.keep_prepared = true;
  options.context.max_tokens = batch.problem.tokens;
  options.context.max_fragments = std::ssize(spec.documents);
  options.made_with = {0, 300, 301};
  expect_bitwise_equal(must_run(batch, options), exact);
}

INSTANTIATE_TEST_SUITE_P(Backends, KeepPrepared, testing::Values("cpu", "reference"),
                         [](const auto& one) { return std::string(one.param); });

// It is a matter of each rank's own memory.
TEST(KeepPreparedRanks, MayDiffer) {
  const Batch batch = *make_batch(small_spec("cpu"));
  RunOptions options;
  options.world_size = 3;
  options.layout = Layout::kZigzag;
  options.context.backend = "cpu";
  const BatchResult want = must_run(batch, options);
  auto communicators = make_thread_communicators(3);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      RunOptions mine = options;
      mine.context.keep_prepared = rank == 1;
      const auto place = make_host_place();
      Communicator& comm = *communicators[rank];
      const auto got = run_batch(batch, mine, comm, comm, *place);
      ASSERT_TRUE(got) << got.status().message();
      if (rank == 0) expect_bitwise_equal(*got, want);
    });
  }
}

// NaN everywhere, so that what nobody wrote shows.
struct Block {
  explicit Block(int64_t bytes) : buffer(bytes) {
    if (bytes > 0) std::memset(buffer.data(), 0xff, static_cast<size_t>(bytes));
  }
  Memory memory() { return {buffer.data(), buffer.bytes()}; }
  std::vector<unsigned char> bytes() const {
    const auto* begin = static_cast<const unsigned char*>(buffer.data());
    return {begin, begin + buffer.bytes()};
  }
  AlignedBuffer buffer;
};

// One rank's contexts of one batch, with and without; the tile cuts its documents.
struct OneRank {
  explicit OneRank(const std::string& backend) : batch(*make_batch(small_spec(backend))) {
    options.backend = backend;
    options.tile = 64;
  }
  Context context(bool keep_prepared) {
    options.keep_prepared = keep_prepared;
    return *Context::make(*Partition::make(batch.cu_seqlens, 1, Layout::kContiguous), *single,
                          batch.problem, options);
  }
  Operands operands() const {
    return {batch.q.view, batch.k.view, batch.v.view, batch.g.view, batch.beta.view, {}, {}};
  }
  ForwardArgs forward(const HostTensor& o) const {
    return {operands(), batch.initial_state.view, o.view, {}};
  }
  HostTensor like_v() const { return {DType::kFloat32, {batch.problem.tokens, 4, dim()}, 0xff}; }
  HostTensor like_q() const { return {DType::kFloat32, {batch.problem.tokens, 2, dim()}, 0xff}; }
  HostTensor like_g() const { return {DType::kFloat32, {batch.problem.tokens, 4}, 0xff}; }
  int64_t dim() const { return batch.problem.dim_k; }

  Batch batch;
  ContextOptions options;
  std::unique_ptr<Communicator> single = make_single_communicator();
};

// The gradients of a backward in memory of its own.
BatchResult backward_of(const OneRank& rank, const Context& context, const Memory* saved) {
  BatchResult out;
  out.dq = rank.like_q(), out.dk = rank.like_q(), out.dv = rank.like_v();
  out.dg = rank.like_g(), out.dbeta = rank.like_g();
  BackwardArgs args;
  args.in = rank.operands();
  args.initial_state = rank.batch.initial_state.view;
  args.d_o = rank.batch.d_o.view;
  args.dfinal_state = rank.batch.dfinal_state.view;
  args.dq = out.dq.view, args.dk = out.dk.view, args.dv = out.dv.view;
  args.dg = out.dg.view, args.dbeta = out.dbeta.view;
  Block workspace(context.backward_workspace_bytes(saved != nullptr));
  const Status status = backward(context, args, workspace.memory(), saved);
  EXPECT_TRUE(status) << status.message();
  return out;
}

TEST(KeepPreparedSet, ServesBackwardsAtOnceAndIsOnlyRead) {
  OneRank rank("cpu");
  const Context plain = rank.context(false), context = rank.context(true);
  const HostTensor o = rank.like_v(), again = rank.like_v();
  Block workspace(context.forward_workspace_bytes()), saved(context.saved_bytes());
  const Memory kept = saved.memory();
  ASSERT_TRUE(forward(context, rank.forward(o), workspace.memory(), &kept));
  const std::vector<unsigned char> before = saved.bytes();
  const BatchResult want = backward_of(rank, plain, nullptr);

  BatchResult results[2];
  {
    std::vector<std::jthread> threads;
    for (BatchResult& result : results) {
      threads.emplace_back([&] { result = backward_of(rank, context, &kept); });
    }
  }
  for (const BatchResult& result : results) expect_bitwise_equal(result, want);

  // The forward again, from the same set.
  Block other(context.forward_workspace_bytes());
  Message message;
  auto call = Call::forward_again(context, rank.forward(again), other.memory(), kept);
  ASSERT_TRUE(call) << call.status().message();
  ASSERT_TRUE(call->advance(message));
  EXPECT_EQ(message.kind, Message::Kind::kNone);
  EXPECT_EQ(std::memcmp(again.view.data, o.view.data, static_cast<size_t>(o.buffer.bytes())), 0);
  EXPECT_EQ(saved.bytes(), before);
}

TEST(KeepPreparedBytes, MoveFromTheBackwardsWorkspaceToTheSavedSet) {
  OneRank rank("cpu");
  const Context plain = rank.context(false), context = rank.context(true);
  const int64_t prepared = context.backend().prepared_bytes(context.problem(), context.plan());
  ASSERT_GT(prepared, 0);
  EXPECT_EQ(context.saved_bytes(), plain.saved_bytes() + prepared);
  EXPECT_EQ(context.backward_workspace_bytes(true),
            plain.backward_workspace_bytes(true) - prepared);
  // What may come without a saved set is as it was.
  EXPECT_EQ(context.forward_workspace_bytes(), plain.forward_workspace_bytes());
  EXPECT_EQ(context.backward_workspace_bytes(false), plain.backward_workspace_bytes(false));
  EXPECT_EQ(context.digest(), plain.digest());

  const HostTensor o = rank.like_v();
  Block workspace(context.forward_workspace_bytes()), saved(plain.saved_bytes());
  const Memory kept = saved.memory();
  EXPECT_EQ(forward(context, rank.forward(o), workspace.memory(), &kept).code(),
            ErrorCode::kWorkspaceTooSmall);
}

}  // namespace
}  // namespace gdn
