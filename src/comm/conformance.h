// What every communicator promises: right blocks, counted bytes, the same error on every rank, and
// a working next call. One suite; each test program instantiates it with worlds of its own kind.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gdn/communicator.h"

namespace gdn::conformance {

// One rank: its communicator, and its way to the memory that the communicator serves.
class Rank {
 public:
  virtual ~Rank() = default;
  virtual Communicator& comm() = 0;
  virtual Stream stream() { return {}; }
  // `values` where the communicator can read and write them; valid until the next take().
  virtual void* place(std::vector<int>& values) { return values.data(); }
  // What is there after the work on stream(), back in `values`.
  virtual void take(std::vector<int>& values, void* placed) {}
};

class World {
 public:
  virtual ~World() = default;
  virtual int size() const = 0;
  // Runs body on every rank that lives in this process, side by side.
  virtual void run(const std::function<void(Rank&)>& body) = 0;
  // Are counts that contradict each other an error? Not where only the device sees them.
  virtual bool compares_counts() const { return true; }
};

// Ranks that are threads of this process and read host memory.
using Ranks = std::vector<std::unique_ptr<Communicator>>;

class HostRank final : public Rank {
 public:
  explicit HostRank(Communicator& comm) : comm_(comm) {}
  Communicator& comm() override { return comm_; }

 private:
  Communicator& comm_;
};

// Runs body(communicator) on one thread per rank.
inline void on_ranks(Ranks& ranks, const std::function<void(Communicator&)>& body) {
  std::vector<std::jthread> threads;
  for (auto& comm : ranks) threads.emplace_back([&] { body(*comm); });
}

class OneProcess : public World {
 public:
  explicit OneProcess(Ranks ranks) : ranks_(std::move(ranks)) {}
  int size() const override { return static_cast<int>(ranks_.size()); }
  void run(const std::function<void(Rank&)>& body) override {
    on_ranks(ranks_, [&](Communicator& comm) {
      HostRank rank(comm);
      body(rank);
    });
  }

 private:
  Ranks ranks_;
};

struct Kind {
  std::string name;
  std::function<std::unique_ptr<World>()> make;
};
inline void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

// Rank r sends (r + 2p + round) % 5 values to rank p, each r * 100 + p * 10 + index.
inline int64_t block(int from, int to, int round) { return (from + 2 * to + round) % 5; }

inline void check_all_to_all(Rank& rank, int round = 0) {
  Communicator& comm = rank.comm();
  const int size = comm.size(), me = comm.rank();
  std::vector<int> send, want;
  std::vector<int64_t> send_bytes, recv_bytes;
  for (int p = 0; p < size; ++p) {
    for (int64_t i = 0; i < block(me, p, round); ++i) send.push_back(me * 100 + p * 10 + int(i));
    for (int64_t i = 0; i < block(p, me, round); ++i) want.push_back(p * 100 + me * 10 + int(i));
    send_bytes.push_back(block(me, p, round) * 4);
    recv_bytes.push_back(block(p, me, round) * 4);
  }
  std::vector<int> recv(want.size(), -1);
  void* from = rank.place(send);
  void* to = rank.place(recv);
  const Status status = comm.all_to_all(from, send_bytes, to, recv_bytes, rank.stream());
  ASSERT_TRUE(status) << status.message();
  rank.take(recv, to);
  EXPECT_EQ(recv, want);
}

inline void check_all_gather(Rank& rank, const std::vector<int64_t>& counts) {
  Communicator& comm = rank.comm();
  std::vector<int64_t> bytes;
  std::vector<int> want;
  for (int r = 0; r < comm.size(); ++r) {
    bytes.push_back(4 * counts[r]);
    for (int64_t i = 0; i < counts[r]; ++i) want.push_back(1000 * r + static_cast<int>(i % 1000));
  }
  std::vector<int> send, recv(want.size(), -1);
  for (int64_t i = 0; i < counts[comm.rank()]; ++i) {
    send.push_back(1000 * comm.rank() + static_cast<int>(i % 1000));
  }
  void* from = rank.place(send);
  void* to = rank.place(recv);
  const Status status = comm.all_gather(from, to, bytes, rank.stream());
  ASSERT_TRUE(status) << status.message();
  rank.take(recv, to);
  EXPECT_EQ(recv, want);
}

class Conformance : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    world_ = GetParam().make();
    ASSERT_NE(world_, nullptr);
  }
  std::unique_ptr<World> world_;
};

TEST_P(Conformance, AllToAllGivesEveryBlock) {
  world_->run([](Rank& rank) {
    const int me = rank.comm().rank();
    int64_t bytes = 0;
    for (int round = 0; round < 20; ++round) {
      check_all_to_all(rank, round);
      for (int p = 0; p < rank.comm().size(); ++p) bytes += p == me ? 0 : block(me, p, round) * 4;
    }
    EXPECT_EQ(rank.comm().bytes_sent(), bytes);
  });
}

