// The 64 x 64 products of k_backward: dP, N and the sums of their pairs.
#pragma once

#include "backend/cuda/sm90/backward_rows.cuh"

namespace gdn::sm90 {

// Products of 64 x 64 are made in halves of 32 columns by one loop: half the code and half the
// registers. The caches of a multiprocessor hold little more than 32 KB of code, and what does not
// fit comes at 128 bytes a clock for up to 18 of them.
inline constexpr int kHalves = 2, kHalfColumns = 32, kHalfBlocks = 2;

// Sums of pair products over rows and columns. Both take the same products, so a pair's share of
// one is its share of the other.
struct PairSums {
  float rows[2] = {0.0f, 0.0f};
  float columns[8];  // of the half

  // Entry i of a thread's 8 of block b of the half.
  __device__ __forceinline__ void add(int b, int i, float x, float y) {
    rows[(i / 2) % 2] += x * y;
    columns[4 * b + 2 * (i / 4) + i % 2] += x * y;
  }
  __device__ __forceinline__ void begin_half() {
#pragma unroll
    for (float& x : columns) x = 0.0f;
  }
  __device__ __forceinline__ void end_half(BackwardShared& s, int which, int half,
                                           const GradientLane& own) {
    int column;
    const float sum = sum_rows(columns, own.lane, column);
    s.pair_columns[which][own.warp][half * kHalfColumns + column] = sum;
  }
  __device__ __forceinline__ void end(BackwardShared& s, int which, const GradientLane& own) {
    const float first = cuda::quad_sum(rows[0]), second = cuda::quad_sum(rows[1]);
    if (own.lane % 4 == 0) {
      s.pair_rows[which][own.row] = first;
      s.pair_rows[which][own.row + 8] = second;
    }
  }
};

// Whether entry i of a thread's 8 of a diagonal block is on the diagonal.
__device__ __forceinline__ bool on_diagonal(int i, int lane) {
  return i / 4 == (i / 2) % 2 && lane / 4 == 2 * (lane % 4) + i % 2;
}

// Of a chunk dP from dO E^T and its pairs with Q K^T without the diagonal (warpgroup 1), or N + N^T
// from dY E^T, and the pairs of N with K K^T (warpgroup 2): one code.
__device__ __forceinline__ void make_square(BackwardShared& s, int turn, bool is_n,
                                            const GradientLane& own) {
  const int stage = turn & 1;
  const uint32_t parity = turn & 1;
  const BackwardVectors& vectors = s.vectors[stage];
  const Decays decays{vectors.gate, vectors.key, vectors.column};
  const auto factor = [&](int row) {
    return is_n ? -vectors.rk[row] * d_v_factor(vectors.beta[row]) : vectors.rq[row];
  };
  const DecayRows rows(decays, factor(own.row), factor(own.row + 8), own.warp, own.lane, is_n);
  const uint32_t square = is_n ? smem_address(s.n) : smem_address(s.dp);
  const int which = is_n;
  PairSums sums;
  barrier_wait(&s.squares_empty, parity ^ 1);
  barrier_wait(&s.sums_empty, parity ^ 1);

  barrier_wait(&s.d_o_full, parity);
  barrier_wait(&s.q_full, parity);
  barrier_wait(&s.e_ready, parity);
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    float keys[16], weighed[16];
    start_qk(keys, is_n ? s.k[stage] : s.q, s.k[stage], half * kHalfColumns);
    start_qk(weighed, is_n ? s.d_v : s.d_o, s.e, half * kHalfColumns);
    wgmma_wait<0>();
    settle(keys);
    settle(weighed);
    sums.begin_half();
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
      const int j = half * kHalfBlocks + b;
      float x[8];
      rows.block(j, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool self = j == own.warp && on_diagonal(i, own.lane);

        x[i] *= weighed[8 * b + i];
        sums.add(b, i, x[i], self ? 0.0f : keys[8 * b + i]);
      }
      // 8 x 8 matrices (row half, column half): 0 (0, 0), 1 (1, 0), 2 (0, 1), 3 (1, 1).
      uint32_t m[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                       pack_bf16(x[6], x[7])};
      if (is_n && j == own.warp) {
        // Each entry has one of N and N^T at most, the other is 0: the sums are exact.
        m[0] = add_bf16(m[0], cuda::movmatrix_trans(m[0]));
        m[2] = cuda::movmatrix_trans(m[1]);
        m[3] = add_bf16(m[3], cuda::movmatrix_trans(m[3]));
      }
      if (is_n && j < own.warp) {
        // Block (j, warp) is the transpose: matrix (c, r) is that of (r, c).
        stmatrix_x4_trans(tile_address(square, 16 * j + own.lane % 8 + 8 * (own.lane / 16),
                                       16 * own.warp + 8 * (own.lane / 8 % 2)),
                          m[0], m[1], m[2], m[3]);
      }
      if (!is_n || j <= own.warp) stmatrix_x4(own.at(square, j), m[0], m[1], m[2], m[3]);
    }
    sums.end_half(s, which, half, own);
  }
  sums.end(s, which, own);
  fence_async_proxy();
  barrier_arrive(is_n ? &s.n_ready : &s.dp_ready);
  barrier_arrive(&s.d_v_empty);
}

}  // namespace gdn::sm90
