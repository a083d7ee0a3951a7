// k_walk and k_summary: the walks of walk.cuh. The first has hand-overs, so it is a cooperative
// launch: its blocks wait for each other.
#include "backend/cuda/common/launch.h"
#include "backend/cuda/sm90/walk.cuh"
#include "backend/cuda/sm90/walk.h"

namespace gdn::sm90 {
namespace {

template <WalkKind kKind>
__global__ void __launch_bounds__(kWalkThreads, 1)
    walk_kernel(const __grid_constant__ WalkParams params) {
  GDN_SHARED_BYTES(raw_shared, 1024);
  walk_block(params, *reinterpret_cast<WalkShared<kKind>*>(raw_shared));
}

template <WalkKind kKind>
Status launch(const char* name, const WalkParams& params, int blocks, Stream stream) {
  const cuda::LaunchShape shape{.blocks = blocks,
                                .threads = kWalkThreads,
                                .shared_bytes = sizeof(WalkShared<kKind>),
                                .cooperative = kKind == WalkKind::kRun && blocks > params.group};
  return cuda::launch(name, walk_kernel<kKind>, shape, stream, params);
}

}  // namespace

Status launch_walk(const WalkParams& params, int blocks, Stream stream) {
  return launch<WalkKind::kRun>("k_walk_sm90", params, blocks, stream);
}
Status launch_summary(const WalkParams& params, int blocks, Stream stream) {
  return launch<WalkKind::kSummary>("k_summary_sm90", params, blocks, stream);
}

}  // namespace gdn::sm90
