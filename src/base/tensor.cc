#include "gdn/tensor.h"

#include <fmt/format.h>

namespace gdn {

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat32: return "float32";
    case DType::kFloat64: return "float64";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
  }
  return "unknown dtype";
}

std::string to_string(Device device) {
  return device.kind == Device::Kind::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

std::string shape_string(const TensorView& view) {
  std::string out = "[";
  for (int i = 0; i < view.rank; ++i) out += fmt::format("{}{}", i ? ", " : "", view.shape[i]);
  return out + "]";
}

}  // namespace gdn
