// Device code of the forward walks, S^T in registers (walk_common.cuh):
//   Y = V^T - a (S^T K^T)           a = gam / |k|, gam_i = e^{G_i}
//   E = Y + (beta Y) W^T            beta E are the corrected values
//   O = d (S^T Q^T) + E P^T         d = gam scale / |q|
//   S^T <- gam_C S^T + (c E) K      c = e^{G_C-G_i} beta / |k|
// with P_ij = scale / |q_i| (q_i.k_j) e^{G_i-G_j} beta_j / |k_j|, j <= i. Tokens are accumulator
// columns, so every per-token factor is a column factor. Two walks: kRun writes o, kSummary only
// boundary states.
//
// Warpgroups: 0 copies (warp 0 fills stages, warps 1 and 2 write results), 1 and 2 state, 3
// auxiliary (Q K^T, P, per-token factors, zeros in the rows past a short chunk). 512 threads, one
// block per SM; registers 24 + 2 * 208 + 72 = 512 = 65,536 / 128.
// Barriers of a stage: full (copies landed) -> ready (P and factors written) -> empty (state done).
// Shared, KiB: kRun 3 stages of 66 (k, q, v 16 each, W and P 8 each, vectors 2) + o 16 = 214.
#pragma once

#include <type_traits>

#include "backend/cuda/sm90/walk_common.cuh"

namespace gdn::sm90 {

enum class WalkKind { kRun, kSummary };

inline constexpr int kWalkStages = 3;
using WalkCursor = StageCursor<kWalkStages>;

struct WithoutOutput {};
struct WithOutput {
  bf16 q[2][kTileElements];
  bf16 p[kTileElements];  // [i][j]
};

template <WalkKind kKind>
struct alignas(1024) WalkStage
    : std::conditional_t<kKind == WalkKind::kRun, WithOutput, WithoutOutput> {
  bf16 k[2][kTileElements];  // [half of K][64 tokens][64]
  bf16 v[2][kTileElements];
  bf16 w[kTileElements];     // [i / 8][j / 8][8][8], the blocks j > i stay zero
  float gate[kChunkTokens];  // gate and beta, rq and rk: two bulk copies
  float beta[kChunkTokens];
  float rq[kChunkTokens];
  float rk[kChunkTokens];
  float4 inner[kChunkTokens / 2];  // {a_t, a_t+1, beta_t, beta_t+1}
  float4 outer[kChunkTokens / 2];  // {c_t, c_t+1, d_t, d_t+1}
};

template <WalkKind kKind>
struct WalkShared {
  WalkStage<kKind> stage[kWalkStages];
  bf16 result[2][kTileElements];  // [state warpgroup][token][64 of V]: o
  float key[kChunkTokens];        // auxiliary warpgroup only: beta_j / |k_j|
  float column[kChunkTokens];     // and that times e^{G_end of its 16-block - G_j}
  uint64_t full[kWalkStages];
  uint64_t ready[kWalkStages];
  uint64_t empty[kWalkStages];
  uint64_t result_full[2];
  uint64_t result_empty[2];
};
static_assert(sizeof(WalkShared<WalkKind::kRun>) <= 227 * 1024);

// The chunks of a piece that a walk of this kind visits begin behind this many.
template <WalkKind kKind>
__device__ __forceinline__ int first_chunk(const WalkParams& p, const WalkPiece& piece, int sub) {
  if (kKind != WalkKind::kSummary) return 0;
  return chunks_to_skip(p, piece, piece.key_head * p.group + sub);
}

// ---- Copies in: one warp
template <WalkKind kKind>
__device__ __forceinline__ void fill_stages(const WalkParams& p, WalkShared<kKind>& s) {
  constexpr bool kOutput = kKind == WalkKind::kRun;
  const Walk walk(p);
  const int lane = threadIdx.x;
  const uint64_t once = evict_first_policy();
  WalkCursor at;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int key_head = piece->key_head, value_head = key_head * p.group + walk.sub;
    const bool has_values = piece->enter != StateKind::kIdentity;
    const uint32_t bytes = 2 * kTileBytes * (1 + kOutput + has_values) +
                           kRecordElements * sizeof(bf16) + 2 * kVectorBytes;
    const int skip = first_chunk<kKind>(p, *piece, walk.sub);
    const int64_t first = piece->first_chunk + skip;
    const bf16* tile = p.tiles + (first * p.heads_v + value_head) * kRecordElements;
    const float* gate = p.gates + (first * p.heads_v + value_head) * 2 * kChunkTokens;
    const float* norm = p.norms + (first * p.heads_k + key_head) * 2 * kChunkTokens;
    int row = static_cast<int>(piece->row) + skip * kChunkTokens;
    for (int left = piece->chunks - skip; left > 0; --left, at.advance()) {
      auto& stage = s.stage[at.index];
      uint64_t* full = &s.full[at.index];
      if (lane == 0) {
        barrier_wait(&s.empty[at.index], at.parity ^ 1);
        barrier_expect_bytes(full, bytes);
        tensor_load(stage.k, &p.k, full, 0, row, 0, key_head);
        if constexpr (kOutput) tensor_load(stage.q, &p.q, full, 0, row, 0, key_head);
        bulk_load(stage.gate, gate, kVectorBytes, full);
        bulk_load(stage.rq, norm, kVectorBytes, full);
        if (has_values) tensor_load(stage.v, &p.v, full, 0, row, 0, value_head, once);
      }
      __syncwarp();
      load_w(stage.w, tile, full, lane);
      row += kChunkTokens;
      tile += int64_t{p.heads_v} * kRecordElements;
      gate += p.heads_v * 2 * kChunkTokens;
      norm += p.heads_k * 2 * kChunkTokens;
    }
  }
}

