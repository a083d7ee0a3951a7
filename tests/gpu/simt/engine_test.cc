// The emulator itself: products against plain loops over the documented layouts, boxes of the copy
// engine, and faults that it has to find.
#include "simt/engine.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "backend/cuda/common/launch.h"
#include "backend/cuda/sm90/ptx.cuh"
#include "backend/cuda/sm90/wgmma.cuh"

namespace gdn::sm90 {
namespace {

// Runs `kernel` once per thread of `blocks` blocks.
template <typename Kernel>
void run(const Kernel& kernel, int threads, int shared_bytes, int64_t blocks = 1) {
  ASSERT_TRUE(
      simt::launch({"test", [&] { kernel(); }, blocks, threads, shared_bytes, blocks > 1}).is_ok());
}

std::vector<float> small_integers(int count, unsigned seed) {  // exact in bf16, and so are sums
  std::mt19937 random(seed);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& one : x) one = static_cast<float>(static_cast<int>(random() % 7) - 3);
  return x;
}

// Element (row, column) of a swizzled 64 x 64 tile at `tile`.
void put(uint32_t tile, int row, int column, float x) {
  const uint32_t address = tile_address(tile, row, column / 8 * 8) + column % 8 * 2;
  const auto bits = static_cast<uint16_t>(pack_bf16(x, 0.0f));
  std::memcpy(cuda::smem_pointer(address, 2), &bits, 2);
}

// a [64 x 16] b [16 x 64] with A and B as tiles, either or both transposed.
template <int kTransA, int kTransB>
void expect_product() {
  const std::vector<float> a = small_integers(64 * 16, 1), b = small_integers(16 * 64, 2);
  std::vector<float> c(64 * 64, -1.0f);
  run(
      [&] {
        auto* shared = static_cast<uint8_t*>(simt::shared_memory());
        const uint32_t left = smem_address(shared), right = left + kTileBytes;
        const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
        for (int i = thread; i < 64 * 16; i += 128) {
          const int m = i / 16, k = i % 16;
          kTransA ? put(left, k, m, a[static_cast<size_t>(i)])
                  : put(left, m, k, a[static_cast<size_t>(i)]);
        }
        for (int i = thread; i < 16 * 64; i += 128) {
          const int k = i / 64, n = i % 64;
          kTransB ? put(right, k, n, b[static_cast<size_t>(i)])
                  : put(right, n, k, b[static_cast<size_t>(i)]);
        }
        __syncthreads();
        float d[32];
        wgmma_ss<kTransA, kTransB>(d, operand(left, kTileBytes), operand(right, kTileBytes), false);
        for (int i = 0; i < 32; ++i) {
          const int row = 16 * (thread / 32) + lane / 4 + 8 * (i / 2 % 2);
          const int column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
          c[static_cast<size_t>(row * 64 + column)] = d[i];
        }
      },
      128, 2 * kTileBytes);
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < 64; ++n) {
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) {
        sum += a[static_cast<size_t>(m * 16 + k)] * b[static_cast<size_t>(k * 64 + n)];
      }
      ASSERT_EQ(c[static_cast<size_t>(m * 64 + n)], sum) << m << ", " << n;
    }
  }
}

TEST(Emulator, WarpgroupProducts) {
  expect_product<0, 0>();
  expect_product<0, 1>();
  expect_product<1, 0>();
  expect_product<1, 1>();
}

TEST(Emulator, BoxesEndWithTheTensor) {
  // 70 tokens of 2 heads of 128, of which a box takes tokens 32 to 95 of head 1.
  constexpr int kTokens = 70, kHeads = 2, kRow = kHeads * 128;
  std::vector<uint16_t> tensor(kTokens * kRow);
  for (size_t i = 0; i < tensor.size(); ++i) tensor[i] = static_cast<uint16_t>(i);
  CUtensorMap map{reinterpret_cast<unsigned char*>(tensor.data()),
                  {64, kTokens, 2, kHeads},
                  {2, kRow * 2, 128, 256},
                  {64, 64, 2, 1}};
  std::vector<uint16_t> got(64 * 128, 1);
  run(
      [&] {
        auto* shared = static_cast<uint8_t*>(simt::shared_memory());
        auto* full = reinterpret_cast<uint64_t*>(shared + 2 * kTileBytes);
        if (threadIdx.x == 0) {
          barrier_init(full, 1);
          barrier_expect_bytes(full, 2 * kTileBytes);
          tensor_load(shared, &map, full, 0, 32, 0, 1);
        }
        __syncthreads();
        barrier_wait(full, 0);
        for (int i = static_cast<int>(threadIdx.x); i < 64 * 128; i += 32) {
          const int t = i / 128, x = i % 128;
          const uint32_t address =
              tile_address(smem_address(shared) + x / 64 * kTileBytes, t, x % 64 / 8 * 8);
          std::memcpy(&got[static_cast<size_t>(i)], cuda::smem_pointer(address + x % 8 * 2, 2), 2);
        }
      },
      32, 2 * kTileBytes + 64);
  for (int t = 0; t < 64; ++t) {
    for (int x = 0; x < 128; ++x) {
      const int row = 32 + t;
      const auto wanted =
          row < kTokens ? tensor[static_cast<size_t>(row * kRow + 128 + x)] : uint16_t{0};
      ASSERT_EQ(got[static_cast<size_t>(t * 128 + x)], wanted) << t << ", " << x;
    }
  }
}

