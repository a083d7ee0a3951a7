// The 64 x 64 products of k_backward: P, dP, N and the sums of their pairs.
#pragma once

#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/sm90/backward_shared.cuh"

namespace gdn::sm90 {

// Where a thread of a warpgroup has its accumulators.
struct GradientLane {
  int thread, lane, warp;
  int row;  // rows `row` and `row + 8` of every accumulator

  __device__ __forceinline__ GradientLane(int of_warpgroup, int uniform_warp)
      : thread(of_warpgroup),
        lane(of_warpgroup % 32),
        warp(uniform_warp),
        row(16 * uniform_warp + lane / 4) {}
  // The same, with addresses made anew.
  __device__ __forceinline__ GradientLane again() const {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return {index % 128, warp};
  }
};

// Sums of pair products over rows and columns. Both take the same products, so a pair's share of
// one is its share of the other.
struct PairSums {
  float rows[2] = {0.0f, 0.0f};
  float columns[16] = {};

  // Entry i of a thread's 8 of block j.
  __device__ __forceinline__ void add(int j, int i, float x, float y) {
    rows[(i / 2) % 2] += x * y;
    columns[4 * j + 2 * (i / 4) + i % 2] += x * y;
  }
  __device__ __forceinline__ void store(BackwardShared& s, int which, const GradientLane& own) {
    const float first = cuda::quad_sum(rows[0]), second = cuda::quad_sum(rows[1]);
    if (own.lane % 4 == 0) {
      s.pair_rows[which][own.row] = first;
      s.pair_rows[which][own.row + 8] = second;
    }
    int column;
    const float2 sums = sum_rows(columns, own.lane, column);
    *reinterpret_cast<float2*>(&s.pair_columns[which][own.warp][column]) = sums;
  }
};

// Whether entry i of a thread's 8 of a diagonal block is on the diagonal.
__device__ __forceinline__ bool on_diagonal(int i, int lane) {
  return i / 4 == (i / 2) % 2 && lane / 4 == 2 * (lane % 4) + i % 2;
}

// dP from dO E^T, and its pairs with Q K^T.
__device__ __forceinline__ void write_dp(const float (&out_e)[32], const float (&qk)[32],
                                         BackwardShared& s, const ReverseVectors& vectors,
                                         PairSums& sums, const GradientLane& own) {
  const Decays decays{vectors.gate, s.key_beta, s.column_beta};
  for_decays<false>(decays, vectors.rq[own.row], vectors.rq[own.row + 8], own.warp, own.lane,
                    [&](int j, float(&x)[8]) {
#pragma unroll
                      for (int i = 0; i < 8; ++i) {
                        x[i] *= out_e[8 * j + i];
                        const bool self = j == own.warp && on_diagonal(i, own.lane);
                        sums.add(j, i, x[i], self ? 0.0f : qk[8 * j + i]);
                      }
                      put_block(s.dp, x, j, own.warp, own.lane);
                    });
}

// N + N^T from dY E^T, and the pairs of N with K K^T.
__device__ __forceinline__ void write_n(const float (&dy_e)[32], const float (&kk)[32],
                                        BackwardShared& s, const ReverseVectors& vectors,
                                        PairSums& sums, const GradientLane& own) {
  const Decays decays{vectors.gate, s.key_beta, s.column_beta};
  const uint32_t tile = smem_address(s.p);
  const uint32_t across = tile_address(tile, own.lane % 8 + 8 * (own.lane / 16),
                                       16 * own.warp + 8 * (own.lane / 8 % 2));
  for_decays<true>(decays, -vectors.rk[own.row], -vectors.rk[own.row + 8], own.warp, own.lane,
                   [&](int j, const float(&w)[8]) {
                     float x[8];
#pragma unroll
                     for (int i = 0; i < 8; ++i) {
                       x[i] = w[i] * dy_e[8 * j + i];
                       sums.add(j, i, x[i], kk[8 * j + i]);
                     }
                     // 8 x 8 matrices (row half, column half): 0 (0, 0), 1 (1, 0), 2 (0, 1), 3 (1,
                     // 1).
                     uint32_t m[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                                      pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
                     if (j < own.warp) {
                       // Block (j, warp) is the transpose: matrix (c, r) is that of (r, c).
                       stmatrix_x4_trans(across + 16 * j * 128, m[0], m[1], m[2], m[3]);
                     } else if (j == own.warp) {
                       // Each entry has one of N and N^T at most, the other is 0: the sums are
                       // exact.
                       m[0] = add_bf16(m[0], cuda::movmatrix_trans(m[0]));
                       m[2] = cuda::movmatrix_trans(m[1]);
                       m[3] = add_bf16(m[3], cuda::movmatrix_trans(m[3]));
                     }
                     if (j <= own.warp) {
                       stmatrix_x4(tile_address(tile, 16 * own.warp + own.lane % 16,
                                                16 * j + 8 * (own.lane / 16)),
                                   m[0], m[1], m[2], m[3]);
                     }
                   });
}

// Warpgroup 1, before its step: factors and P, and zeros in the rows past a short chunk.
__device__ __forceinline__ void make_p(BackwardShared& s, const ChunkAt& at,
                                       const GradientLane& own) {
  const int stage = at.turn & 1;
  const uint32_t parity = at.turn & 1;
  const ReverseVectors& vectors = s.vectors[stage];
  if (at.tokens < kChunkTokens) {
    barrier_wait(&s.out_full, parity);
    clear_rows(s.k[stage][0], 2, at.tokens, own.thread);
    clear_rows(s.q[stage][0], 2, at.tokens, own.thread);
    clear_rows(s.d_o[0], 2, at.tokens, own.thread);
    fence_async_proxy();
    named_barrier(1, 128);
  }
  float qk[32];
  start_qk(qk, s.q[stage], s.k[stage]);
  barrier_wait(&s.sums_empty, parity ^ 1);  // the last factors, dots and sums have been read
  if (own.thread < kChunkTokens) {
    const int t = own.thread;
    write_factors(s.factors, vectors, t);
    s.key_beta[t] = vectors.rk[t] * vectors.beta[t];
    s.column_beta[t] = s.factors.column[t] * vectors.beta[t];
  }
  wgmma_wait<0>();
  settle(qk);
  named_barrier(1, 128);
  barrier_wait(&s.squares_empty, parity ^ 1);
  write_p(qk, s.p, vectors.rq, {vectors.gate, vectors.rk, s.factors.column}, own.warp, own.lane);
  fence_async_proxy();
  barrier_arrive(&s.p_ready);
}

// Warpgroup 2, after its step: N.
__device__ __forceinline__ void make_n(BackwardShared& s, int turn, const GradientLane& own) {
  const int stage = turn & 1;
  float kk[32];
  start_qk(kk, s.k[stage], s.k[stage]);
  barrier_wait(&s.solved, turn & 1);
  float dy_e[32];
  start_qk(dy_e, s.d_v, s.e);
  wgmma_wait<0>();
  settle(kk);
  settle(dy_e);
  PairSums sums;
  write_n(dy_e, kk, s, s.vectors[stage], sums, own);
  fence_async_proxy();
  barrier_arrive(&s.n_ready);
  barrier_arrive(&s.e_empty);
  barrier_arrive(&s.keys_empty[stage]);
  sums.store(s, 1, own);
  barrier_arrive(&s.sums_full);
}

}  // namespace gdn::sm90
