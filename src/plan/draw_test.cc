// What people read: drawings and plan descriptions, as golden text where they are small.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "gdn/plan.h"

namespace gdn {
namespace {

using Rows = std::vector<int64_t>;

TEST(Draw, ZigzagPerDocument) {
  const auto p = Partition::make(Rows{0, 16, 40}, 2, Layout::kZigzagPerDocument);
  EXPECT_EQ(draw(*p, 60),
            "zigzag_per_document: 2 documents over 2 ranks, 2 of them on several; 1 token per "
            "column\n"
            "documents  A 16, B 24\n"
            "stream AAAAAAAAAAAAAAAABBBBBBBBBBBBBBBBBBBBBBBB  40 tokens\n"
            "rank 0 AAAA........AAAABBBBBB............BBBBBB  20 in 4\n"
            "rank 1 ....AAAAAAAA..........BBBBBBBBBBBB......  20 in 2\n");
}

TEST(Draw, ColumnsSmallerAndLargerThanTokens) {
  const auto small = Partition::make(Rows{0, 1, 3}, 2, Layout::kContiguous);
  EXPECT_NE(draw(*small, 30)
                .find("\nrank 0 AAAA........  1 in 1\n"
                      "rank 1 ....BBBBBBBB  2 in 1\n"),
            std::string::npos)
      << draw(*small, 30);
  const auto large = Partition::make(Rows{0, 5, 1000}, 3, Layout::kContiguous);
  EXPECT_NE(draw(*large, 34)
                .find("\nstream #BBBBBBBBBBBBB  1000 tokens\n"
                      "rank 0 #BBBb.........  333 in 2\n"
                      "rank 1 ....bBBBBb....  333 in 1\n"),
            std::string::npos)
      << draw(*large, 34);
}

TEST(Draw, OneOfAThingIsSingular) {
  const std::string one = draw(*Partition::make(Rows{0, 1}, 1, Layout::kContiguous), 80);
  EXPECT_EQ(one.find("contiguous: 1 document over 1 rank, 0 of them on several; "), 0u) << one;
  EXPECT_NE(one.find("  1 token\n"), std::string::npos) << one;
  const std::string many = draw(*Partition::make(Rows{0, 9}, 65, Layout::kContiguous), 80);
  EXPECT_NE(many.find("and 1 more rank\n"), std::string::npos) << many;
}

TEST(Draw, EdgesStayReadable) {
  EXPECT_NE(draw(*Partition::make(Rows{0}, 3, Layout::kZigzag), 80).find("rank 2   0 in 0"),
            std::string::npos);
  const std::string many = draw(*Partition::make(Rows{0, 100'000}, 1000, Layout::kZigzag), 80);
  EXPECT_NE(many.find("and 936 more ranks"), std::string::npos);
  Rows cu{0};
  for (int i = 0; i < 5000; ++i) cu.push_back(cu.back() + 3);
  for (const int width : {-5, 0, 40, 80, 300}) {
    std::istringstream lines(draw(*Partition::make(cu, 4, Layout::kContiguous), width));
    std::string line;
    std::getline(lines, line);  // the heading may be longer
    while (std::getline(lines, line)) EXPECT_LE(std::ssize(line), std::max(width, 44)) << line;
  }
}

TEST(Describe, SmallPlan) {
  const auto p = Partition::make(Rows{0, 16, 40, 40}, 2, Layout::kZigzagPerDocument);
  PlanOptions options;
  options.heads_v = 4;
  options.dim_k = options.dim_v = 64;
  options.workers = 2;
  options.exchange = ExchangePolicy::kAllToAll;
  EXPECT_EQ(describe(*Plan::make(*p, 0, options)),
            R"(rank 0 of 2: 20 tokens, 4 value heads of 64 x 64
segments: 4 of 4 chunks; fragments whole: 4 heads keep 2 workers busy
  document fragment    first row     tokens  chunks  entry   exit    map
         0        0            0          4       1      -      0      -
         0        1            4          4       1      0      -      -
         1        2            8          6       1      -      1      -
         1        3           14          6       1      1      -      -
documents without tokens: 1, kept by rank 0
boundary slots: 2 entry, 2 exit, 0 map; maps 0 B, forward states 256.0 KiB, backward states 256.0 KiB
exchange: all-to-all (forced): all-gather moves 640.0 KiB, all-to-all 576.0 KiB, over all ranks, forward and backward, in fp32
forward: 128.0 KiB to other ranks; 4 fold steps in 2 chains
    rank        sent    received      return    returned
       0    64.0 KiB    64.0 KiB    64.0 KiB    64.0 KiB  (kept here)
       1    64.0 KiB   128.0 KiB    64.0 KiB    64.0 KiB
backward: 128.0 KiB to other ranks; 4 fold steps in 2 chains
    rank        sent    received      return    returned
       0    64.0 KiB    64.0 KiB    64.0 KiB    64.0 KiB  (kept here)
       1    64.0 KiB    64.0 KiB    64.0 KiB    64.0 KiB
)");
}

TEST(Describe, LongTablesAreShortened) {
  Rows cu{0};
  for (int i = 0; i < 300; ++i) cu.push_back(cu.back() + 1000);
  const auto p = Partition::make(cu, 64, Layout::kContiguous);
  const std::string text = describe(*Plan::make(*p, 3, {}));
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 60);
  EXPECT_NE(text.find("... 48 more ranks ..."), std::string::npos);
  const auto whole = Partition::make(cu, 1, Layout::kContiguous);
  const std::string alone = describe(*Plan::make(*whole, 0, {}));
  EXPECT_NE(alone.find("... 284 more segments ..."), std::string::npos);
  EXPECT_NE(alone.find("exchange: none, no document spans two ranks\n"), std::string::npos);
}

}  // namespace
}  // namespace gdn
