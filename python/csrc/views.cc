#include "views.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace gdn_torch {
namespace {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;

constexpr int64_t kAlignment = 256;  // of the core's workspaces

// Straight through the C ABI: an op looked up by name costs a microsecond more for each tensor.
Tensor allocate(const int64_t* sizes, int rank, ScalarType dtype, gdn::Device device) {
  int64_t strides[gdn::TensorView::kMaxRank + 1];
  int64_t step = 1;
  for (int i = rank; i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  const bool cuda = device.kind == gdn::Device::Kind::kCuda;
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      rank, sizes, strides, static_cast<int32_t>(dtype),
      cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(), device.index, &made));
  return Tensor(made);
}

// The dimensions of a tensor in one place: every access through the ABI is a call.
struct Dims {
  int rank;
  const int64_t* size;
  const int64_t* stride;
};

Dims dims_of(const Tensor& tensor) {
  Dims dims{static_cast<int>(tensor.dim()), nullptr, nullptr};
  int64_t* size = nullptr;
  int64_t* stride = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &size));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &stride));
  dims.size = size;
  dims.stride = stride;
  return dims;
}

bool is_batched(const Dims& d, int inner) { return d.rank == inner + 2; }

bool uniform(const Dims& d, int inner) {
  return !is_batched(d, inner) || d.size[0] == 1 || d.size[1] <= 1 ||
         d.stride[0] == d.size[1] * d.stride[1];
}

// In the words of to_string(DType) and of torch's Python.
const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return torch::headeronly::toString(type);
  }
}

}  // namespace

void raise(gdn::ErrorCode code, const std::string& message) {
  throw std::runtime_error(std::string("gdn_kcp: ") + std::to_string(static_cast<int>(code)) +
                           ": " + message);
}

void check(const gdn::Status& status) {
  if (!status) raise(status.code(), status.message());
}

gdn::Device device_of(const Tensor& tensor, const char* name) {
  if (tensor.is_cpu()) return {};
  if (tensor.is_cuda()) return {gdn::Device::Kind::kCuda, tensor.get_device_index()};
  raise(gdn::ErrorCode::kUnsupported, std::string(name) + ": expected a CPU or CUDA tensor");
}

gdn::DType dtype_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return gdn::DType::kBFloat16;
    case ScalarType::Float:
      return gdn::DType::kFloat32;
    case ScalarType::Double:
      return gdn::DType::kFloat64;
    case ScalarType::Int:
      return gdn::DType::kInt32;
    case ScalarType::Long:
      return gdn::DType::kInt64;
    default:
      const std::string expected = ": expected bfloat16, float32 or float64, got ";
      raise(gdn::ErrorCode::kInvalidArgument, name + expected + name_of(tensor.scalar_type()));
  }
}

ScalarType scalar_type_of(gdn::DType dtype) {
  switch (dtype) {
    case gdn::DType::kBFloat16:
      return ScalarType::BFloat16;
    case gdn::DType::kFloat32:
      return ScalarType::Float;
    case gdn::DType::kFloat64:
      return ScalarType::Double;
    case gdn::DType::kInt32:
      return ScalarType::Int;
    case gdn::DType::kInt64:
      return ScalarType::Long;
  }
  return ScalarType::Float;
}

gdn::TensorView view_of(const char* name, const Tensor& tensor) {
  const Dims d = dims_of(tensor);
  if (d.rank < 1 || d.rank > gdn::TensorView::kMaxRank) {
    raise(gdn::ErrorCode::kInvalidArgument,
          std::string(name) + ": expected 1 to 4 dimensions, got " + std::to_string(d.rank));
  }
  gdn::TensorView view;
  view.data = tensor.data_ptr();
  view.dtype = dtype_of(name, tensor);
  view.device = device_of(tensor, name);
  view.rank = d.rank;
  std::copy(d.size, d.size + d.rank, view.shape.begin());
  std::copy(d.stride, d.stride + d.rank, view.stride.begin());
  return view;
}

gdn::TensorView view_of(const char* name, const MaybeTensor& tensor) {
  return tensor ? view_of(name, *tensor) : gdn::TensorView{};
}

bool has_rows_view(const Tensor& tensor, int inner) { return uniform(dims_of(tensor), inner); }

