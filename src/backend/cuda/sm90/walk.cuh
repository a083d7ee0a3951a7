// Device code of the forward walks. One block walks pieces of one value head, chunk after chunk,
// with the state S^T [V x K] in fp32 registers of two warpgroups (64 rows of V each):
//   Y = V^T - a (S^T K^T)        a = gam / |k|, gam_i = e^{G_i}
//   E = Y + (beta Y) W^T         beta E are the corrected values
//   O = d (S^T Q^T) + E P^T      d = gam scale / |q|, P = scale/|q| (Q K^T) e^{G_i-G_j} beta/|k|, j
//   <= i S^T <- gam_C S^T + (c E) K   c = e^{G_C-G_i} beta / |k|
// Tokens are accumulator columns, so every per-token factor is a column factor.
//
// Warpgroups: 0 = copies (warp 0 fills stages, warps 1 and 2 write o), 1 and 2 = state, 3 =
// auxiliary (Q K^T, P, per-token factors, zeros in the rows past a short chunk). Registers 24 + 2 *
// 208 + 72 = 512: 65,536 / 128. 512 threads, one block per SM. A state warpgroup works beside its
// products where it can: S Q runs under the packing of E, E P^T under the packing of the next S,
// and o leaves while the next S K runs. Barriers of a stage: full (copies landed) -> ready (P and
// factors written) -> empty (state is done). Shared: 3 stages x 66 KiB (k, q, v 16 each, W and P 8
// each, vectors 2) + o 16 KiB + vectors = 214.7 KiB.
#pragma once

#include "backend/cuda/sm90/params.h"
#include "backend/cuda/sm90/ptx.cuh"
#include "backend/cuda/sm90/wgmma.cuh"

namespace gdn::sm90 {

inline constexpr int kStages = 3;
inline constexpr int kWalkThreads = 512;
inline constexpr int kTileElements = kChunkTokens * kChunkTokens;

struct alignas(1024) WalkStage {
  bf16 k[2][kTileElements];  // [half of K][64 tokens][64]
  bf16 q[2][kTileElements];
  bf16 v[2][kTileElements];
  bf16 w[kTileElements];     // [i / 8][j / 8][8][8], the blocks j > i stay zero
  bf16 p[kTileElements];     // [i][j]
  float gate[kChunkTokens];  // gate and beta, rq and rk: two bulk copies
  float beta[kChunkTokens];
  float rq[kChunkTokens];
  float rk[kChunkTokens];
  float4 inner[kChunkTokens / 2];  // {a_t, a_t+1, beta_t, beta_t+1}
  float4 outer[kChunkTokens / 2];  // {c_t, c_t+1, d_t, d_t+1}
};
static_assert(sizeof(WalkStage) == 66 * 1024);

struct WalkShared {
  WalkStage stage[kStages];
  bf16 o[2][kTileElements];    // [state warpgroup][token][64 of V]
  float key[kChunkTokens];     // auxiliary warpgroup only: beta_j / |k_j|
  float column[kChunkTokens];  // and that times e^{G_end of its 16-block - G_j}
  uint64_t full[kStages];
  uint64_t ready[kStages];
  uint64_t empty[kStages];
  uint64_t o_full[2];
  uint64_t o_empty[2];
};
static_assert(sizeof(WalkShared) <= 227 * 1024);

// Position in the ring of stages; the same sequence in every role.
struct StageCursor {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// What a block walks: pieces [begin, end), and which value head of their groups.
struct Walk {
  int begin, end, sub;

