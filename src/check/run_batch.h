// Runs a batch over W ranks, of this process or one of many, and gathers global results: the
// vehicle of tests, the command and benchmarks. A run also fails if a rank handed others another
// number of bytes than its context's comm_bytes.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "check/batch.h"
#include "check/place.h"
#include "gdn/gdn.h"

namespace gdn {

struct RunOptions {
  int world_size = 1;
  Layout layout = Layout::kContiguous;
  std::vector<std::vector<Fragment>> fragments;  // with Layout::kExplicit
  ContextOptions context;                        // backend, tile, exchange policy, saved set
  // With a capacity (context.max_tokens): the packing that contexts are made with, and refilled
  // from; empty: the batch's own. The batch has world_size * max_fragments documents; those at its
  // end without tokens are left out of its partition.
  std::vector<int64_t> made_with;
  bool keep_saved = true;  // false: the backward recomputes
  // Where each rank's thread runs, with boundary states over NCCL or, `through_host`, over copies
  // in host memory, so that ranks may share a GPU. Empty: host memory.
  std::function<Result<std::unique_ptr<Place>>(int rank)> place;
  bool through_host = false;
};

// What the calls of all ranks have in common beside their contexts: is there a backward, and does
// it recompute? Where ranks differ, all get an error that names the option of the command.
Status agree_on_calls(Communicator& comm, bool has_backward, bool keep_saved);

// Ranks are threads of this process.
Result<BatchResult> run_batch(const Batch& batch, const RunOptions& options);

// This process is one rank of `comm`, at `place`; all ranks have the same batch and options. Rank 0
// gets the results, through `host`, which serves host memory (it may be `comm` itself); the others
// get only the backend's name. An error on one rank is an error on all.
Result<BatchResult> run_batch(const Batch& batch, const RunOptions& options, Communicator& comm,
                              Communicator& host, Place& place);

}  // namespace gdn
