// What the forward and the backward walks share: the ring of stages, a block's pieces, P, boundary
// states in registers and their hand-over between blocks. A block walks pieces of one value head,
// chunk after chunk, with a state^T [V x K] in fp32 registers of two warpgroups (64 rows of V
// each).
#pragma once

#include "backend/cuda/sm90/params.h"
#include "backend/cuda/sm90/ptx.cuh"
#include "backend/cuda/sm90/wgmma.cuh"

namespace gdn::sm90 {

inline constexpr int kWalkThreads = 512;
inline constexpr int kTileElements = kChunkTokens * kChunkTokens;
inline constexpr uint32_t kVectorBytes = 2 * kChunkTokens * sizeof(float);

// Position in a ring of stages; the same sequence in every role.
template <int kStages>
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
  int begin, end, lane_group, sub;

  __device__ __forceinline__ explicit Walk(const WalkParams& p) {
    const int blocks = static_cast<int>(gridDim.x);
    int block = static_cast<int>(blockIdx.x) * p.block_stride;
#pragma unroll 1
    while (block >= blocks) block -= blocks;  // a few times, with less code than a division
    lane_group = block / p.group;
    sub = block % p.group;
    begin = p.piece_begin[lane_group];
    end = p.piece_begin[lane_group + 1];
  }
};

// How many of a piece's first chunks a summary may leave out, because later ones decay so far that
// they forget them: B then starts from 0, and M is 0 as a whole. For all lanes of a warp together.
__device__ __forceinline__ int chunks_to_skip(const WalkParams& p, const WalkPiece& piece,
                                              int value_head) {
  const int lane = threadIdx.x % 32;
  float after = 0.0f;  // decay of the chunks from `end` on
  for (int end = piece.chunks; end > 0; end -= 32) {
    const int chunk = end - 1 - lane;
    const int64_t record = int64_t{piece.first_chunk + chunk} * p.heads_v + value_head;
    float sum = chunk >= 0 ? p.gates[record * 2 * kChunkTokens + kChunkTokens - 1] : 0.0f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    const uint32_t forgets = __ballot_sync(0xffffffffu, chunk >= 0 && after + sum < p.log2_bound);
    if (forgets != 0) {
      return piece.enter == StateKind::kIdentity ? piece.chunks : end - __ffs(forgets);
    }
    after += __shfl_sync(0xffffffffu, sum, 31);
  }
  return 0;
}

// Barriers of a walk's shared block: by one thread, before the block's first barrier. Every thread
// arrives, for what it has written or read itself.
template <typename Shared>
__device__ __forceinline__ void init_ring(Shared& s, int stages) {
  if (threadIdx.x != 0) return;
  for (int i = 0; i < stages; ++i) {
    barrier_init(&s.full[i], 1);
    barrier_init(&s.ready[i], 128);
    barrier_init(&s.empty[i], 256);
  }
  for (int i = 0; i < 2; ++i) {
    barrier_init(&s.result_full[i], 128);
    barrier_init(&s.result_empty[i], 32);
  }
  barrier_init_fence();
}

// A 64 x 64 tile of zeros, by all threads of the block.
__device__ __forceinline__ void clear_tile(bf16* tile) {
  for (int i = threadIdx.x; i < kTileElements / 8; i += blockDim.x) {
    reinterpret_cast<uint4*>(tile)[i] = {0, 0, 0, 0};
  }
}

// `tokens` rows (64 or more: 64) of a tile [token][64 of V] to rows from `row` on of o, one warp.
__device__ __forceinline__ void write_rows(const WalkParams& p, const bf16* tile, int row,
                                           int tokens, int value_head, int half, int lane) {
  if (tokens >= kChunkTokens) {
    if (lane == 0) {
      tensor_store(&p.o_map, tile, 0, row, half, value_head);
      bulk_store_wait();
    }
    return;
  }
  // The neighbour's rows stay as they are.
  const int column = value_head * kDim + half * 64 + (lane % 8) * 8;
#pragma unroll 1
  for (int r = lane / 8; r < tokens; r += 4) {
    *reinterpret_cast<uint4*>(p.o + (row + r) * p.o_stride + column) =
        *reinterpret_cast<const uint4*>(reinterpret_cast<const uint8_t*>(tile) + r * 128 +
                                        (((lane % 8) ^ (r % 8)) * 16));
  }
  __syncwarp();
}

