// What the kernels and their host code use of CUDA, for a host compiler: keywords, indices, warp
// functions through the SIMT emulator, and a runtime whose device memory is host memory.
#pragma once

#include <vector_types.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "simt/engine.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __grid_constant__
#define threadIdx (::simt::thread_index())
#define blockIdx (::simt::block_index())
#define gridDim (::simt::grid_size())
#define blockDim (::simt::block_size())

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { simt::pause(); }
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline bool __any_sync(unsigned, bool predicate) { return simt::ballot(predicate) != 0; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline void __syncthreads() { simt::block_barrier(); }
inline void __syncwarp() { simt::warp_barrier(); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return simt::exchange(value, lane & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return simt::exchange(value, simt::lane() ^ bits);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
  return simt::exchange(value, simt::lane() >= by ? simt::lane() - by : simt::lane());
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int by) {
  return simt::exchange(value, simt::lane() + by < 32 ? simt::lane() + by : simt::lane());
}
inline unsigned __ballot_sync(unsigned, bool predicate) { return simt::ballot(predicate); }

enum cudaError_t { cudaSuccess = 0, cudaErrorStreamCaptureUnsupported = 900 };
using cudaStream_t = void*;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDefault };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

struct cudaDeviceProp {
  int major, minor, multiProcessorCount;
  size_t sharedMemPerBlockOptin;
  char name[64];
};
struct dim3 {
  unsigned x;
  explicit dim3(unsigned n) : x(n) {}
};

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* index) {
  return *index = simt::machine().device, cudaSuccess;
}
inline cudaError_t cudaSetDevice(int index) { return simt::machine().device = index, cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = simt::kDevices, cudaSuccess; }
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
  const simt::DeviceKind& kind = simt::kDeviceKinds[index];
  *properties = {kind.compute_capability / 10, kind.compute_capability % 10,
                 simt::machine().multiprocessors, static_cast<size_t>(kind.shared_bytes),
                 "SIMT emulator"};
  return cudaSuccess;
}
// A copy from the host within a capture would be noted with its address, to be read at each replay:
// nothing here does that.
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t = nullptr) {
  if (simt::machine().capture != nullptr) return cudaErrorStreamCaptureUnsupported;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaSuccess;  // never reached: cuda::launch() calls simt::launch()
}
inline cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t,
                                               cudaStream_t) {
  return cudaSuccess;  // likewise
}

inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* pointer) { return std::free(pointer), cudaSuccess; }
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return std::memset(to, value, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  const auto fill = [=] {
    if (simt::thread_index().x == 0) std::memset(to, value, bytes);
  };
  if (simt::machine().capture == nullptr) return cudaMemset(to, value, bytes);
  simt::machine().capture->push_back({"memset", fill, 1, 32, 0, false});
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

// Page-locked memory, events that have always passed and know when they were recorded, and where a
// pointer is.
inline constexpr unsigned cudaHostAllocDefault = 0, cudaEventDisableTiming = 2;
struct SimtEvent {
  std::chrono::steady_clock::time_point at;
};
using cudaEvent_t = SimtEvent*;
struct cudaPointerAttributes {
  int device;
};
inline cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return *pointer = std::malloc(bytes), cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* pointer) { return std::free(pointer), cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return *event = new SimtEvent, cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  return event->at = std::chrono::steady_clock::now(), cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void*) {
  return attributes->device = simt::machine().device, cudaSuccess;
}

// Streams and graphs: a graph is the list of its launches.
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline constexpr unsigned cudaStreamNonBlocking = 1;
using cudaGraph_t = std::vector<simt::Launch>*;
using cudaGraphExec_t = std::vector<simt::Launch>*;
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = nullptr, cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = simt::machine().capture != nullptr ? cudaStreamCaptureStatusActive
                                               : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return simt::machine().capture = new std::vector<simt::Launch>, cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = std::exchange(simt::machine().capture, nullptr);
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                        unsigned long long) {
  return *exec = new std::vector<simt::Launch>(*graph), cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
  for (const simt::Launch& one : *exec) {
    if (!simt::launch(one)) return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete exec, cudaSuccess; }
