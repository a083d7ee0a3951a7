// The one way a kernel is launched and a runtime call is checked: errors come back as Status and
// name the kernel and its grid. Grids use the x dimension only (up to 2^31 - 1 blocks).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "gdn/status.h"
#include "gdn/tensor.h"

namespace gdn::cuda {

struct LaunchShape {
  int64_t blocks = 0;  // 0: nothing to do
  int threads = 0;
  int shared_bytes = 0;  // dynamic
  // All blocks run at once or none does: for kernels whose blocks wait for each other, which could
  // otherwise wait forever beside another stream's kernel.
  bool cooperative = false;
};

// kDevice with `what` and the runtime's words, unless `error` is cudaSuccess.
Status check(cudaError_t error, const std::string& what);

// kDevice if the grid or the kernel's shared memory cannot be; else enqueues.
Status launch_kernel(const char* name, const void* kernel, const LaunchShape& shape, Stream stream,
                     void** arguments);

// Zeros in the stream's order, and at every replay of a graph captured of it.
Status zero(void* to, int64_t bytes, Stream stream);

// Every kernel takes one struct by value.
template <typename Params>
Status launch(const char* name, void (*kernel)(Params), const LaunchShape& shape, Stream stream,
              const Params& params) {
#ifdef GDN_SIMT
  static_cast<void>(stream);
  return simt::launch(
      {name, [=] { kernel(params); }, shape.blocks, shape.threads, shape.shared_bytes,
       shape.cooperative});
#else
  Params copy = params;
  void* arguments[] = {&copy};
  return launch_kernel(name, reinterpret_cast<const void*>(kernel), shape, stream, arguments);
#endif
}

inline cudaStream_t to_cuda(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

// What the backends ask about a device, read once per device and process.
struct DeviceFacts {
  int compute_capability = 0;  // 10 * major + minor; 0: there is no such device
  int multiprocessors = 0;
  int shared_bytes = 0;  // most dynamic shared memory of one block
  std::string name;
};
const DeviceFacts& device_facts(int index);
int current_device();  // -1: no device at all

// Makes `index` current while it lives, if it is not.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace gdn::cuda
