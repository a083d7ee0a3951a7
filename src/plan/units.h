// The units of the exchange over all ranks, in the order that every rank derives alike: documents
// ascending, each in document order. A unit is a fragment of a document that spans two or more
// ranks; in tile mode each of its tiles. Private to src/plan/.
//
// Directions: 0 is the forward pass, 1 the backward pass, which walks documents from the right.
#pragma once

#include <array>
#include <vector>

#include "gdn/plan.h"

namespace gdn {

inline constexpr int kForward = 0;
inline constexpr int kBackward = 1;
inline constexpr int64_t kAbsent = -1;

// Offsets count elements of one head, within the tables of the unit's rank.
struct Unit {
  int rank = 0;
  int64_t map = kAbsent;                              // M in the forward record; inner units
  std::array<int64_t, 2> part{kAbsent, kAbsent};      // B, C in the record of the direction
  std::array<int64_t, 2> returned{kAbsent, kAbsent};  // S_in, dS_out in what comes back
};

// Local segments that are walked one after another in document order: those of one local unit, or
// all of a document that is on this rank alone.
struct LocalChain {
  int64_t unit = kAbsent;  // index into units; kAbsent: the document is on this rank alone
  int64_t begin = 0;       // into UnitTable::chain_segments
  int64_t end = 0;
};

struct UnitTable {
  std::vector<Unit> units;
  std::vector<int64_t> document_begin;           // [crossing documents + 1] into units
  std::vector<LocalChain> chains;                // of this rank
  std::vector<int64_t> chain_segments;           // indices into plan.segments
  std::array<std::vector<int64_t>, 2> sent;      // [direction][W] elements per head in kSend
  std::array<std::vector<int64_t>, 2> returned;  // [direction][W] per head in kReturned
};

// O(units of all ranks + segments of this rank).
UnitTable make_units(const Partition& partition, const Plan& plan,
                     const std::vector<int64_t>& segment_begin);

}  // namespace gdn