// W of a chunk record, by rows of 8 x 8 blocks; by the lanes of a warp.
__device__ __forceinline__ void load_w(bf16* to, const bf16* tile, uint64_t* full, int lane) {
  if (lane < 8) bulk_load(to + lane * 512, tile + lane * (lane + 1) * 32, (lane + 1) * 128, full);
}

// Zeros in rows [tokens, 64) of the 64 x 64 tiles from `tile` on: nothing of a neighbour enters a
// product. By `threads` threads.
__device__ __forceinline__ void clear_rows(bf16* tile, int tiles, int tokens, int thread,
                                           int threads = 128) {
  const int pieces = (kChunkTokens - tokens) * 8;
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    auto* at = reinterpret_cast<uint4*>(tile + t * kTileElements + tokens * 64);
#pragma unroll 1
    for (int i = thread; i < pieces; i += threads) at[i] = {0, 0, 0, 0};
  }
}

// Rows [row, row + N) of b: qk [64 x N] = a b^T, issued; a and b two tiles [64 tokens][64], N twice
// the accumulators.
template <int kAccumulators>
__device__ __forceinline__ void start_qk(float (&qk)[kAccumulators],
                                         const bf16 (&a)[2][kTileElements],
                                         const bf16 (&b)[2][kTileElements], int row = 0) {
  const Operand q = operand(made_anew(smem_address(a)));
  const Operand k = operand(made_anew(smem_address(b))).at(row * 128);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    const uint32_t step = (kk / 4) * kTileBytes + (kk % 4) * 32;
    wgmma_ss<0, 0>(qk, q.at(step), k.at(step), kk > 0);
  }
  wgmma_commit();
}

// Decays between the tokens of a chunk, with a factor for each row and column.
struct Decays {
  const float* gate;    // G
  const float* key;     // key_j, the column factors
  const float* column;  // key_j e^{G_end-G_j}, end the last token of j's 16-block
};

// The decays of a warp's 16 rows, in blocks of 16 columns: w_i = row_i key_j e^{G_i-G_j} of this
// thread's 8 accumulator entries of a block, 0 above the diagonal (`strict`: and on it). Below the
// diagonal block the decay is a row factor times a column factor, each at most 1, that meet at the
// end of the column's block. Without branches, so that the blocks overlap.
struct DecayRows {
  const Decays& decays;
  float row0, row1;  // the row factors of this thread's two rows
  int warp, c2;
  float g0, g1;
  float diagonal[8];

  __device__ __forceinline__ DecayRows(const Decays& of, float first, float second, int warp_row,
                                       int lane, bool strict = false)
      : decays(of), row0(first), row1(second), warp(warp_row), c2(2 * (lane % 4)) {
    const int r0 = lane / 4;  // within the warp's block
    g0 = decays.gate[16 * warp + r0], g1 = decays.gate[16 * warp + r0 + 8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = 8 * h + c2;
      const float2 g = *reinterpret_cast<const float2*>(&decays.gate[16 * warp + c]);
      const float2 k = *reinterpret_cast<const float2*>(&decays.key[16 * warp + c]);
      const auto entry = [&](int row, int col, float gi, float gj, float f) {
        return col + strict <= row ? f * exp2_approx(gi - gj) : 0.0f;
      };
      diagonal[4 * h] = entry(r0, c, g0, g.x, row0 * k.x);
      diagonal[4 * h + 1] = entry(r0, c + 1, g0, g.y, row0 * k.y);
      diagonal[4 * h + 2] = entry(r0 + 8, c, g1, g.x, row1 * k.x);
      diagonal[4 * h + 3] = entry(r0 + 8, c + 1, g1, g.y, row1 * k.y);
    }
  }

  __device__ __forceinline__ void block(int j, float (&w)[8]) const {
    const float end = decays.gate[16 * j + 15];
    const float f0 = j < warp ? row0 * exp2_approx(g0 - end) : 0.0f;
    const float f1 = j < warp ? row1 * exp2_approx(g1 - end) : 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 c = *reinterpret_cast<const float2*>(&decays.column[16 * j + 8 * h + c2]);
      w[4 * h] = j == warp ? diagonal[4 * h] : f0 * c.x;
      w[4 * h + 1] = j == warp ? diagonal[4 * h + 1] : f0 * c.y;
      w[4 * h + 2] = j == warp ? diagonal[4 * h + 2] : f1 * c.x;
      w[4 * h + 3] = j == warp ? diagonal[4 * h + 3] : f1 * c.y;
    }
  }
};

