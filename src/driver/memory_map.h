// Where the arrays of a call lie in the caller's workspace and saved memory.
#pragma once

#include "gdn/backend.h"
#include "gdn/gdn.h"

namespace gdn {

// Offsets into one block of memory; a table that a pass does not use has size 0, and prepared data
// that another block keeps too.
struct PassMap {
  int64_t table_offset[kNumTables] = {};
  int64_t prepared = 0;
  int64_t scratch = 0;
  int64_t bytes = 0;
};

// What a forward leaves for its backward: kBoundary (entry states), kMap, and kReceived (whose maps
// the backward's fold reads); where the context keeps_prepared(), prepared data behind them.
PassMap saved_map(const Context& context);

// Everything else of a forward. Without saved memory what saved_map has lies here too.
PassMap forward_map(const Context& context, bool have_saved);

// A backward; `recompute_base` is where a recomputed forward's own block begins (0 bytes long when
// the saved set is given): it shares prepared and scratch.
struct BackwardMap {
  PassMap pass;
  PassMap forward;  // offsets relative to the same workspace; only when recomputing
  int64_t bytes = 0;
};
BackwardMap backward_map(const Context& context, bool have_saved);

// Where prepared data of a call lies: in `saved`, where given and the context keeps it, else at
// `map` of the workspace `base`.
void* prepared_at(const Context& context, const PassMap& map, void* base, const Memory* saved);

// Table pointers from a map; tables that are not in the map keep what `tables` has.
void place_tables(const PassMap& map, void* base, TablePointers& tables);

}  // namespace gdn
