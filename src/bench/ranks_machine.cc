// A machine among the machines of other ranks, one process each: every call begins once all ranks
// are ready, and takes as long as the slowest one's. So all ranks see the same times and the same
// errors.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/counted.h"
#include "bench/machine.h"

namespace gdn::bench {
namespace {

class RanksMachine : public Machine {
 public:
  RanksMachine(std::unique_ptr<Machine> own, Communicator& host)
      : own_(std::move(own)), host_(host) {}

  Device device() const override { return own_->device(); }
  std::string description() const override {
    return fmt::format("{} ({}), slowest rank; each {}", counted(host_.size(), "rank"),
                       host_.name(), own_->description());
  }
  std::string why_no_power_cap() const override { return own_->why_no_power_cap(); }

  Result<Storage> allocate(int64_t bytes) override { return own_->allocate(bytes); }
  Status upload(void* to, const void* from, int64_t bytes) override {
    return own_->upload(to, from, bytes);
  }
  Status download(void* to, const void* from, int64_t bytes) override {
    return own_->download(to, from, bytes);
  }

  Result<Time> time(const TimedCall& call) override {
    Status met;
    const auto meet = [&] { return met = host_.agree(call.before ? call.before() : Status::ok()); };
    const Result<Time> mine = own_->time({call.run, meet});
    GDN_RETURN_IF_ERROR(met);
    GDN_RETURN_IF_ERROR(host_.agree(mine.status()));
    return slowest(*mine);
  }
  Status complete(const std::function<Status()>& call) override {
    return host_.agree(own_->complete(call));
  }
  void idle(double seconds) override { own_->idle(seconds); }

 private:
  Result<Time> slowest(const Time& mine) {
    struct Shown {
      double ms;
      int64_t capped;  // -1: not known
    };
    const Shown shown{mine.ms, mine.capped ? *mine.capped : -1};
    std::vector<Shown> all(static_cast<size_t>(host_.size()));
    const std::vector<int64_t> bytes(all.size(), sizeof(Shown));
    GDN_RETURN_IF_ERROR(host_.all_gather(&shown, all.data(), bytes, {}));
    Shown most = all[0];
    for (const Shown& rank : all) {
      most = {std::max(most.ms, rank.ms), std::max(most.capped, rank.capped)};
    }
    return Time{most.ms, most.capped < 0 ? std::nullopt : std::optional(most.capped > 0)};
  }

  std::unique_ptr<Machine> own_;
  Communicator& host_;
};

}  // namespace

std::unique_ptr<Machine> make_ranks_machine(std::unique_ptr<Machine> own, Communicator& host) {
  return std::make_unique<RanksMachine>(std::move(own), host);
}

}  // namespace gdn::bench
