// A CUDA device as a machine: device 0, its default stream, events as the stopwatch.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "bench/machine.h"
#include "bench/power_cap.h"

namespace gdn::bench {
namespace {

// More than any L2 cache there is (H200: 50 MiB), so that a fill leaves nothing of the operands.
constexpr int64_t kFillBytes = 256 << 20;

Status check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status::ok();
  return {ErrorCode::kDevice, fmt::format("{}: {}", what, cudaGetErrorString(error))};
}

class CudaMachine : public Machine {
 public:
  explicit CudaMachine(const std::string& bus) : power_cap_(bus) {}
  ~CudaMachine() override {
    if (begin_ != nullptr) static_cast<void>(cudaEventDestroy(begin_));
    if (end_ != nullptr) static_cast<void>(cudaEventDestroy(end_));
  }

  Status set_up() {
    GDN_RETURN_IF_ERROR(check(cudaEventCreate(&begin_), "an event"));
    GDN_RETURN_IF_ERROR(check(cudaEventCreate(&end_), "an event"));
    Result<Storage> fill = allocate(kFillBytes);
    if (!fill) return fill.status();
    fill_ = std::move(*fill);
    cudaDeviceProp properties;
    GDN_RETURN_IF_ERROR(check(cudaGetDeviceProperties(&properties, 0), "device 0"));
    description_ = fmt::format("{}, sm_{}{}, {} multiprocessors", properties.name, properties.major,
                               properties.minor, properties.multiProcessorCount);
    return Status::ok();
  }

  Device device() const override { return {Device::Kind::kCuda, 0}; }
  std::string description() const override { return description_; }
  std::string why_no_power_cap() const override { return power_cap_.why_not(); }

  Result<Storage> allocate(int64_t bytes) override {
    void* data = nullptr;
    if (bytes > 0) {
      const size_t size = static_cast<size_t>(bytes);
      GDN_RETURN_IF_ERROR(
          check(cudaMalloc(&data, size), fmt::format("{} bytes of device memory", bytes).c_str()));
      const Storage storage{
          std::shared_ptr<void>(data, [](void* p) { static_cast<void>(cudaFree(p)); }), bytes};
      GDN_RETURN_IF_ERROR(check(cudaMemset(data, 0, size), "zeroing device memory"));
      return storage;
    }
    return Storage{};
  }
  Status upload(void* to, const void* from, int64_t bytes) override {
    return check(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice),
                 "a copy to the device");
  }
  Status download(void* to, const void* from, int64_t bytes) override {
    return check(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost),
                 "a copy from the device");
  }

  Result<Time> time(const TimedCall& call) override {
    if (call.before) GDN_RETURN_IF_ERROR(call.before());
    fill_value_ ^= 1;
    GDN_RETURN_IF_ERROR(check(
        cudaMemsetAsync(fill_.owner.get(), fill_value_, static_cast<size_t>(kFillBytes)), "fill"));
    GDN_RETURN_IF_ERROR(check(cudaDeviceSynchronize(), "before a timed call"));
    GDN_RETURN_IF_ERROR(check(cudaEventRecord(begin_), "an event"));
    GDN_RETURN_IF_ERROR(call.run());
    GDN_RETURN_IF_ERROR(check(cudaEventRecord(end_), "an event"));
    Time time;
    time.capped = power_cap_.held();  // read while the device works
    GDN_RETURN_IF_ERROR(check(cudaEventSynchronize(end_), "a timed call"));
    float ms = 0;
    GDN_RETURN_IF_ERROR(check(cudaEventElapsedTime(&ms, begin_, end_), "an event"));
    time.ms = ms;
    return time;
  }
  Status complete(const std::function<Status()>& call) override {
    GDN_RETURN_IF_ERROR(call());
    return check(cudaDeviceSynchronize(), "a call");
  }
  void idle(double seconds) override {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }

 private:
  PowerCap power_cap_;
  std::string description_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  Storage fill_;
  int fill_value_ = 0;
};

}  // namespace

Result<std::unique_ptr<Machine>> make_cuda_machine() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    static_cast<void>(cudaGetLastError());
    return Status(ErrorCode::kUnsupported, "no CUDA device here");
  }
  char bus[32] = "";
  GDN_RETURN_IF_ERROR(check(cudaSetDevice(0), "device 0"));
  GDN_RETURN_IF_ERROR(check(cudaDeviceGetPCIBusId(bus, sizeof(bus), 0), "device 0"));
  auto machine = std::make_unique<CudaMachine>(bus);
  GDN_RETURN_IF_ERROR(machine->set_up());
  return std::unique_ptr<Machine>(std::move(machine));
}

}  // namespace gdn::bench
