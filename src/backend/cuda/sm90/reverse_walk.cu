// k_reverse_summary and k_reverse_states: the walks of reverse_walk.cuh. The second has hand-overs,
// so it is a cooperative launch: its blocks wait for each other.
#include "backend/cuda/common/launch.h"
#include "backend/cuda/sm90/reverse_walk.cuh"
#include "backend/cuda/sm90/walk.h"

namespace gdn::sm90 {
namespace {

template <ReverseKind kKind>
__global__ void __launch_bounds__(kWalkThreads, 1)
    reverse_kernel(const __grid_constant__ WalkParams params) {
  GDN_SHARED_BYTES(raw_shared, 1024);
  reverse_block(params, *reinterpret_cast<ReverseShared<kKind>*>(raw_shared));
}

template <ReverseKind kKind>
Status launch(const char* name, const WalkParams& params, int blocks, Stream stream) {
  const cuda::LaunchShape shape{
      .blocks = blocks,
      .threads = kWalkThreads,
      .shared_bytes = sizeof(ReverseShared<kKind>),
      .cooperative = kKind == ReverseKind::kStates && blocks > params.group};
  return cuda::launch(name, reverse_kernel<kKind>, shape, stream, params);
}

}  // namespace

Status launch_reverse_summary(const WalkParams& params, int blocks, Stream stream) {
  return launch<ReverseKind::kSummary>("k_reverse_summary_sm90", params, blocks, stream);
}
Status launch_reverse_states(const WalkParams& params, int blocks, Stream stream) {
  return launch<ReverseKind::kStates>("k_reverse_states_sm90", params, blocks, stream);
}

}  // namespace gdn::sm90
