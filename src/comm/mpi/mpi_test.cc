// The suite with every process of an mpirun as one rank, and what happens when one stays away.
#include "gdn/mpi.h"

#include <thread>

#include "comm/conformance.h"

namespace gdn {
namespace {

using conformance::check_all_to_all;
using conformance::Conformance;
using conformance::Kind;
using conformance::Rank;
using conformance::World;
using std::chrono::milliseconds;

class MpiRank final : public Rank {
 public:
  explicit MpiRank(std::unique_ptr<Communicator> comm) : comm_(std::move(comm)) {}
  Communicator& comm() override { return *comm_; }

 private:
  std::unique_ptr<Communicator> comm_;
};

class MpiWorld final : public World {
 public:
  explicit MpiWorld(std::unique_ptr<Communicator> comm) : rank_(std::move(comm)) {}
  int size() const override { return const_cast<MpiRank&>(rank_).comm().size(); }
  void run(const std::function<void(Rank&)>& body) override { body(rank_); }

 private:
  MpiRank rank_;
};

std::unique_ptr<World> make_mpi() {
  auto made = make_mpi_communicator(nullptr, std::chrono::seconds(60));
  EXPECT_TRUE(made) << made.status().message();
  return made ? std::make_unique<MpiWorld>(std::move(*made)) : nullptr;
}
INSTANTIATE_TEST_SUITE_P(Mpi, Conformance, testing::Values(Kind{"mpi", make_mpi}));

TEST(MpiCommunicator, ALateRankEndsAllWithTheSameWords) {
  auto comm = *make_mpi_communicator(nullptr, milliseconds(300));
  if (comm->size() < 2) GTEST_SKIP() << "needs two ranks";
  const int late = comm->size() - 1;
  if (comm->rank() == late) std::this_thread::sleep_for(milliseconds(1500));
  for (int call = 0; call < 2; ++call) {  // and the communicator stays over
    const Status status = comm->agree({});
    EXPECT_EQ(status.code(), ErrorCode::kPeerFailed);
    EXPECT_EQ(status.message(), "rank " + std::to_string(late) + " did not arrive within 300 ms");
  }
  comm.reset();
  MpiRank next(*make_mpi_communicator());  // a new one works
  check_all_to_all(next);
}

TEST(MpiCommunicator, ARankThatLeavesEndsTheOthersAtOnce) {
  auto comm = *make_mpi_communicator(nullptr, std::chrono::seconds(60));
  if (comm->size() < 2) GTEST_SKIP() << "needs two ranks";
  const int leaver = comm->size() - 1, me = comm->rank();
  const auto start = std::chrono::steady_clock::now();
  if (me != leaver) {
    const Status status = comm->agree({});
    EXPECT_EQ(status.code(), ErrorCode::kPeerFailed);
    EXPECT_EQ(status.message(),
              "rank " + std::to_string(leaver) + " left before the others were done");
  }
  comm.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  MpiRank next(*make_mpi_communicator());
  check_all_to_all(next);
}

}  // namespace
}  // namespace gdn

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const gdn::Status status = gdn::start_mpi(); !status) return 2;
  const int code = RUN_ALL_TESTS();
  gdn::finish_mpi(code, /*abandon=*/code != 0);
  return code;
}
