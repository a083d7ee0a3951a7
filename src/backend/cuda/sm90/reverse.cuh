// What the reverse walks share: one chunk of dS^T [V x K] in registers, from the piece's last
// chunk to its first, dS the gradient of the state that leaves a chunk:
//   D = c (dS^T K^T) + dO^T P            c = e^{G_C-G_i} / |k|     (columns: tokens)
//   U = D + (beta D) W                   the gradient of E / beta; d_v = beta U
//   dS^T <- gam_C dS^T + (d dO^T) Q - (ab U) K    d = gam scale / |q|, ab = gam beta / |k|
// with P_ij = scale / (|q_i| |k_j|) (q_i.k_j) e^{G_i-G_j}, j <= i.
#pragma once

#include "backend/cuda/sm90/walk_common.cuh"

namespace gdn::sm90 {

// U is stored as f U, which is d_v but for tokens whose beta is so small, or 0, that U could not be
// had from it: these keep U.
__device__ __forceinline__ float stored_factor(float beta) {
  return beta >= 0x1p-40f ? beta : 1.0f;
}
// d_v / (f U).
__device__ __forceinline__ float d_v_factor(float beta) { return beta >= 0x1p-40f ? 1.0f : beta; }

// Per-token factors of a chunk in shared memory.
struct ReverseFactors {
  float4 inner[kChunkTokens / 2];  // {c_t, c_t+1, beta_t, beta_t+1}
  struct Outer {
    SplitPair d;  // d_t, d_t+1
    float2 ab;    // ab_t, ab_t+1
  } outer[kChunkTokens / 2];
  float column[kChunkTokens];  // e^{G_end of its 16-block - G_t} / |k_t|
};

// Gates and norms of a chunk, as copied in.
struct ReverseVectors {
  float gate[kChunkTokens];
  float beta[kChunkTokens];
  float rq[kChunkTokens];
  float rk[kChunkTokens];
};

__device__ __forceinline__ void write_factors(ReverseFactors& out, const ReverseVectors& in,
                                              int t) {
  const float gate = in.gate[t], rk = in.rk[t], beta = in.beta[t];
  const float gam = exp2_approx(gate);
  auto* inner = reinterpret_cast<float*>(&out.inner[t / 2]) + t % 2;
  auto* d = reinterpret_cast<bf16*>(&out.outer[t / 2].d) + t % 2;
  inner[0] = exp2_approx(in.gate[kChunkTokens - 1] - gate) * rk;
  inner[2] = beta;
  d[0] = __float2bfloat16_rn(gam * in.rq[t]);
  d[2] = __float2bfloat16_rn(gam * in.rq[t] - __bfloat162float(d[0]));
  (&out.outer[t / 2].ab.x)[t % 2] = gam * rk * beta;
  out.column[t] = exp2_approx(in.gate[t | 15] - gate) * rk;
}

// What a state warpgroup reads of a chunk.
struct ReverseTiles {
  const bf16 (&k)[2][kTileElements];  // [half of K][64 tokens][64]
  const bf16 (&q)[2][kTileElements];
  const bf16 (&d_o)[kTileElements];  // the warpgroup's half of V: [64 tokens][64]
  const bf16 (&w)[kTileElements];    // [i / 8][j / 8][8][8]
  const bf16 (&p)[kTileElements];    // [i][j]
  const ReverseFactors& factors;
};

// d *= the factors c.
__device__ __forceinline__ void scale_columns(float (&d)[32], const float4* inner, int pair) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 c = *reinterpret_cast<const float2*>(&inner[4 * j + pair].x);
    d[4 * j] *= c.x;
    d[4 * j + 1] *= c.y;
    d[4 * j + 2] *= c.x;
    d[4 * j + 3] *= c.y;
  }
}

// d += a b, issued: a [64 of V x 64 tokens] packed, b [64][64] by its rows (its k step 0, and how
// far apart the steps are).
__device__ __forceinline__ void start_square_product(float (&d)[32], const uint32_t (&a)[16],
                                                     Operand b, uint32_t step) {
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    wgmma_rs<1>(d, a[4 * kk], a[4 * kk + 1], a[4 * kk + 2], a[4 * kk + 3], b.at(kk * step), true);
  }
  wgmma_commit();
}

// Transposed fragments of a tile [64 tokens][64 of V]: registers 2 j and 2 j + 1 are rows V of
// tokens 8 j ...
__device__ __forceinline__ void load_transposed(uint32_t (&x)[16], const bf16* tile,
                                                const StateLane& own) {
  const uint32_t from = smem_address(tile);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t part[4];
    ldmatrix_x4_trans(part, tile_address(from, 16 * j + own.token, own.column));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * j + i] = part[i];
  }
}

// One chunk. Steps::entered(a) sees dS packed, while the first product runs; solved(d) sees U.
template <typename Steps>
__device__ __forceinline__ void reverse_step(float (&state)[64], float decay,
                                             const ReverseTiles& tiles, const StateLane& own,
                                             Steps& steps) {
  const ReverseFactors& factors = tiles.factors;
  float d[32];
  {
    uint32_t a[32];
    pack_state(a, state);
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] *= decay;
    wgmma_fence();
    start_state_product(d, a, tiles.k);
    steps.entered(a);
    wgmma_wait<0>();
    settle(d);
  }
  scale_columns(d, factors.inner, own.pair);
  uint32_t from_o[16];  // dO^T as operand
  load_transposed(from_o, tiles.d_o, own);
  wgmma_fence();
  start_square_product(d, from_o, operand(smem_address(tiles.p), kTileBytes), 2048);
  wgmma_wait<0>();
  settle(d);
  uint32_t b[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 beta = *reinterpret_cast<const float2*>(&factors.inner[4 * j + own.pair].z);
    b[2 * j] = pack_bf16(beta.x * d[4 * j], beta.y * d[4 * j + 1]);
    b[2 * j + 1] = pack_bf16(beta.x * d[4 * j + 2], beta.y * d[4 * j + 3]);
  }
  wgmma_fence();
  start_square_product(d, b, plain_operand(smem_address(tiles.w), 1024, 128), 2048);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const SplitPair f = factors.outer[4 * j + own.pair].d;
    from_o[2 * j] = scale_bf16(from_o[2 * j], f);
    from_o[2 * j + 1] = scale_bf16(from_o[2 * j + 1], f);
  }
  wgmma_fence();
  start_state_update(state, from_o, tiles.q);
  wgmma_wait<1>();
  settle(d);
  steps.solved(d);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 f = factors.outer[4 * j + own.pair].ab;
    b[2 * j] = pack_bf16(-f.x * d[4 * j], -f.y * d[4 * j + 1]);
    b[2 * j + 1] = pack_bf16(-f.x * d[4 * j + 2], -f.y * d[4 * j + 3]);
  }
  wgmma_fence();
  start_state_update(state, b, tiles.k);
  wgmma_wait<0>();
  settle(state);
}

}  // namespace gdn::sm90
