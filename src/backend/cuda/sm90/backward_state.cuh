// Warpgroups 1 and 2 of k_backward: S and E of every chunk, then dP or N, then a half of dq.
#pragma once

#include "backend/cuda/sm90/backward_squares.cuh"

namespace gdn::sm90 {

// E . (f U) of every token over this warp's 16 rows of V: E^T in accumulators, still in fp32, f U a
// tile [64 tokens][64 of V].
__device__ __forceinline__ void put_beta_dots(const float (&e)[32], const bf16* tile, float* out,
                                              const StateLane& own) {
  uint32_t x[16];
  load_transposed(x, tile, own);
  float products[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 x0 = unpack_bf16(x[2 * j]), x1 = unpack_bf16(x[2 * j + 1]);
    products[2 * j] = x0.x * e[4 * j] + x1.x * e[4 * j + 2];
    products[2 * j + 1] = x0.y * e[4 * j + 1] + x1.y * e[4 * j + 3];
  }
  int token;
  const float2 sums = sum_rows(products, own.lane, token);
  *reinterpret_cast<float2*>(out + token) = sums;
}

// S to the next chunk's, E, and the dots for dbeta.
__device__ __forceinline__ void step_state(float (&state)[64], float decay, BackwardShared& s,
                                           int turn, const StateLane& own) {
  const int stage = turn & 1;
  const uint32_t parity = turn & 1;
  const BackwardVectors& vectors = s.vectors[stage];
  float y[32];
  {
    uint32_t a[32];
    pack_state(a, state);
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] *= decay;
    wgmma_fence();
    start_state_product(y, a, s.k[stage]);
    barrier_wait(&s.states_empty, parity ^ 1);
    put_state(a, s.states[own.half], own);
    fence_async_proxy();
    barrier_arrive(&s.states_ready);
    wgmma_wait<0>();
    settle(y);
  }
  barrier_wait(&s.values_full, parity);
  {
    uint32_t b[16];
    make_y(y, b, s.v[own.half], vectors.inner, true, own);
    const Operand w = plain_operand(smem_address(s.w), 128, 1024);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      wgmma_rs<0>(y, b[4 * kk], b[4 * kk + 1], b[4 * kk + 2], b[4 * kk + 3], w.at(kk * 256), true);
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
  settle(y);
  barrier_arrive(&s.values_empty);
  uint32_t weighted[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 c = *reinterpret_cast<const float2*>(&vectors.c[8 * j + 2 * own.pair]);
    const float* e = &y[4 * j];
    weighted[2 * j] = pack_bf16(c.x * e[0], c.y * e[1]);
    weighted[2 * j + 1] = pack_bf16(c.x * e[2], c.y * e[3]);
  }
  wgmma_fence();
  start_state_update(state, weighted, s.k[stage]);
  barrier_wait(&s.e_empty, parity ^ 1);
  put_transposed(y, s.e[own.half], own);
  fence_async_proxy();
  barrier_arrive(&s.e_ready);
  barrier_wait(&s.d_v_full, parity);
  barrier_wait(&s.sums_empty, parity ^ 1);
  put_beta_dots(y, s.d_v[own.half], s.beta_dots[4 * own.half + own.thread / 32], own);
  wgmma_wait<0>();
  settle(state);
}

// Columns [64 half, 64 half + 64) of dq.
__device__ __forceinline__ void make_dq(const BackwardParams& p, BackwardShared& s, int turn,
                                        int half, const GradientLane& own) {
  const int stage = turn & 1;
  const uint32_t parity = turn & 1;
  const BackwardVectors& vectors = s.vectors[stage];
  const uint32_t q = smem_address(s.q[half]);
  float acc[32];
  start_with_state(acc, smem_address(s.d_o), smem_address(s.states[0][half]));
  wgmma_wait<0>();
  settle(acc);
  barrier_arrive(&s.d_o_empty);
  barrier_arrive(&s.states_empty);
  const float r[2] = {vectors.rq[own.row], vectors.rq[own.row + 8]};
  scale_rows(acc, {exp2_approx(vectors.gate[own.row]) * r[0],
                   exp2_approx(vectors.gate[own.row + 8]) * r[1]});
  put_row_dots(row_dots(acc, q, own), s.query_dots[half], own);
  barrier_arrive(&s.sums_full);
  barrier_wait(&s.dp_ready, parity);
  wgmma_fence();
  start_with_square<0>(acc, s.dp, smem_address(s.k[stage][half]));
  wgmma_wait<0>();
  settle(acc);
  barrier_arrive(&s.squares_empty);
  barrier_arrive(&s.keys_empty[stage]);
  if (p.l2norm) {
    // Linear, so it need not wait for the sum over a group.
    put_row_dots(row_dots(acc, q, own), s.norm_dots[half], own);
    named_barrier(3, 256);
    float along[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = own.row + 8 * i;
      const float by = r[i] * p.inverse_scale;
      along[i] = -by * by * (s.norm_dots[0][row] + s.norm_dots[1][row]);
    }
    add_rows(acc, along, q, own);
  }
  barrier_arrive(&s.q_empty);
  barrier_wait(&s.dq_empty, parity ^ 1);
  put_rows(acc, smem_address(s.rows[half]), own);
  fence_async_proxy();
  barrier_arrive(&s.dq_full);
}

__device__ __forceinline__ void run_state(const BackwardParams& params, BackwardShared& s,
                                          int half) {
  const WalkParams& p = params.walk;
  const Walk walk(p);
  const StateLane own(half);
  int turn = 0;
  float state[64];
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    enter_state(state, p, *piece, walk.sub, false, half, own.thread);
#pragma unroll 1
    for (int left = piece->chunks; left > 0; --left, ++turn) {
      const int stage = turn & 1;
      barrier_wait(&s.keys_full[stage], (turn >> 1) & 1);
      barrier_wait(&s.factors_full[stage], (turn >> 1) & 1);
      step_state(state, exp2_approx(s.vectors[stage].gate[kChunkTokens - 1]), s, turn, own);
      const GradientLane rows(fresh_thread());
      make_square(s, turn, half == 1, rows);
      make_dq(params, s, turn, half, rows);
    }
    leave_state(state, p, *piece, walk.sub, half, own.thread);
  }
}

}  // namespace gdn::sm90
