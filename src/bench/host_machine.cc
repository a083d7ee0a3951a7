// The host as a machine: no cold caches, no power cap to read.
#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "base/counted.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "bench/machine.h"

namespace gdn::bench {
namespace {

class HostMachine : public Machine {
 public:
  Device device() const override { return {}; }
  std::string description() const override { return "CPU, " + counted(num_threads(), "thread"); }
  std::string why_no_power_cap() const override { return "not read on CPUs"; }

  Result<Storage> allocate(int64_t bytes) override {
    auto buffer = std::make_shared<AlignedBuffer>(bytes);
    fill_bytes(buffer->data(), 0, bytes);
    return Storage{std::shared_ptr<void>(buffer, buffer->data()), bytes};
  }
  Status upload(void* to, const void* from, int64_t bytes) override {
    copy_bytes(to, from, bytes);
    return Status::ok();
  }
  Status download(void* to, const void* from, int64_t bytes) override {
    return upload(to, from, bytes);
  }

  Result<Time> time(const TimedCall& call) override {
    if (call.before) GDN_RETURN_IF_ERROR(call.before());
    const auto start = std::chrono::steady_clock::now();
    GDN_RETURN_IF_ERROR(call.run());
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - start;
    return Time{spent.count(), std::nullopt};
  }
  Status complete(const std::function<Status()>& call) override { return call(); }
  void idle(double seconds) override {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
};

}  // namespace

std::unique_ptr<Machine> make_host_machine() { return std::make_unique<HostMachine>(); }

#ifndef GDN_WITH_CUDA
Result<std::unique_ptr<Machine>> make_cuda_machine() {
  return Status(ErrorCode::kUnsupported,
                "no CUDA backends in this build (configure with -DGDN_CUDA=ON)");
}
#endif

}  // namespace gdn::bench