  __device__ __forceinline__ explicit Walk(const WalkParams& p) {
    const int lane_group = blockIdx.x / p.group;
    sub = blockIdx.x % p.group;
    begin = p.piece_begin[lane_group];
    end = p.piece_begin[lane_group + 1];
  }
};

// ---- Copies in: one warp ------------------------------------------------------------------------
template <bool kOutput>
__device__ __forceinline__ void fill_stages(const WalkParams& p, WalkShared& s) {
  const Walk walk(p);
  const int lane = threadIdx.x;
  const uint64_t once = evict_first_policy();
  constexpr uint32_t kVectorBytes = 2 * kChunkTokens * sizeof(float);
  StageCursor at;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int key_head = piece->key_head, value_head = key_head * p.group + walk.sub;
    const bool has_values = piece->enter != StateKind::kIdentity;
    const uint32_t bytes = 2 * kTileBytes * (1 + kOutput + has_values) +
                           kRecordElements * sizeof(bf16) + 2 * kVectorBytes;
    const int64_t first = piece->first_chunk;
    const bf16* tile = p.tiles + (first * p.heads_v + value_head) * kRecordElements;
    const float* gate = p.gates + (first * p.heads_v + value_head) * 2 * kChunkTokens;
    const float* norm = p.norms + (first * p.heads_k + key_head) * 2 * kChunkTokens;
    int row = static_cast<int>(piece->row);
    for (int left = piece->chunks; left > 0; --left, at.advance()) {
      WalkStage& stage = s.stage[at.index];
      uint64_t* full = &s.full[at.index];
      if (lane == 0) {
        barrier_wait(&s.empty[at.index], at.parity ^ 1);
        barrier_expect_bytes(full, bytes);
        tensor_load(stage.k, &p.k, full, 0, row, 0, key_head);
        if (kOutput) tensor_load(stage.q, &p.q, full, 0, row, 0, key_head);
        bulk_load(stage.gate, gate, kVectorBytes, full);
        bulk_load(stage.rq, norm, kVectorBytes, full);
        if (has_values) tensor_load(stage.v, &p.v, full, 0, row, 0, value_head, once);
      }
      __syncwarp();
      if (lane < 8) {  // W by rows of 8 x 8 blocks
        bulk_load(stage.w + lane * 512, tile + lane * (lane + 1) * 32, (lane + 1) * 128, full);
      }
      row += kChunkTokens;
      tile += int64_t{p.heads_v} * kRecordElements;
      gate += p.heads_v * 2 * kChunkTokens;
      norm += p.heads_k * 2 * kChunkTokens;
    }
  }
}

// ---- Copies out: one warp per state warpgroup
// -----------------------------------------------------
__device__ __forceinline__ void write_outputs(const WalkParams& p, WalkShared& s, int half) {
  const Walk walk(p);
  const int lane = threadIdx.x % 32;
  uint32_t parity = 0;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int value_head = piece->key_head * p.group + walk.sub;
    int row = static_cast<int>(piece->row);
    for (int tokens = piece->tokens; tokens > 0; tokens -= kChunkTokens, parity ^= 1) {
      barrier_wait(&s.o_full[half], parity);
      if (tokens >= kChunkTokens) {
        if (lane == 0) {
          tensor_store(&p.o_map, s.o[half], 0, row, half, value_head);
          bulk_store_wait();
        }
      } else {  // the neighbour's rows stay as they are
        const int column = value_head * kDim + half * 64 + (lane % 8) * 8;
#pragma unroll 1
        for (int r = lane / 8; r < tokens; r += 4) {
          *reinterpret_cast<uint4*>(p.o + (row + r) * p.o_stride + column) =
              *reinterpret_cast<const uint4*>(reinterpret_cast<const uint8_t*>(s.o[half]) +
                                              r * 128 + (((lane % 8) ^ (r % 8)) * 16));
        }
        __syncwarp();
      }
      if (lane == 0) barrier_arrive(&s.o_empty[half]);
      row += kChunkTokens;
    }
  }
}

// ---- Auxiliary warpgroup
// -------------------------------------------------------------------------- Zeros in rows [tokens,
// 64) of the 64 x 64 tiles from `tile` on: nothing of a neighbour enters a product.
__device__ __forceinline__ void clear_rows(bf16* tile, int tiles, int tokens, int thread) {
  const int pieces = (kChunkTokens - tokens) * 8;
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    auto* at = reinterpret_cast<uint4*>(tile + t * kTileElements + tokens * 64);
#pragma unroll 1
    for (int i = thread; i < pieces; i += 128) at[i] = {0, 0, 0, 0};
  }
}

