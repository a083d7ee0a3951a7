#include "bench/protocol.h"

#include <gtest/gtest.h>

namespace gdn::bench {
namespace {

Samples of(const std::vector<std::vector<double>>& groups) { return {groups, 0, 0}; }

std::string letters(const Protocol& protocol, int arms) {
  std::string text;
  int group = 0;
  for (const Block& block : schedule(protocol, arms)) {
    if (block.group != group) text += ' ';
    group = block.group;
    text += static_cast<char>('A' + block.arm);
  }
  return text;
}

TEST(Protocol, ArmsAreInPalindromicOrderAndTheSecondRunReversed) {
  EXPECT_EQ(letters({"x", 1, 2, 1, 1, 0}, 3), "ABCCBA ABCCBA");
  EXPECT_EQ(letters({"x", 2, 2, 1, 1, 0}, 2), "ABBA ABBA BAAB BAAB");
  EXPECT_EQ(letters({"x", 3, 1, 1, 1, 0}, 2), "ABBA BAAB ABBA");
  EXPECT_EQ(letters({"x", 2, 1, 1, 1, 0}, 1), "AA AA");
  EXPECT_EQ(letters(quick_protocol(), 2), "ABBA BAAB");
  EXPECT_TRUE(schedule(short_protocol(), 0).empty());
}

TEST(Protocol, EveryArmHasTwoBlocksInEveryGroup) {
  for (const Protocol& protocol : {short_protocol(), quick_protocol(), sustained_protocol()}) {
    const auto blocks = schedule(protocol, 3);
    ASSERT_EQ(blocks.size(), static_cast<size_t>(6 * protocol.runs * protocol.groups));
    std::vector<int> count(3 * static_cast<size_t>(protocol.runs * protocol.groups));
    for (const Block& b : blocks) ++count.at(static_cast<size_t>(3 * b.group + b.arm));
    for (int n : count) EXPECT_EQ(n, 2);
  }
}

TEST(Protocol, TheNumbersOfTheContract) {
  EXPECT_EQ(describe(short_protocol()),
            "short: 2 runs of 8 groups, 2 blocks of 5 + 20 calls per arm");
  EXPECT_EQ(describe(quick_protocol()),
            "quick: 2 runs of 1 group, 2 blocks of 5 + 20 calls per arm (reduced)");
  EXPECT_EQ(describe(sustained_protocol()),
            "sustained: 1 run of 3 groups, 2 blocks of 20 + 300 calls per arm, each after 5 s "
            "idle");
}

TEST(Statistics, MedianOfGroupMedians) {
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({4, 1, 3}), 3);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
  // Group medians 2, 10, 5; the median of all nine would be 4.
  const Samples s = of({{1, 2, 3}, {9, 10, 11}, {4, 5, 100}});
  EXPECT_EQ(group_medians(s), (std::vector<double>{2, 10, 5}));
  EXPECT_EQ(value_ms(s), 5);
  EXPECT_EQ(value_ms({}), 0);
}

TEST(Statistics, DriftIsLastOverFirstEitherWay) {
  EXPECT_NEAR(drift(of({{100}, {500}, {103}})), 0.03, 1e-12);
  EXPECT_NEAR(drift(of({{100}, {97}})), 0.03, 1e-12);
  EXPECT_EQ(drift(of({{100}})), 0);
  EXPECT_EQ(drift({}), 0);
}

TEST(Statistics, RatiosArePairedByGroup) {
  const PairedRatio even = paired_ratio(of({{10}, {20}, {30}}), of({{5}, {10}, {15}}));
  EXPECT_EQ(even.ratio, 2);
  EXPECT_EQ(even.spread, 0);
  const PairedRatio uneven = paired_ratio(of({{10}, {10}, {11}}), of({{5}, {5}, {5}}));
  EXPECT_EQ(uneven.ratio, 2);
  EXPECT_NEAR(uneven.spread, 0.1, 1e-12);
}

TEST(Claim, DriftAloneIsNoObjectionWhereTheRatiosHold) {
  const Samples warm = of({{100}, {103}, {110}}), twice = of({{200}, {206}, {220}});
  EXPECT_EQ(why_not_claimed(twice, warm, true), "");
  const Samples loose = of({{200}, {206}, {226}});
  EXPECT_EQ(why_not_claimed(loose, warm, true),
            "drift 13.0 %, group ratios up to 2.7 % apart from their median");
  // Wide ratios without a drift are no objection either.
  EXPECT_EQ(why_not_claimed(of({{100}, {110}, {100}}), of({{50}, {50}, {50}}), true), "");
}

TEST(Claim, TheBarsThemselves) {
  // Both exactly at the bar: claimed. Beyond it: not.
  EXPECT_EQ(why_not_claimed(of({{1000}, {1020}}), of({{1000}, {1000}}), true), "");
  EXPECT_NE(why_not_claimed(of({{1000}, {1000}, {1021}}), of({{1000}, {1000}, {1000}}), true), "");
}

TEST(Claim, PowerCapOfEitherArm) {
  Samples a = of({{10}}), b = of({{10}});
  a.power_readings = b.power_readings = 100;
  a.capped = 4;
  EXPECT_EQ(why_not_claimed(a, b, true), "");
  b.capped = 5;
  EXPECT_EQ(why_not_claimed(a, b, true), "5 % of the calls under the power cap");
  EXPECT_EQ(why_not_claimed(b, a, true), "5 % of the calls under the power cap");
  EXPECT_EQ(capped_share(Samples{}), 0) << "no reading, no share";
}

TEST(Claim, OneProcess) {
  EXPECT_EQ(why_not_claimed(of({{10}}), of({{10}}), false), "measured in another process");
}

}  // namespace
}  // namespace gdn::bench
