// The most that the tables of any packing within a capacity (PlanOptions::max_tokens,
// max_fragments) need, as a function of layout, world size and options alone. Private to src/plan/.
#pragma once

#include "plan/units.h"

namespace gdn {

struct ProgramRoom {
  int64_t steps = 0;
  int64_t chains = 0;
};

struct Capacity {
  PlanCounts counts;
  int64_t documents = 0;  // of the whole partition
  // Units of a rank that follow (or precede) another unit of their document: each has at most M and
  // B, or C, in its record, and one boundary state that comes back.
  int64_t records = 0;
  ProgramRoom pack;    // and of pack_maps, where K and V differ
  ProgramRoom fold;    // of the units of all ranks
  ProgramRoom spread;  // both directions

  static Capacity of(Layout layout, int world_size, const PlanOptions& options);
};

// Records of the size of the capacity on every rank, so that messages and tables do not depend on
// the packing.
void widen(const Capacity& capacity, const PlanOptions& options, UnitTable& units);

}  // namespace gdn