TEST_P(Conformance, AllGatherConcatenatesInRankOrder) {
  world_->run([](Rank& rank) {
    const int size = rank.comm().size();
    std::vector<int64_t> uneven(size);
    for (int r = 0; r < size; ++r) uneven[r] = r % 3;
    check_all_gather(rank, uneven);
    EXPECT_EQ(rank.comm().bytes_sent(), 4 * (rank.comm().rank() % 3) * (size - 1));
    check_all_gather(rank, std::vector<int64_t>(size, 7));
    check_all_gather(rank, std::vector<int64_t>(size, 0));
    EXPECT_EQ(rank.comm().bytes_sent(), 4 * (rank.comm().rank() % 3 + 7) * (size - 1));
  });
}

TEST_P(Conformance, LargeBlocks) {  // beyond what a transport sends at once
  world_->run([](Rank& rank) {
    std::vector<int64_t> counts(rank.comm().size());
    for (int r = 0; r < rank.comm().size(); ++r) counts[r] = 500'000 + 1'000 * r;
    check_all_gather(rank, counts);
    check_all_to_all(rank);
  });
}

TEST_P(Conformance, OneRanksErrorReachesAllAndTheNextCallWorks) {
  const int bad = world_->size() / 2;
  world_->run([&](Rank& rank) {
    Communicator& comm = rank.comm();
    Status local;
    if (comm.rank() == bad) {
      local = {ErrorCode::kInvalidArgument, "k: expected bfloat16, got float32"};
    }
    const Status status = comm.agree(local);
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    if (comm.size() > 1) {
      EXPECT_EQ(status.message(),
                "rank " + std::to_string(bad) + ": " + "k: expected bfloat16, got float32");
    }
    EXPECT_TRUE(comm.agree({}));
    EXPECT_TRUE(comm.agree_on(7, "partition"));
    check_all_to_all(rank);
  });
}

TEST_P(Conformance, TheLowestOfSeveralErrorsIsEverybodys) {
  if (world_->size() < 2) GTEST_SKIP() << "needs two ranks";
  world_->run([&](Rank& rank) {
    Communicator& comm = rank.comm();
    const Status status = comm.agree(
        {ErrorCode::kUnsupported, std::string(static_cast<size_t>(comm.rank() + 1), 'x')});
    EXPECT_EQ(status.code(), ErrorCode::kUnsupported);
    EXPECT_EQ(status.message(), "rank 0: x");
  });
}

TEST_P(Conformance, DifferingDigestsAreNamed) {
  if (world_->size() < 2) GTEST_SKIP() << "needs two ranks";
  world_->run([](Rank& rank) {
    const Status status = rank.comm().agree_on(rank.comm().rank() == 1 ? 8 : 7, "partition");
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "partition: differs between rank 0 and rank 1");
    check_all_to_all(rank);
  });
}

TEST_P(Conformance, CountsThatDoNotFitFailEverywhere) {
  if (world_->size() < 2) GTEST_SKIP() << "needs two ranks";
  if (!world_->compares_counts()) GTEST_SKIP() << "counts are seen by the device alone";
  world_->run([](Rank& rank) {
    Communicator& comm = rank.comm();
    std::vector<int64_t> bytes(comm.size(), 4);
    if (comm.rank() == 1) bytes[0] = 8;
    std::vector<int> data(comm.size() + 1, 0), recv(comm.size() + 1, 0);
    const Status status = comm.all_gather(data.data(), recv.data(), bytes, {});
    EXPECT_EQ(status.code(), ErrorCode::kPeerFailed);
    EXPECT_EQ(status.message(), "all_gather: rank 0 sends 4 bytes to rank 1, which expects 8");
    check_all_to_all(rank);
    const std::vector<int64_t> none(comm.size(), 0);
    const Status mixed =
        comm.rank() == 1 ? comm.agree({}) : comm.all_gather(data.data(), recv.data(), none, {});
    EXPECT_EQ(mixed.code(), ErrorCode::kPeerFailed);
    EXPECT_EQ(mixed.message(), "rank 0 calls all_gather, rank 1 calls agree");
    check_all_to_all(rank);
  });
}

TEST_P(Conformance, AWrongNumberOfCountsIsAnError) {
  world_->run([](Rank& rank) {
    std::vector<int64_t> bytes(rank.comm().size() + 1, 0);
    EXPECT_FALSE(rank.comm().all_gather(nullptr, nullptr, bytes, {}));
    EXPECT_FALSE(rank.comm().all_to_all(nullptr, bytes, nullptr, bytes, {}));
    check_all_to_all(rank);
  });
}

}  // namespace gdn::conformance
