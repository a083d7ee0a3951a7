// Runs a batch over W in-process ranks and gathers global results: the vehicle of tests, the
// command and benchmarks.
#pragma once

#include <string>

#include "check/batch.h"
#include "gdn/gdn.h"

namespace gdn {

struct RunOptions {
  int world_size = 1;
  Layout layout = Layout::kContiguous;
  std::vector<std::vector<Fragment>> fragments;  // with Layout::kExplicit
  ContextOptions context;                        // backend, tile, exchange policy
  // With a capacity (context.max_tokens): the packing that contexts are made with, and refilled
  // from; empty: the batch's own. The batch has world_size * max_fragments documents; those at its
  // end without tokens are left out of its partition.
  std::vector<int64_t> made_with;
  bool keep_saved = true;                        // false: the backward recomputes
};

Result<BatchResult> run_batch(const Batch& batch, const RunOptions& options);

}  // namespace gdn
