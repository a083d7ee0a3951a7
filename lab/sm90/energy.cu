// Study: what the parts of a kernel cost in energy on a card that is at its power cap, where time is
// energy. Each part alone on all multiprocessors for about a second; joules from NVML's counter.
// Build and run: nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Isrc -Iinclude -o OUT
// lab/sm90/energy.cu -ldl && OUT
// Found on an H200: docs/notes/sm90.md. `python lab/energy_of_calls.py` has whole calls beside it.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "backend/cuda/sm90/wgmma.cuh"

namespace {

using namespace gdn::sm90;

constexpr int kBlocks = 132;

void check(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  std::printf("line %d: %s\n", line, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

// Joules since the driver was loaded.
class Meter {
 public:
  Meter() {
    void* nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (nvml == nullptr) std::exit((std::printf("no NVML\n"), 1));
    const auto init = reinterpret_cast<int (*)()>(dlsym(nvml, "nvmlInit_v2"));
    const auto handle =
        reinterpret_cast<int (*)(unsigned, void**)>(dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"));
    energy_ = reinterpret_cast<Energy>(dlsym(nvml, "nvmlDeviceGetTotalEnergyConsumption"));
    if (init() != 0 || handle(0, &device_) != 0) std::exit((std::printf("NVML fails\n"), 1));
  }
  double joules() const {
    unsigned long long millijoules = 0;
    if (energy_(device_, &millijoules) != 0) std::exit((std::printf("no energy counter\n"), 1));
    return static_cast<double>(millijoules) * 1e-3;
  }

 private:
  using Energy = int (*)(void*, unsigned long long*);
  void* device_ = nullptr;
  Energy energy_ = nullptr;
};

double base_watts = 0;  // of multiprocessors that hold blocks which sleep

// Runs `launch` for a second; `units` of `unit` each time.
void measure(const Meter& meter, const char* name, double units, const char* unit,
             const std::function<void()>& launch) {
  using Clock = std::chrono::steady_clock;
  const auto run_for = [&](double seconds) {
    int64_t calls = 0;
    const auto begin = Clock::now();
    while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
      for (int i = 0; i < 4; ++i) launch();
      CHECK(cudaDeviceSynchronize());
      calls += 4;
    }
    return calls;
  };
  run_for(0.3);
  const double joules = meter.joules();
  const auto begin = Clock::now();
  const int64_t calls = run_for(1.0);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  const double watts = (meter.joules() - joules) / seconds;
  const double rate = units * static_cast<double>(calls) / seconds;
  if (base_watts == 0) base_watts = watts;
  std::printf("%-42s %5.0f W", name, watts);
  if (units > 0) {
    std::printf("  %9.3f %s/s  %8.4f J more than sleeping per %s", rate, unit,
                (watts - base_watts) / rate, unit);
  }
  std::printf("\n");
  std::fflush(stdout);
}

__global__ void sleep_for(int64_t clocks) {
  const int64_t begin = clock64();
  while (clock64() - begin < clocks) __nanosleep(1000);
}

__global__ void read_all(const uint4* data, int64_t count, uint4* sink) {
  uint4 sum{};
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 x = __ldcs(data + i);
    sum.x ^= x.x, sum.y ^= x.y, sum.z ^= x.z, sum.w ^= x.w;
  }
  if (sum.x == 1 && sum.y == 2) *sink = sum;
}

__global__ void write_all(uint4* data, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const auto word = static_cast<uint32_t>(i) * 2654435761u;
    __stcs(data + i, uint4{word, word ^ 0x5bd1e995u, word * 3, word * 5});
  }
}

// Random normal-like bf16 bits: sign and mantissa random, exponents around 1.
__device__ uint32_t random_pair(uint32_t i) {
  uint32_t x = i * 2654435761u;
  x ^= x >> 15, x *= 0x85ebca6b, x ^= x >> 13;
  return (x & 0x80ff80ffu) | 0x3f003f00u;
}

__global__ void randomise(uint32_t* data, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    data[i] = random_pair(static_cast<uint32_t>(i));
  }
}