// A thread's 8 entries of block (warp, j) to a swizzled tile.
__device__ __forceinline__ void put_block(bf16* tile, const float (&x)[8], int j, int warp,
                                          int lane) {
  stmatrix_x4(tile_address(smem_address(tile), 16 * warp + lane % 16, 16 * j + 8 * (lane / 16)),
              pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
              pack_bf16(x[6], x[7]));
}

// P from columns of Q K^T in accumulator layout, from 16-column block `first` on: entry (i, j)
// times rq_i key_j e^{G_i-G_j}, j <= i.
template <int kAccumulators>
__device__ __forceinline__ void write_p(const float (&qk)[kAccumulators], bf16* tile,
                                        const DecayRows& rows, int first, int lane) {
#pragma unroll
  for (int b = 0; b < kAccumulators / 8; ++b) {
    float w[8];
    rows.block(first + b, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] *= qk[8 * b + i];
    put_block(tile, w, first + b, rows.warp, lane);
  }
}

// Address of matrix (head, index) of a [HV, slots, 128, 128] table.
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

// `forgotten`: the walk begins behind the piece's first chunk, from 0.
__device__ __forceinline__ void enter_state(float (&state)[64], const WalkParams& p,
                                            const WalkPiece& piece, int sub, bool forgotten,
                                            int half, int thread) {
  const int head = piece.key_head * p.group + sub;
  const cuda::StateView& initial = p.initial_state;
  if (piece.enter == StateKind::kHandOver) {
    const int64_t slot = int64_t{piece.enter_index} * p.group + sub;
    take_state(state, p.hand_over + slot * kDim * kDim, p.flags + slot * 2 + half, half, thread);
  } else if (piece.enter == StateKind::kSlot) {
    load_state(state, table_entry(p.enter_table, p.enter_slots, head, piece.enter_index), kDim, 1,
               half, thread);
  } else if (piece.enter == StateKind::kDocument && initial.data != nullptr && !forgotten) {
    load_state(state, initial.data + piece.enter_index * initial.doc + head * initial.head,
               initial.k, initial.v, half, thread);
  } else {
    const float diagonal = piece.enter == StateKind::kIdentity && !forgotten ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      state[i] = fragment_dk(thread, i) == fragment_dv(half, thread, i) ? diagonal : 0.0f;
    }
  }
}

__device__ __forceinline__ void leave_state(const float (&state)[64], const WalkParams& p,
                                            const WalkPiece& piece, int sub, int half, int thread) {
  const int head = piece.key_head * p.group + sub;
  const cuda::StateView& last = p.final_state;
  if (piece.leave == StateKind::kHandOver) {
    const int64_t slot = int64_t{piece.leave_index} * p.group + sub;
    give_state(state, p.hand_over + slot * kDim * kDim, p.flags + slot * 2 + half, half, thread);
  } else if (piece.leave == StateKind::kDocument && last.data != nullptr) {
    store_state(state, last.data + piece.leave_index * last.doc + head * last.head, last.k, last.v,
                half, thread);
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
  int half;    // warpgroup: rows 64 half of every ^T
  int thread;  // of the warpgroup
  int lane;
  int pair;    // lane % 4: column pair of an 8-column block
  int token;   // its row of an ldmatrix or stmatrix of 16 tokens,
  int column;  // and column of V

  __device__ __forceinline__ explicit StateLane(int state_half)
      : half(state_half),
        thread(threadIdx.x % 128),
        lane(thread % 32),
        pair(lane % 4),
        token(lane % 8 + 8 * (lane / 16)),
        column(16 * __shfl_sync(0xffffffffu, thread / 32, 0) + 8 * ((lane / 8) % 2)) {}

  // Where this thread's row of ldmatrix and stmatrix is: 16 x 16 entries from (16 warp, 16 kk) on
  // of a state^T's image, two tiles [64 of V][64 of K].
  __device__ __forceinline__ uint32_t state_block(const bf16 (&image)[2][kTileElements],
                                                  int kk) const {
    const uint32_t first = tile_address(0, 16 * (thread / 32) + lane % 16, 8 * (lane / 16));
    return made_anew(smem_address(image[kk / 4])) + (first ^ (kk % 4 * 32));
  }
};

__device__ __forceinline__ void pack_state(uint32_t (&a)[32], const float (&state)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i] = pack_bf16(state[2 * i], state[2 * i + 1]);
}

