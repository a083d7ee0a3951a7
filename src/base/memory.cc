#include "base/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/thread_pool.h"

namespace gdn {
namespace {

// What one thread takes at a time: many pages, so that the first touch of fresh memory, most of
// what filling it costs, is shared.
constexpr int64_t kBlock = int64_t{4} << 20;

// body(first, bytes) for blocks that cover [0, bytes).
template <typename Body>
void over_blocks(int64_t bytes, const Body& body) {
  parallel_for((bytes + kBlock - 1) / kBlock, [&](int64_t block, int) {
    const int64_t first = block * kBlock;
    body(first, static_cast<size_t>(std::min(kBlock, bytes - first)));
  });
}

}  // namespace

void fill_bytes(void* to, int byte, int64_t bytes) {
  over_blocks(bytes, [&](int64_t first, size_t n) {
    std::memset(static_cast<std::byte*>(to) + first, byte, n);
  });
}

void copy_bytes(void* to, const void* from, int64_t bytes) {
  over_blocks(bytes, [&](int64_t first, size_t n) {
    std::memcpy(static_cast<std::byte*>(to) + first, static_cast<const std::byte*>(from) + first,
                n);
  });
}

Status check_memory(const char* what, const Memory& memory, int64_t bytes) {
  if (memory.bytes < bytes || (bytes > 0 && memory.data == nullptr)) {
    return {ErrorCode::kWorkspaceTooSmall,
            fmt::format("{}: expected at least {} bytes, got {}", what, bytes, memory.bytes)};
  }
  if (reinterpret_cast<uintptr_t>(memory.data) % kMemoryAlignment != 0) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("{}: expected an address aligned to {} bytes", what, kMemoryAlignment)};
  }
  return Status::ok();
}

}  // namespace gdn