constexpr int kCopyBytes = 16384, kStages = 8;

// Bulk copies of 16 KB to shared memory, eight in flight, out of `tiles` of them.
__global__ void copy_in(const std::byte* data, int tiles, int copies) {
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ uint64_t full[kStages];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kStages; ++i) barrier_init(&full[i], 1);
  barrier_init_fence();
  const auto issue = [&](int i) {
    const int tile = static_cast<int>((blockIdx.x * 7919u + i * 104729u) % tiles);
    barrier_expect_bytes(&full[i % kStages], kCopyBytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(gdn::cuda::smem_address(shared + (i % kStages) * kCopyBytes)),
        "l"(data + int64_t{tile} * kCopyBytes), "r"(kCopyBytes),
        "r"(gdn::cuda::smem_address(&full[i % kStages]))
        : "memory");
  };
  for (int i = 0; i < kStages; ++i) issue(i);
  for (int i = 0; i < copies; ++i) {
    barrier_wait(&full[i % kStages], (i / kStages) % 2);
    if (i + kStages < copies) issue(i + kStages);
  }
}

__global__ void read_shared(int rounds, uint4* sink) {
  extern __shared__ __align__(1024) std::byte shared[];
  auto* words = reinterpret_cast<uint32_t*>(shared);
  for (int i = threadIdx.x; i < 32768; i += blockDim.x) words[i] = random_pair(i);
  __syncthreads();
  const auto* rows = reinterpret_cast<const uint4*>(shared);
  uint4 sum{};
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 x = rows[(threadIdx.x + i * 512 + round * 32) % 8192];
      sum.x ^= x.x, sum.y ^= x.y, sum.z ^= x.z, sum.w ^= x.w;
    }
  }
  if (sum.x == 1 && sum.y == 2) *sink = sum;
}

// Products of two warpgroups, 64 x N x 64 each time: A in registers or shared memory.
template <int kN, bool kRegisters>
__global__ void __launch_bounds__(256) multiply(int rounds, float* sink) {
  extern __shared__ __align__(1024) std::byte raw[];
  const uint32_t base = (gdn::cuda::smem_address(raw) + 1023) & ~1023u;
  const uint32_t words = base - gdn::cuda::smem_address(raw);
  auto* tiles = reinterpret_cast<uint32_t*>(raw + words);
  for (int i = threadIdx.x; i < 8 * kTileBytes / 4; i += blockDim.x) tiles[i] = random_pair(i);
  fence_async_proxy();
  __syncthreads();
  const int group = threadIdx.x / 128;
  const Operand left = operand(base + group * kTileBytes);
  const Operand right = operand(base + (2 + 2 * group) * kTileBytes, kTileBytes);
  uint32_t a[16];
  for (int i = 0; i < 16; ++i) a[i] = random_pair(threadIdx.x * 16 + i);
  float d[kN / 2];
  for (float& x : d) x = 0;
  for (int round = 0; round < rounds; ++round) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kRegisters) {
        wgmma_rs<1>(d, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3], right.at(2048 * k), true);
      } else {
        wgmma_ss<0, 1>(d, left.at(32 * k), right.at(2048 * k), true);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    settle(d);
  }
  float sum = 0;
  for (const float x : d) sum += x;
  if (sum == 1.5f) *sink = sum;
}

#define PAIR                                                  \
  asm volatile("fma.rn.f32 %0,%0,%1,%1;" : "+f"(a) : "f"(b)); \
  asm volatile("fma.rn.f32 %0,%0,%1,%1;" : "+f"(c) : "f"(b));
#define PAIRS8 PAIR PAIR PAIR PAIR PAIR PAIR PAIR PAIR
#define PAIRS64 PAIRS8 PAIRS8 PAIRS8 PAIRS8 PAIRS8 PAIRS8 PAIRS8 PAIRS8
#define PAIRS256 PAIRS64 PAIRS64 PAIRS64 PAIRS64  // 8 KB

