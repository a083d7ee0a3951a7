// Device buffers for tests.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "gdn/gdn.h"

namespace gdn {

// Owned device memory; null after a failed allocation (check data() where bytes > 0).
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(int64_t bytes, int fill = 0xff) : bytes_(bytes) {
    if (bytes <= 0) return;
    if (cudaMalloc(&data_, static_cast<size_t>(bytes)) != cudaSuccess) data_ = nullptr;
    if (data_ != nullptr) static_cast<void>(this->fill(fill));
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) static_cast<void>(cudaFree(data_));
  }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  Memory memory() const { return {data_, bytes_}; }

  bool fill(int byte = 0xff) {
    return bytes_ <= 0 || cudaMemset(data_, byte, static_cast<size_t>(bytes_)) == cudaSuccess;
  }
  bool upload(const void* from) {
    return bytes_ == 0 || cudaMemcpy(data_, from, static_cast<size_t>(bytes_),
                                     cudaMemcpyHostToDevice) == cudaSuccess;
  }
  std::vector<unsigned char> download() const {
    std::vector<unsigned char> bytes(static_cast<size_t>(bytes_));
    if (bytes_ > 0) {
      static_cast<void>(
          cudaMemcpy(bytes.data(), data_, static_cast<size_t>(bytes_), cudaMemcpyDeviceToHost));
    }
    return bytes;
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace gdn