// Per-token factors of token t.
__device__ __forceinline__ void write_factors(WalkStage& stage, float* key, float* column, int t) {
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

// P from Q K^T in accumulator layout. Below the diagonal 16-blocks the decay is a row factor times
// a column factor, each at most 1, that meet at the end of the column's block.
__device__ __forceinline__ void write_p(const float (&qk)[32], WalkStage& stage, const float* key,
                                        const float* column, int warp, int lane) {
  const int r0 = 16 * warp + lane / 4, c2 = 2 * (lane % 4);
  const float g0 = stage.gate[r0], g1 = stage.gate[r0 + 8];
  const float q0 = stage.rq[r0], q1 = stage.rq[r0 + 8];
  const uint32_t tile = smem_address(stage.p);
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 16 columns
    uint32_t out[4] = {0, 0, 0, 0};
    if (j < warp) {
      const float end = stage.gate[16 * j + 15];
      const float f0 = q0 * exp2_approx(g0 - end), f1 = q1 * exp2_approx(g1 - end);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 c = *reinterpret_cast<const float2*>(&column[16 * j + 8 * h + c2]);
        const float* x = &qk[8 * j + 4 * h];
        out[2 * h] = pack_bf16(x[0] * f0 * c.x, x[1] * f0 * c.y);
        out[2 * h + 1] = pack_bf16(x[2] * f1 * c.x, x[3] * f1 * c.y);
      }
    } else if (j == warp) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int c = 16 * j + 8 * h + c2;
        const float2 g = *reinterpret_cast<const float2*>(&stage.gate[c]);
        const float2 k = *reinterpret_cast<const float2*>(&key[c]);
        const float* x = &qk[8 * j + 4 * h];
        const auto entry = [](float value, int row, int col, float gi, float gj, float f) {
          return col <= row ? value * f * exp2_approx(gi - gj) : 0.0f;
        };
        out[2 * h] = pack_bf16(entry(x[0], r0, c, g0, g.x, q0 * k.x),
                               entry(x[1], r0, c + 1, g0, g.y, q0 * k.y));
        out[2 * h + 1] = pack_bf16(entry(x[2], r0 + 8, c, g1, g.x, q1 * k.x),
                                   entry(x[3], r0 + 8, c + 1, g1, g.y, q1 * k.y));
      }
    }
    stmatrix_x4(tile_address(tile, 16 * warp + lane % 16, 16 * j + 8 * (lane / 16)), out[0], out[1],
                out[2], out[3]);
  }
}

template <bool kOutput>
__device__ __forceinline__ void run_auxiliary(const WalkParams& p, WalkShared& s) {
  const Walk walk(p);
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  StageCursor at;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const bool has_values = piece->enter != StateKind::kIdentity;
    for (int tokens = piece->tokens; tokens > 0; tokens -= kChunkTokens, at.advance()) {
      WalkStage& stage = s.stage[at.index];
      barrier_wait(&s.full[at.index], at.parity);
      float qk[32];
      if (kOutput) {
        const uint32_t q = smem_address(stage.q), k = smem_address(stage.k);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
          const uint32_t at_k = (kk / 4) * kTileBytes + (kk % 4) * 32;
          wgmma_ss<0, 0>(qk, descriptor(q + at_k), descriptor(k + at_k), kk > 0);
        }
        wgmma_commit();
      }
      if (thread < kChunkTokens) write_factors(stage, s.key, s.column, thread);
      if (kOutput) {
        wgmma_wait<0>();
        settle(qk);
        named_barrier(3, 128);
        write_p(qk, stage, s.key, s.column, warp, lane);
      }
      if (tokens < kChunkTokens) {
        clear_rows(stage.k[0], 2, tokens, thread);
        if (kOutput) clear_rows(stage.q[0], 2, tokens, thread);
        if (has_values) clear_rows(stage.v[0], 2, tokens, thread);
      }
      fence_async_proxy();
      barrier_arrive(&s.ready[at.index]);
      if (kOutput) named_barrier(3, 128);  // `key` and `column` are read
    }
  }
}

