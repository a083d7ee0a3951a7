// Study: clocks an instruction takes in straight-line code that a loop repeats, by the size of the
// code, how many warpgroups run a part of their own, and how many multiprocessors do so at once.
// Build and run: nvcc -O3 -gencode=arch=compute_90a,code=sm_90a -o OUT lab/sm90/code_cache.cu && OUT
// Found on an H200 (docs/notes/sm90.md): about 30 KB stay in a multiprocessor; the rest is read again,
// at 128 bytes a clock for the up to 18 multiprocessors of a GPC.
#include <algorithm>
#include <cstdio>
#include <vector>

// Two independent sums, so that one warp can issue every other clock; 16 bytes an instruction.
#define PAIR                                                  \
  asm volatile("fma.rn.f32 %0,%0,%1,%1;" : "+f"(a) : "f"(b)); \
  asm volatile("fma.rn.f32 %0,%0,%1,%1;" : "+f"(c) : "f"(b));
#define KILOBYTE_8TH PAIR PAIR PAIR PAIR
#define KILOBYTE                                                                      \
  KILOBYTE_8TH KILOBYTE_8TH KILOBYTE_8TH KILOBYTE_8TH KILOBYTE_8TH KILOBYTE_8TH       \
      KILOBYTE_8TH KILOBYTE_8TH
#define KILOBYTES_8 KILOBYTE KILOBYTE KILOBYTE KILOBYTE KILOBYTE KILOBYTE KILOBYTE KILOBYTE

template <int kEighths>  // of 8 KB
__device__ __forceinline__ void straight_line(float& a, float& c, float b) {
  if constexpr (kEighths > 0) {
    KILOBYTES_8
    straight_line<kEighths - 1>(a, c, b);
  }
}

constexpr int kWarmUp = 2, kTurns = 50;

// Warpgroup w runs part w % kParts of the code.
template <int kKilobytes, int kParts>
__global__ void __launch_bounds__(512) repeat(float b, long long* clocks, float* sink) {
  float a = threadIdx.x, c = b;
  const int warpgroup = threadIdx.x / 128;
  long long start = 0;
  for (int turn = 0; turn < kWarmUp + kTurns; ++turn) {
    if (turn == kWarmUp) start = clock64();
    // Different constants keep the parts apart.
    switch (warpgroup % kParts) {
      case 0: straight_line<kKilobytes / 8>(a, c, b); break;
      case 1: straight_line<kKilobytes / 8>(a, c, b + 1); break;
      case 2: straight_line<kKilobytes / 8>(a, c, b + 2); break;
      default: straight_line<kKilobytes / 8>(a, c, b + 3); break;
    }
  }
  if (threadIdx.x % 128 == 0) clocks[blockIdx.x * 4 + warpgroup] = clock64() - start;
  sink[blockIdx.x * 512 + threadIdx.x] = a + c;
}

template <int kKilobytes, int kParts>
void measure(int blocks, int threads) {
  long long* clocks = nullptr;
  float* sink = nullptr;
  const size_t count = 4 * static_cast<size_t>(blocks);
  cudaMalloc(&clocks, count * sizeof(long long));
  cudaMalloc(&sink, 512 * sizeof(float) * blocks);
  cudaMemset(clocks, 0, count * sizeof(long long));
  repeat<kKilobytes, kParts><<<blocks, threads>>>(1.0f, clocks, sink);
  std::vector<long long> host(count);
  const cudaError_t error =
      cudaMemcpy(host.data(), clocks, count * sizeof(long long), cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(error));
    return;
  }
  std::printf("%3d KB x %d parts, %d warpgroups, %3d blocks: %.2f clocks\n", kKilobytes, kParts,
              threads / 128, blocks,
              static_cast<double>(*std::max_element(host.begin(), host.end())) / kTurns /
                  (64.0 * kKilobytes));
  cudaFree(clocks);
  cudaFree(sink);
}

template <int kKilobytes, int kParts>
void measure_all() {
  for (const int blocks : {1, 132}) {
    for (const int threads : {128, 512}) measure<kKilobytes, kParts>(blocks, threads);
  }
}

int main() {
  measure_all<8, 1>();
  measure_all<24, 1>();
  measure_all<32, 1>();
  measure_all<24, 2>();
  measure_all<8, 4>();
  measure_all<16, 4>();
  measure_all<32, 4>();
}
