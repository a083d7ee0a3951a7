// Where arms run: memory, copies, and a stopwatch that starts with cold caches where the device has
// one. The host and a CUDA device behind one interface, so that the protocol is the same code.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "gdn/gdn.h"

namespace gdn::bench {

struct Storage {
  std::shared_ptr<void> owner;
  int64_t bytes = 0;

  Memory memory() const { return {owner.get(), bytes}; }
};

struct TimedCall {
  std::function<Status()> run;
  std::function<Status()> before = {};  // where given: comes first, before the caches are made cold
};

class Machine {
 public:
  struct Time {
    double ms = 0;
    std::optional<bool> capped;  // was the power cap holding the clock down? absent: not known
  };

  virtual ~Machine() = default;
  virtual Device device() const = 0;
  virtual std::string description() const = 0;
  // Why the power cap cannot be read; empty where it can.
  virtual std::string why_no_power_cap() const = 0;

  virtual Result<Storage> allocate(int64_t bytes) = 0;  // zeros
  virtual Status upload(void* to, const void* from, int64_t bytes) = 0;
  virtual Status download(void* to, const void* from, int64_t bytes) = 0;

  // The time of one call, which enqueues (on hosts: runs) its work on the default stream.
  virtual Result<Time> time(const TimedCall& call) = 0;
  // Runs a call to its end without timing it.
  virtual Status complete(const std::function<Status()>& call) = 0;
  virtual void idle(double seconds) = 0;
};

std::unique_ptr<Machine> make_host_machine();
// `own` among those of other processes, which all call the same things: calls begin together and
// take as long as the slowest rank's. `host`, of all ranks, outlives it.
std::unique_ptr<Machine> make_ranks_machine(std::unique_ptr<Machine> own, Communicator& host);
// kUnsupported where this build, or this machine, has no CUDA device.
Result<std::unique_ptr<Machine>> make_cuda_machine();

}  // namespace gdn::bench