// ---- Copies out: one warp per state warpgroup
__device__ __forceinline__ void write_outputs(const WalkParams& p, WalkShared<WalkKind::kRun>& s,
                                              int half) {
  const Walk walk(p);
  const int lane = threadIdx.x % 32;
  uint32_t parity = 0;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int value_head = piece->key_head * p.group + walk.sub;
    int row = static_cast<int>(piece->row);
    for (int tokens = piece->tokens; tokens > 0; tokens -= kChunkTokens, parity ^= 1) {
      barrier_wait(&s.result_full[half], parity);
      write_rows(p, s.result[half], row, tokens, value_head, half, lane);
      __syncwarp();
      barrier_arrive(&s.result_empty[half]);
      row += kChunkTokens;
    }
  }
}

// ---- Auxiliary warpgroup
// Per-token factors of token t.
template <typename Stage>
__device__ __forceinline__ void write_factors(Stage& stage, float* key, float* column, int t) {
  const float gate = stage.gate[t], rk = stage.rk[t], beta = stage.beta[t], rkb = rk * beta;
  const float gam = exp2_approx(gate);
  auto* inner = reinterpret_cast<float*>(&stage.inner[t / 2]) + t % 2;
  auto* outer = reinterpret_cast<float*>(&stage.outer[t / 2]) + t % 2;
  inner[0] = gam * rk;
  inner[2] = beta;
  outer[0] = exp2_approx(stage.gate[kChunkTokens - 1] - gate) * rkb;
  outer[2] = gam * stage.rq[t];
  key[t] = rkb;
  column[t] = exp2_approx(stage.gate[t | 15] - gate) * rkb;
}

template <WalkKind kKind>
__device__ __forceinline__ void run_auxiliary(const WalkParams& p, WalkShared<kKind>& s) {
  constexpr bool kOutput = kKind == WalkKind::kRun;
  const Walk walk(p);
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  WalkCursor at;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const bool has_values = piece->enter != StateKind::kIdentity;
    const int skip = first_chunk<kKind>(p, *piece, walk.sub);
    for (int tokens = piece->tokens - skip * kChunkTokens; tokens > 0;
         tokens -= kChunkTokens, at.advance()) {
      auto& stage = s.stage[at.index];
      barrier_wait(&s.full[at.index], at.parity);
      if (tokens < kChunkTokens) {
        clear_rows(stage.k[0], 2, tokens, thread);
        if constexpr (kOutput) clear_rows(stage.q[0], 2, tokens, thread);
        if (has_values) clear_rows(stage.v[0], 2, tokens, thread);
        fence_async_proxy();
        named_barrier(3, 128);
      }
      float qk[32];
      if constexpr (kOutput) start_qk(qk, stage.q, stage.k);
      if (thread < kChunkTokens) write_factors(stage, s.key, s.column, thread);
      if constexpr (kOutput) {
        wgmma_wait<0>();
        settle(qk);
        named_barrier(3, 128);
        const int row = 16 * warp + lane / 4;
        const Decays decays{stage.gate, s.key, s.column};
        write_p(qk, stage.p, {decays, stage.rq[row], stage.rq[row + 8], warp, lane}, 0, lane);
      }
      fence_async_proxy();
      barrier_arrive(&s.ready[at.index]);
      if (kOutput) named_barrier(3, 128);  // `key` and `column` are read
    }
  }
}

// ---- State warpgroups
// The result's tile is written: the copy warp takes it from there.
template <WalkKind kKind>
__device__ __forceinline__ void announce_result(WalkShared<kKind>& s, const StateLane& own) {
  fence_async_proxy();
  barrier_arrive(&s.result_full[own.half]);
}

