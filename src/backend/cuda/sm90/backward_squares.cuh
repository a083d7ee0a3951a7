// Warpgroups 3 and 4 of k_backward: the 64 x 64 products dP and N and the sums of their pairs, then
// dk.
#pragma once

#include "backend/cuda/sm90/backward_rows.cuh"

namespace gdn::sm90 {

// Of a chunk dP from dO E^T (warpgroup 3) or N + N^T from dY E^T (warpgroup 4), one code. x: this
// thread's entries of dP or N without the diagonal, in accumulator layout.
__device__ __forceinline__ void make_square(float (&x)[32], BackwardShared& s, int turn,
                                            bool is_n) {
  const uint32_t parity = turn & 1;
  const BackwardVectors& vectors = s.vectors[turn & 1];
  for (uint64_t* full : {&s.d_o_full, &s.d_v_full, &s.e_ready}) barrier_wait(full, parity);
  start_qk(x, is_n ? s.d_v : s.d_o, s.v);
  const GradientLane own(fresh_thread());
  const auto factor = [&](int row) {
    return is_n ? -vectors.rk[row] * d_v_factor(vectors.beta[row]) : vectors.rq[row];
  };
  const Decays decays{vectors.gate, vectors.key, vectors.column};
  const DecayRows rows(decays, factor(own.row), factor(own.row + 8), own.warp, own.lane, is_n);
  const int diagonal = own.lane / 4 - rows.c2;  // entries i % 2 of diagonal 8 x 8 blocks
  const uint32_t square = smem_address(is_n ? s.n : s.dp);
  wgmma_wait<0>();
  settle(x);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float w[8];
    rows.block(j, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[8 * j + i] *= w[i];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > own.warp) break;
    float* const w = &x[8 * j];
    // 8 x 8 matrices (row half, column half): 0 (0, 0), 1 (1, 0), 2 (0, 1), 3 (1, 1).
    uint32_t m[4] = {pack_bf16(w[0], w[1]), pack_bf16(w[2], w[3]), pack_bf16(w[4], w[5]),
                     pack_bf16(w[6], w[7])};
    const bool is_diagonal = j == own.warp;
    if (is_n) {
      if (is_diagonal) {
        // Each entry has one of N and N^T at most, the other is 0: the sums are exact.
        m[0] = add_bf16(m[0], cuda::movmatrix_trans(m[0]));
        m[2] = cuda::movmatrix_trans(m[1]);
        m[3] = add_bf16(m[3], cuda::movmatrix_trans(m[3]));
      } else {
        // Block (j, warp) is the transpose: matrix (c, r) is that of (r, c).
        stmatrix_x4_trans(tile_address(square, 16 * j + own.lane % 8 + 8 * (own.lane / 16),
                                       16 * own.warp + 8 * (own.lane / 8 % 2)),
                          m[0], m[1], m[2], m[3]);
      }
    }
    stmatrix_x4(own.at(square, j), m[0], m[1], m[2], m[3]);
    if (is_diagonal) {
#pragma unroll
      for (const int i : {0, 1, 6, 7}) {
        if (diagonal == i % 2) w[i] = 0.0f;
      }
    }
  }
  fence_async_proxy();
  barrier_arrive(&s.values_empty);
  barrier_arrive(&s.squares_ready);
}

// Sums over rows and columns of the pairs of dP with Q K^T, or of N with K K^T. Both take the same
// products, so a pair's share of one is its share of the other. In halves of 32 columns: so they
// fit in registers beside the square, whose second half takes the place of the first.
__device__ __forceinline__ void sum_pairs(float (&x)[32], BackwardShared& s, int turn, bool is_n) {
  const int stage = turn & 1;
  float rows[2] = {0.0f, 0.0f};
  barrier_wait(&s.sums_empty, (turn & 1) ^ 1);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float keys[16];
    start_qk(keys, is_n ? s.k[stage] : s.q[stage], s.k[stage], 32 * half);
    const GradientLane own(fresh_thread());
    wgmma_wait<0>();
    settle(keys);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int j = 2 * half + b;
      if (j > own.warp) break;
      float columns[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float product = x[8 * b + i] * keys[8 * b + i];
        rows[i / 2 % 2] += product;
        columns[2 * (i / 4) + i % 2] += product;
      }
      int column;
      const float sum = sum_rows(columns, own.lane, column);
      if (own.lane / 4 % 2 == 0) {
        s.pair_columns[is_n][own.warp * (own.warp + 1) / 2 + j][column] = sum;
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = x[16 + i];
  }
  const GradientLane own(fresh_thread());
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = cuda::quad_sum(rows[r]);
    if (own.lane % 4 == 0) s.pair_rows[is_n][own.row + 8 * r] = sum;
  }
}

// Warpgroup `half`: dP (0) or N (1) of every chunk, then a half of K of dk.
template <bool kNorm>
__device__ __forceinline__ void run_gradients(const BackwardParams& p, BackwardShared& s,
                                              int half) {
  for_chunks(p.walk, s.walk, [&](const ChunkAt& at) {
    barrier_wait(&s.factors_full[at.stage()], at.stage_parity());
    float square[32];
    make_square(square, s, at.turn, half == 1);
    sum_pairs(square, s, at.turn, half == 1);
    make_dk<kNorm>(s, at.turn, half);
  });
}

}  // namespace gdn::sm90
