// Warpgroups 3 and 4 of k_backward: the 64 x 64 products dP and N and the sums of their pairs, then
// dk.
#pragma once

#include "backend/cuda/sm90/backward_rows.cuh"

namespace gdn::sm90 {

// Products of 64 x 64 are made in halves of 32 columns by one loop: half the code and half the
// registers. The caches of a multiprocessor hold little more than 32 KB of code, and what does not
// fit comes at 128 bytes a clock for up to 18 of them.
inline constexpr int kHalves = 2, kHalfColumns = 32, kHalfBlocks = 2;

// Decays of a thread's 8 entries of a 16 x 16 block: row_i key_j e^{G_i-G_j}. At most those of j <=
// i are meant; the others may be anything, infinite too.
struct EntryDecays {
  const BackwardVectors& vectors;
  float gate[2], row[2];  // of this thread's two rows
  int column;             // its first one in each half of a block

  __device__ __forceinline__ void block(int j, float (&w)[8]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = 16 * j + 8 * h + column;
      const float2 g = *reinterpret_cast<const float2*>(&vectors.gate[at]);
      const float2 k = *reinterpret_cast<const float2*>(&vectors.key[at]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        w[4 * h + 2 * r] = row[r] * k.x * exp2_approx(gate[r] - g.x);
        w[4 * h + 2 * r + 1] = row[r] * k.y * exp2_approx(gate[r] - g.y);
      }
    }
  }
};

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
  __device__ __forceinline__ void end_half(float* out, const GradientLane& own) const {
    int column;
    const float sum = sum_rows(columns, own.lane, column);
    out[column] = sum;
  }
  __device__ __forceinline__ void end(float* out, const GradientLane& own) const {
    const float first = cuda::quad_sum(rows[0]), second = cuda::quad_sum(rows[1]);
    if (own.lane % 4 == 0) {
      out[own.row] = first;
      out[own.row + 8] = second;
    }
  }
};

// Of a chunk dP from dO E^T and its pairs with Q K^T without the diagonal (warpgroup 3), or N + N^T
// from dY E^T, and the pairs of N with K K^T (warpgroup 4): one code.
__device__ __forceinline__ void make_square(BackwardShared& s, int turn, bool is_n,
                                            const GradientLane& own) {
  const int stage = turn & 1;
  const uint32_t parity = turn & 1;
  const BackwardVectors& vectors = s.vectors[stage];
  const auto factor = [&](int row) {
    return is_n ? -vectors.rk[row] * d_v_factor(vectors.beta[row]) : vectors.rq[row];
  };
  const EntryDecays decays{vectors,
                           {vectors.gate[own.row], vectors.gate[own.row + 8]},
                           {factor(own.row), factor(own.row + 8)},
                           2 * (own.lane % 4)};
  const int diagonal = own.lane / 4 - decays.column;  // entries i % 2 of diagonal 8 x 8 blocks
  const uint32_t square = smem_address(is_n ? s.n : s.dp);
  PairSums sums;
  barrier_wait(&s.squares_empty, parity ^ 1);
  barrier_wait(&s.sums_empty, parity ^ 1);
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    float keys[16], weighed[16];
    start_qk(keys, is_n ? s.k[stage] : s.q[stage], s.k[stage], half * kHalfColumns);
    for (uint64_t* full : {&s.d_o_full, &s.d_v_full, &s.e_ready}) barrier_wait(full, parity);
    start_qk(weighed, is_n ? s.d_v : s.d_o, s.v, half * kHalfColumns);
    float factors[kHalfBlocks][8];
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) decays.block(half * kHalfBlocks + b, factors[b]);
    wgmma_wait<0>();
    settle(keys);
    settle(weighed);
    sums.begin_half();
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
      const int j = half * kHalfBlocks + b;
      if (j > own.warp) continue;
      float(&x)[8] = factors[b];
      if (j == own.warp) {
        x[4] = x[5] = 0.0f;
#pragma unroll
        for (const int i : {0, 1, 6, 7}) {
          if (diagonal < i % 2 + is_n) x[i] = 0.0f;
          if (diagonal == i % 2) keys[8 * b + i] = 0.0f;  // pairs without the diagonal
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] *= weighed[8 * b + i];
        sums.add(b, i, x[i], keys[8 * b + i]);
      }
      // 8 x 8 matrices (row half, column half): 0 (0, 0), 1 (1, 0), 2 (0, 1), 3 (1, 1).
      uint32_t m[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                       pack_bf16(x[6], x[7])};
      if (is_n) {
        if (j == own.warp) {
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
    }
    sums.end_half(&s.pair_columns[is_n][own.warp][half * kHalfColumns], own);
  }
  sums.end(s.pair_rows[is_n], own);
  fence_async_proxy();
  barrier_arrive(&s.values_empty);
  barrier_arrive(&s.squares_ready);
}

// Warpgroup `half`: dP (0) or N (1) of every chunk, then a half of K of dk.
__device__ __forceinline__ void run_gradients(const BackwardParams& p, BackwardShared& s,
                                              int half) {
  for_chunks(p.walk, s.walk, [&](const ChunkAt& at) {
    barrier_wait(&s.keys_full[at.stage()], at.stage_parity());
    barrier_wait(&s.factors_full[at.stage()], at.stage_parity());
    barrier_wait(&s.q_full[at.stage()], at.stage_parity());
    make_square(s, at.turn, half == 1, GradientLane(fresh_thread()));
    make_dk(p, s, at.turn, half, GradientLane(fresh_thread()));
  });
}

}  // namespace gdn::sm90
