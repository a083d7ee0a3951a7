// Warpgroups 1 and 2 of k_backward: S and E of every chunk, then dP or N.
#pragma once

#include "backend/cuda/sm90/backward_squares.cuh"

namespace gdn::sm90 {

// S to the next chunk's, and E.
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
  wgmma_wait<0>();
  settle(state);
}

__device__ __forceinline__ void run_state(const WalkParams& p, BackwardShared& s, int half) {
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
      const float decay = exp2_approx(s.vectors[stage].gate[kChunkTokens - 1]);
      step_state(state, decay, s, turn, own);
      make_square(s, turn, half == 1, GradientLane(fresh_thread()));
      barrier_arrive(&s.sums_full);
    }
    leave_state(state, p, *piece, walk.sub, half, own.thread);
  }
}

}  // namespace gdn::sm90
