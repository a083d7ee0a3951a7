// Device memory that calls on several streams read, and that belongs to the stream that wrote it:
// the plan's tables. What is written is there before another stream reads it, and what is read
// stays until it was read, also where torch's allocator, which knows the owner's stream alone,
// takes it back. Nothing here waits on the host. Without CUDA it does nothing.
#pragma once

#include <map>
#include <mutex>

#include "gdn/tensor.h"

namespace gdn_torch {

class StreamUses {
 public:
  explicit StreamUses(gdn::Device device) : device_(device) {}
  // The first writer's stream, which the memory goes back to, comes after all that others were
  // given.
  ~StreamUses();
  StreamUses(const StreamUses&) = delete;
  StreamUses& operator=(const StreamUses&) = delete;

  // Around a write: its stream, from then on the owner, comes after all reads so far.
  void before_write(gdn::Stream stream);
  void after_write(gdn::Stream stream);
  // Around a read. A stream under capture is not ordered, since a graph cannot wait for what is
  // outside it: torch.cuda.graph waits for the device before it begins.
  void before_read(gdn::Stream stream);
  void after_read(gdn::Stream stream);

 private:
  gdn::Device device_;
  std::mutex mutex_;
  void* first_ = nullptr;        // the stream of the first write
  void* owner_ = nullptr;        // of the last
  void* written_ = nullptr;      // an event after it; null: nothing is written
  std::map<void*, void*> read_;  // by stream, an event after its last read
};

bool is_capturing(gdn::Stream stream);

}  // namespace gdn_torch