// One chunk; `turn` counts the block's chunks.
template <WalkKind kKind>
__device__ __forceinline__ void step_state(float (&state)[64], WalkShared<kKind>& s,
                                           WalkStage<kKind>& stage, uint64_t* empty, int turn,
                                           bool has_values, const StateLane& own) {
  constexpr bool kOutput = kKind == WalkKind::kRun;
  float y[32], o[32];
  uint32_t a[32];
  const float decay = exp2_approx(stage.gate[kChunkTokens - 1]);
  pack_state(a, state);
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] *= decay;
  wgmma_fence();
  start_state_product(y, a, stage.k);
  wgmma_wait<0>();
  settle(y);
  {
    uint32_t b[16];
    const auto factors = [&](int t) { return stage.inner[t / 2]; };
    make_y(y, b, stage.v[own.half], factors, has_values, own);
    const Operand w = plain_operand(smem_address(stage.w), 128, 1024);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      wgmma_rs<0>(y, b[4 * kk], b[4 * kk + 1], b[4 * kk + 2], b[4 * kk + 3], w.at(kk * 256), true);
    }
    wgmma_commit();
  }
  if constexpr (kOutput) start_state_product(o, a, stage.q);
  wgmma_wait<kOutput ? 1 : 0>();
  settle(y);
  uint32_t corrected[16], weighted[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 c = *reinterpret_cast<const float2*>(&stage.outer[4 * j + own.pair].x);
    const float* e = &y[4 * j];
    weighted[2 * j] = pack_bf16(c.x * e[0], c.y * e[1]);
    weighted[2 * j + 1] = pack_bf16(c.x * e[2], c.y * e[3]);
    if (kOutput) {
      corrected[2 * j] = pack_bf16(e[0], e[1]);
      corrected[2 * j + 1] = pack_bf16(e[2], e[3]);
    }
  }
  if (kOutput) {
    wgmma_wait<0>();
    settle(o);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 d = *reinterpret_cast<const float2*>(&stage.outer[4 * j + own.pair].z);
      o[4 * j] *= d.x;
      o[4 * j + 1] *= d.y;
      o[4 * j + 2] *= d.x;
      o[4 * j + 3] *= d.y;
    }
  }
  wgmma_fence();
  if constexpr (kOutput) {
    const Operand pt = operand(smem_address(stage.p));
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      wgmma_rs<0>(o, corrected[4 * kk], corrected[4 * kk + 1], corrected[4 * kk + 2],
                  corrected[4 * kk + 3], pt.at(kk * 32), true);
    }
    wgmma_commit();
  }
  start_state_update(state, weighted, stage.k);
  if constexpr (kOutput) {
    wgmma_wait<1>();
    settle(o);
    barrier_wait(&s.result_empty[own.half], (turn & 1) ^ 1);
    put_transposed(o, s.result[own.half], own);
    announce_result(s, own);
  }
  wgmma_wait<0>();
  settle(state);
  barrier_arrive(empty);
}

template <WalkKind kKind>
__device__ __forceinline__ void run_state(const WalkParams& p, WalkShared<kKind>& s, int half) {
  const Walk walk(p);
  const StateLane own(half);
  WalkCursor at;
  int turn = 0;
  float state[64];
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int skip = first_chunk<kKind>(p, *piece, walk.sub);
    const bool has_values = piece->enter != StateKind::kIdentity;
    enter_state(state, p, *piece, walk.sub, skip > 0, half, own.thread);
    for (int left = piece->chunks - skip; left > 0; --left, at.advance(), ++turn) {
      barrier_wait(&s.full[at.index], at.parity);
      barrier_wait(&s.ready[at.index], at.parity);
      step_state<kKind>(state, s, s.stage[at.index], &s.empty[at.index], turn, has_values, own);
    }
    leave_state(state, p, *piece, walk.sub, half, own.thread);
  }
}

template <WalkKind kKind>
__device__ __forceinline__ void walk_block(const WalkParams& p, WalkShared<kKind>& s) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  init_ring(s, kWalkStages);
  for (auto& stage : s.stage) clear_tile(stage.w);
  fence_async_proxy();
  __syncthreads();
  if (warpgroup == 0) {
    registers_decrease<24>();
    if (warp == 0) {
      fill_stages(p, s);
    } else if (warp < 3) {
      if constexpr (kKind == WalkKind::kRun) write_outputs(p, s, warp - 1);
    }
  } else if (warpgroup == 3) {
    registers_decrease<72>();
    run_auxiliary(p, s);
  } else {
    registers_increase<208>();
    run_state(p, s, warpgroup - 1);
  }
}

}  // namespace gdn::sm90
