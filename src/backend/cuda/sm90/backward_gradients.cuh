// Warpgroup 3 of k_backward: dk of every chunk.
#pragma once

#include "backend/cuda/sm90/backward_rows.cuh"

namespace gdn::sm90 {

// acc += (f E) dS^T with a factor for each row. Issued.
__device__ __forceinline__ void start_exit_term(float (&acc)[64], BackwardShared& s,
                                                const float (&factor)[2], const GradientLane& own) {
  const SplitPair f[2] = {split_pair(factor[0], factor[0]), split_pair(factor[1], factor[1])};
  uint32_t a[8][4];
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    ldmatrix_x4(a[kk], own.at(smem_address(s.e[kk / 4]), kk % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) a[kk][i] = scale_bf16(a[kk][i], f[i % 2]);
  }
  const Operand state = operand(smem_address(s.dstates), kTileBytes);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    wgmma_rs<1>(acc, a[kk][0], a[kk][1], a[kk][2], a[kk][3],
                state.at((kk / 4) * 2 * kTileBytes + (kk % 4) * 2048), true);
  }
  wgmma_commit();
}

__device__ __forceinline__ void run_gradients(const BackwardParams& p, BackwardShared& s) {
  const GradientLane own(threadIdx.x % 128);
  for_chunks(p.walk, [&](const ChunkAt& at) {
    const int stage = at.stage();
    const uint32_t parity = at.parity();
    const BackwardVectors& vectors = s.vectors[stage];
    const uint32_t k = smem_address(s.k[stage]);
    float acc[64];
    barrier_wait(&s.keys_full[stage], at.stage_parity());
    barrier_wait(&s.factors_full[stage], at.stage_parity());
    barrier_wait(&s.d_v_full, parity);
    barrier_wait(&s.states_ready, parity);
    start_with_state(acc, smem_address(s.d_v), smem_address(s.states));
    wgmma_wait<0>();
    settle(acc);
    barrier_arrive(&s.d_v_empty);
    barrier_arrive(&s.states_empty);
    const float r[2] = {vectors.rk[own.row], vectors.rk[own.row + 8]};
    {
      float f[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = own.row + 8 * i;
        f[i] = -exp2_approx(vectors.gate[row]) * r[i] * d_v_factor(vectors.beta[row]);
      }
      scale_rows(acc, {forget_value(f[0]), forget_value(f[1])});
    }
    // Of dY S^T, then of that and E dS^T.
#pragma unroll 1
    for (int terms = 0;; ++terms) {
      const float2 dots = row_dots(acc, k, own);
      if (terms == 0) barrier_wait(&s.sums_empty, parity ^ 1);
      put_row_dots(dots, s.row_dots[terms], own);
      if (terms == 1) break;
      barrier_wait(&s.e_ready, parity);
      barrier_wait(&s.dstates_full, parity);
      start_exit_term(acc, s, {vectors.c[own.row], vectors.c[own.row + 8]}, own);
      wgmma_wait<0>();
      settle(acc);
      barrier_arrive(&s.dstates_empty);
    }
    barrier_arrive(&s.sums_full);
    barrier_wait(&s.q_full, parity);
    barrier_wait(&s.dp_ready, parity);
    barrier_wait(&s.n_ready, parity);
    wgmma_fence();
    start_with_square<1>(acc, s.dp, smem_address(s.q));
    start_with_square<0>(acc, s.n, k);
    wgmma_wait<0>();
    settle(acc);
    barrier_arrive(&s.squares_empty);
    barrier_arrive(&s.q_empty);
    if (p.l2norm) {
      // Linear, so it need not wait for the sum over a group.
      const float2 dots = row_dots(acc, k, own);
      add_rows(acc, {-r[0] * r[0] * dots.x, -r[1] * r[1] * dots.y}, k, own);
    }
    put_rows(acc, smem_address(s.e), own);  // E has been read
    fence_async_proxy();
    barrier_arrive(&s.dk_full);
    barrier_arrive(&s.keys_empty[stage]);
  });
}

}  // namespace gdn::sm90
