// Layouts against their rules, random cases against the invariants, and the text of every error.
#include <gtest/gtest.h>

#include <algorithm>

#include "plan/partition_property.h"
#include "plan/share.h"

namespace gdn {
namespace {

using Table = std::vector<std::vector<Fragment>>;
using Rows = std::vector<int64_t>;

Partition made(const Rows& cu, int world_size, Layout layout) {
  auto partition = Partition::make(cu, world_size, layout);
  EXPECT_TRUE(partition.is_ok()) << partition.status().message();
  return *partition;
}

Rows range(int64_t begin, int64_t end) {
  Rows rows;
  for (int64_t i = begin; i < end; ++i) rows.push_back(i);
  return rows;
}

Rows joined(std::initializer_list<Rows> parts) {
  Rows all;
  for (const Rows& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

TEST(Partition, ZigzagPerDocumentExample) {
  const Partition p = made({0, 16, 40}, 2, Layout::kZigzagPerDocument);
  EXPECT_EQ(p.token_indices(0), joined({range(0, 4), range(12, 16), range(16, 22), range(34, 40)}));
  EXPECT_EQ(p.token_indices(1), joined({range(4, 12), range(22, 34)}));
  EXPECT_EQ(p.fragments(1).size(),
            2u);  // pieces 1 and 2 of a document are neighbours: one fragment
  EXPECT_EQ(Rows(p.local_cu_seqlens(0).begin(), p.local_cu_seqlens(0).end()),
            (Rows{0, 4, 8, 14, 20}));
  EXPECT_EQ(p.crossing(0),
            (std::vector<Crossing>{
                {0, -1, -1, 1, 0}, {1, 1, 0, -1, -1}, {2, -1, -1, 1, 1}, {3, 1, 1, -1, -1}}));
  EXPECT_EQ(p.crossing(1), (std::vector<Crossing>{{0, 0, 0, 0, 1}, {1, 0, 2, 0, 3}}));
  EXPECT_EQ(p.halo(1, 4), (std::vector<HaloRun>{{0, 3, 3, 0, 1}, {1, 3, 3, 0, 11}}));
}

TEST(Partition, ContiguousAndZigzagFollowTheirFormulas) {
  for (const int w : {1, 2, 3, 4, 5, 8, 64}) {
    for (const int64_t tokens : {0, 1, 2, 7, 63, 64, 127, 1000}) {
      const Rows cu{0, tokens / 3, tokens / 3, tokens / 2, tokens};
      const Partition contiguous = made(cu, w, Layout::kContiguous);
      const Partition zigzag = made(cu, w, Layout::kZigzag);
      for (int r = 0; r < w; ++r) {
        EXPECT_EQ(contiguous.token_indices(r), range(r * tokens / w, (r + 1) * tokens / w));
        const int64_t p = 2 * w - 1 - r;
        EXPECT_EQ(zigzag.token_indices(r),
                  joined({range(r * tokens / (2 * w), (r + 1) * tokens / (2 * w)),
                          range(p * tokens / (2 * w), (p + 1) * tokens / (2 * w))}));
      }
    }
  }
}

TEST(Partition, ZigzagPerDocumentFollowsItsFormula) {
  const Rows cu{0, 0, 1, 8, 8, 30, 1000};
  for (const int w : {1, 2, 3, 4, 5, 8, 64}) {
    const Partition partition = made(cu, w, Layout::kZigzagPerDocument);
    for (int r = 0; r < w; ++r) {
      Rows expected;
      for (size_t doc = 0; doc + 1 < cu.size(); ++doc) {
        const int64_t length = cu[doc + 1] - cu[doc];
        for (const int64_t p : {r, 2 * w - 1 - r}) {
          for (int64_t t = p * length / (2 * w); t < (p + 1) * length / (2 * w); ++t) {
            expected.push_back(cu[doc] + t);
          }
        }
      }
      EXPECT_EQ(partition.token_indices(r), expected);
    }
  }
}

TEST(Partition, WholeDocumentsDoNotCross) {
  const Partition p = made({0, 10, 20}, 2, Layout::kContiguous);
  EXPECT_FALSE(p.has_crossing());
  EXPECT_TRUE(p.crossing(0).empty());
  // Several fragments, all on one rank: chained locally, nothing to exchange.
  const auto chained = Partition::make_explicit(Rows{0, 10}, {{{0, 4, 6}, {0, 0, 4}}, {}});
  ASSERT_TRUE(chained.is_ok());
  EXPECT_FALSE(chained->has_crossing());
  EXPECT_TRUE(chained->crossing(0).empty());
  EXPECT_EQ(chained->halo(0, 4), (std::vector<HaloRun>{{0, 3, 3, 0, 7}}));
}

TEST(Partition, HaloReachesOverShortFragments) {
  const auto p = Partition::make_explicit(
      Rows{0, 8}, {{{0, 0, 3}, {0, 3, 0}}, {{0, 3, 1}}, {{0, 4, 1}}, {{0, 5, 3}}});
  ASSERT_TRUE(p.is_ok()) << p.status().message();
  EXPECT_EQ(p->halo(3, 4),
            (std::vector<HaloRun>{{0, 3, 1, 0, 2}, {0, 2, 1, 1, 0}, {0, 1, 1, 2, 0}}));
  EXPECT_EQ(p->halo(1, 64), (std::vector<HaloRun>{{0, 3, 3, 0, 0}}));
  EXPECT_TRUE(p->halo(3, 1).empty());
  EXPECT_TRUE(p->halo(0, 4).empty());
}

TEST(Partition, LargeOffsetsStay64Bit) {
  const int64_t big = int64_t{1} << 40;
  const Partition p = made({0, big, 3 * big}, 3, Layout::kContiguous);
  EXPECT_EQ(p.fragments(1)[0], (Fragment{1, 0, big}));
  EXPECT_EQ(share_begin(3, 4, INT64_MAX), INT64_MAX / 4 * 3 + 2);  // INT64_MAX % 4 == 3
  EXPECT_EQ(share_begin(INT32_MAX, INT32_MAX, INT64_MAX), INT64_MAX);
}

TEST(Partition, DigestTellsPartitionsApart) {
  const Partition p = made({0, 16, 40}, 2, Layout::kContiguous);
  EXPECT_EQ(p.digest(), made({0, 16, 40}, 2, Layout::kContiguous).digest());
  EXPECT_NE(p.digest(), made({0, 16, 40}, 4, Layout::kContiguous).digest());
  EXPECT_NE(p.digest(), made({0, 16, 40}, 2, Layout::kZigzag).digest());
  EXPECT_NE(p.digest(), made({0, 17, 40}, 2, Layout::kContiguous).digest());
  EXPECT_NE(p.digest(), made({0, 16, 16, 40}, 2, Layout::kContiguous).digest());
}

TEST(Partition, RandomCasesKeepTheInvariants) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const auto partition = make_case(draw_case(seed));
    ASSERT_TRUE(partition.is_ok()) << "seed " << seed << ": " << partition.status().message();
    ASSERT_EQ(broken_invariant(*partition), "") << "seed " << seed;
  }
}

TEST(Partition, LayoutNamesRoundTrip) {
  for (const Layout layout :
       {Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument, Layout::kExplicit}) {
    EXPECT_EQ(*parse_layout(to_string(layout)), layout);
  }
  EXPECT_EQ(parse_layout("diagonal").status().message(),
            "layout: expected contiguous, zigzag, zigzag_per_document or explicit, got "
            "\"diagonal\"");
}

void expect_error(const Result<Partition>& result, const std::string& message) {
  EXPECT_EQ(result.status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(result.status().message(), message);
}

TEST(PartitionErrors, CuSeqlensAndWorldSize) {
  const auto of = [](const Rows& cu, int w) { return Partition::make(cu, w, Layout::kContiguous); };
  expect_error(of({}, 1), "cu_seqlens: expected at least 1 entry, got 0");
  expect_error(of({5, 9}, 1), "cu_seqlens[0]: expected 0, got 5");
  expect_error(of({0, 9, 8, 7}, 1),
               "cu_seqlens[2]: expected at least 9, the entry before it, got 8");
  expect_error(of({0, INT64_MAX}, 1),
               "cu_seqlens[1]: expected at most 2^48 tokens, got 9223372036854775807");
  expect_error(of({0, 9}, 0), "world_size: expected 1 to 1048576, got 0");
  expect_error(of({0, 9}, -3), "world_size: expected 1 to 1048576, got -3");
  expect_error(Partition::make(Rows{0, 9}, 1, Layout::kExplicit),
               "layout: expected contiguous, zigzag or zigzag_per_document, got explicit (an "
               "explicit layout is made from fragments)");
  EXPECT_TRUE(of({0}, 3).is_ok());
  EXPECT_TRUE(of({0, 0, 0}, 3).is_ok());
}

TEST(PartitionErrors, ExplicitTables) {
  const Rows cu{0, 10, 30};
  const auto of = [&](Table table) { return Partition::make_explicit(cu, std::move(table)); };
  expect_error(of({}), "fragments: expected lists of 1 to 1048576 ranks, got 0");
  expect_error(of({{{0, 0, 10}}, {{1, 0, 20}, {2, 0, 1}}}),
               "fragments[1][1].doc: expected 0 to 1, got 2");
  expect_error(of({{{-1, 0, 10}}}), "fragments[0][0].doc: expected 0 to 1, got -1");
  expect_error(of({{{0, 11, 0}}}),
               "fragments[0][0].offset: expected 0 to 10, the length of document 0, got 11");
  expect_error(of({{{0, -2, 4}}}),
               "fragments[0][0].offset: expected 0 to 10, the length of document 0, got -2");
  expect_error(of({{{0, 4, 7}}}),
               "fragments[0][0].length: expected 0 to 6, what is left of document 0 from offset 4, "
               "got 7");
  expect_error(of({{{0, 4, -1}}}),
               "fragments[0][0].length: expected 0 to 6, what is left of document 0 from offset 4, "
               "got -1");
  expect_error(of({{{0, 0, 6}}, {{0, 5, 5}, {1, 0, 20}}}),
               "fragments[1][0]: expected tokens that no other entry holds, got tokens [5, 10) of "
               "document 0, where fragments[0][0] holds [0, 6)");
  expect_error(of({{{0, 0, 6}}, {{0, 8, 2}, {1, 0, 20}}}),
               "fragments: expected every token of document 0 (length 10) on one rank, got none "
               "that holds [6, 8)");
  expect_error(of({{{0, 0, 10}}, {}}),
               "fragments: expected every token of document 1 (length 20) on one rank, got none "
               "that holds [0, 20)");
  EXPECT_TRUE(of({{}, {{1, 7, 0}, {1, 0, 20}, {0, 10, 0}}, {{0, 0, 10}}}).is_ok());
}

TEST(PartitionErrors, CutPoints) {
  const Rows cu{0, 10, 30};
  const auto of = [&](const Rows& cuts) { return Partition::make_with_cuts(cu, 1, cuts); };
  expect_error(of({0, 5, 10}),
               "cut_points: expected 2 W + 1 = 3 entries for each of 2 documents, got 3");
  expect_error(of({0, 5, 10, 0, 9}),
               "cut_points: expected 2 W + 1 = 3 entries for each of 2 documents, got 5");
  expect_error(of({0, 5, 10, 1, 9, 20}), "cut_points[3] (document 1, cut 0): expected 0, got 1");
  expect_error(of({0, 5, 10, 0, -1, 20}),
               "cut_points[4] (document 1, cut 1): expected at least 0, the cut before it, got -1");
  expect_error(of({0, 11, 10, 0, 9, 20}),
               "cut_points[1] (document 0, cut 1): expected at most 10, the document's length, got "
               "11");
  expect_error(of({0, 5, 9, 0, 9, 20}),
               "cut_points[2] (document 0, cut 2): expected 10, the document's length, got 9");
  EXPECT_TRUE(of({0, 0, 10, 0, 20, 20}).is_ok());
}

// A cut adds one fragment at most, whatever the number of documents (the streams are cut in 64 and
// 128 parts).
TEST(Partition, HundredThousandDocumentsOver64Ranks) {
  Rows cu{0};
  for (int64_t i = 0; i < 100'000; ++i) cu.push_back(cu.back() + 100 + i % 700);
  for (const Layout layout : {Layout::kContiguous, Layout::kZigzag}) {
    const Partition p = made(cu, 64, layout);
    size_t fragments = 0;
    int64_t tokens = 0;
    for (int r = 0; r < 64; ++r) {
      fragments += p.fragments(r).size();
      tokens += p.local_tokens(r);
    }
    EXPECT_GE(fragments, 100'000u);
    EXPECT_LE(fragments, 100'000u + 127u);
    EXPECT_EQ(tokens, cu.back());
  }
}

}  // namespace
}  // namespace gdn
