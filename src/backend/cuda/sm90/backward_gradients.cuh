// Warpgroup 3 of k_backward: dq and dk of every chunk.
#pragma once

#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/sm90/backward_squares.cuh"

namespace gdn::sm90 {

// Scales rows of a product with a state by `factor`, and leaves their dots with the same rows of
// the two tiles from `tiles` on.
__device__ __forceinline__ void finish_state_term(float (&acc)[64], const float (&factor)[2],
                                                  uint32_t tiles, float* out,
                                                  const GradientLane& own) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] *= factor[(i / 2) % 2];
  const auto put = [&](int kk, uint32_t(&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = pack_bf16(acc[8 * kk + 2 * i], acc[8 * kk + 2 * i + 1]);
  };
  const float2 dots = diagonal_products(put, tiles, 16 * own.warp, own.lane);
  if (has_diagonal(own.lane)) {
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
  const float along[2] = {-r[0] * r[0] * cuda::quad_sum(dots[0]),
                          -r[1] * r[1] * cuda::quad_sum(dots[1])};
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

// Rows of this head's part of dq or dk, for warp 2.
__device__ __forceinline__ void put_gradient_rows(const float (&acc)[64], BackwardShared& s,
                                                  uint32_t parity, const GradientLane& own) {
  barrier_wait(&s.rows_empty, parity);
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    const float* x = &acc[8 * kk];
    stmatrix_x4(own.at(smem_address(s.rows[kk / 4]), kk % 4), pack_bf16(x[0], x[1]),
                pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  }
  fence_async_proxy();
  barrier_arrive(&s.rows_full);
}

// dP of a chunk, and its pairs.
__device__ __forceinline__ void make_dp(BackwardShared& s, int stage, const GradientLane& own) {
  const ReverseVectors& vectors = s.vectors[stage];
  const Decays decays{vectors.gate, s.key_beta, s.column_beta};
  const DecayRows rows(decays, vectors.rq[own.row], vectors.rq[own.row + 8], own.warp, own.lane);
  PairSums sums;
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    float qk[16], out_e[16];
    start_qk(qk, s.q[stage], s.k[stage], half * kHalfColumns);
    start_qk(out_e, s.d_o, s.e, half * kHalfColumns);
    wgmma_wait<0>();
    settle(qk);
    settle(out_e);
    sums.begin_half();
    write_dp(out_e, qk, s, rows, sums, half, own);
    sums.end_half(s, 0, half, own);
  }
  sums.end(s, 0, own);
  fence_async_proxy();
  named_barrier(3, 128);
}

__device__ __forceinline__ void run_gradients(const BackwardParams& p, BackwardShared& s) {
  const GradientLane own(threadIdx.x % 128);
  for_chunks(p.walk, [&](const ChunkAt& at) {
    const int stage = at.turn & 1;
    const uint32_t parity = at.turn & 1;
    const ReverseVectors& vectors = s.vectors[stage];
    const uint32_t k = smem_address(s.k[stage]), q = smem_address(s.q[stage]);
    barrier_wait(&s.keys_full[stage], (at.turn >> 1) & 1);
    barrier_wait(&s.p_ready, parity);  // factors; short rows are zero
    barrier_wait(&s.out_full, parity);
    barrier_wait(&s.e_full, parity);
    make_dp(s, stage, own);
    barrier_wait(&s.states_full, parity);
    // dq, then dk: mostly the same code, so one loop.
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const bool is_dk = which == 1;
      const uint32_t tiles = is_dk ? k : q;
      const float* r = is_dk ? vectors.rk : vectors.rq;
      if (is_dk) barrier_wait(&s.solved, parity);
      float acc[64];
      start_with_state(acc, is_dk ? smem_address(s.d_v) : smem_address(s.d_o), s.states);
      wgmma_wait<0>();
      settle(acc);
      barrier_arrive(is_dk ? &s.states_empty : &s.out_empty);
      {
        const float sign = is_dk ? -1.0f : 1.0f;
        const float gam[2] = {exp2_approx(vectors.gate[own.row]),
                              exp2_approx(vectors.gate[own.row + 8])};
        finish_state_term(acc, {sign * gam[0] * r[own.row], sign * gam[1] * r[own.row + 8]}, tiles,
                          s.row_dots[which], own);
      }
      if (is_dk) {
        barrier_arrive(&s.sums_full);
        {
          const auto* c =
              reinterpret_cast<const float*>(&s.factors.inner[own.row / 2]) + own.row % 2;
          start_exit_term(acc, s, {c[0] * c[2], c[16] * c[18]}, own);
        }
        barrier_wait(&s.n_ready, parity);
        wgmma_fence();
        start_with_square<1>(acc, s.dp, q);
        start_with_square<0>(acc, s.p, k);
        wgmma_wait<2>();
        barrier_arrive(&s.e_empty);
        barrier_arrive(&s.solution_empty);
      } else {
        wgmma_fence();
        start_with_square<0>(acc, s.dp, k);
      }
      wgmma_wait<0>();
      settle(acc);
      if (is_dk) barrier_arrive(&s.squares_empty);
      if (p.l2norm) {
        const float by = is_dk ? 1.0f : p.inverse_scale;
        project_rows(acc, tiles, {r[own.row] * by, r[own.row + 8] * by}, own);
      }
      put_gradient_rows(acc, s, which ^ 1, own);
    }
    barrier_arrive(&s.keys_empty[stage]);
  });
}

}  // namespace gdn::sm90
