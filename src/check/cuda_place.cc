#include <fmt/format.h>

#include "check/place.h"

#ifdef GDN_WITH_CUDA
#include <cuda_runtime.h>

#include <vector>

namespace gdn {
namespace {

Status check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status::ok();
  return {ErrorCode::kDevice, fmt::format("{}: {}", what, cudaGetErrorString(error))};
}

class CudaPlace final : public Place {
 public:
  CudaPlace(int index, cudaStream_t stream) : index_(index), stream_(stream) {}
  ~CudaPlace() override {
    for (void* data : blocks_) static_cast<void>(cudaFree(data));
    static_cast<void>(cudaStreamDestroy(stream_));
  }

  Device device() const override { return {Device::Kind::kCuda, index_}; }
  Stream stream() const override { return {stream_}; }

  Result<TensorView> in(const HostTensor& tensor) override {
    if (!tensor.present()) return tensor.view;
    const Result<Memory> memory = block(tensor.buffer.bytes());
    if (!memory) return memory.status();
    if (memory->bytes > 0) {
      GDN_RETURN_IF_ERROR(
          check(cudaMemcpyAsync(memory->data, tensor.view.data, static_cast<size_t>(memory->bytes),
                                cudaMemcpyHostToDevice, stream_),
                "copying an operand to the device"));
    }
    TensorView view = tensor.view;
    view.data = memory->data;
    view.device = device();
    return view;
  }
  Result<TensorView> out(const HostTensor& tensor) override {
    Result<TensorView> view = in(tensor);
    if (view && tensor.present())
      outputs_.push_back({tensor.view.data, view->data, tensor.buffer.bytes()});
    return view;
  }
  Result<Memory> block(int64_t bytes) override {
    void* data = nullptr;
    if (bytes <= 0) return Memory{};
    GDN_RETURN_IF_ERROR(check(cudaMalloc(&data, static_cast<size_t>(bytes)), "cudaMalloc"));
    blocks_.push_back(data);
    GDN_RETURN_IF_ERROR(
        check(cudaMemsetAsync(data, 0xff, static_cast<size_t>(bytes), stream_), "cudaMemset"));
    return Memory{data, bytes};
  }
  Status to_host(void* host, const void* from, int64_t bytes) override {
    return copy(host, from, bytes, cudaMemcpyDeviceToHost, "copying a message to the host");
  }
  Status from_host(void* to, const void* host, int64_t bytes) override {
    return copy(to, host, bytes, cudaMemcpyHostToDevice, "copying a message to the device");
  }
  Status finish() override {
    GDN_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream_), "running on the device"));
    for (const Output& output : outputs_) {
      if (output.bytes == 0) continue;
      GDN_RETURN_IF_ERROR(
          check(cudaMemcpy(output.host, output.device, static_cast<size_t>(output.bytes),
                           cudaMemcpyDeviceToHost),
                "copying a result to the host"));
    }
    return Status::ok();
  }

 private:
  Status copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind, const char* what) {
    if (bytes == 0) return Status::ok();
    GDN_RETURN_IF_ERROR(
        check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream_), what));
    return check(cudaStreamSynchronize(stream_), what);
  }

  struct Output {
    void* host;
    const void* device;
    int64_t bytes;
  };
  int index_;
  cudaStream_t stream_;
  std::vector<void*> blocks_;
  std::vector<Output> outputs_;
};

}  // namespace

Result<std::unique_ptr<Place>> make_cuda_place(int index) {
  GDN_RETURN_IF_ERROR(check(cudaSetDevice(index), "cudaSetDevice"));
  cudaStream_t stream = nullptr;
  GDN_RETURN_IF_ERROR(
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
  return std::unique_ptr<Place>(std::make_unique<CudaPlace>(index, stream));
}

int cuda_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace gdn

#else

namespace gdn {

Result<std::unique_ptr<Place>> make_cuda_place(int) {
  return Status(ErrorCode::kUnsupported,
                "device: no CUDA backends in this build (configure with -DGDN_CUDA=ON)");
}

int cuda_devices() { return 0; }

}  // namespace gdn

#endif
