#include <algorithm>

#include "backend/cuda/portable/kernels.h"
#include "backend/cuda/portable/prepare.cuh"

namespace gdn::cuda {
namespace {

template <int K>
Status launch_dim(const KernelCall& call, PrepareParams params) {
  params.batch = std::min(params.shape.group, 4);
  while (params.batch > 1 && PrepareShared<K>::bytes(params.batch) > call.shared_limit) {
    --params.batch;
  }
  const LaunchShape shape{call.items * params.shape.heads_qk, kPrepareThreads,
                          PrepareShared<K>::bytes(params.batch)};
  return launch("prepare", prepare_kernel<K>, shape, call.stream, params);
}

}  // namespace

Status launch_prepare(const KernelCall& call, PrepareParams params) {
  return call.dim == 128 ? launch_dim<128>(call, params) : launch_dim<64>(call, params);
}

}  // namespace gdn::cuda
