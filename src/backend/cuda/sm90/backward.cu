// k_backward: the walk of backward.cuh, a cooperative launch, since its blocks wait for each other.
#include "backend/cuda/common/launch.h"
#include "backend/cuda/sm90/backward.cuh"
#include "backend/cuda/sm90/walk.h"

namespace gdn::sm90 {
namespace {

template <bool kNorm>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  GDN_SHARED_BYTES(raw_shared, 1024);
  backward_block<kNorm>(params, *reinterpret_cast<BackwardShared*>(raw_shared));
}

}  // namespace

Status launch_backward(const BackwardParams& params, int blocks, Stream stream) {
  const cuda::LaunchShape shape{.blocks = blocks,
                                .threads = kBackwardThreads,
                                .shared_bytes = sizeof(BackwardShared),
                                .cooperative = blocks > 1};
  return params.l2norm
             ? cuda::launch("k_backward_sm90", backward_kernel<true>, shape, stream, params)
             : cuda::launch("k_backward_sm90", backward_kernel<false>, shape, stream, params);
}

}  // namespace gdn::sm90
