#include "backend/cuda/portable/forward_walk.cuh"
#include "backend/cuda/portable/kernels.h"

namespace gdn::cuda {
namespace {

template <int D, Walk kWalk>
Status launch_dim(const char* name, const KernelCall& call, ForwardWalkParams params) {
  constexpr int kStage = ForwardStage<D, D>::bytes(kWalk == Walk::kRun);
  params.stages = pick_stages(0, kStage, call.shared_limit);
  const LaunchShape shape{call.items * params.shape.heads, ForwardStage<D, D>::kThreads,
                          params.stages * kStage};
  return launch(name, forward_walk_kernel<D, D, kWalk>, shape, call.stream, params);
}

template <Walk kWalk>
Status launch_walk(const char* name, const KernelCall& call, const ForwardWalkParams& params) {
  return call.dim == 128 ? launch_dim<128, kWalk>(name, call, params)
                         : launch_dim<64, kWalk>(name, call, params);
}

}  // namespace

Status launch_forward_run(const KernelCall& call, ForwardWalkParams params) {
  return launch_walk<Walk::kRun>("forward_run", call, params);
}
Status launch_forward_states(const KernelCall& call, ForwardWalkParams params) {
  return launch_walk<Walk::kStates>("forward_states", call, params);
}
Status launch_forward_summary(const KernelCall& call, ForwardWalkParams params) {
  return launch_walk<Walk::kSummary>("forward_summary", call, params);
}

}  // namespace gdn::cuda