gdn::TensorView rows_view(const char* name, const Tensor& tensor, int inner) {
  const Dims d = dims_of(tensor);
  if (d.rank != inner + 1 && d.rank != inner + 2) {
    raise(gdn::ErrorCode::kInvalidArgument,
          std::string(name) + ": expected " + std::to_string(inner + 2) +
              " dimensions [B, T, ...]"
              " or " +
              std::to_string(inner + 1) + " [T, ...], got " + std::to_string(d.rank));
  }
  if (!uniform(d, inner)) {
    raise(gdn::ErrorCode::kInvalidArgument,
          std::string(name) + ": expected the batch stride to be T = " + std::to_string(d.size[1]) +
              " times the token stride " + std::to_string(d.stride[1]) + ", got " +
              std::to_string(d.stride[0]));
  }
  const bool batched = is_batched(d, inner);
  gdn::TensorView view;
  view.data = tensor.data_ptr();
  view.dtype = dtype_of(name, tensor);
  view.device = device_of(tensor, name);
  view.rank = inner + 1;
  view.shape[0] = batched ? d.size[0] * d.size[1] : d.size[0];
  // With one token in each batch entry the entries are the rows.
  view.stride[0] = batched && (d.size[1] != 1 || d.size[0] == 1) ? d.stride[1] : d.stride[0];
  for (int i = 0; i < inner; ++i) {
    view.shape[i + 1] = d.size[i + 1 + batched];
    view.stride[i + 1] = d.stride[i + 1 + batched];
  }
  return view;
}

gdn::TensorView state_view(const char* name, const MaybeTensor& tensor, bool v_first) {
  if (!tensor) return {};
  gdn::TensorView view = view_of(name, *tensor);
  if (view.rank != 4) {
    raise(gdn::ErrorCode::kInvalidArgument,
          std::string(name) +
              (v_first ? ": expected [N, HV, V, K], got " : ": expected [N, HV, K, V], got ") +
              gdn::shape_string(view));
  }
  if (v_first) {
    std::swap(view.shape[2], view.shape[3]);
    std::swap(view.stride[2], view.stride[3]);
  }
  return view;
}

Tensor empty(const std::vector<int64_t>& shape, gdn::DType dtype, gdn::Device device) {
  return allocate(shape.data(), static_cast<int>(shape.size()), scalar_type_of(dtype), device);
}

Tensor zeros(const std::vector<int64_t>& shape, gdn::DType dtype, gdn::Device device) {
  Tensor tensor = empty(shape, dtype, device);
  torch::stable::zero_(tensor);
  return tensor;
}

Tensor empty_like_shape(const Tensor& tensor) {
  const Dims d = dims_of(tensor);
  return allocate(d.size, d.rank, tensor.scalar_type(), device_of(tensor));
}

Tensor aligned_bytes(int64_t bytes, gdn::Device device) {
  const int64_t with_slack = bytes > 0 ? bytes + kAlignment : 0;
  Tensor block = allocate(&with_slack, 1, ScalarType::Byte, device);
  if (bytes == 0) return block;
  const auto address = reinterpret_cast<uintptr_t>(block.data_ptr());
  const int64_t skip = static_cast<int64_t>(-address % kAlignment), step = 1;
  AtenTensorHandle aligned = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(block.get(), 1, &bytes, &step, skip, &aligned));
  return Tensor(aligned);
}

gdn::Memory memory_of(const Tensor& bytes) {
  return {bytes.numel() > 0 ? bytes.data_ptr() : nullptr, bytes.numel()};
}

Tensor int64_tensor(const std::vector<int64_t>& values, const std::vector<int64_t>& shape) {
  Tensor tensor = empty(shape, gdn::DType::kInt64, {});
  if (!values.empty())
    std::memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(int64_t));
  return tensor;
}

std::vector<int64_t> int64_values(const char* name, const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  const Dims d = dims_of(tensor);
  if (d.rank != 1 || (type != ScalarType::Int && type != ScalarType::Long)) {
    std::string shape;
    for (int i = 0; i < d.rank; ++i) shape += (i > 0 ? ", " : "") + std::to_string(d.size[i]);
    raise(gdn::ErrorCode::kInvalidArgument, std::string(name) +
                                                ": expected one dimension of int32 or int64, got " +
                                                name_of(type) + " [" + shape + "]");
  }
  const bool on_host = tensor.is_cpu();
  const Tensor host =
      on_host ? tensor : torch::stable::to(tensor, torch::stable::Device(DeviceType::CPU));
  const gdn::TensorView view = view_of(name, host);
  std::vector<int64_t> values(static_cast<size_t>(view.shape[0]));
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * view.stride[0];
    values[i] = view.dtype == gdn::DType::kInt64 ? view.as<const int64_t>()[at]
                                                 : view.as<const int32_t>()[at];
  }
  return values;
}

gdn::Stream current_stream(gdn::Device device) {
  if (device.kind != gdn::Device::Kind::kCuda) return {};
  // A CPU build of torch does not have this function, so it is looked up where torch has CUDA.
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library
               ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
               : nullptr;
  }();
  gdn::Stream stream;
  if (!get || get(device.index, &stream.handle) != 0) {
    raise(gdn::ErrorCode::kDevice, "stream: this build of torch has no current CUDA stream");
  }
  return stream;
}

std::optional<torch::stable::accelerator::DeviceGuard> guard_for(gdn::Device device) {
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (device.kind == gdn::Device::Kind::kCuda) guard.emplace(device.index);
  return guard;
}

}  // namespace gdn_torch
