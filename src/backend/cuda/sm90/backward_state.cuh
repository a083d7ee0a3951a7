// Warpgroups 1 and 2 of k_backward: dS.
#pragma once

#include "backend/cuda/sm90/backward_squares.cuh"

namespace gdn::sm90 {

// x^T o y^T: y in accumulator order, x a tile [64 tokens][64 of V]; summed over the two rows of V
// of this thread, as sum_rows takes them.
__device__ __forceinline__ void value_products(float (&out)[16], const float (&y)[32],
                                               const bf16* tile, const StateLane& own) {
  uint32_t x[16];
  load_transposed(x, tile, own);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 x0 = unpack_bf16(x[2 * j]), x1 = unpack_bf16(x[2 * j + 1]);
    out[2 * j] = x0.x * y[4 * j] + x1.x * y[4 * j + 2];
    out[2 * j + 1] = x0.y * y[4 * j + 1] + x1.y * y[4 * j + 3];
  }
}

__device__ __forceinline__ void put_value_dots(const float (&products)[16], float* out, int lane) {
  int token;
  const float2 sums = sum_rows(products, lane, token);
  *reinterpret_cast<float2*>(out + token) = sums;
}

struct GradientSteps {
  BackwardShared& s;
  const StateLane& own;
  int warp;  // of the eight
  uint32_t parity;
  float decay;
  float products[16];

  // dS for the gradients, and <gam_C dS, S>: row by row, as the diagonal of dS^T S.
  __device__ __forceinline__ void entered(const uint32_t (&a)[32]) {
    barrier_wait(&s.solution_empty, parity ^ 1);
    put_state(a, s.dstates[own.half], own);
    barrier_wait(&s.states_full, parity);
    barrier_wait(&s.sums_empty, parity ^ 1);
    const auto put = [&](int kk, uint32_t(&x)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = a[4 * kk + i];
    };
    const float2 dots =
        diagonal_products(put, smem_address(s.states[own.half]), own.thread / 32 * 16, own.lane);
    float sum = has_diagonal(own.lane) ? dots.x + dots.y : 0.0f;
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    if (own.lane == 0) s.through[warp] = decay * sum;
    barrier_arrive(&s.states_empty);
  }
  __device__ __forceinline__ void ready(const float (&d)[32]) {
    barrier_wait(&s.e_full, parity);
    value_products(products, d, s.e[own.half], own);
    barrier_wait(&s.out_full, parity);
    barrier_wait(&s.p_ready, parity);
  }
  __device__ __forceinline__ void in_second() {
    put_value_dots(products, s.value_dots[1][warp], own.lane);
  }
  __device__ __forceinline__ void solved(const float (&u)[32]) {
    barrier_wait(&s.d_v_empty, parity ^ 1);
    const uint32_t tile = smem_address(s.d_v[own.half]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t x[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 beta =
            *reinterpret_cast<const float2*>(&s.factors.inner[8 * j + 4 * h + own.pair].z);
        const float* at = &u[8 * j + 4 * h];
        x[2 * h] = pack_bf16(beta.x * at[0], beta.y * at[1]);
        x[2 * h + 1] = pack_bf16(beta.x * at[2], beta.y * at[3]);
      }
      stmatrix_x4_trans(tile_address(tile, 16 * j + own.token, own.column), x[0], x[1], x[2], x[3]);
    }
    fence_async_proxy();
    barrier_arrive(&s.solved);
    barrier_arrive(&s.out_empty);
  }
  __device__ __forceinline__ void after(const float (&u)[32]) {
    value_products(products, u, s.e[own.half], own);
    if (own.half == 0) barrier_arrive(&s.e_empty);
    put_value_dots(products, s.value_dots[0][warp], own.lane);
    barrier_arrive(&s.dots_full);
  }
};

// Warpgroup 1 makes P of a chunk before its step, warpgroup 2 N after it: which is before the next.
__device__ __forceinline__ void run_state(const WalkParams& p, BackwardShared& s, int half) {
  const Walk walk(p);
  const StateLane own(half);
  const int warp = __shfl_sync(0xffffffffu, own.thread / 32, 0);
  GradientSteps steps{s, own, 4 * half + warp};
  const WalkPiece* piece = nullptr;
  int next = walk.begin, left = 0, tokens = 0;  // of the piece
  float state[64];
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const WalkPiece* done = piece;
    if (left == 0) {
      piece = next < walk.end ? p.pieces + next++ : nullptr;
      tokens = piece ? (piece->tokens - 1) % kChunkTokens + 1 : 0;  // of the first chunk walked
    }
    const int stage = turn & 1;
    if (piece) barrier_wait(&s.keys_full[stage], (turn >> 1) & 1);
    if (half == 0 && piece) make_factors(s, turn, tokens, own.thread);
    if (half == 0 ? piece != nullptr : turn > 0) {
      make_square(s, turn - half, half == 1, GradientLane(fresh_thread()));
    }
    if (left == 0) {
      if (done) leave_state(state, p, *done, walk.sub, half, own.thread);
      if (!piece) break;
      enter_state(state, p, *piece, walk.sub, false, half, own.thread);
      left = piece->chunks;
    }
    steps.parity = turn & 1;
    if (tokens < kChunkTokens) barrier_wait(&s.p_ready, steps.parity);  // its rows are cleared
    tokens = kChunkTokens;
    const ReverseTiles tiles{s.k[stage], s.q[stage], s.d_o[half], s.w, s.p, s.factors};
    steps.decay = exp2_approx(s.vectors[stage].gate[kChunkTokens - 1]);
    reverse_step(state, steps.decay, tiles, own, steps);
    if (half == 0) barrier_arrive(&s.keys_empty[stage]);
    --left;
  }
}

}  // namespace gdn::sm90
