// What every communicator promises: right blocks, counted bytes, the same error on every rank, no
// hang when a rank is missing, and a working next call.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "gdn/communicator.h"

namespace gdn {
namespace {

using std::chrono::milliseconds;

// Runs body(rank, communicator) on one thread per rank.
void on_ranks(std::vector<std::unique_ptr<Communicator>>& ranks,
              const std::function<void(int, Communicator&)>& body) {
  std::vector<std::jthread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] { body(static_cast<int>(r), *ranks[r]); });
  }
}

// Rank r sends (r + 2p) % 5 values to rank p, each r * 100 + p * 10 + index.
int64_t block(int from, int to) { return (from + 2 * to) % 5; }

void check_all_to_all(int rank, Communicator& comm) {
  const int size = comm.size();
  std::vector<int> send;
  std::vector<int64_t> send_bytes, recv_bytes;
  for (int p = 0; p < size; ++p) {
    for (int64_t i = 0; i < block(rank, p); ++i) send.push_back(rank * 100 + p * 10 + int(i));
    send_bytes.push_back(block(rank, p) * 4);
    recv_bytes.push_back(block(p, rank) * 4);
  }
  std::vector<int> recv(std::accumulate(recv_bytes.begin(), recv_bytes.end(), int64_t{0}) / 4, -1);
  ASSERT_TRUE(comm.all_to_all(send.data(), send_bytes, recv.data(), recv_bytes, {}));
  size_t at = 0;
  for (int p = 0; p < size; ++p) {
    for (int64_t i = 0; i < block(p, rank); ++i) EXPECT_EQ(recv[at++], p * 100 + rank * 10 + i);
  }
}

class Conformance : public testing::TestWithParam<int> {};

TEST_P(Conformance, AllToAllGivesEveryBlock) {
  auto ranks = make_thread_communicators(GetParam());
  for (int round = 0; round < 20; ++round) on_ranks(ranks, check_all_to_all);
  for (int r = 0; r < GetParam(); ++r) {
    int64_t bytes = 0;
    for (int p = 0; p < GetParam(); ++p) bytes += p == r ? 0 : block(r, p) * 4;
    EXPECT_EQ(ranks[r]->bytes_sent(), 20 * bytes);
  }
}

TEST_P(Conformance, AllGatherConcatenatesInRankOrder) {
  auto ranks = make_thread_communicators(GetParam());
  on_ranks(ranks, [&](int rank, Communicator& comm) {
    std::vector<int64_t> bytes;
    std::vector<int> expected;
    for (int r = 0; r < comm.size(); ++r) {
      bytes.push_back(4 * (r % 3));
      expected.insert(expected.end(), r % 3, r);
    }
    std::vector<int> send(rank % 3, rank), recv(expected.size(), -1);
    ASSERT_TRUE(comm.all_gather(send.data(), recv.data(), bytes, {}));
    EXPECT_EQ(recv, expected);
  });
}

TEST_P(Conformance, OneRanksErrorReachesAllAndTheNextCallWorks) {
  auto ranks = make_thread_communicators(GetParam());
  const int bad = GetParam() / 2;
  on_ranks(ranks, [&](int rank, Communicator& comm) {
    Status local;
    if (rank == bad) local = {ErrorCode::kInvalidArgument, "k: expected bfloat16, got float32"};
    const Status status = comm.agree(local);
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(status.message().find("rank " + std::to_string(bad) + ": k: "), std::string::npos);
    EXPECT_TRUE(comm.agree({}));
    EXPECT_TRUE(comm.agree_on(7, "partition"));
    check_all_to_all(rank, comm);
  });
}

TEST_P(Conformance, DifferingDigestsAreNamed) {
  if (GetParam() < 2) GTEST_SKIP() << "needs two ranks";
  auto ranks = make_thread_communicators(GetParam());
  on_ranks(ranks, [&](int rank, Communicator& comm) {
    const Status status = comm.agree_on(rank == 1 ? 8 : 7, "partition");
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "partition: differs between rank 0 and rank 1");
  });
}

TEST_P(Conformance, CountsThatDoNotFitFailEverywhere) {
  if (GetParam() < 2) GTEST_SKIP() << "needs two ranks";
  auto ranks = make_thread_communicators(GetParam());
  on_ranks(ranks, [&](int rank, Communicator& comm) {
    std::vector<int64_t> bytes(comm.size(), 4);
    if (rank == 1) bytes[0] = 8;
    std::vector<int> data(comm.size() + 1, 0), recv(comm.size() + 1, 0);
    EXPECT_EQ(comm.all_gather(data.data(), recv.data(), bytes, {}).code(), ErrorCode::kPeerFailed);
    check_all_to_all(rank, comm);
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, Conformance, testing::Values(1, 2, 3, 5, 8));

TEST(ThreadCommunicator, ARankThatNeverComesIsATimeoutNotAHang) {
  auto ranks = make_thread_communicators(3, milliseconds(50));
  on_ranks(ranks, [](int rank, Communicator& comm) {
    if (rank == 2) std::this_thread::sleep_for(milliseconds(200));  // late
    const Status status = comm.agree({});
    EXPECT_EQ(status.code(), ErrorCode::kPeerFailed);
    EXPECT_EQ(status.message(), "rank 2 did not arrive within 50 ms");
  });
  on_ranks(ranks, check_all_to_all);  // and the next call works
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

TEST(SingleCommunicator, CopiesToItself) {
  auto comm = make_single_communicator();
  check_all_to_all(0, *comm);
  EXPECT_EQ(comm->bytes_sent(), 0);
}

}  // namespace
}  // namespace gdn