// ---- State warpgroups
// ----------------------------------------------------------------------------- Address of matrix
// (head, index) of a [HV, slots, 128, 128] table.
template <typename T>
__device__ __forceinline__ T* table_entry(T* table, int64_t slots, int head, int index) {
  return table + (head * slots + index) * kDim * kDim;
}

// S^T fragments of thread `thread` of warpgroup `half`: element i is V row dv(i), K column dk(i).
__device__ __forceinline__ int fragment_dv(int half, int thread, int i) {
  return 64 * half + 16 * (thread / 32) + (thread % 32) / 4 + 8 * ((i / 2) % 2);
}
__device__ __forceinline__ int fragment_dk(int thread, int i) {
  return 8 * (i / 4) + 2 * (thread % 4) + i % 2;
}

__device__ __forceinline__ void load_state(float (&state)[64], const float* from, int64_t stride_k,
                                           int64_t stride_v, int half, int thread) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    state[i] = from[fragment_dk(thread, i) * stride_k + fragment_dv(half, thread, i) * stride_v];
  }
}
__device__ __forceinline__ void store_state(const float (&state)[64], float* to, int64_t stride_k,
                                            int64_t stride_v, int half, int thread) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    to[fragment_dk(thread, i) * stride_k + fragment_dv(half, thread, i) * stride_v] = state[i];
  }
}

// Hand-over between blocks: [16][128 threads] float4 per warpgroup, then a flag that its one reader
// clears.
__device__ __forceinline__ void give_state(const float (&state)[64], float* buffer, int* flag,
                                           int half, int thread) {
  auto* to = reinterpret_cast<float4*>(buffer) + half * 2048 + thread;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    __stcg(to + i * 128, {state[4 * i], state[4 * i + 1], state[4 * i + 2], state[4 * i + 3]});
  }
  __threadfence();
  named_barrier(1 + half, 128);
  if (thread == 0) flag_release(flag, 1);
}
__device__ __forceinline__ void take_state(float (&state)[64], const float* buffer, int* flag,
                                           int half, int thread) {
  if (thread == 0) {
    for (SpinLimit limit; flag_acquire(flag) == 0; limit.turn(flag)) __nanosleep(100);
    *flag = 0;
  }
  named_barrier(1 + half, 128);
  const auto* from = reinterpret_cast<const float4*>(buffer) + half * 2048 + thread;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float4 x = __ldcg(from + i * 128);
    state[4 * i] = x.x, state[4 * i + 1] = x.y, state[4 * i + 2] = x.z, state[4 * i + 3] = x.w;
  }
}

__device__ __forceinline__ void enter_state(float (&state)[64], const WalkParams& p,
                                            const WalkPiece& piece, int sub, int half, int thread) {
  const int head = piece.key_head * p.group + sub;
  const int64_t index = piece.enter_index;
  if (piece.enter == StateKind::kHandOver) {
    const int64_t slot = index * p.group + sub;
    take_state(state, p.hand_over + slot * kDim * kDim, p.flags + slot * 2 + half, half, thread);
  } else if (piece.enter == StateKind::kDocument || piece.enter == StateKind::kSlot) {
    const bool document = piece.enter == StateKind::kDocument;
    const StateView& view = p.initial_state;
    const float* from = document
                            ? view.data + index * view.stride[0] + head * view.stride[1]
                            : table_entry(p.enter_table, p.enter_slots, head, piece.enter_index);
    load_state(state, from, document ? view.stride[2] : kDim, document ? view.stride[3] : 1, half,
               thread);
  } else {
    const float diagonal = piece.enter == StateKind::kIdentity ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      state[i] = fragment_dk(thread, i) == fragment_dv(half, thread, i) ? diagonal : 0.0f;
    }
  }
}

