#include "stream_uses.h"

#include "views.h"

#ifdef GDN_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace gdn_torch {

#ifdef GDN_WITH_CUDA

namespace {

cudaStream_t cuda(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event(void* made) { return static_cast<cudaEvent_t>(made); }

void checked(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  raise(gdn::ErrorCode::kDevice, std::string(what) + ": " + cudaGetErrorString(error));
}

void record(void*& made, void* stream) {
  if (made == nullptr) {
    cudaEvent_t fresh = nullptr;
    checked(cudaEventCreateWithFlags(&fresh, cudaEventDisableTiming), "an event");
    made = fresh;
  }
  checked(cudaEventRecord(event(made), cuda(stream)), "an event of a stream");
}

}  // namespace

StreamUses::~StreamUses() {
  if (written_ == nullptr) return;
  try {
    const auto guard = guard_for(device_);
    before_write({first_});
  } catch (const std::exception&) {  // the device has failed: every later call says so
  }
  for (const auto& [stream, made] : read_) static_cast<void>(cudaEventDestroy(event(made)));
  static_cast<void>(cudaEventDestroy(event(written_)));
}

void StreamUses::before_write(gdn::Stream stream) {
  const std::lock_guard lock(mutex_);
  if (written_ == nullptr || is_capturing(stream)) return;  // a write under capture is refused
  if (owner_ != stream.handle) {
    record(written_, owner_);  // also after the owner's reads, which have no event of their own
    checked(cudaStreamWaitEvent(cuda(stream.handle), event(written_)), "a wait for another stream");
  }
  for (const auto& [reader, made] : read_) {
    if (reader == stream.handle) continue;
    checked(cudaStreamWaitEvent(cuda(stream.handle), event(made)), "a wait for another stream");
  }
}

void StreamUses::after_write(gdn::Stream stream) {
  const std::lock_guard lock(mutex_);
  if (written_ == nullptr) first_ = stream.handle;
  record(written_, stream.handle);
  owner_ = stream.handle;
}

void StreamUses::before_read(gdn::Stream stream) {
  const std::lock_guard lock(mutex_);
  if (written_ == nullptr || owner_ == stream.handle || is_capturing(stream)) return;
  checked(cudaStreamWaitEvent(cuda(stream.handle), event(written_)), "a wait for another stream");
}

void StreamUses::after_read(gdn::Stream stream) {
  const std::lock_guard lock(mutex_);
  if (written_ == nullptr || owner_ == stream.handle || is_capturing(stream)) return;
  const auto guard = guard_for(device_);
  record(read_[stream.handle], stream.handle);
}

bool is_capturing(gdn::Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  checked(cudaStreamIsCapturing(cuda(stream.handle), &status), "a stream");
  return status != cudaStreamCaptureStatusNone;
}

#else

StreamUses::~StreamUses() = default;
void StreamUses::before_write(gdn::Stream) {}
void StreamUses::after_write(gdn::Stream) {}
void StreamUses::before_read(gdn::Stream) {}
void StreamUses::after_read(gdn::Stream) {}
bool is_capturing(gdn::Stream) { return false; }

#endif

}  // namespace gdn_torch
