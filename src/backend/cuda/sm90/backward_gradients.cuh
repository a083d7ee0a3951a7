// Warpgroup 3 of k_backward: dk and dq of every chunk.
#pragma once

#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/sm90/backward_squares.cuh"

namespace gdn::sm90 {

__device__ __forceinline__ void scale_rows(float (&acc)[64], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] *= factor[(i / 2) % 2];
}

// Dots of this thread's two rows with the same rows of the two tiles from `tiles` on. In fp32: dg
// takes differences of them.
__device__ __forceinline__ float2 row_dots(const float (&acc)[64], uint32_t tiles,
                                           const GradientLane& own) {
  float dots[2] = {0.0f, 0.0f};
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    uint32_t x[4];
    ldmatrix_x4(x, own.at(tiles + (kk / 4) * kTileBytes, kk % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_bf16(x[i]);
      dots[i % 2] += pair.x * acc[8 * kk + 2 * i] + pair.y * acc[8 * kk + 2 * i + 1];
    }
  }
  return {cuda::quad_sum(dots[0]), cuda::quad_sum(dots[1])};
}
__device__ __forceinline__ void put_row_dots(const float (&acc)[64], uint32_t tiles, float* out,
                                             const GradientLane& own) {
  const float2 dots = row_dots(acc, tiles, own);
  if (own.lane % 4 == 0) {
    out[own.row] = dots.x;
    out[own.row + 8] = dots.y;
  }
}

// acc = a b: a two tiles [64 tokens][64 of V], b a state image. Issued.
__device__ __forceinline__ void start_with_state(float (&acc)[64], uint32_t a,
                                                 const bf16 (&b)[2][2][kTileElements]) {
  const Operand rows = operand(a), state = operand(smem_address(b), kTileBytes);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    wgmma_ss<0, 1>(acc, rows.at((kk / 4) * kTileBytes + (kk % 4) * 32),
                   state.at((kk / 4) * 2 * kTileBytes + (kk % 4) * 2048), kk > 0);
  }
  wgmma_commit();
}

// acc += a b or a^T b: a a square tile, b two tiles [64 tokens][64 of K]. Issued.
template <int kTransA>
__device__ __forceinline__ void start_with_square(float (&acc)[64], const bf16 (&a)[kTileElements],
                                                  uint32_t b) {
  const Operand square = operand(smem_address(a), kTileBytes), rows = operand(b, kTileBytes);
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    wgmma_ss<kTransA, 1>(acc, square.at(kk * (kTransA ? 2048 : 32)), rows.at(kk * 2048), true);
  }
  wgmma_commit();
}

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

// Takes from rows of a gradient what lies along the rows x of the two tiles from `tiles` on: that
// of the normalised row becomes that of the raw one, r = 1 / |x|. Linear, so it need not wait for
// the sum over a group.
__device__ __forceinline__ void project_rows(float (&acc)[64], uint32_t tiles, const float (&r)[2],
                                             const GradientLane& own) {
  const float2 dots = row_dots(acc, tiles, own);
  const float along[2] = {-r[0] * r[0] * dots.x, -r[1] * r[1] * dots.y};
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    uint32_t x[4];
    ldmatrix_x4(x, own.at(tiles + (kk / 4) * kTileBytes, kk % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_bf16(x[i]);
      acc[8 * kk + 2 * i] += along[i % 2] * pair.x;
      acc[8 * kk + 2 * i + 1] += along[i % 2] * pair.y;
    }
  }
}

// Rows of this head's part of dk or dq, for warp 2.
__device__ __forceinline__ void put_gradient_rows(const float (&acc)[64], BackwardShared& s,
                                                  const GradientLane& own) {
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    const float* x = &acc[8 * kk];
    stmatrix_x4(own.at(smem_address(s.rows[kk / 4]), kk % 4), pack_bf16(x[0], x[1]),
                pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  }
  fence_async_proxy();
  barrier_arrive(&s.rows_full);
}

__device__ __forceinline__ void run_gradients(const BackwardParams& p, BackwardShared& s) {
  const GradientLane own(threadIdx.x % 128);
  for_chunks(p.walk, [&](const ChunkAt& at) {
    const int stage = at.stage();
    const uint32_t parity = at.parity();
    const BackwardVectors& vectors = s.vectors[stage];
    const uint32_t k = smem_address(s.k[stage]), q = smem_address(s.q);
    barrier_wait(&s.keys_full[stage], at.stage_parity());
    barrier_wait(&s.factors_full[stage], at.stage_parity());
    barrier_wait(&s.d_v_full, parity);
    barrier_wait(&s.states_ready, parity);
    barrier_wait(&s.sums_empty, parity ^ 1);
    // dk, then dq: mostly the same code, so one loop.
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const bool is_dq = which == 1;
      const uint32_t tiles = is_dq ? q : k;
      const float* r = is_dq ? vectors.rq : vectors.rk;
      float acc[64];
      if (is_dq) barrier_wait(&s.d_o_full, parity);
      start_with_state(acc, is_dq ? smem_address(s.d_o) : smem_address(s.d_v), s.states);
      wgmma_wait<0>();
      settle(acc);
      barrier_arrive(is_dq ? &s.d_o_empty : &s.d_v_empty);
      if (is_dq) barrier_arrive(&s.states_empty);
      {
        float f[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = own.row + 8 * i;
          f[i] = exp2_approx(vectors.gate[row]) * r[row] * (is_dq ? 1.0f : -vectors.d_v[row]);
        }
        scale_rows(acc, f);
      }
      if (!is_dq) {
        put_row_dots(acc, k, s.row_dots[0], own);
        barrier_wait(&s.e_ready, parity);
        barrier_wait(&s.dstates_full, parity);
        start_exit_term(acc, s, {vectors.c[own.row], vectors.c[own.row + 8]}, own);
        barrier_arrive(&s.e_empty);
        wgmma_wait<0>();
        settle(acc);
        barrier_arrive(&s.dstates_empty);
      }
      put_row_dots(acc, tiles, s.row_dots[which + 1], own);
      if (is_dq) {
        barrier_arrive(&s.sums_full);
        wgmma_fence();
        start_with_square<0>(acc, s.dp, k);
      } else {
        barrier_wait(&s.q_full, parity);
        barrier_wait(&s.dp_ready, parity);
        barrier_wait(&s.n_ready, parity);
        wgmma_fence();
        start_with_square<1>(acc, s.dp, q);
        start_with_square<0>(acc, s.n, k);
      }
      wgmma_wait<0>();
      settle(acc);
      if (is_dq) barrier_arrive(&s.squares_empty);
      if (p.l2norm) {
        const float by = is_dq ? p.inverse_scale : 1.0f;
        project_rows(acc, tiles, {r[own.row] * by, r[own.row + 8] * by}, own);
      }
      barrier_wait(&s.rows_empty, which ^ 1);
      put_gradient_rows(acc, s, own);
    }
    barrier_arrive(&s.q_empty);
    barrier_arrive(&s.keys_empty[stage]);
  });
}

}  // namespace gdn::sm90
