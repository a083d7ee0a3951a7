// A tensor that somebody else owns: pointer, dtype, device, shape and strides.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace gdn {

enum class DType : uint8_t { kBFloat16, kFloat32, kFloat64, kInt32, kInt64 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return 2;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat64:
    case DType::kInt64: return 8;
  }
  return 0;
}

const char* to_string(DType dtype);

struct Device {
  enum class Kind : uint8_t { kCpu, kCuda };
  Kind kind = Kind::kCpu;
  int index = 0;

  bool operator==(const Device&) const = default;
};

std::string to_string(Device device);

// A stream of the device's runtime (a cudaStream_t on CUDA), or null: the default stream, or none.
struct Stream {
  void* handle = nullptr;
};

// Shape and strides count elements. A view with null data and rank 0 is "absent".
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};

  bool present() const { return rank > 0; }
  int64_t numel() const {
    int64_t n = rank > 0 ? 1 : 0;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }

  // Row-major view over `data`.
  template <int R>
  static TensorView contiguous(void* data, DType dtype, const int64_t (&shape)[R],
                               Device device = {}) {
    static_assert(R >= 1 && R <= kMaxRank);
    TensorView view{data, dtype, device, R, {}, {}};
    int64_t step = 1;
    for (int i = R - 1; i >= 0; --i) {
      view.shape[i] = shape[i];
      view.stride[i] = step;
      step *= shape[i];
    }
    return view;
  }
};

// "[512, 4, 128]"
std::string shape_string(const TensorView& view);

}  // namespace gdn