TEST(Emulator, StoresReadTheirSourceUntilTheyAreWaitedFor) {
  alignas(16) uint32_t out[4] = {};
  int late = 0;
  const simt::SeedScope scope;
  for (uint64_t seed = 1; seed < 40; ++seed) {
    simt::machine().seed = seed;
    run(
        [&] {
          auto* shared = static_cast<uint32_t*>(simt::shared_memory());
          if (threadIdx.x != 0) return;
          shared[0] = 1;
          bulk_store(out, shared, 16);
          simt::pause();  // time passes
          shared[0] = 2;  // too soon
          bulk_store_wait();
        },
        32, 64);
    late += out[0] == 2;
  }
  EXPECT_GT(late, 0);
  EXPECT_LT(late, 39);
}

// A copy's barrier whose phases pass while a warp that waits for each of them is late.
void miss_a_phase(bool waited_for) {
  const simt::SeedScope scope;
  for (uint64_t seed = 1; seed < 40; ++seed) {
    simt::machine().seed = seed;
    run(
        [&] {
          auto* full = static_cast<uint64_t*>(simt::shared_memory());
          auto* empty = full + 1;
          const int warp = static_cast<int>(threadIdx.x) / 32;
          if (threadIdx.x == 0) {
            barrier_init(full, 32);
            barrier_init(empty, waited_for ? 64 : 32);
          }
          __syncthreads();
          for (int turn = 0; turn < 200; ++turn) {
            const uint32_t parity = turn & 1;
            if (warp == 0) {
              barrier_wait(empty, parity ^ 1);
              barrier_arrive(full);
            } else {
              barrier_wait(full, parity);
              if (warp == 1 || waited_for) barrier_arrive(empty);
            }
          }
        },
        96, 64);
  }
}

TEST(Emulator, FindsAPhaseThatALateWarpMisses) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  miss_a_phase(true);
  EXPECT_DEATH(miss_a_phase(false), "no thread can go on");
}

TEST(Emulator, FindsArrivalsThatNeverCome) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto wait_for_more = [] {
    run(
        [] {
          auto* bar = static_cast<uint64_t*>(simt::shared_memory());
          if (threadIdx.x == 0) barrier_init(bar, 40);
          __syncthreads();
          barrier_arrive(bar);
          __syncthreads();
          if (threadIdx.x < 4) barrier_wait(bar, 0);
        },
        32, 64);
  };
  EXPECT_DEATH(wait_for_more(), "no thread can go on");
}

TEST(Emulator, RefusesNamedBarriersThatTheHardwareLacks) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto meet = [](int id, int threads) { run([=] { named_barrier(id, threads); }, 64, 64); };
  meet(15, 64);
  EXPECT_DEATH(meet(16, 64), "a named barrier's id is not 0 to 15");
  EXPECT_DEATH(meet(-1, 64), "a named barrier's id is not 0 to 15");
  EXPECT_DEATH(meet(1, 48), "a named barrier of no whole warps");
}

// Two warps meet, then all three: the count may change from phase to phase, not within one.
TEST(Emulator, FindsDifferentCountsInOnePhaseOfANamedBarrier) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto meet = [](int others) {
    run(
        [=] {
          const bool last = threadIdx.x >= 64;
          if (!last) named_barrier(1, 64);
          __syncthreads();
          named_barrier(1, last ? others : 96);
        },
        96, 64);
  };
  meet(96);
  EXPECT_DEATH(meet(64), "threads meet at a named barrier with different counts");
  EXPECT_DEATH(meet(128), "threads meet at a named barrier with different counts");
}

// The first bytes are within shared memory, the last ones are not.
TEST(Emulator, FindsCopiesThatLeaveSharedMemory) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  alignas(16) static unsigned char global[256];
  std::vector<uint16_t> tensor(64 * 128);
  const CUtensorMap map{reinterpret_cast<unsigned char*>(tensor.data()),
                        {64, 64, 2, 1},
                        {2, 256, 128, 256},
                        {64, 64, 2, 1}};
  constexpr int kShared = 2 * kTileBytes + 1024;
  enum Copy { kBulkLoad, kBulkStore, kLoad, kStore, kAdd };
  const auto copy = [&](Copy which, int at, uint32_t bytes) {
    run(
        [=, &map] {
          if (threadIdx.x != 0) return;
          auto* shared = static_cast<uint8_t*>(simt::shared_memory());
          auto* full = reinterpret_cast<uint64_t*>(shared);
          uint8_t* place = shared + at;
          barrier_init(full, 1);
          barrier_expect_bytes(full, bytes);
          if (which == kBulkLoad) bulk_load(place, global, bytes, full);
          if (which == kBulkStore) bulk_store(global, place, bytes);
          if (which == kLoad) tensor_load(place, &map, full, 0, 0, 0, 0);
          if (which == kStore) tensor_store(&map, place, 0, 0, 0, 0);
          if (which == kAdd) tensor_add(&map, place, 0, 0, 0, 0);
        },
        32, kShared);
  };
  for (Copy which : {kBulkLoad, kBulkStore}) {
    copy(which, kShared - 64, 64);
    EXPECT_DEATH(copy(which, kShared - 64, 80), "access past the end of shared memory");
  }
  for (Copy which : {kLoad, kStore, kAdd}) {
    copy(which, 1024, 2 * kTileBytes);
    EXPECT_DEATH(copy(which, 2048, 2 * kTileBytes), "access past the end of shared memory");
  }
}

TEST(Emulator, BlocksOfACooperativeLaunchWaitForEachOther) {
  int flags[3] = {0, 0, 1};
  run(
      [&] {
        const unsigned block = blockIdx.x;
        if (threadIdx.x != 0 || block == 2) return;
        while (flag_acquire(&flags[block + 1]) == 0) __nanosleep(10);
        flag_release(&flags[block], 1);
      },
      32, 64, 3);
  EXPECT_EQ(flags[0], 1);
}

}  // namespace
}  // namespace gdn::sm90
