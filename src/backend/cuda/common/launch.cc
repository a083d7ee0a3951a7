#include "backend/cuda/common/launch.h"

#include <fmt/format.h>

#include <limits>
#include <map>
#include <mutex>
#include <utility>

namespace gdn::cuda {
namespace {

constexpr int kDefaultSharedBytes = 48 * 1024;  // what a kernel may use without asking

// Asks once per kernel and device for as much dynamic shared memory as `bytes`.
Status allow_shared(const char* name, const void* kernel, int bytes) {
  if (bytes <= kDefaultSharedBytes) return Status::ok();
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> allowed;
  const std::lock_guard lock(mutex);
  int& granted = allowed[{kernel, current_device()}];
  if (granted >= bytes) return Status::ok();
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) granted = bytes;
  return check(error, fmt::format("{}: {} bytes of shared memory", name, bytes));
}

DeviceFacts read_facts(int index) {
  DeviceFacts facts;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || index < 0 || index >= count) {
    static_cast<void>(cudaGetLastError());
    return facts;
  }
  static cudaDeviceProp properties;  // large; the caller holds a lock
  if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) return facts;
  facts.compute_capability = 10 * properties.major + properties.minor;
  facts.multiprocessors = properties.multiProcessorCount;
  facts.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  facts.name = properties.name;
  return facts;
}

}  // namespace

Status check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return Status::ok();
  return {ErrorCode::kDevice, fmt::format("{}: {}", what, cudaGetErrorString(error))};
}

Status launch_kernel(const char* name, const void* kernel, const LaunchShape& shape, Stream stream,
                     void** arguments) {
  if (shape.blocks == 0) return Status::ok();
  const auto what = [&] {
    return fmt::format("{}, {} blocks of {} threads with {} bytes shared", name, shape.blocks,
                       shape.threads, shape.shared_bytes);
  };
  if (shape.blocks < 0 || shape.blocks > std::numeric_limits<int32_t>::max()) {
    return {ErrorCode::kDevice, what() + ": more blocks than a grid has"};
  }
  GDN_RETURN_IF_ERROR(allow_shared(name, kernel, shape.shared_bytes));
  const dim3 grid(static_cast<unsigned>(shape.blocks)), block(static_cast<unsigned>(shape.threads));
  const size_t shared = static_cast<size_t>(shape.shared_bytes);
  cudaError_t error =
      shape.cooperative
          ? cudaLaunchCooperativeKernel(kernel, grid, block, arguments, shared, to_cuda(stream))
          : cudaLaunchKernel(kernel, grid, block, arguments, shared, to_cuda(stream));
  if (error == cudaSuccess) error = cudaPeekAtLastError();
  return error == cudaSuccess ? Status::ok() : check(error, what());
}

Status zero(void* to, int64_t bytes, Stream stream) {
  const cudaError_t error = cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), to_cuda(stream));
  if (error == cudaSuccess) return Status::ok();  // without the words, which each pass would make
  return check(error, fmt::format("zeroing {} bytes", bytes));
}

int current_device() {
  int index = -1;
  if (cudaGetDevice(&index) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return -1;
  }
  return index;
}

const DeviceFacts& device_facts(int index) {
  static std::mutex mutex;
  static std::map<int, DeviceFacts> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(index);
  if (found != known.end()) return found->second;
  return known.emplace(index, read_facts(index)).first->second;
}

DeviceGuard::DeviceGuard(int index) {
  const int current = current_device();
  if (current == index || index < 0) return;
  if (cudaSetDevice(index) == cudaSuccess) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

}  // namespace gdn::cuda
