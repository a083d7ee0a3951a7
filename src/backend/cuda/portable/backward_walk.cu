#include "backend/cuda/portable/backward_walk.cuh"
#include "backend/cuda/portable/kernels.h"

namespace gdn::cuda {
namespace {

template <int D, BackWalk kWalk>
Status launch_dim(const char* name, const KernelCall& call, BackwardWalkParams params) {
  using Stage = BackwardStage<D, D>;
  constexpr bool kGradients = kWalk == BackWalk::kGradients;
  params.stages =
      pick_stages(Stage::total(kGradients, 0), Stage::bytes(kGradients), call.shared_limit);
  const LaunchShape shape{call.items * params.shape.heads, Stage::kThreads,
                          Stage::total(kGradients, params.stages)};
  return launch(name, backward_walk_kernel<D, D, kWalk>, shape, call.stream, params);
}

template <BackWalk kWalk>
Status launch_walk(const char* name, const KernelCall& call, const BackwardWalkParams& params) {
  return call.dim == 128 ? launch_dim<128, kWalk>(name, call, params)
                         : launch_dim<64, kWalk>(name, call, params);
}

}  // namespace

Status launch_backward_gradients(const KernelCall& call, BackwardWalkParams params) {
  return launch_walk<BackWalk::kGradients>("backward_gradients", call, params);
}
Status launch_backward_summary(const KernelCall& call, BackwardWalkParams params) {
  return launch_walk<BackWalk::kSummary>("backward_summary", call, params);
}

}  // namespace gdn::cuda
