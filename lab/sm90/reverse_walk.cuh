// Device code of the backward walks, from a piece's last chunk to its first, dS^T [V x K] in
// registers (walk_common.cuh), dS the gradient of the state that leaves a chunk:
//   D = c (dS^T K^T) + dO^T P            c = e^{G_C-G_i} / |k|     (columns: tokens)
//   U = D + (beta D) W                   the gradient of E / beta; d_v = beta U
//   dS^T <- gam_C dS^T + (d dO^T) Q - (ab U) K    d = gam scale / |q|, ab = gam beta / |k|
// with P_ij = scale / (|q_i| |k_j|) (q_i.k_j) e^{G_i-G_j}, j <= i. kGradients leaves U in the rows
// of d_v and dS of every chunk for the gradients; kSummary only boundary gradients (C).
//
// Warpgroups as in walk.cuh; registers 24 + 2 * 208 + 72 = 512.
// Shared, KiB: 2 stages of 66 (k, q, d_o 16 each, W and P 8 each, vectors 2) + dS 2 x 32 + U 16 =
// 212.
#pragma once

#include "backend/cuda/sm90/walk_common.cuh"

namespace gdn::sm90 {

enum class ReverseKind { kGradients, kSummary };

inline constexpr int kReverseStages = 2;
using ReverseCursor = StageCursor<kReverseStages>;

struct alignas(1024) ReverseStage {
  bf16 k[2][kTileElements];  // [half of K][64 tokens][64]
  bf16 q[2][kTileElements];
  bf16 d_o[2][kTileElements];  // [half of V][64 tokens][64]
  bf16 w[kTileElements];       // [i / 8][j / 8][8][8], the blocks j > i stay zero
  bf16 p[kTileElements];       // [i][j]
  float gate[kChunkTokens];    // gate and beta, rq and rk: two bulk copies
  float beta[kChunkTokens];
  float rq[kChunkTokens];
  float rk[kChunkTokens];
  float4 inner[kChunkTokens / 2];  // {c_t, c_t+1, beta_t, beta_t+1}
  float4 outer[kChunkTokens / 2];  // {d_t, d_t+1, ab_t, ab_t+1}
};
static_assert(sizeof(ReverseStage) == 66 * 1024);

struct ReverseShared {
  ReverseStage stage[kReverseStages];
  bf16 states[2][2][2][kTileElements];  // [turn][warpgroup][tile]: dS
  bf16 result[2][kTileElements];        // [warpgroup][token][64 of V]: U
  float column[kChunkTokens];  // auxiliary warpgroup only: e^{G_end of its 16-block - G_j} / |k_j|
  uint64_t full[kReverseStages];
  uint64_t ready[kReverseStages];
  uint64_t empty[kReverseStages];
  uint64_t result_full[2];
  uint64_t result_empty[2];
};
static_assert(sizeof(ReverseShared) <= 227 * 1024);

// How many of a piece's last chunks a summary may leave out: earlier ones forget them.
template <ReverseKind kKind>
__device__ __forceinline__ int chunks_to_visit(const WalkParams& p, const WalkPiece& piece,
                                               int sub) {
  if (kKind != ReverseKind::kSummary) return piece.chunks;
  const int value_head = piece.key_head * p.group + sub, lane = threadIdx.x % 32;
  float before = 0.0f;  // decay of the chunks in front of `begin`
  for (int begin = 0; begin < piece.chunks; begin += 32) {
    const int chunk = begin + lane;
    const int64_t record = int64_t{piece.first_chunk + chunk} * p.heads_v + value_head;
    float sum = chunk < piece.chunks ? p.gates[record * 2 * kChunkTokens + kChunkTokens - 1] : 0.0f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    const uint32_t forgets =
        __ballot_sync(0xffffffffu, chunk < piece.chunks && before + sum < p.log2_bound);
    if (forgets != 0) return begin + __ffs(forgets);
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return piece.chunks;
}

// ---- Copies in: one warp
template <ReverseKind kKind>
__device__ __forceinline__ void fill_stages(const WalkParams& p, ReverseShared& s) {
  const Walk walk(p);
  const int lane = threadIdx.x;
  const uint64_t once = evict_first_policy();
  constexpr uint32_t kBytes = 6 * kTileBytes + kRecordElements * sizeof(bf16) + 2 * kVectorBytes;
  ReverseCursor at;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int key_head = piece->key_head, value_head = key_head * p.group + walk.sub;
    for (int chunk = chunks_to_visit<kKind>(p, *piece, walk.sub) - 1; chunk >= 0;
         --chunk, at.advance()) {
      ReverseStage& stage = s.stage[at.index];
      uint64_t* full = &s.full[at.index];
      const int64_t record = int64_t{piece->first_chunk + chunk};
      const int row = static_cast<int>(piece->row) + chunk * kChunkTokens;
      if (lane == 0) {
        barrier_wait(&s.empty[at.index], at.parity ^ 1);
        barrier_expect_bytes(full, kBytes);
        tensor_load(stage.k, &p.k, full, 0, row, 0, key_head);
        tensor_load(stage.q, &p.q, full, 0, row, 0, key_head);
        bulk_load(stage.gate, p.gates + (record * p.heads_v + value_head) * 2 * kChunkTokens,
                  kVectorBytes, full);
        bulk_load(stage.rq, p.norms + (record * p.heads_k + key_head) * 2 * kChunkTokens,
                  kVectorBytes, full);
        tensor_load(stage.d_o, &p.v, full, 0, row, 0, value_head, once);
      }
      __syncwarp();
      load_w(stage.w, p.tiles + (record * p.heads_v + value_head) * kRecordElements, full, lane);
    }
  }
}

// ---- Copies out: one warp per state warpgroup; dS as images, U to the rows of d_v
__device__ __forceinline__ void write_gradients(const WalkParams& p, ReverseShared& s, int half) {
  const Walk walk(p);
  const int lane = threadIdx.x % 32;
  int turn = 0;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int value_head = piece->key_head * p.group + walk.sub;
    for (int chunk = piece->chunks - 1; chunk >= 0; --chunk, ++turn) {
      barrier_wait(&s.result_full[half], turn & 1);
      if (lane == 0) {
        const int64_t record = int64_t{piece->first_chunk + chunk} * p.heads_v + value_head;
        bulk_store(p.states + (record * 2 + half) * 2 * kTileElements, s.states[turn & 1][half],
                   2 * kTileBytes);
      }
      write_rows(p, s.result[half], static_cast<int>(piece->row) + chunk * kChunkTokens,
                 piece->tokens - chunk * kChunkTokens, value_head, half, lane);
      if (lane == 0) {
        bulk_store_wait();
        barrier_arrive(&s.result_empty[half]);
      }
    }
  }
}

