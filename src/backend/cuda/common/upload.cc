#include "backend/cuda/common/upload.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <mutex>

#include "backend/cuda/common/launch.h"

namespace gdn::cuda {
namespace {

constexpr size_t kLeastBytes = 64 * 1024;

// One page-locked block; free again once `done` has passed.
struct Block {
  void* data;
  size_t bytes;
  int device;  // of `done`
  cudaEvent_t done;
};

// Blocks of powers of two, kept for the next uploads: of each size as many as were under way at
// once. Refilling a context of a capacity takes the same size each time.
class Blocks {
 public:
  Status copy(const std::vector<unsigned char>& image, void* to, int device, Stream stream) {
    const std::lock_guard lock(mutex_);
    Block* block = nullptr;
    GDN_RETURN_IF_ERROR(find(std::bit_ceil(std::max(image.size(), kLeastBytes)), device, block));
    std::memcpy(block->data, image.data(), image.size());
    GDN_RETURN_IF_ERROR(check(
        cudaMemcpyAsync(to, block->data, image.size(), cudaMemcpyHostToDevice, to_cuda(stream)),
        "upload of the plan's tables"));
    return check(cudaEventRecord(block->done, to_cuda(stream)), "upload of the plan's tables");
  }

 private:
  Status find(size_t bytes, int device, Block*& found) {
    for (Block& block : blocks_) {
      if (block.bytes == bytes && block.device == device &&
          cudaEventQuery(block.done) == cudaSuccess) {
        found = &block;
        return Status::ok();
      }
    }
    static_cast<void>(cudaGetLastError());  // cudaErrorNotReady is no error
    Block block{nullptr, bytes, device, nullptr};
    GDN_RETURN_IF_ERROR(check(cudaHostAlloc(&block.data, bytes, cudaHostAllocDefault),
                              fmt::format("{} bytes of page-locked memory", bytes)));
    const Status made =
        check(cudaEventCreateWithFlags(&block.done, cudaEventDisableTiming), "an event");
    if (!made) {
      static_cast<void>(cudaFreeHost(block.data));
      return made;
    }
    blocks_.push_back(block);
    found = &blocks_.back();
    return Status::ok();
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;
};

Blocks& blocks() {
  static auto* kept = new Blocks;  // outlives the runtime's own clean-up
  return *kept;
}

}  // namespace

Status upload_image(const std::vector<unsigned char>& image, void* to, Stream stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  GDN_RETURN_IF_ERROR(
      check(cudaStreamIsCapturing(to_cuda(stream), &capture), "upload of the plan's tables"));
  if (capture != cudaStreamCaptureStatusNone) {
    return {ErrorCode::kInvalidArgument,
            "stream: expected one that is not being captured for the upload of the plan's tables; "
            "upload or refill the context (or make its first call) before the capture begins"};
  }
  if (image.empty()) return Status::ok();
  cudaPointerAttributes attributes{};
  GDN_RETURN_IF_ERROR(check(cudaPointerGetAttributes(&attributes, to), "resident"));
  const DeviceGuard guard(attributes.device);
  return blocks().copy(image, to, attributes.device, stream);
}

}  // namespace gdn::cuda