__device__ __forceinline__ void leave_state(const float (&state)[64], const WalkParams& p,
                                            const WalkPiece& piece, int sub, int half, int thread) {
  const int head = piece.key_head * p.group + sub;
  const int64_t index = piece.leave_index;
  if (piece.leave == StateKind::kHandOver) {
    const int64_t slot = index * p.group + sub;
    give_state(state, p.hand_over + slot * kDim * kDim, p.flags + slot * 2 + half, half, thread);
  } else if (piece.leave == StateKind::kDocument) {
    const StateView& view = p.final_state;
    store_state(state, view.data + index * view.stride[0] + head * view.stride[1], view.stride[2],
                view.stride[3], half, thread);
  } else if (piece.leave == StateKind::kIdentity) {
    store_state(state, table_entry(p.map_table, p.map_slots, head, piece.leave_index), kDim, 1,
                half, thread);
  } else if (piece.leave == StateKind::kSlot) {
    store_state(state, table_entry(p.leave_table, p.leave_slots, head, piece.leave_index), kDim, 1,
                half, thread);
  }
}

// What a thread of a state warpgroup is.
struct StateLane {
  int half;    // warpgroup: rows 64 half of V^T, S^T, O^T
  int thread;  // of the warpgroup
  int lane;
  int pair;    // lane % 4: column pair of an 8-column block
  int token;   // its row of an ldmatrix or stmatrix of 16 tokens,
  int column;  // and column of V
};

// y = V^T - a y; b: beta y as operand.
__device__ __forceinline__ void make_y(float (&y)[32], uint32_t (&b)[16], const WalkStage& stage,
                                       bool has_values, const StateLane& own) {
  const uint32_t v = smem_address(stage.v[own.half]);
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 16 tokens
    uint32_t values[4] = {0, 0, 0, 0};
    if (has_values) ldmatrix_x4_trans(values, tile_address(v, 16 * j + own.token, own.column));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 f = stage.inner[8 * j + 4 * h + own.pair];
      const float2 v0 = unpack_bf16(values[2 * h]), v1 = unpack_bf16(values[2 * h + 1]);
      float* at = &y[8 * j + 4 * h];
      at[0] = v0.x - f.x * at[0];
      at[1] = v0.y - f.y * at[1];
      at[2] = v1.x - f.x * at[2];
      at[3] = v1.y - f.y * at[3];
      b[4 * j + 2 * h] = pack_bf16(f.z * at[0], f.w * at[1]);
      b[4 * j + 2 * h + 1] = pack_bf16(f.z * at[2], f.w * at[3]);
    }
  }
}

// O^T to shared memory as [token][V]; the copy warp takes it from there.
__device__ __forceinline__ void put_output(const float (&o)[32], WalkShared& s, uint32_t parity,
                                           const StateLane& own) {
  barrier_wait(&s.o_empty[own.half], parity ^ 1);
  const uint32_t out = smem_address(s.o[own.half]);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    stmatrix_x4_trans(tile_address(out, 16 * j + own.token, own.column),
                      pack_bf16(o[8 * j], o[8 * j + 1]), pack_bf16(o[8 * j + 2], o[8 * j + 3]),
                      pack_bf16(o[8 * j + 4], o[8 * j + 5]), pack_bf16(o[8 * j + 6], o[8 * j + 7]));
  }
  fence_async_proxy();
  __syncwarp();
  if (own.lane == 0) barrier_arrive(&s.o_full[own.half]);
}