// ---- Auxiliary warpgroup
// Per-token factors of token t.
__device__ __forceinline__ void write_factors(ReverseStage& stage, float* column, int t) {
  const float gate = stage.gate[t], rk = stage.rk[t], beta = stage.beta[t];
  const float gam = exp2_approx(gate);
  auto* inner = reinterpret_cast<float*>(&stage.inner[t / 2]) + t % 2;
  auto* outer = reinterpret_cast<float*>(&stage.outer[t / 2]) + t % 2;
  inner[0] = exp2_approx(stage.gate[kChunkTokens - 1] - gate) * rk;
  inner[2] = beta;
  outer[0] = gam * stage.rq[t];
  outer[2] = gam * rk * beta;
  column[t] = exp2_approx(stage.gate[t | 15] - gate) * rk;
}

template <ReverseKind kKind>
__device__ __forceinline__ void run_auxiliary(const WalkParams& p, ReverseShared& s) {
  const Walk walk(p);
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  ReverseCursor at;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    for (int chunk = chunks_to_visit<kKind>(p, *piece, walk.sub) - 1; chunk >= 0;
         --chunk, at.advance()) {
      ReverseStage& stage = s.stage[at.index];
      barrier_wait(&s.full[at.index], at.parity);
      float qk[32];
      start_qk(qk, stage);
      if (thread < kChunkTokens) write_factors(stage, s.column, thread);
      wgmma_wait<0>();
      settle(qk);
      named_barrier(3, 128);
      write_p(qk, stage, stage.rk, s.column, warp, lane);
      if (const int tokens = piece->tokens - chunk * kChunkTokens; tokens < kChunkTokens) {
        clear_rows(stage.k[0], 6, tokens, thread);
      }
      fence_async_proxy();
      barrier_arrive(&s.ready[at.index]);
      named_barrier(3, 128);  // `column` is read
    }
  }
}

// ---- State warpgroups
// d *= the first of the column factors in `inner`.
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

// d += a b, issued: a [64 of V x 64 tokens] packed, b [64][64] by its rows (descriptor of k step 0,
// and how far apart the steps are).
__device__ __forceinline__ void start_square_product(float (&d)[32], const uint32_t (&a)[16],
                                                     uint64_t first, uint32_t step) {
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    wgmma_rs<1>(d, a[4 * kk], a[4 * kk + 1], a[4 * kk + 2], a[4 * kk + 3], first + kk * (step >> 4),
                true);
  }
  wgmma_commit();
}

