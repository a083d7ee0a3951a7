#include "backend/cuda/portable/gradients.cuh"
#include "backend/cuda/portable/kernels.h"

namespace gdn::cuda {
namespace {

template <int D, int kTile>
Status launch_tile(const KernelCall& call, GradientParams params) {
  using Shared = GradientShared<D, D, kTile>;
  params.stages = pick_stages(Shared::bytes(0), Shared::kStage, call.shared_limit);
  const LaunchShape shape{call.items * (params.shape.heads / params.shape.group), kGradientThreads,
                          Shared::bytes(params.stages)};
  return launch("gradients", gradient_kernel<D, D, kTile>, shape, call.stream, params);
}

// Tiles of 64 columns; of 32 where one stage of 64 would not fit (99 KiB of sm_86 and sm_89).
template <int D>
Status launch_dim(const KernelCall& call, const GradientParams& params) {
  return GradientShared<D, D, 64>::bytes(1) <= call.shared_limit ? launch_tile<D, 64>(call, params)
                                                                 : launch_tile<D, 32>(call, params);
}

}  // namespace

Status launch_gradients(const KernelCall& call, GradientParams params) {
  return call.dim == 128 ? launch_dim<128>(call, params) : launch_dim<64>(call, params);
}

}  // namespace gdn::cuda
