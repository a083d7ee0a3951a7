#include "bench/proxy.h"

#include <gtest/gtest.h>

namespace gdn::bench {
namespace {

TEST(Proxy, RoundTrip) {
  for (const char* name : {"G CP4 Z r3", "A CP1 C r0", "N CP16 D", "D CP8 D r7"}) {
    const auto proxy = parse_proxy(name);
    ASSERT_TRUE(proxy) << proxy.status().message();
    EXPECT_EQ(name_of(*proxy), name);
  }
  const auto proxy = parse_proxy("  G   CP4 Z  r3 ");
  ASSERT_TRUE(proxy);
  EXPECT_EQ(*proxy, (Proxy{"G", 4, Layout::kZigzag, 3}));
  EXPECT_FALSE(parse_proxy("G CP4 Z")->rank.has_value());
}

TEST(Proxy, RefusesByTheOffendingWord) {
  const std::pair<const char*, const char*> wrong[] = {
      {"", "LETTER CPn LAYOUT"},
      {"G CP4", "LETTER CPn LAYOUT"},
      {"G CP4 Z r1 x", "LETTER CPn LAYOUT"},
      {"O CP4 Z r1", "a workload from A to N, got 'O'"},
      {"GG CP4 Z r1", "got 'GG'"},
      {"G CP0 Z r0", "CP1 to CP4096, got 'CP0'"},
      {"G 4 Z r0", "got '4'"},
      {"G CP4x Z r0", "got 'CP4x'"},
      {"G CP-4 Z r0", "got 'CP-4'"},
      {"G CP99999999999 Z", "got 'CP99999999999'"},
      {"G CP4 S r0", "layout C, Z or D, got 'S'"},
      {"G CP4 Z r4", "r0 to r3, got 'r4'"},
      {"G CP4 Z r-1", "got 'r-1'"},
      {"G CP4 Z 3", "r0 to r3, got '3'"}};
  for (const auto& [name, words] : wrong) {
    const auto proxy = parse_proxy(name);
    ASSERT_FALSE(proxy) << name;
    EXPECT_NE(proxy.status().message().find(words), std::string::npos) << proxy.status().message();
  }
}

}  // namespace
}  // namespace gdn::bench
