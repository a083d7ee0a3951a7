// bf16 rounding, tensor views, the thread pool.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

#include "base/bf16.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "gdn/status.h"
#include "gdn/tensor.h"

namespace gdn {
namespace {

TEST(BFloat16, RoundsToNearestEven) {
  EXPECT_EQ(BFloat16(1.0f).bits, 0x3f80);
  EXPECT_EQ(static_cast<float>(BFloat16(1.0f + 0x1p-8f)), 1.0f);                // tie, to even
  EXPECT_EQ(static_cast<float>(BFloat16(1.0f + 3 * 0x1p-8f)), 1.0f + 0x1p-6f);  // tie, to even
  EXPECT_EQ(static_cast<float>(BFloat16(1.0f + 0x1.01p-8f)), 1.0f + 0x1p-7f);
  EXPECT_EQ(static_cast<float>(BFloat16(-0.0f)), 0.0f);
  EXPECT_TRUE(std::isinf(static_cast<float>(BFloat16(std::numeric_limits<float>::max()))));
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(std::nanf("")))));
}

TEST(TensorView, ContiguousStrides) {
  const auto view = TensorView::contiguous(nullptr, DType::kFloat32, {5, 3, 2});
  EXPECT_EQ(view.stride[0], 6);
  EXPECT_EQ(view.stride[2], 1);
  EXPECT_EQ(view.numel(), 30);
  EXPECT_EQ(shape_string(view), "[5, 3, 2]");
  EXPECT_FALSE(TensorView{}.present());
}

TEST(Memory, LayoutAligns) {
  BlockLayout layout;
  EXPECT_EQ(layout.take(1), 0);
  EXPECT_EQ(layout.take(257), 256);
  EXPECT_EQ(layout.bytes(), 256 + 512);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(AlignedBuffer(100).data()) % kMemoryAlignment, 0u);
}

TEST(Memory, FillsAndCopiesEveryByteOfManyBlocks) {
  constexpr int64_t kBytes = (int64_t{9} << 20) + 3;  // two blocks and a part of one
  std::vector<unsigned char> from(kBytes + 1, 1), to(kBytes + 1, 1);
  fill_bytes(from.data(), 7, kBytes);
  copy_bytes(to.data(), from.data(), kBytes);
  EXPECT_EQ(std::count(to.begin(), to.end(), 7), kBytes);
  EXPECT_EQ(to.back(), 1);
  fill_bytes(nullptr, 7, 0);
  copy_bytes(nullptr, nullptr, 0);
}

TEST(ThreadPool, RunsEveryItemOnceAlsoNestedAndFromManyThreads) {
  std::vector<std::jthread> callers;
  std::atomic<int64_t> total{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        std::vector<std::atomic<int>> hits(100);
        parallel_for(100, [&](int64_t i, int worker) {
          ASSERT_LT(worker, num_threads());
          ++hits[i];
          parallel_for(2, [&](int64_t, int) { ++total; });
        });
        for (const auto& hit : hits) ASSERT_EQ(hit.load(), 1);
      }
    });
  }
  callers.clear();
  EXPECT_EQ(total.load(), 4 * 50 * 100 * 2);
}

TEST(ThreadPool, CountIsANumberOrAnError) {
  EXPECT_EQ(parse_num_threads("1").value(), 1);
  EXPECT_EQ(parse_num_threads("1024").value(), kMostThreads);
  for (const char* bad : {"", "0", "-1", "1025", "two", "2 ", " 2", "2.0", "99999999999"}) {
    const Result<int> refused = parse_num_threads(bad);
    ASSERT_FALSE(refused) << bad;
    EXPECT_NE(refused.status().message().find("GDN_NUM_THREADS: expected a number from 1 to 1024"),
              std::string::npos)
        << refused.status().message();
  }
}

TEST(Status, CarriesItsMessage) {
  const Result<int> good = 3;
  const Result<int> bad = Status(ErrorCode::kInvalidArgument, "k: expected [1], got [2]");
  EXPECT_EQ(good.value(), 3);
  EXPECT_EQ(bad.status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(bad.status().message(), "k: expected [1], got [2]");
}

TEST(ParallelFor, WorksInAForkedChild) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer starts no threads in a forked child";
#endif
  const auto right = [] {
    std::atomic<int64_t> sum{0};
    parallel_for(1000, [&](int64_t i, int) { sum += i; });
    return sum == 499500;
  };
  ASSERT_TRUE(right());
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::exit(right() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(right());
}

}  // namespace
}  // namespace gdn
