// Sums over the lanes of a warp: of a quad, and along the 64 tokens of a chunk.
#pragma once

#include "backend/cuda/common/ptx.cuh"

namespace gdn::cuda {

// x summed over the four lanes of a quad.
GDN_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Sums over the tokens before each of 64, two a lane. Nothing is ever taken away again: under
// strong decay the sums differ by more than fp32 resolves.
GDN_DEVICE void sum_before(float (&x)[2], int lane) {
  float sum = x[0] + x[1];
  GDN_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  const float before = __shfl_up_sync(0xffffffffu, sum, 1);
  x[1] = x[0] + (lane > 0 ? before : 0.0f);
  x[0] = lane > 0 ? before : 0.0f;
}
// Sums over each token and those after it.
GDN_DEVICE void sum_from(float (&x)[2], int lane) {
  float sum = x[0] + x[1];
  GDN_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, sum, step);
    if (lane + step < 32) sum += other;
  }
  const float after = __shfl_down_sync(0xffffffffu, sum, 1);
  x[1] += lane < 31 ? after : 0.0f;
  x[0] = sum;
}

}  // namespace gdn::cuda
