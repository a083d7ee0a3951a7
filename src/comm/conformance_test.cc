// The suite over the communicators of one process: single, threads, and NCCL's calls over a
// stand-in of libnccl that works on host memory (fake_nccl.cc).
#include "comm/conformance.h"

#include <cstdlib>
#include <filesystem>
#include <thread>

namespace gdn {
namespace {

using conformance::check_all_to_all;
using conformance::Conformance;
using conformance::HostRank;
using conformance::Kind;
using conformance::on_ranks;
using conformance::OneProcess;
using conformance::Ranks;
using conformance::World;
using std::chrono::milliseconds;

std::unique_ptr<World> make_single() {
  Ranks one;
  one.push_back(make_single_communicator());
  return std::make_unique<OneProcess>(std::move(one));
}

// Before the first look for NCCL in this process.
void use_fake_nccl() { ::setenv("GDN_NCCL_LIBRARY", FAKE_NCCL, 1); }

// NCCL ranks that agree through thread ranks.
class Nccl final : public OneProcess {
 public:
  Nccl(Ranks host, Ranks nccl) : OneProcess(std::move(nccl)), host_(std::move(host)) {}
  bool compares_counts() const override { return false; }

 private:
  Ranks host_;
};

std::unique_ptr<World> make_nccl(int size) {
  use_fake_nccl();
  Ranks host = make_thread_communicators(size), nccl(size);
  on_ranks(host, [&](Communicator& comm) {
    auto made = make_nccl_communicator(comm);
    EXPECT_TRUE(made) << made.status().message();
    if (made) nccl[comm.rank()] = std::move(*made);
  });
  for (const auto& rank : nccl) {
    if (rank == nullptr) return nullptr;
  }
  return std::make_unique<Nccl>(std::move(host), std::move(nccl));
}

INSTANTIATE_TEST_SUITE_P(Single, Conformance, testing::Values(Kind{"single", make_single}));

std::vector<Kind> kinds(const std::string& name, std::unique_ptr<World> (*make)(int)) {
  std::vector<Kind> all;
  for (int size : {1, 2, 3, 5, 8}) {
    all.push_back({name + "_" + std::to_string(size), [=] { return make(size); }});
  }
  return all;
}
std::unique_ptr<World> make_threads(int size) {
  return std::make_unique<OneProcess>(make_thread_communicators(size));
}
INSTANTIATE_TEST_SUITE_P(Threads, Conformance, testing::ValuesIn(kinds("threads", make_threads)));
INSTANTIATE_TEST_SUITE_P(Nccl, Conformance, testing::ValuesIn(kinds("nccl", make_nccl)));

TEST(ThreadCommunicator, ARankThatNeverComesIsATimeoutNotAHang) {
  auto ranks = make_thread_communicators(3, milliseconds(50));
  on_ranks(ranks, [](Communicator& comm) {
    if (comm.rank() == 2) std::this_thread::sleep_for(milliseconds(200));  // late
    const Status status = comm.agree({});
    EXPECT_EQ(status.code(), ErrorCode::kPeerFailed);
    EXPECT_EQ(status.message(), "rank 2 did not arrive within 50 ms");
  });
  on_ranks(ranks, [](Communicator& comm) {  // and the next call works
    HostRank rank(comm);
    check_all_to_all(rank);
  });
}

TEST(ThreadCommunicator, ARankThatLeavesEndsTheOthersAtOnce) {
  auto ranks = make_thread_communicators(3);
  ranks[1].reset();
  std::vector<std::jthread> threads;
  for (int r : {0, 2}) {
    threads.emplace_back([&, r] {
      const Status status = ranks[r]->agree({});
      EXPECT_EQ(status.code(), ErrorCode::kPeerFailed);
      EXPECT_EQ(status.message(), "rank 1 left before the others were done");
    });
  }
}

// The fake's communicators carry their own error; a real one is set by its watchdog.
TEST(NcclCommunicator, AnEarlierFailureIsReportedBeforeTheNextCollective) {
  use_fake_nccl();
  ::setenv("FAKE_NCCL_ASYNC_ERROR", "6", 1);  // ncclRemoteError
  auto host = make_single_communicator();
  auto made = make_nccl_communicator(*host);
  ASSERT_TRUE(made) << made.status().message();
  const std::vector<int64_t> bytes = {4};
  int value = 1, got = 0;
  const Status status = (*made)->all_gather(&value, &got, bytes, {});
  ::unsetenv("FAKE_NCCL_ASYNC_ERROR");
  EXPECT_EQ(status.code(), ErrorCode::kPeerFailed);
  EXPECT_EQ(status.message(), "an earlier collective: fake error 6");
}

TEST(NcclCommunicator, AbandonedItGivesPeerFailed) {
  use_fake_nccl();
  auto host = make_single_communicator();
  auto made = make_nccl_communicator(*host);
  ASSERT_TRUE(made) << made.status().message();
  (*made)->abandon();
  (*made)->abandon();
  const std::vector<int64_t> bytes = {4};
  int value = 1, got = 0;
  for (const Status& status : {(*made)->all_gather(&value, &got, bytes, {}),
                               (*made)->all_to_all(&value, bytes, &got, bytes, {})}) {
    EXPECT_EQ(status.code(), ErrorCode::kPeerFailed);
    EXPECT_EQ(status.message(), "nccl: another rank is gone");
  }
}

TEST(FakeNccl, ItsFolderGoesWithItsLastRank) {
  const char* given = std::getenv("TMPDIR");
  const std::string before = given != nullptr ? given : "";
  std::string folder = (std::filesystem::temp_directory_path() / "conformance_XXXXXX").string();
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  ::setenv("TMPDIR", folder.c_str(), 1);
  auto world = make_nccl(2);
  given != nullptr ? ::setenv("TMPDIR", before.c_str(), 1) : ::unsetenv("TMPDIR");
  EXPECT_FALSE(std::filesystem::is_empty(folder));
  world.reset();
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

TEST(NcclCommunicator, NullIsRefused) {
  use_fake_nccl();
  auto host = make_thread_communicators(3);
  on_ranks(host, [](Communicator& comm) {
    const auto made = make_nccl_communicator(nullptr, &comm);
    ASSERT_FALSE(made);
    EXPECT_EQ(made.status().message(), "nccl_comm: expected an ncclComm_t, got null");
  });
}

}  // namespace
}  // namespace gdn