// y = V^T - a y, V a tile [64 tokens][64 of V]; b: beta y as operand. factors(t), t even: {a_t,
// a_t+1, beta_t, beta_t+1}.
template <typename Factors>
__device__ __forceinline__ void make_y(float (&y)[32], uint32_t (&b)[16], const bf16* values,
                                       Factors&& factors, bool has_values, const StateLane& own) {
  const uint32_t v = smem_address(values);
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 16 tokens
    uint32_t x[4] = {0, 0, 0, 0};
    if (has_values) ldmatrix_x4_trans(x, tile_address(v, 16 * j + own.token, own.column));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 f = factors(16 * j + 8 * h + 2 * own.pair);
      const float2 v0 = unpack_bf16(x[2 * h]), v1 = unpack_bf16(x[2 * h + 1]);
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

// Accumulators d^T [64 of V x 64 tokens] to shared memory as a tile [token][V].
__device__ __forceinline__ void put_transposed(const float (&d)[32], bf16* tile,
                                               const StateLane& own) {
  const uint32_t out = smem_address(tile);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    stmatrix_x4_trans(tile_address(out, 16 * j + own.token, own.column),
                      pack_bf16(d[8 * j], d[8 * j + 1]), pack_bf16(d[8 * j + 2], d[8 * j + 3]),
                      pack_bf16(d[8 * j + 4], d[8 * j + 5]), pack_bf16(d[8 * j + 6], d[8 * j + 7]));
  }
}

// A packed state^T [64 of V x 128] to two tiles [V][64 of K].
__device__ __forceinline__ void put_state(const uint32_t (&a)[32], bf16 (&image)[2][kTileElements],
                                          const StateLane& own) {
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    stmatrix_x4(own.state_block(image, kk), a[4 * kk], a[4 * kk + 1], a[4 * kk + 2], a[4 * kk + 3]);
  }
}

// y = a b^T, issued: a packed state^T, b two tiles [64 tokens][64 of K].
__device__ __forceinline__ void start_state_product(float (&y)[32], const uint32_t (&a)[32],
                                                    const bf16 (&b)[2][kTileElements]) {
  const Operand tiles = operand(smem_address(b));
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    wgmma_rs<0>(y, a[4 * kk], a[4 * kk + 1], a[4 * kk + 2], a[4 * kk + 3],
                tiles.at((kk / 4) * kTileBytes + (kk % 4) * 32), kk > 0);
  }
  wgmma_commit();
}

// state += a b, issued: a [64 of V x 64 tokens] packed, b two tiles [64 tokens][64 of K].
__device__ __forceinline__ void start_state_update(float (&state)[64], const uint32_t (&a)[16],
                                                   const bf16 (&b)[2][kTileElements]) {
  const Operand tiles = operand(smem_address(b), kTileBytes);
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    wgmma_rs<1>(state, a[4 * kk], a[4 * kk + 1], a[4 * kk + 2], a[4 * kk + 3], tiles.at(kk * 2048),
                true);
  }
  wgmma_commit();
}

// Sums over the rows of an accumulator's columns: x[k] is this thread's part of column
// 8 (k / 2) + 2 (lane % 4) + k % 2. Of 16 the sums of the two columns from `column` on, of 4 that
// of the one, in two lanes each.
template <int kCount, int kBit>
__device__ __forceinline__ void fold_columns(float (&out)[kCount / 2], const float (&x)[kCount],
                                             int lane) {
  const bool high = lane & kBit;
#pragma unroll
  for (int k = 0; k < kCount / 2; ++k) {
    const float other = __shfl_xor_sync(0xffffffffu, high ? x[k] : x[k + kCount / 2], kBit);
    out[k] = (high ? x[k + kCount / 2] : x[k]) + other;
  }
}
__device__ __forceinline__ float2 sum_rows(const float (&x)[16], int lane, int& column) {
  float a[8], b[4], c[2];
  fold_columns<16, 16>(a, x, lane);
  fold_columns<8, 8>(b, a, lane);
  fold_columns<4, 4>(c, b, lane);
  column = 8 * (4 * (lane / 16) + 2 * (lane / 8 % 2) + lane / 4 % 2) + 2 * (lane % 4);
  return {c[0], c[1]};
}
__device__ __forceinline__ float sum_rows(const float (&x)[4], int lane, int& column) {
  float a[2], b[1];
  fold_columns<4, 16>(a, x, lane);
  fold_columns<2, 8>(b, a, lane);
  column = 8 * (lane / 16) + 2 * (lane % 4) + lane / 8 % 2;
  return b[0] + __shfl_xor_sync(0xffffffffu, b[0], 4);
}

}  // namespace gdn::sm90
