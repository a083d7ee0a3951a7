#include "bench/measure.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "bench/power_cap.h"

namespace gdn::bench {
namespace {

// A machine whose clock shows what the calls left in `next`.
class FakeMachine : public Machine {
 public:
  Device device() const override { return {}; }
  std::string description() const override { return "fake"; }
  std::string why_no_power_cap() const override { return ""; }
  Result<Storage> allocate(int64_t) override { return Storage{}; }
  Status upload(void*, const void*, int64_t) override { return Status::ok(); }
  Status download(void*, const void*, int64_t) override { return Status::ok(); }
  Result<Time> time(const TimedCall& call) override {
    if (call.before) GDN_RETURN_IF_ERROR(call.before());
    GDN_RETURN_IF_ERROR(call.run());
    ++calls;
    return Time{next, capped};
  }
  Status complete(const std::function<Status()>& call) override { return call(); }
  void idle(double seconds) override { idled += seconds; }

  double next = 0, idled = 0;
  int calls = 0;
  std::optional<bool> capped;
};

TEST(Measure, EveryCallOfTheProtocolAndNoMore) {
  FakeMachine machine;
  std::string order;
  int prepared = 0;
  const TimedCall calls[] = {
      {[&] { return order += 'a', machine.next = 1, machine.capped = false, Status::ok(); }},
      {[&] { return order += 'b', machine.next = 2, machine.capped = true, Status::ok(); },
       [&] { return ++prepared, Status::ok(); }}};
  int blocks = 0;
  const auto samples = measure(machine, {"x", 2, 1, 1, 2, 0.5}, calls, [&] { ++blocks; });
  ASSERT_TRUE(samples) << samples.status().message();
  EXPECT_EQ(order, "aaabbbbbbaaabbbaaaaaabbb");
  EXPECT_EQ(blocks, 8);
  EXPECT_EQ(prepared, 12) << "before every call of the second arm";
  EXPECT_EQ(machine.idled, 4.0);
  ASSERT_EQ(samples->size(), 2u);
  for (int arm = 0; arm < 2; ++arm) {
    const Samples& s = (*samples)[static_cast<size_t>(arm)];
    ASSERT_EQ(s.groups.size(), 2u);
    for (const auto& group : s.groups) EXPECT_EQ(group, std::vector<double>(4, arm + 1));
    EXPECT_EQ(s.power_readings, 8);
    EXPECT_EQ(s.capped, arm == 1 ? 8 : 0);
  }
}

TEST(Measure, StopsAtTheFirstError) {
  FakeMachine machine;
  const TimedCall calls[] = {
      {[&] { return machine.calls < 3 ? Status::ok() : Status(ErrorCode::kDevice, "gone"); }}};
  const auto samples = measure(machine, short_protocol(), calls);
  ASSERT_FALSE(samples);
  EXPECT_EQ(samples.status().message(), "gone");
  EXPECT_EQ(machine.calls, 3);
}

TEST(PowerCapTest, SaysWhyItCannotBeRead) {
  const PowerCap none("0000:00:00.0", "libno-such-library.so.9");
  EXPECT_EQ(none.why_not(), "libno-such-library.so.9 is not here");
  EXPECT_FALSE(none.held().has_value());
  const PowerCap other("0000:00:00.0", "libm.so.6");
  EXPECT_EQ(other.why_not(), "libm.so.6 lacks the calls");
  EXPECT_FALSE(other.held().has_value());
}

// A machine of ranks that are threads: calls begin together, times are the slowest rank's, and an
// error of one is everybody's.
TEST(RanksMachine, TimesOfTheSlowestRankForAll) {
  constexpr int kRanks = 3;
  auto hosts = make_thread_communicators(kRanks);
  std::atomic<int> ready = 0;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      auto fake = std::make_unique<FakeMachine>();
      fake->next = 10 + rank;
      if (rank == 1) fake->capped = true;
      const auto machine = make_ranks_machine(std::move(fake), *hosts[rank]);
      EXPECT_EQ(machine->description(), "3 ranks (threads), slowest rank; each fake");
      const auto time = machine->time({[&] {
                                         EXPECT_EQ(ready, kRanks);
                                         return Status::ok();
                                       },
                                       [&] { return ++ready, Status::ok(); }});
      ASSERT_TRUE(time) << time.status().message();
      EXPECT_EQ(time->ms, 12);
      EXPECT_EQ(time->capped, true);
      const auto fails_on = [&](int bad) {
        return rank == bad ? Status(ErrorCode::kDevice, "no more") : Status::ok();
      };
      const auto ok = [] { return Status::ok(); };
      for (const auto& call : {TimedCall{[&] { return fails_on(2); }, {}},
                               TimedCall{ok, [&] { return fails_on(2); }}}) {
        EXPECT_EQ(machine->time(call).status().message(), "rank 2: no more");
      }
      EXPECT_EQ(machine->complete([&] { return fails_on(0); }).message(), "rank 0: no more");
      EXPECT_TRUE(machine->time({ok, {}}));
    });
  }
}

}  // namespace
}  // namespace gdn::bench
