// The communicators' suite through host copies, over threads and a place that is host memory; and a
// copy that fails.
#include "check/staged_communicator.h"

#include <cstring>
#include <thread>

#include "comm/conformance.h"

namespace gdn {
namespace {

using conformance::Conformance;
using conformance::Kind;
using conformance::Rank;
using conformance::World;

class StagedRank final : public Rank {
 public:
  explicit StagedRank(Communicator& comm) : comm_(comm) {}
  Communicator& comm() override { return comm_; }

 private:
  Communicator& comm_;
};

class Staged final : public World {
 public:
  explicit Staged(int size) : host_(make_thread_communicators(size)) {
    for (const auto& host : host_) {
      places_.push_back(make_host_place());
      ranks_.push_back(make_staged_communicator(*host, *places_.back()));
    }
  }
  int size() const override { return static_cast<int>(ranks_.size()); }
  void run(const std::function<void(Rank&)>& body) override {
    std::vector<std::jthread> threads;
    for (auto& comm : ranks_) {
      threads.emplace_back([&] {
        StagedRank rank(*comm);
        body(rank);
      });
    }
  }

 private:
  std::vector<std::unique_ptr<Communicator>> host_;
  std::vector<std::unique_ptr<Place>> places_;
  std::vector<std::unique_ptr<Communicator>> ranks_;
};

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  for (int size : {1, 2, 3, 5}) {
    all.push_back(
        {"staged_" + std::to_string(size), [=] { return std::make_unique<Staged>(size); }});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Staged, Conformance, testing::ValuesIn(kinds()));

// A device that fails one copy to the host.
class Failing final : public Place {
 public:
  explicit Failing(bool fails) : fails_(fails) {}
  Device device() const override { return {}; }
  Result<TensorView> in(const HostTensor& tensor) override { return tensor.view; }
  Result<TensorView> out(const HostTensor& tensor) override { return tensor.view; }
  Result<Memory> block(int64_t) override { return Memory{}; }
  Status to_host(void* host, const void* from, int64_t bytes) override {
    if (std::exchange(fails_, false)) return {ErrorCode::kDevice, "planted"};
    std::memcpy(host, from, static_cast<size_t>(bytes));
    return Status::ok();
  }
  Status from_host(void* to, const void* host, int64_t bytes) override {
    std::memcpy(to, host, static_cast<size_t>(bytes));
    return Status::ok();
  }
  Status finish() override { return Status::ok(); }

 private:
  bool fails_;
};

TEST(StagedCommunicator, AFailedCopyFailsOnEveryRankAndTheNextCallWorks) {
  auto host = make_thread_communicators(3);
  std::vector<std::jthread> threads;
  for (const auto& peer : host) {
    threads.emplace_back([&] {
      Failing place(peer->rank() == 1);
      const auto comm = make_staged_communicator(*peer, place);
      const std::vector<int64_t> bytes(3, 4);
      const int mine = peer->rank();
      int all[3] = {-1, -1, -1};
      const Status status = comm->all_gather(&mine, all, bytes, {});
      EXPECT_FALSE(status);
      if (mine == 1) {
        EXPECT_EQ(status.message(), "planted");
      }
      EXPECT_EQ(comm->bytes_sent(), 0);
      EXPECT_TRUE(comm->all_gather(&mine, all, bytes, {}));
      for (int r = 0; r < 3; ++r) EXPECT_EQ(all[r], r);
      EXPECT_EQ(comm->bytes_sent(), 8);
    });
  }
}

}  // namespace
}  // namespace gdn