// One chunk.
template <bool kOutput>
__device__ __forceinline__ void step_state(float (&state)[64], WalkShared& s, WalkStage& stage,
                                           uint64_t* empty, uint32_t o_parity, bool has_values,
                                           const StateLane& own) {
  float y[32], o[32];
  uint32_t a[32];
  const uint32_t k = smem_address(stage.k);
  const float decay = exp2_approx(stage.gate[kChunkTokens - 1]);
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i] = pack_bf16(state[2 * i], state[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] *= decay;
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    wgmma_rs<0>(y, a[4 * kk], a[4 * kk + 1], a[4 * kk + 2], a[4 * kk + 3],
                descriptor(k + (kk / 4) * kTileBytes + (kk % 4) * 32), kk > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  settle(y);
  {
    uint32_t b[16];
    make_y(y, b, stage, has_values, own);
    const uint32_t w = smem_address(stage.w);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      wgmma_rs<0>(y, b[4 * kk], b[4 * kk + 1], b[4 * kk + 2], b[4 * kk + 3],
                  plain_descriptor(w + kk * 256, 128, 1024), true);
    }
    wgmma_commit();
  }
  if (kOutput) {
    const uint32_t q = smem_address(stage.q);
#pragma unroll
    for (int kk = 0; kk < 8; ++kk) {
      wgmma_rs<0>(o, a[4 * kk], a[4 * kk + 1], a[4 * kk + 2], a[4 * kk + 3],
                  descriptor(q + (kk / 4) * kTileBytes + (kk % 4) * 32), kk > 0);
    }
    wgmma_commit();
  }
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
  if (kOutput) {
    const uint32_t pt = smem_address(stage.p);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      wgmma_rs<0>(o, corrected[4 * kk], corrected[4 * kk + 1], corrected[4 * kk + 2],
                  corrected[4 * kk + 3], descriptor(pt + kk * 32), true);
    }
    wgmma_commit();
  }
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    wgmma_rs<1>(state, weighted[4 * kk], weighted[4 * kk + 1], weighted[4 * kk + 2],
                weighted[4 * kk + 3], descriptor(k + kk * 2048, kTileBytes), true);
  }
  wgmma_commit();
  if (kOutput) {
    wgmma_wait<1>();
    settle(o);
    put_output(o, s, o_parity, own);
  }
  wgmma_wait<0>();
  settle(state);
  if (own.lane == 0) barrier_arrive(empty);
}

template <bool kOutput>
__device__ __forceinline__ void run_state(const WalkParams& p, WalkShared& s, int half) {
  const Walk walk(p);
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  const StateLane own{
      half, thread, lane, lane % 4, lane % 8 + 8 * (lane / 16), 16 * warp + 8 * ((lane / 8) % 2)};
  StageCursor at;
  uint32_t o_parity = 0;
  float state[64];
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    enter_state(state, p, *piece, walk.sub, half, thread);
    const bool has_values = piece->enter != StateKind::kIdentity;
    for (int left = piece->chunks; left > 0; --left, at.advance(), o_parity ^= 1) {
      barrier_wait(&s.full[at.index], at.parity);
      barrier_wait(&s.ready[at.index], at.parity);
      step_state<kOutput>(state, s, s.stage[at.index], &s.empty[at.index], o_parity, has_values,
                          own);
    }
    leave_state(state, p, *piece, walk.sub, half, thread);
  }
}

template <bool kOutput>
__device__ __forceinline__ void walk_block(const WalkParams& p, WalkShared& s) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.ready[i], 128);
      barrier_init(&s.empty[i], 8);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&s.o_full[i], 4);
      barrier_init(&s.o_empty[i], 1);
    }
    barrier_init_fence();
  }
  for (int i = threadIdx.x; i < kStages * 512; i += kWalkThreads) {
    reinterpret_cast<uint4*>(s.stage[i / 512].w)[i % 512] = {0, 0, 0, 0};
  }
  fence_async_proxy();
  __syncthreads();
  if (warpgroup == 0) {
    registers_decrease<24>();
    if (warp == 0) {
      fill_stages<kOutput>(p, s);
    } else if (kOutput && warp < 3) {
      write_outputs(p, s, warp - 1);
    }
  } else if (warpgroup == 3) {
    registers_decrease<72>();
    run_auxiliary<kOutput>(p, s);
  } else {
    registers_increase<208>();
    run_state<kOutput>(p, s, warpgroup - 1);
  }
}

}  // namespace gdn::sm90
