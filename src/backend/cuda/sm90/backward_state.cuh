// Warpgroups 1 and 2 of k_backward: S and E of every chunk, the dots for dbeta, then a half of dq.
#pragma once

#include "backend/cuda/sm90/backward_rows.cuh"

namespace gdn::sm90 {

// E . (f U) of every token over this warp's 16 rows of V: E^T in accumulators, still in fp32, f U a
// tile [64 tokens][64 of V].
__device__ __forceinline__ void put_beta_dots(const float (&e)[32], const bf16* tile, float* out,
                                              const StateLane& own) {
  float products[16];
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 16 tokens
    uint32_t x[4];
    ldmatrix_x4_trans(x, tile_address(smem_address(tile), 16 * j + own.token, own.column));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 x0 = unpack_bf16(x[2 * h]), x1 = unpack_bf16(x[2 * h + 1]);
      const float* at = &e[8 * j + 4 * h];
      products[4 * j + 2 * h] = x0.x * at[0] + x1.x * at[2];
      products[4 * j + 2 * h + 1] = x0.y * at[1] + x1.y * at[3];
    }
  }
  int token;
  const float2 sums = sum_rows(products, own.lane, token);
  *reinterpret_cast<float2*>(out + token) = sums;
}

// This warp's part of the product of dS with its decayed S, as eight sums.
__device__ __forceinline__ void put_state_dot(const float (&state)[64],
                                              const bf16 (&image)[2][kTileElements], float* out,
                                              const StateLane& own) {
  float sums[4] = {};
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    uint32_t x[4];
    ldmatrix_x4(x, own.state_block(image, kk));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_bf16(x[i]);
      sums[i] += pair.x * state[8 * kk + 2 * i];
      sums[i] += pair.y * state[8 * kk + 2 * i + 1];
    }
  }
  const float sum = cuda::quad_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (own.lane % 4 == 0) out[own.lane / 4] = sum;
}

// y = S^T K^T; on the way the state goes to its image, and is multiplied by the chunk's decay. In
// halves of K, so that the state, the product and its operands fit in registers.
__device__ __forceinline__ void start_step(float (&y)[32], float (&state)[64], float decay,
                                           BackwardShared& s, int stage, const StateLane& own) {
  const Operand k = operand(smem_address(s.k[stage]));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t a[16];
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      const float* x = &state[32 * h + 8 * kk];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[4 * kk + i] = pack_bf16(x[2 * i], x[2 * i + 1]);
      stmatrix_x4(own.state_block(s.states[own.half], 4 * h + kk), a[4 * kk], a[4 * kk + 1],
                  a[4 * kk + 2], a[4 * kk + 3]);
    }
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      wgmma_rs<0>(y, a[4 * kk], a[4 * kk + 1], a[4 * kk + 2], a[4 * kk + 3],
                  k.at(h * kTileBytes + kk * 32), h + kk > 0);
    }
    wgmma_commit();
    if (h == 1) {
      fence_async_proxy();
      barrier_arrive(&s.states_ready);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) state[32 * h + i] *= decay;
    wgmma_wait<0>();
    settle(y);
  }
}

// E in the place of V, and c E, which is also left as operand.
__device__ __forceinline__ void put_e(const float (&e)[32], uint32_t (&weighted)[16], bf16* tile,
                                      bf16* weighted_tile, const float* c, const StateLane& own) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float* x = &e[8 * j];
    uint32_t* w = &weighted[4 * j];
    const float2 c0 = *reinterpret_cast<const float2*>(&c[16 * j + 2 * own.pair]);
    const float2 c1 = *reinterpret_cast<const float2*>(&c[16 * j + 8 + 2 * own.pair]);
    w[0] = pack_bf16(c0.x * x[0], c0.y * x[1]);
    w[1] = pack_bf16(c0.x * x[2], c0.y * x[3]);
    w[2] = pack_bf16(c1.x * x[4], c1.y * x[5]);
    w[3] = pack_bf16(c1.x * x[6], c1.y * x[7]);
    const uint32_t block = tile_address(0, 16 * j + own.token, own.column);
    stmatrix_x4_trans(smem_address(tile) + block, pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                      pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    stmatrix_x4_trans(smem_address(weighted_tile) + block, w[0], w[1], w[2], w[3]);
  }
}

// E of a chunk, c E and the dots for dbeta; the state is left decayed. `weighted`: c E as operand.
__device__ __forceinline__ void make_e(uint32_t (&weighted)[16], float (&state)[64], float decay,
                                       BackwardShared& s, int turn, const StateLane& own) {
  const int stage = turn & 1, half = own.half;
  const uint32_t parity = turn & 1;
  const BackwardVectors& vectors = s.vectors[stage];
  float y[32];
  barrier_wait(&s.states_empty, parity ^ 1);
  start_step(y, state, decay, s, stage, own);
  barrier_wait(&s.values_full, parity);
  {
    uint32_t b[16];
    const auto factors = [&](int t) {
      const float2 a = *reinterpret_cast<const float2*>(&vectors.a[t]);
      const float2 beta = *reinterpret_cast<const float2*>(&vectors.beta[t]);
      return make_float4(a.x, a.y, beta.x, beta.y);
    };
    make_y(y, b, s.v[half], factors, true, own);
    const Operand w = plain_operand(smem_address(s.w), 128, 1024);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      wgmma_rs<0>(y, b[4 * kk], b[4 * kk + 1], b[4 * kk + 2], b[4 * kk + 3], w.at(kk * 256), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    settle(y);
  }
  barrier_wait(&s.c_e_empty, parity ^ 1);
  put_e(y, weighted, s.v[half], s.c_e[half], vectors.c, own);
  fence_async_proxy();
  barrier_arrive(&s.e_ready);
  barrier_arrive(&s.values_empty);
  barrier_wait(&s.d_v_full, parity);
  barrier_wait(&s.sums_empty, parity ^ 1);
  put_beta_dots(y, s.d_v[half], s.beta_dots[4 * half + own.thread / 32], own);
  barrier_arrive(&s.d_v_empty);
}

template <bool kNorm>
__device__ __forceinline__ void run_state(const BackwardParams& params, BackwardShared& s,
                                          int half) {
  const WalkParams& p = params.walk;
  const Walk& walk = s.walk;
  const StateLane own(half);
  int turn = 0;
  float state[64];
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    enter_state(state, p, *piece, walk.sub, false, half, own.thread);
#pragma unroll 1
    for (int left = piece->chunks; left > 0; --left, ++turn) {
      const int stage = turn & 1;
      barrier_wait(&s.factors_full[stage], (turn >> 1) & 1);
      uint32_t weighted[16];
      make_e(weighted, state, exp2_approx(s.vectors[stage].gate[kChunkTokens - 1]), s, turn, own);
      const GradientLane rows(fresh_thread());
      float acc[32];
      begin_dq(acc, s, turn, half, rows);
      barrier_arrive(&s.states_empty);
      barrier_wait(&s.dstates_full, turn & 1);
      put_state_dot(state, s.dstates[half], s.through[4 * half + own.thread / 32], own);
      for (uint64_t* done : {&s.dstates_read, &s.sums_full}) barrier_arrive(done);
      wgmma_fence();
      start_state_update(state, weighted, s.k[stage]);
      end_dq<kNorm>(acc, params, s, turn, half, rows);
      settle(state);
      barrier_arrive(&s.keys_empty[stage]);
    }
    leave_state(state, p, *piece, walk.sub, half, own.thread);
  }
}

}  // namespace gdn::sm90
