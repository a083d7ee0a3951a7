// Warpgroup 3 of k_backward: dq and dk of every chunk.
#pragma once

#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/sm90/backward_squares.cuh"

namespace gdn::sm90 {

// Scales rows of a product with a state by `factor`, and leaves their dots with the same rows of
// `tiles`.
__device__ __forceinline__ void finish_state_term(float (&acc)[64], float factor0, float factor1,
                                                  const bf16 (&tiles)[2][kTileElements], float* out,
                                                  const GradientLane& own) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] *= (i / 2) % 2 ? factor1 : factor0;
  const auto put = [&](int kk, uint32_t(&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = pack_bf16(acc[8 * kk + 2 * i], acc[8 * kk + 2 * i + 1]);
  };
  const float2 dots =
      diagonal_products(put, forget_value(smem_address(tiles)), 16 * own.warp, own.lane);
  if (has_diagonal(own.lane)) {
    out[own.row] = dots.x;
    out[own.row + 8] = dots.y;
  }
}

// acc = a b: a two tiles [64 tokens][64 of V], b a state image. Issued, not committed.
__device__ __forceinline__ void start_with_state(float (&acc)[64],
                                                 const bf16 (&a)[2][kTileElements],
                                                 const bf16 (&b)[2][2][kTileElements]) {
  const uint32_t rows = forget_value(smem_address(a)), state = forget_value(smem_address(b));
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    wgmma_ss<0, 1>(acc, descriptor(rows + (kk / 4) * kTileBytes + (kk % 4) * 32),
                   descriptor(state + (kk / 4) * 2 * kTileBytes + (kk % 4) * 2048, kTileBytes),
                   kk > 0);
  }
}

// acc += a b or a^T b: a a square tile, b two tiles [64 tokens][64 of K]. Issued, not committed.
template <int kTransA>
__device__ __forceinline__ void start_with_square(float (&acc)[64], const bf16 (&a)[kTileElements],
                                                  const bf16 (&b)[2][kTileElements]) {
  const uint32_t square = forget_value(smem_address(a)), rows = forget_value(smem_address(b));
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    wgmma_ss<kTransA, 1>(acc, descriptor(square + kk * (kTransA ? 2048 : 32), kTileBytes),
                         descriptor(rows + kk * 2048, kTileBytes), true);
  }
}

// acc += (f E) dS^T with a factor for each row. Issued and committed.
__device__ __forceinline__ void start_exit_term(float (&acc)[64], BackwardShared& s,
                                                const float (&factor)[2], const GradientLane& own) {
  uint32_t a[8][4];
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    ldmatrix_x4(a[kk], tile_address(smem_address(s.e[kk / 4]), 16 * own.warp + own.lane % 16,
                                    16 * (kk % 4) + 8 * (own.lane / 16)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_bf16(a[kk][i]);
      a[kk][i] = pack_bf16(factor[i % 2] * x.x, factor[i % 2] * x.y);
    }
  }
  const uint32_t state = forget_value(smem_address(s.dstates));
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    wgmma_rs<1>(acc, a[kk][0], a[kk][1], a[kk][2], a[kk][3],
                descriptor(state + (kk / 4) * 2 * kTileBytes + (kk % 4) * 2048, kTileBytes), true);
  }
  wgmma_commit();
}

// Rows of this head's part of dq or dk, for warp 2; without what lies along the raw rows when there
// is a norm, `by` r = 1 / |x|. That is linear, so it need not wait for the sum.
__device__ __forceinline__ void put_gradient_rows(float (&acc)[64],
                                                  const bf16 (&tiles)[2][kTileElements],
                                                  const float* r, float by, bool l2norm,
                                                  BackwardShared& s, uint32_t parity,
                                                  const GradientLane& own) {
  const int row = 16 * own.warp + own.lane % 16, column = 8 * (own.lane / 16);
  if (l2norm) {
    float dots[2] = {0.0f, 0.0f};
#pragma unroll
    for (int kk = 0; kk < 8; ++kk) {
      uint32_t x[4];
      ldmatrix_x4(x, tile_address(smem_address(tiles[kk / 4]), row, 16 * (kk % 4) + column));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_bf16(x[i]);
        dots[i % 2] += pair.x * acc[8 * kk + 2 * i] + pair.y * acc[8 * kk + 2 * i + 1];
      }
    }
    const float r0 = r[own.row] * by, r1 = r[own.row + 8] * by;
    const float along[2] = {-r0 * r0 * cuda::quad_sum(dots[0]), -r1 * r1 * cuda::quad_sum(dots[1])};
#pragma unroll
    for (int kk = 0; kk < 8; ++kk) {
      uint32_t x[4];
      ldmatrix_x4(x, tile_address(smem_address(tiles[kk / 4]), row, 16 * (kk % 4) + column));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_bf16(x[i]);
        acc[8 * kk + 2 * i] += along[i % 2] * pair.x;
        acc[8 * kk + 2 * i + 1] += along[i % 2] * pair.y;
      }
    }
  }
  barrier_wait(&s.rows_empty, parity);
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    const float* x = &acc[8 * kk];
    stmatrix_x4(tile_address(smem_address(s.rows[kk / 4]), row, 16 * (kk % 4) + column),
                pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                pack_bf16(x[6], x[7]));
  }
  fence_async_proxy();
  barrier_arrive(&s.rows_full);
}

