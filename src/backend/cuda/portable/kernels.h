// The launches of cuda-portable: one function per kernel, which picks the instantiation for the
// head dim (64 or 128) and the deepest load pipeline that the device's shared memory holds.
#pragma once

#include "backend/cuda/common/launch.h"
#include "backend/cuda/portable/params.h"

namespace gdn::cuda {

struct KernelCall {
  int dim = 128;         // K = V
  int64_t items = 0;     // chunks, or rows of an item table
  int shared_limit = 0;  // DeviceFacts::shared_bytes
  Stream stream;
};

Status launch_prepare(const KernelCall& call, PrepareParams params);
Status launch_forward_run(const KernelCall& call, ForwardWalkParams params);
Status launch_forward_states(const KernelCall& call, ForwardWalkParams params);
Status launch_forward_summary(const KernelCall& call, ForwardWalkParams params);
Status launch_backward_gradients(const KernelCall& call, BackwardWalkParams params);
Status launch_backward_summary(const KernelCall& call, BackwardWalkParams params);
Status launch_gradients(const KernelCall& call, GradientParams params);

// The deepest pipeline of up to `most` stages within the limit, at least 1.
constexpr int pick_stages(int fixed, int stage, int limit, int most = 3) {
  int stages = most;
  while (stages > 1 && fixed + stages * stage > limit) --stages;
  return stages;
}

}  // namespace gdn::cuda