// 8 KB of code again and again, or four times as much for each of two halves of the block's warps.
template <bool kLarge>
__global__ void __launch_bounds__(512) code(int rounds, float b, float* sink) {
  float a = threadIdx.x, c = b;
  for (int round = 0; round < rounds; ++round) {
    if constexpr (kLarge) {
      if (threadIdx.x < 256) {
        PAIRS256 PAIRS256 PAIRS256 PAIRS256
      } else {
        b += 1;
        PAIRS256 PAIRS256 PAIRS256 PAIRS256
      }
    } else {
      PAIRS256
    }
  }
  if (a + c == 1.5f) *sink = a;
}

template <typename Kernel>
void allow_shared(Kernel* kernel, int bytes) {
  CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

}  // namespace

int main() {
  const Meter meter;
  constexpr int64_t kBytes = int64_t{4} << 30;
  std::byte* data = nullptr;
  CHECK(cudaMalloc(&data, kBytes));
  randomise<<<4 * kBlocks, 512>>>(reinterpret_cast<uint32_t*>(data), kBytes / 4);
  CHECK(cudaDeviceSynchronize());
  auto* rows = reinterpret_cast<uint4*>(data);
  auto* sink = reinterpret_cast<float*>(data);

  measure(meter, "blocks that sleep", 0, "", [] { sleep_for<<<kBlocks, 640>>>(10'000'000); });
  measure(meter, "read from HBM", kBytes * 1e-9, "GB",
          [&] { read_all<<<8 * kBlocks, 512>>>(rows, kBytes / 16, rows); });
  measure(meter, "write to HBM", kBytes * 1e-9, "GB",
          [&] { write_all<<<8 * kBlocks, 512>>>(rows, kBytes / 16); });
  randomise<<<4 * kBlocks, 512>>>(reinterpret_cast<uint32_t*>(data), kBytes / 4);
  constexpr int kCopies = 20000;
  allow_shared(copy_in, kStages * kCopyBytes);
  for (const int megabytes : {8, 20, 1024}) {
    char name[64];
    std::snprintf(name, sizeof name, "bulk copies to shared memory out of %d MB", megabytes);
    measure(meter, name, 1e-9 * kBlocks * kCopies * kCopyBytes, "GB", [&] {
      copy_in<<<kBlocks, 32, kStages * kCopyBytes>>>(data, megabytes * 64, kCopies);
    });
  }
  constexpr int kRounds = 20000;
  allow_shared(read_shared, 131072);
  measure(meter, "read from shared memory", 1e-12 * kBlocks * 512 * 8 * 16 * kRounds, "TB",
          [&] { read_shared<<<kBlocks, 512, 131072>>>(kRounds, rows); });
  const auto products = [&](const char* name, auto* kernel, int n) {
    allow_shared(kernel, 9 * kTileBytes);
    measure(meter, name, 1e-12 * kBlocks * 2 * kRounds * 2.0 * 64 * 64 * n, "TFLOP",
            [&] { kernel<<<kBlocks, 256, 9 * kTileBytes>>>(kRounds, sink); });
  };
  products("products, N = 64, both in shared memory", multiply<64, false>, 64);
  products("products, N = 64, A in registers", multiply<64, true>, 64);
  products("products, N = 128, both in shared memory", multiply<128, false>, 128);
  products("products, N = 128, A in registers", multiply<128, true>, 128);
  measure(meter, "fma, 8 KB of code", 1e-9 * kBlocks * 16 * 512 * kRounds / 4, "G instructions",
          [&] { code<false><<<kBlocks, 512>>>(kRounds / 4, 1.0f, sink); });
  measure(meter, "fma, 64 KB of code", 1e-9 * kBlocks * 16 * 2048 * kRounds / 16, "G instructions",
          [&] { code<true><<<kBlocks, 512>>>(kRounds / 16, 1.0f, sink); });
  return 0;
}
