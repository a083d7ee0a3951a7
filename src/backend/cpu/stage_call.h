// One stage call as the kernels get it, and the kernels of the best instruction set. An item is
// independent of all others and runs on one worker from beginning to end.
#pragma once

#include <cstdint>

#include "backend/cpu/layout.h"
#include "gdn/backend.h"

namespace gdn::cpu {

struct StageCall {
  const StageArgs* args = nullptr;
  Dims dims;
  int64_t worker_bytes = 0;   // of scratch, per worker
  int64_t head_parts = 1;     // items per key head: 1 or the group (forward stages only)
  TensorView initial_state;   // forward
  TensorView o, final_state;  // forward
  const BackwardArgs* grads = nullptr;
  BlockPlan blocks;             // backward
  const void* entry = nullptr;  // backward: forward kBoundary
  const FoldProgram* program = nullptr;
  double* gate_sums = nullptr;  // [segments, HV, 2]: dA_log, ddt_bias parts

  void* worker_scratch(int worker) const {
    return static_cast<char*>(args->scratch) + worker * worker_bytes;
  }
};

// One item of each stage. Their numbers (cpu_backend.cc): prepare chunks * H; summarize, run and
// summarize_backward segments * H * head_parts; run_backward segments * H; fold chains * heads *
// column blocks.
void prepare_item(const StageCall& call, int64_t item, int worker);
void summarize_item(const StageCall& call, int64_t item, int worker);
void fold_item(const StageCall& call, int64_t item, int worker);
void run_item(const StageCall& call, int64_t item, int worker);
void summarize_backward_item(const StageCall& call, int64_t item, int worker);
void run_backward_item(const StageCall& call, int64_t item, int worker);

// Scratch bytes per worker of the forward and the backward kernels.
int64_t forward_worker_bytes(const Problem& problem);
int64_t backward_worker_bytes(const Problem& problem, const Plan& plan);

const char* target_name();  // the instruction set in use: "AVX3", "NEON", ...

}  // namespace gdn::cpu
