// Arms on the host: that they compute what a run of the batch computes, stage by stage too, and
// that a build's shared object is an arm like any other.
#include "bench/arm.h"

#include <gtest/gtest.h>

#include "check/run_batch.h"
#include "check/tensor_check.h"

namespace gdn::bench {
namespace {

constexpr Operation kAll[] = {
    Operation::kForward,      Operation::kBackward,   Operation::kForwardBackward,
    Operation::kCheckpoint,   Operation::kPrepare,    Operation::kSummarize,
    Operation::kFold,         Operation::kRun,        Operation::kSummarizeBackward,
    Operation::kFoldBackward, Operation::kRunBackward};

// Whether there is one, and with prepared data.
constexpr std::pair<bool, bool> kSavedSets[] = {{true, false}, {true, true}, {false, false}};

Batch batch_of(const std::vector<int64_t>& documents, bool states = false) {
  BatchSpec spec;
  spec.documents = documents;
  spec.heads_qk = 1;
  spec.heads_v = 2;
  spec.dim_k = spec.dim_v = 16;
  spec.initial_state = spec.dfinal_state = states;
  auto batch = make_batch(spec);
  EXPECT_TRUE(batch) << batch.status().message();
  return std::move(*batch);
}

ArmOptions options(const char* backend, bool keep_saved = true, const char* library = "") {
  ArmOptions made;
  made.context.backend = backend;
  made.keep_saved = keep_saved;
  made.library = library;
  return made;
}

Partition whole(const Batch& batch) {
  return *Partition::make(batch.cu_seqlens, 1, Layout::kContiguous);
}

void expect_results(const Case& what, Machine& machine, const Batch& batch) {
  const auto got = what.download(machine);
  ASSERT_TRUE(got) << got.status().message();
  const auto want = run_batch(batch, {});
  ASSERT_TRUE(want) << want.status().message();
  for (const TensorCheck& check :
       check_results(*got, *want, batch.cu_seqlens, [](const std::string&) { return Bars{}; })) {
    EXPECT_TRUE(check.bitwise) << check.tensor << " " << check.accuracy.rel_rms;
  }
}

TEST(Operations, NamesGoBothWays) {
  for (Operation operation : kAll) EXPECT_EQ(*parse_operation(to_string(operation)), operation);
  EXPECT_FALSE(parse_operation("forward"));
  EXPECT_FALSE(is_stage(Operation::kCheckpoint));
  EXPECT_TRUE(is_stage(Operation::kPrepare));
  EXPECT_FALSE(needs_backward(Operation::kRun));
  EXPECT_FALSE(needs_backward(Operation::kForward));
  EXPECT_TRUE(needs_backward(Operation::kCheckpoint));
  EXPECT_TRUE(needs_backward(Operation::kFoldBackward));
}

TEST(Operations, ProductsAreCountedAsInTheDocs) {
  constexpr double u = 2.0 * 64 * 64 * 64;
  EXPECT_EQ(products_flop(Operation::kForward, 3, 128, 128), 3 * 20 * u);
  EXPECT_EQ(products_flop(Operation::kForwardBackward, 1, 128, 128), 62 * u);
  EXPECT_EQ(products_flop(Operation::kCheckpoint, 1, 128, 128), 82 * u);
  EXPECT_EQ(products_flop(Operation::kForward, 1, 64, 128), (2 + 4 + 6) * u);
  EXPECT_EQ(products_flop(Operation::kRun, 1, 128, 128), 0);
}

TEST(OwnArm, ComputesWhatARunComputes) {
  const auto machine = make_host_machine();
  const Batch batch = batch_of({130, 0, 1, 70}, true);
  const auto what = Case::make(*machine, whole(batch), 0, batch, true);
  ASSERT_TRUE(what) << what.status().message();
  for (const auto& [keep, prepared] : kSavedSets) {
    ArmOptions saved = options("", keep);
    saved.context.keep_prepared = prepared;
    const auto arm = make_arm(*machine, *what, saved);
    ASSERT_TRUE(arm) << arm.status().message();
    EXPECT_EQ((*arm)->facts().backend, "cpu");
    for (Operation operation : {Operation::kForwardBackward, Operation::kCheckpoint}) {
      const Status status = (*arm)->call(operation);
      ASSERT_TRUE(status) << status.message();
      expect_results(*what, *machine, batch);
    }
    EXPECT_EQ((*arm)->offers(Operation::kPrepare).is_ok(), keep) << "stages want a saved set";
  }
}

TEST(OwnArm, StagesInOrderAreTheCall) {
  const auto machine = make_host_machine();
  const Batch batch = batch_of({4500, 70});
  const auto what = Case::make(*machine, whole(batch), 0, batch, true);
  ASSERT_TRUE(what) << what.status().message();
  // The tile cuts the first document, so that every stage has something to do.
  for (const bool keep_prepared : {false, true}) {
    ArmOptions tiled = options("cpu");
    tiled.context.tile = 1024;
    tiled.context.keep_prepared = keep_prepared;
    const auto arm = make_arm(*machine, *what, tiled);
    ASSERT_TRUE(arm) << arm.status().message();
    for (Operation stage : kAll) {
      if (!is_stage(stage)) continue;
      EXPECT_TRUE((*arm)->offers(stage)) << to_string(stage);
      for (int i = 0; i < 2; ++i) {
        const Status status = (*arm)->call(stage);
        ASSERT_TRUE(status) << to_string(stage) << ": " << status.message();
      }
    }
    const auto got = what->download(*machine);
    RunOptions run;
    run.context.tile = 1024;
    const auto want = run_batch(batch, run);
    ASSERT_TRUE(want) << want.status().message();
    for (const TensorCheck& check :
         check_results(*got, *want, batch.cu_seqlens, [](const std::string&) { return Bars{}; })) {
      EXPECT_TRUE(check.bitwise) << check.tensor << " " << check.accuracy.rel_rms;
    }
  }
}

TEST(OwnArm, SaysWhatThereIsNothingToTimeOf) {
  const auto machine = make_host_machine();
  Batch batch = batch_of({70});
  batch.d_o = {};
  const auto what = Case::make(*machine, whole(batch), 0, batch, false);
  ASSERT_TRUE(what);
  const auto arm = make_arm(*machine, *what, options(""));
  ASSERT_TRUE(arm) << arm.status().message();
  EXPECT_TRUE((*arm)->offers(Operation::kForward));
  EXPECT_TRUE((*arm)->offers(Operation::kPrepare));
  for (Operation operation : {Operation::kBackward, Operation::kSummarize, Operation::kFold}) {
    EXPECT_FALSE((*arm)->offers(operation)) << to_string(operation);
  }
}

TEST(OwnArm, ARankAloneRunsWithoutTheOthers) {
  const auto machine = make_host_machine();
  const Batch batch = batch_of({300, 211});
  for (int rank = 0; rank < 3; ++rank) {
    const auto partition = Partition::make(batch.cu_seqlens, 3, Layout::kZigzag);
    ASSERT_TRUE(partition);
    const auto what = Case::make(*machine, *partition, rank, batch, false);
    ASSERT_TRUE(what) << what.status().message();
    EXPECT_EQ(what->problem.tokens, partition->local_tokens(rank));
    const auto arm = make_arm(*machine, *what, options(""));
    ASSERT_TRUE(arm) << arm.status().message();
    for (Operation operation : kAll) {
      if (!(*arm)->offers(operation)) continue;
      const Status status = (*arm)->call(operation);
      EXPECT_TRUE(status) << to_string(operation) << ": " << status.message();
    }
  }
}

TEST(CaseTest, RowsOfTheSampleRepeat) {
  const auto machine = make_host_machine();
  const Batch batch = batch_of({5, 2}, true);
  const int64_t cu[] = {0, 9, 9, 16};
  const auto what =
      Case::make(*machine, *Partition::make(cu, 1, Layout::kContiguous), 0, batch, false);
  ASSERT_TRUE(what) << what.status().message();
  ASSERT_EQ(what->forward.in.g.shape[0], 16);
  for (int64_t t = 0; t < 16; ++t) {
    EXPECT_EQ(what->forward.in.g.as<float>()[2 * t], batch.g.as<float>()[2 * (t % 7)]);
  }
  ASSERT_EQ(what->forward.initial_state.shape[0], 3);
  const int64_t state = 2 * 16 * 16;
  EXPECT_EQ(what->forward.initial_state.as<float>()[2 * state], batch.initial_state.as<float>()[0]);
}

TEST(CaseTest, SampleDocuments) {
  EXPECT_EQ(sample_documents({12000, 9000}), (std::vector<int64_t>{1200, 800, 48}));
  EXPECT_EQ(sample_documents({2000, 48}), (std::vector<int64_t>{2000, 48}));
  EXPECT_EQ(sample_documents({0}), (std::vector<int64_t>{0}));
}

TEST(LibraryArm, IsTheSameThroughTheCAbi) {
  const auto machine = make_host_machine();
  const Batch batch = batch_of({130, 0, 1, 70}, true);
  const auto what = Case::make(*machine, whole(batch), 0, batch, true);
  ASSERT_TRUE(what);
  for (const auto& [keep, prepared] : kSavedSets) {
    ArmOptions saved = options("cpu", keep, GDN_C_LIBRARY);
    saved.context.keep_prepared = prepared;
    const auto arm = make_arm(*machine, *what, saved);
    ASSERT_TRUE(arm) << arm.status().message();
    EXPECT_EQ((*arm)->facts().backend, "cpu");
    EXPECT_FALSE((*arm)->offers(Operation::kRun));
    for (Operation operation : {Operation::kForwardBackward, Operation::kCheckpoint}) {
      const Status status = (*arm)->call(operation);
      ASSERT_TRUE(status) << status.message();
      expect_results(*what, *machine, batch);
    }
  }
}

TEST(LibraryArm, Refusals) {
  const auto machine = make_host_machine();
  const Batch batch = batch_of({70});
  const auto what = Case::make(*machine, whole(batch), 0, batch, false);
  ASSERT_TRUE(what);
  const auto none = make_arm(*machine, *what, options("", true, "/no/such/library.so"));
  ASSERT_FALSE(none);
  EXPECT_NE(none.status().message().find("/no/such/library.so"), std::string::npos);
  const auto other = make_arm(*machine, *what, options("", true, "libm.so.6"));
  ASSERT_FALSE(other);
  EXPECT_NE(other.status().message().find("expected the C ABI of gdn"), std::string::npos);
  const auto unknown = make_arm(*machine, *what, options("none", true, GDN_C_LIBRARY));
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.status().message().find("got 'none'"), std::string::npos);
  const auto rank =
      Case::make(*machine, *Partition::make(batch.cu_seqlens, 2, Layout::kZigzag), 0, batch, false);
  ASSERT_TRUE(rank);
  EXPECT_FALSE(make_arm(*machine, *rank, options("", true, GDN_C_LIBRARY)));
}

}  // namespace
}  // namespace gdn::bench
