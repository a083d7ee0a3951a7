// The 64 x 64 products of k_backward: P, dP, N and the sums of their pairs.
#pragma once

#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/sm90/backward_shared.cuh"

namespace gdn::sm90 {

// threadIdx.x of the warpgroup, read anew: what is made from it is not kept in registers.
__device__ __forceinline__ int fresh_thread() { return fresh_thread_index() % 128; }

// What a thread of a warpgroup with row accumulators is.
struct GradientLane {
  int lane, warp;
  int row;  // rows `row` and `row + 8` of every accumulator
  uint32_t
      fragment;  // bytes to its row of ldmatrix and stmatrix, 16 x 16 entries from (16 warp, 0)

  __device__ __forceinline__ explicit GradientLane(int of_warpgroup)
      : lane(of_warpgroup % 32),
        warp(__shfl_sync(0xffffffffu, of_warpgroup / 32, 0)),
        row(16 * warp + lane / 4),
        fragment(tile_address(0, 16 * warp + lane % 16, 8 * (lane / 16))) {}

  // The same for entries from (16 warp, 16 step) of a tile.
  __device__ __forceinline__ uint32_t at(uint32_t tile, int step) const {
    return tile + (fragment ^ (step * 32));
  }
};

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

// Half of dP from dO E^T, and its pairs with Q K^T.
__device__ __forceinline__ void write_dp(const float (&out_e)[16], const float (&qk)[16],
                                         BackwardShared& s, const DecayRows& rows, PairSums& sums,
                                         int half, const GradientLane& own) {
#pragma unroll
  for (int b = 0; b < kHalfBlocks; ++b) {
    const int j = half * kHalfBlocks + b;
    float x[8];
    rows.block(j, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] *= out_e[8 * b + i];
      const bool self = j == own.warp && on_diagonal(i, own.lane);
      sums.add(b, i, x[i], self ? 0.0f : qk[8 * b + i]);
    }
    stmatrix_x4(own.at(smem_address(s.dp), j), pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  }
}

// Of chunk `turn` P (warpgroup 1, before its step), or N + N^T and the pairs of N with K K^T
// (warpgroup 2, after its step). One code for both: P is Q K^T with weights, N is dY E^T with
// others.
__device__ __forceinline__ void make_square(BackwardShared& s, int turn, bool is_n,
                                            const GradientLane& own) {
  const int stage = turn & 1;
  const uint32_t parity = turn & 1;
  const ReverseVectors& vectors = s.vectors[stage];
  const Decays decays{vectors.gate, is_n ? s.key_beta : vectors.rk,
                      is_n ? s.column_beta : s.factors.column};
  const float* factors = is_n ? vectors.rk : vectors.rq;
  const float sign = is_n ? -1.0f : 1.0f;
  const DecayRows rows(decays, sign * factors[own.row], sign * factors[own.row + 8], own.warp,
                       own.lane, is_n);
  PairSums sums;
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    float keys[16], weighed[16];
    if (is_n) {
      start_qk(keys, s.k[stage], s.k[stage], half * kHalfColumns);
      wgmma_wait<0>();
      settle(keys);
    } else {
#pragma unroll
      for (float& x : keys) x = 0.0f;
    }
    barrier_wait(is_n ? &s.solved : &s.squares_empty, is_n ? parity : parity ^ 1);
    start_qk(weighed, is_n ? s.d_v : s.q[stage], is_n ? s.e : s.k[stage], half * kHalfColumns);
    wgmma_wait<0>();
    settle(weighed);
    sums.begin_half();
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
      const int j = half * kHalfBlocks + b;
      float x[8];
      rows.block(j, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] *= weighed[8 * b + i];
        sums.add(b, i, x[i], keys[8 * b + i]);
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
        stmatrix_x4_trans(
            tile_address(smem_address(s.p), 16 * j + own.lane % 8 + 8 * (own.lane / 16),
                         16 * own.warp + 8 * (own.lane / 8 % 2)),
            m[0], m[1], m[2], m[3]);
      }
      if (!is_n || j <= own.warp) {
        stmatrix_x4(own.at(smem_address(s.p), j), m[0], m[1], m[2], m[3]);
      }
    }
    if (is_n) sums.end_half(s, 1, half, own);
  }
  fence_async_proxy();
  barrier_arrive(is_n ? &s.n_ready : &s.p_ready);
  if (!is_n) return;
  barrier_arrive(&s.e_empty);
  barrier_arrive(&s.keys_empty[stage]);
  sums.end(s, 1, own);
  barrier_arrive(&s.sums_full);
}

// Warpgroup 1, before P: the factors, and zeros in the rows past a short chunk.
__device__ __forceinline__ void make_factors(BackwardShared& s, int turn, int tokens, int thread) {
  const int stage = turn & 1;
  const uint32_t parity = turn & 1;
  if (tokens < kChunkTokens) {
    barrier_wait(&s.out_full, parity);
    clear_rows(s.k[stage][0], 2, tokens, thread);
    clear_rows(s.q[stage][0], 2, tokens, thread);
    clear_rows(s.d_o[0], 2, tokens, thread);
    fence_async_proxy();
  }
  barrier_wait(&s.sums_empty, parity ^ 1);  // the last factors, dots and sums have been read
  if (thread < kChunkTokens) {
    const ReverseVectors& vectors = s.vectors[stage];
    write_factors(s.factors, vectors, thread);
    s.key_beta[thread] = vectors.rk[thread] * vectors.beta[thread];
    s.column_beta[thread] = s.factors.column[thread] * vectors.beta[thread];
  }
  named_barrier(1, 128);
}

}  // namespace gdn::sm90
