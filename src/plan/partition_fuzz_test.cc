// The fuzzer's property on fixed seeds: runs everywhere, needs no clang.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "plan/partition_bytes.h"

namespace gdn {
namespace {

TEST(PartitionFuzz, FixedSeedsBreakNothing) {
  for (uint64_t seed = 0; seed < 20'000; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<uint8_t> bytes(random() % 160);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random() >> 32);
    ASSERT_EQ(check_partition_bytes(bytes), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace gdn
