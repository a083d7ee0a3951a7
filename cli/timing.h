// Forward and backward of a batch on one rank of this process, prepared once and timed call by
// call.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "check/batch.h"
#include "gdn/gdn.h"

namespace gdn::cli {

struct Timing {
  std::string backend;
  std::vector<double> forward_seconds;   // one per repetition
  std::vector<double> training_seconds;  // forward + backward; empty without a backward
  int64_t chunk_heads = 0;               // 64-token chunks times value heads
  int64_t saved_bytes = 0, forward_workspace_bytes = 0, backward_workspace_bytes = 0;
};

// `before`, where given, is called before each call, warm-up included.
Result<Timing> time_batch(const Batch& batch, const ContextOptions& options, int repetitions,
                          bool keep_saved, const std::function<void()>& before = {});

// FLOP of one chunk of one head, as the matrix products of docs/math.md count them:
// u = 2 * 64^3 at K = V = 128; forward 20 u, forward and backward 62 u.
double forward_flop(int64_t dim_k, int64_t dim_v);
double training_flop(int64_t dim_k, int64_t dim_v);

}  // namespace gdn::cli
