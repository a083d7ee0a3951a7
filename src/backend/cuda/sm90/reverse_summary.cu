// k_reverse_summary: the walk of reverse_summary.cuh.
#include "backend/cuda/common/launch.h"
#include "backend/cuda/sm90/reverse_summary.cuh"
#include "backend/cuda/sm90/walk.h"

namespace gdn::sm90 {
namespace {

__global__ void __launch_bounds__(kWalkThreads, 1)
    reverse_summary_kernel(const __grid_constant__ WalkParams params) {
  GDN_SHARED_BYTES(raw_shared, 1024);
  summary_block(params, *reinterpret_cast<ReverseShared*>(raw_shared));
}

}  // namespace

Status launch_reverse_summary(const WalkParams& params, int blocks, Stream stream) {
  const cuda::LaunchShape shape{
      .blocks = blocks, .threads = kWalkThreads, .shared_bytes = sizeof(ReverseShared)};
  return cuda::launch("k_reverse_summary_sm90", reverse_summary_kernel, shape, stream, params);
}

}  // namespace gdn::sm90