__device__ __forceinline__ void run_gradients(const BackwardParams& p, BackwardShared& s) {
  const GradientLane own(threadIdx.x % 128, __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0));
  for_chunks(p.walk, [&](const ChunkAt& at) {
    const int stage = at.turn & 1;
    const uint32_t parity = at.turn & 1;
    const auto& k = s.k[stage];
    const auto& q = s.q[stage];
    const ReverseVectors& vectors = s.vectors[stage];
    barrier_wait(&s.keys_full[stage], (at.turn >> 1) & 1);
    barrier_wait(&s.p_ready, parity);  // factors; short rows are zero
    barrier_wait(&s.out_full, parity);
    barrier_wait(&s.e_full, parity);
    {
      float qk[32], out_e[32];
      start_qk(qk, q, k);
      start_qk(out_e, s.d_o, s.e);
      wgmma_wait<0>();
      settle(qk);
      settle(out_e);
      PairSums sums;
      write_dp(out_e, qk, s, vectors, sums, own.again());
      sums.store(s, 0, own.again());
    }
    fence_async_proxy();
    named_barrier(3, 128);

    {
      float acc[64];
      barrier_wait(&s.states_full, parity);
      wgmma_fence();
      start_with_state(acc, s.d_o, s.states);
      wgmma_commit();
      wgmma_wait<0>();
      settle(acc);
      barrier_arrive(&s.out_empty);
      {
        const auto again = own.again();
        const float* d = reinterpret_cast<const float*>(&s.factors.outer[again.row / 2]);
        finish_state_term(acc, d[again.row % 2], d[again.row % 2 + 16], q, s.row_dots[0], again);
      }
      wgmma_fence();
      start_with_square<0>(acc, s.dp, k);
      wgmma_commit();
      wgmma_wait<0>();
      settle(acc);
      put_gradient_rows(acc, q, vectors.rq, p.inverse_scale, p.l2norm, s, 1, own.again());
    }

    barrier_wait(&s.solved, parity);
    {
      float acc[64];
      wgmma_fence();
      start_with_state(acc, s.d_v, s.states);
      wgmma_commit();
      wgmma_wait<0>();
      settle(acc);
      barrier_arrive(&s.states_empty);
      {
        const auto again = own.again();
        finish_state_term(acc, -exp2_approx(vectors.gate[again.row]) * vectors.rk[again.row],
                          -exp2_approx(vectors.gate[again.row + 8]) * vectors.rk[again.row + 8], k,
                          s.row_dots[1], again);
      }
      float c0, c1;
      {
        const auto again = own.again();
        const float* c =
            reinterpret_cast<const float*>(&s.factors.inner[again.row / 2]) + again.row % 2;
        c0 = c[0] * c[2], c1 = c[16] * c[18];
      }
      barrier_arrive(&s.sums_full);
      start_exit_term(acc, s, {c0, c1}, own.again());
      barrier_wait(&s.n_ready, parity);
      wgmma_fence();
      start_with_square<1>(acc, s.dp, q);
      start_with_square<0>(acc, s.p, k);
      wgmma_commit();
      wgmma_wait<1>();
      barrier_arrive(&s.e_empty);
      barrier_arrive(&s.solution_empty);
      wgmma_wait<0>();
      settle(acc);
      barrier_arrive(&s.squares_empty);
      put_gradient_rows(acc, k, vectors.rk, 1.0f, p.l2norm, s, 0, own.again());
    }
    barrier_arrive(&s.keys_empty[stage]);
  });
}

}  // namespace gdn::sm90
