// Where one rank's tensors live while it runs: host memory, or a device that results are fetched
// from.
#pragma once

#include <memory>

#include "base/host_tensor.h"
#include "gdn/gdn.h"

namespace gdn {

class Place {
 public:
  virtual ~Place() = default;
  virtual Device device() const = 0;
  virtual Stream stream() const { return {}; }

  // `tensor`'s values where the rank can read them; absent stays absent.
  virtual Result<TensorView> in(const HostTensor& tensor) = 0;
  // Memory of the same shape that finish() brings back into `tensor`, which outlives that. Every
  // byte that nobody writes stays as it is in `tensor`.
  virtual Result<TensorView> out(const HostTensor& tensor) = 0;
  // Every byte 0xff (NaN), so that what nobody wrote shows.
  virtual Result<Memory> block(int64_t bytes) = 0;
  // Between host memory and this place's, in the order of stream(); done when they return.
  virtual Status to_host(void* host, const void* from, int64_t bytes) = 0;
  virtual Status from_host(void* to, const void* host, int64_t bytes) = 0;
  // Waits for the work and fetches what out() handed out.
  virtual Status finish() = 0;
};

// Host memory: tensors are taken as they are.
std::unique_ptr<Place> make_host_place();

// CUDA device `index`, with a stream of its own; made current for this thread. kUnsupported in a
// build without CUDA.
Result<std::unique_ptr<Place>> make_cuda_place(int index);
// 0 without a driver, or in a build without CUDA.
int cuda_devices();

}  // namespace gdn
