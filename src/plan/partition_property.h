// What holds of every partition, checked token by token against the definition, and random cases to
// check it on. Test support, shared by the property tests and the fuzzer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gdn/partition.h"

namespace gdn {

struct PartitionCase {
  std::vector<int64_t> cu_seqlens;
  int world_size = 1;
  Layout layout = Layout::kContiguous;
  std::vector<int64_t> cut_points;               // kZigzagPerDocument: not empty if given
  std::vector<std::vector<Fragment>> fragments;  // kExplicit
};

// A valid case drawn from a seed: documents (some empty), W in {1, 2, 3, 4, 5, 8, 64}, any layout;
// explicit tables are ragged, with empty fragments and empty ranks. unit > 1: only explicit
// layouts, every cut a multiple of unit from its document's start.
PartitionCase draw_case(uint64_t seed, int64_t unit = 1);
// The same documents, cut anew for another number of ranks.
PartitionCase redraw_case(const PartitionCase& drawn, uint64_t seed, int world_size, int64_t unit);
Result<Partition> make_case(const PartitionCase& drawn);

// The first broken invariant, or an empty string. Work grows with tokens x log(fragments).
std::string broken_invariant(const Partition& partition);

}  // namespace gdn
