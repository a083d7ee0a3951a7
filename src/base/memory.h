// Aligned host memory and the arithmetic of laying out several arrays in one block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "gdn/gdn.h"

namespace gdn {

inline constexpr int64_t kMemoryAlignment = 256;

constexpr int64_t align_up(int64_t bytes) {
  return (bytes + kMemoryAlignment - 1) / kMemoryAlignment * kMemoryAlignment;
}

// Offsets of consecutive aligned arrays: `take` returns where the next one starts.
class BlockLayout {
 public:
  int64_t take(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += align_up(bytes);
    return at;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

// Uninitialised, 256-byte aligned host memory.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(int64_t bytes)
      : data_(bytes > 0
                  ? ::operator new(static_cast<size_t>(bytes), std::align_val_t{kMemoryAlignment})
                  : nullptr),
        bytes_(bytes) {}

  void* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }

 private:
  struct Free {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t{kMemoryAlignment}); }
  };
  std::unique_ptr<void, Free> data_;
  int64_t bytes_ = 0;
};

// Every byte `byte`, and a copy between blocks that do not overlap, on all threads of the pool.
void fill_bytes(void* to, int byte, int64_t bytes);
void copy_bytes(void* to, const void* from, int64_t bytes);

// kWorkspaceTooSmall, or kInvalidArgument where it is not aligned; `what` names the argument.
Status check_memory(const char* what, const Memory& memory, int64_t bytes);

}  // namespace gdn
