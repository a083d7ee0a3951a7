// The communicators' suite through host copies, over threads and a place that is host memory; and a
// copy that fails.
#include "check/staged_communicator.h"

#include <cstring>
#include <utility>

#include "comm/conformance.h"

namespace gdn {
namespace {

using conformance::Conformance;
using conformance::Kind;
using conformance::on_ranks;
using conformance::OneProcess;
using conformance::Ranks;
using conformance::World;

// Staged ranks over threads, and what these stand on.
class Staged final : public OneProcess {
 public:
  Staged(Ranks host, std::vector<std::unique_ptr<Place>> places, Ranks staged)
      : OneProcess(std::move(staged)), host_(std::move(host)), places_(std::move(places)) {}

 private:
  Ranks host_;
  std::vector<std::unique_ptr<Place>> places_;
};

std::unique_ptr<World> make_staged(int size) {
  Ranks host = make_thread_communicators(size), staged;
  std::vector<std::unique_ptr<Place>> places;
  for (const auto& peer : host) {
    places.push_back(make_host_place());
    staged.push_back(make_staged_communicator(*peer, *places.back()));
  }
  return std::make_unique<Staged>(std::move(host), std::move(places), std::move(staged));
}

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  for (int size : {1, 2, 3, 5}) {
    all.push_back({"staged_" + std::to_string(size), [=] { return make_staged(size); }});
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
  on_ranks(host, [](Communicator& peer) {
    Failing place(peer.rank() == 1);
    const auto comm = make_staged_communicator(peer, place);
    const std::vector<int64_t> bytes(3, 4);
    const int mine = peer.rank();
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

}  // namespace
}  // namespace gdn
