// Where cuda-portable keeps what prepare writes and what a backward needs on its way, as offsets
// into `prepared` and `scratch`; pure functions of problem and plan. With C chunks (T / 64 and a
// few):
//   prepared          C * (HV * 17,924 + H * 512) bytes
//   backward scratch  C * (heads * (4 K V + 128 V) + 8 HV), heads = those of a slice of key heads
// At 16/48 heads of 128 and full chunks: 13.3 and 30.4 KiB per token. A forward has no scratch.
#pragma once

#include <algorithm>

#include "backend/cuda/common/tables.h"
#include "backend/cuda/portable/params.h"
#include "base/memory.h"
#include "gdn/problem.h"

namespace gdn::cuda {

struct PreparedLayout {
  int64_t z = 0, p = 0, vectors = 0, gate_sums = 0, log2_decay = 0, norms = 0, bytes = 0;

  static PreparedLayout of(const Problem& problem, const Plan& plan) {
    const int64_t values = plan.capacity.chunks * problem.heads_v;
    PreparedLayout layout;
    BlockLayout block;
    layout.z = block.take(values * kSquare * 2);
    layout.p = block.take(values * kSquare * 2);
    layout.vectors = block.take(values * kVectors * 4);
    layout.gate_sums = block.take(values * kTileRows * 8);
    layout.log2_decay = block.take(values * 4);
    layout.norms = block.take(plan.capacity.chunks * problem.heads_qk * 2 * kTileRows * 4);
    layout.bytes = block.bytes();
    return layout;
  }
  Prepared at(void* base) const {
    return {cuda::at<uint16_t>(base, z),       cuda::at<uint16_t>(base, p),
            cuda::at<float>(base, vectors),    cuda::at<float2>(base, gate_sums),
            cuda::at<float>(base, log2_decay), cuda::at<float>(base, norms)};
  }
};

struct BackwardScratch {
  int key_heads = 1;  // of a slice
  int64_t states = 0, dstates = 0, e = 0, sums = 0, bytes = 0;

  // Two slices halve the memory; below 16 value heads a slice would leave multiprocessors idle.
  static BackwardScratch of(const Problem& problem, const Plan& plan) {
    BackwardScratch scratch;
    const int64_t slices = problem.heads_v >= 16 ? std::min<int64_t>(2, problem.heads_qk) : 1;
    scratch.key_heads = static_cast<int>((problem.heads_qk + slices - 1) / slices);
    const int64_t values = plan.capacity.chunks * scratch.key_heads * problem.group();
    BlockLayout block;
    scratch.states = block.take(values * problem.dim_k * problem.dim_v * 2);
    scratch.dstates = block.take(values * problem.dim_k * problem.dim_v * 2);
    scratch.e = block.take(values * kTileRows * problem.dim_v * 2);
    scratch.sums = block.take(plan.capacity.chunks * problem.heads_v *
                              (problem.options.gate_in_kernel ? 8 : 0));
    scratch.bytes = block.bytes();
    return scratch;
  }
};

}  // namespace gdn::cuda