// One chunk; `turn` counts the block's chunks.
template <ReverseKind kKind>
__device__ __forceinline__ void step_state(float (&state)[64], ReverseShared& s,
                                           ReverseStage& stage, uint64_t* empty, int turn,
                                           const StateLane& own) {
  constexpr bool kLeaves = kKind == ReverseKind::kGradients;
  float d[32];
  uint32_t from_o[16];  // dO^T as operand
  {
    uint32_t a[32];
    const float decay = exp2_approx(stage.gate[kChunkTokens - 1]);
    pack_state(a, state);
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] *= decay;
    wgmma_fence();
    start_state_product(d, a, stage.k);
    if (kLeaves) put_state(a, s.states[turn & 1][own.half], own);
    const uint32_t tile = smem_address(stage.d_o[own.half]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t x[4];
      ldmatrix_x4_trans(x, tile_address(tile, 16 * j + own.token, own.column));
#pragma unroll
      for (int i = 0; i < 4; ++i) from_o[4 * j + i] = x[i];
    }
    wgmma_wait<0>();
    settle(d);
  }
  scale_columns(d, stage.inner, own.pair);
  wgmma_fence();
  start_square_product(d, from_o, descriptor(smem_address(stage.p), kTileBytes), 2048);
  wgmma_wait<0>();
  settle(d);
  uint32_t b[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 beta = *reinterpret_cast<const float2*>(&stage.inner[4 * j + own.pair].z);
    b[2 * j] = pack_bf16(beta.x * d[4 * j], beta.y * d[4 * j + 1]);
    b[2 * j + 1] = pack_bf16(beta.x * d[4 * j + 2], beta.y * d[4 * j + 3]);
    const float2 f = *reinterpret_cast<const float2*>(&stage.outer[4 * j + own.pair].x);
    const float2 o0 = unpack_bf16(from_o[2 * j]), o1 = unpack_bf16(from_o[2 * j + 1]);
    from_o[2 * j] = pack_bf16(f.x * o0.x, f.y * o0.y);
    from_o[2 * j + 1] = pack_bf16(f.x * o1.x, f.y * o1.y);
  }
  wgmma_fence();
  start_square_product(d, b, plain_descriptor(smem_address(stage.w), 1024, 128), 2048);
  start_state_update(state, from_o, stage.q);
  wgmma_wait<1>();
  settle(d);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 f = *reinterpret_cast<const float2*>(&stage.outer[4 * j + own.pair].z);
    b[2 * j] = pack_bf16(-f.x * d[4 * j], -f.y * d[4 * j + 1]);
    b[2 * j + 1] = pack_bf16(-f.x * d[4 * j + 2], -f.y * d[4 * j + 3]);
  }
  wgmma_fence();
  start_state_update(state, b, stage.k);
  if (kLeaves) {
    barrier_wait(&s.result_empty[own.half], (turn & 1) ^ 1);
    put_transposed(d, s.result[own.half], own);
    fence_async_proxy();
    __syncwarp();
    if (own.lane == 0) barrier_arrive(&s.result_full[own.half]);
  }
  wgmma_wait<0>();
  settle(state);
  if (own.lane == 0) barrier_arrive(empty);
}

template <ReverseKind kKind>
__device__ __forceinline__ void run_state(const WalkParams& p, ReverseShared& s, int half) {
  const Walk walk(p);
  const StateLane own(half);
  ReverseCursor at;
  int turn = 0;
  float state[64];
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int visited = chunks_to_visit<kKind>(p, *piece, walk.sub);
    enter_state(state, p, *piece, walk.sub, visited < piece->chunks, half, own.thread);
    for (int left = visited; left > 0; --left, at.advance(), ++turn) {
      barrier_wait(&s.full[at.index], at.parity);
      barrier_wait(&s.ready[at.index], at.parity);
      step_state<kKind>(state, s, s.stage[at.index], &s.empty[at.index], turn, own);
    }
    leave_state(state, p, *piece, walk.sub, half, own.thread);
  }
}

template <ReverseKind kKind>
__device__ __forceinline__ void reverse_block(const WalkParams& p, ReverseShared& s) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  init_ring(s, kReverseStages);
  for (auto& stage : s.stage) clear_tile(stage.w);
  fence_async_proxy();
  __syncthreads();
  if (warpgroup == 0) {
    registers_decrease<24>();
    if (warp == 0) {
      fill_stages<kKind>(p, s);
    } else if (kKind == ReverseKind::kGradients && warp < 3) {
      write_gradients(p, s, warp - 1);
    }
  } else if (warpgroup == 3) {
    registers_decrease<72>();
    run_auxiliary<kKind>(p, s);
  } else {
    registers_increase<208>();
    run_state<kKind>(p, s, warpgroup - 1);
  }
}

}  // namespace gdn::sm90
