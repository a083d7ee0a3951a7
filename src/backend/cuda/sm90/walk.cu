// k_walk and k_summary: the walks of walk.cuh with and without q and o.
#include "backend/cuda/common/launch.h"
#include "backend/cuda/sm90/walk.cuh"
#include "backend/cuda/sm90/walk.h"

namespace gdn::sm90 {
namespace {

template <bool kOutput>
__global__ void __launch_bounds__(kWalkThreads, 1)
    walk_kernel(const __grid_constant__ WalkParams params) {
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  walk_block<kOutput>(params, *reinterpret_cast<WalkShared*>(raw_shared));
}

template <bool kOutput>
Status launch(const char* name, const WalkParams& params, int blocks, Stream stream) {
  const cuda::LaunchShape shape{
      .blocks = blocks, .threads = kWalkThreads, .shared_bytes = sizeof(WalkShared)};
  return cuda::launch(name, walk_kernel<kOutput>, shape, stream, params);
}

}  // namespace

Status launch_walk(const WalkParams& params, int blocks, Stream stream) {
  return launch<true>("k_walk_sm90", params, blocks, stream);
}
Status launch_summary(const WalkParams& params, int blocks, Stream stream) {
  return launch<false>("k_summary_sm90", params, blocks, stream);
}

}  // namespace gdn::sm90
