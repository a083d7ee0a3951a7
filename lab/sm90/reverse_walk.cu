// A study, compiled and never run: the walks that a backward of our own would take. k_states leaves
// S and E of every chunk; k_reverse, from the last chunk to the first, U in the rows of d_v, dS of
// every chunk, and the gradients of states that pieces leave behind; k_reverse_summary only these.
#include "backend/cuda/common/launch.h"
#include "backend/cuda/sm90/walk.cuh"
#include "reverse_walk.cuh"

namespace gdn::sm90 {
namespace {

template <ReverseKind kKind>
__global__ void __launch_bounds__(kWalkThreads, 1)
    reverse_kernel(const __grid_constant__ WalkParams params) {
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  reverse_block<kKind>(params, *reinterpret_cast<ReverseShared*>(raw_shared));
}

__global__ void __launch_bounds__(kWalkThreads, 1)
    states_kernel(const __grid_constant__ WalkParams params) {
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  walk_block(params, *reinterpret_cast<WalkShared<WalkKind::kStates>*>(raw_shared));
}

template <ReverseKind kKind>
Status launch(const char* name, const WalkParams& params, int blocks, Stream stream) {
  const cuda::LaunchShape shape{
      .blocks = blocks, .threads = kWalkThreads, .shared_bytes = sizeof(ReverseShared)};
  return cuda::launch(name, reverse_kernel<kKind>, shape, stream, params);
}

}  // namespace

Status launch_states(const WalkParams& params, int blocks, Stream stream) {
  const cuda::LaunchShape shape{.blocks = blocks,
                                .threads = kWalkThreads,
                                .shared_bytes = sizeof(WalkShared<WalkKind::kStates>)};
  return cuda::launch("k_states_sm90", states_kernel, shape, stream, params);
}

Status launch_reverse(const WalkParams& params, int blocks, Stream stream) {
  return launch<ReverseKind::kGradients>("k_reverse_sm90", params, blocks, stream);
}
Status launch_reverse_summary(const WalkParams& params, int blocks, Stream stream) {
  return launch<ReverseKind::kSummary>("k_reverse_summary_sm90", params, blocks, stream);
}

}  // namespace gdn::sm90
