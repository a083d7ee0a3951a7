// Device code of k_backward: the walk of reverse.cuh and, beside it, every gradient of its chunks,
// so that neither dS nor U ever leaves the multiprocessor. In rows (tokens), with S the state that
// enters the chunk, dS the gradient of the one that leaves it, dY = beta U = d_v:
//   dP = rq_i rk_j beta_j e^{G_i-G_j} (dO E^T)_ij, j <= i
//   N  = -rk_i rk_j beta_j e^{G_i-G_j} (dY E^T)_ij, j < i
//   dq = d (dO S^T) + dP K                                     d, c, ab as in reverse.cuh
//   dk = -(gam / |k|) (dY S^T) + (c beta E) dS^T + dP^T Q + (N + N^T) K
// rq = scale / |q|, rk = 1 / |k|: with raw q and k as operands the sums are r times the gradient of
// the normalised row, so its gradient is sum - r^2 x (x . sum). docs/math.md has dg and dbeta = U .
// E.
//
// Warpgroups: 0 copies and sums (warp 0 fills, 1 writes d_v, 2 adds to dq and dk, 3 writes dg and
// dbeta), 1 and 2 state (64 rows of V each; 1 also makes P and the per-token factors, 2 also N), 3
// gradients. 512 threads, one block per SM; registers 40 + 2 * 168 + 136 = 512 = 65,536 / 128.
//
// A chunk's chain: keys_full -> 1: P (p_ready) -> 1, 2: dS, U (solved) -> 2: N (n_ready) -> 3: dk
// (squares_empty) -> the next chunk's P. Beside it 3 makes dP and dq after p_ready, and what of dk
// needs no N after solved.
//
// dq and dk are sums over the G value heads of a group, whose blocks walk the same pieces: block 0
// stores its rows (bf16), every other one adds its own in L2 when the block before it has. So the
// order of the sum is fixed, and no block waits for a later one.
//
// Buffers are single but k and q, each loaded as soon as its last reader of the chunk before is
// done: d_o, W after the state's update and dO S^T, S after dY S^T, E after E dS^T. The next
// chunk's are prefetched to L2. Shared, KiB: k and q 2 x 32, S 32, dS 32, E, d_o, d_v, rows out 16
// each, W, P (then N), dP 8 each, sums and vectors 11 = 227.
#pragma once

#include "backend/cuda/common/scalars.cuh"
#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/sm90/backward_params.h"
#include "backend/cuda/sm90/reverse.cuh"

namespace gdn::sm90 {

struct BackwardShared {
  bf16 k[2][2][kTileElements];  // [turn][half of K][64 tokens][64]
  bf16 q[2][2][kTileElements];
  bf16 states[2][2][kTileElements];   // [half of V][tile of K][64 of V][64 of K]: S
  bf16 dstates[2][2][kTileElements];  // dS
  bf16 e[2][kTileElements];           // [half of V][64 tokens][64]
  bf16 d_o[2][kTileElements];
  bf16 d_v[2][kTileElements];
  bf16 rows[2][kTileElements];  // [half of K]: rows of dq, then dk
  bf16 w[kTileElements];        // [i / 8][j / 8][8][8], the blocks j > i stay zero
  bf16 p[kTileElements];        // [i][j]: P, then N + N^T
  bf16 dp[kTileElements];       // [i][j], the blocks j > i stay zero
  ReverseVectors vectors[2];
  ReverseFactors factors;
  float key_beta[kChunkTokens];          // beta_t / |k_t|
  float column_beta[kChunkTokens];       // factors.column beta
  float value_dots[2][8][kChunkTokens];  // per state warp: U . E, E . (dS^T k)
  float row_dots[2][kChunkTokens];       // q . dq and k . dk of their terms with S
  float pair_rows[2][kChunkTokens];      // of dP o Q K^T without its diagonal, of N o K K^T
  float pair_columns[2][4][kChunkTokens];
  float through[8];  // <gam_C dS, S>, per state warp
  uint64_t keys_full[2], keys_empty[2];
  uint64_t out_full, out_empty;  // d_o, W
  uint64_t e_full, e_empty;
  uint64_t states_full, states_empty;
  uint64_t p_ready;                // P and the factors; short rows are zero
  uint64_t n_ready;                // N + N^T
  uint64_t squares_empty;          // P and N have been read
  uint64_t solved;                 // d_v and dS are written
  uint64_t solution_empty;         // and may be written again: gradients
  uint64_t d_v_empty;              // and: copy
  uint64_t dots_full;              // value_dots, through
  uint64_t sums_full;              // row_dots, pair_*
  uint64_t sums_empty;             // all of them
  uint64_t rows_full, rows_empty;  // twice a chunk: dq, dk
};
static_assert(sizeof(BackwardShared) <= 227 * 1024);

__device__ __forceinline__ void init_barriers(BackwardShared& s) {
  if (threadIdx.x != 0) return;
  // Every thread arrives, for what it has written or read itself.
  constexpr uint32_t kState = 256, kGradient = 128;
  for (int i = 0; i < 2; ++i) {
    barrier_init(&s.keys_full[i], 1);
    barrier_init(&s.keys_empty[i], kState + kGradient);
  }
  for (uint64_t* full : {&s.out_full, &s.e_full, &s.states_full}) barrier_init(full, 1);
  for (uint64_t* empty : {&s.out_empty, &s.e_empty, &s.states_empty}) {
    barrier_init(empty, kState + kGradient);
  }
  barrier_init(&s.p_ready, 128);
  barrier_init(&s.n_ready, 128);
  barrier_init(&s.squares_empty, kGradient);
  barrier_init(&s.solved, 256);
  barrier_init(&s.solution_empty, kGradient);
  barrier_init(&s.d_v_empty, 32);
  barrier_init(&s.dots_full, 256);
  barrier_init(&s.sums_full, 256);
  barrier_init(&s.sums_empty, 32);
  barrier_init(&s.rows_full, 128);
  barrier_init(&s.rows_empty, 32);
  barrier_init_fence();
}

// A chunk of a block's walk, in walking order.
struct ChunkAt {
  int chunk;  // of its piece
  int turn;   // counts the block's chunks
  int key_head, value_head;
  int row;         // first local row
  int tokens;      // 1..64
  int64_t record;  // of the chunk; times heads and plus the head for its images
};

// Calls visit(ChunkAt) for every chunk of the block.
template <typename Visit>
__device__ __forceinline__ void for_chunks(const WalkParams& p, Visit&& visit) {
  const Walk walk(p);
  ChunkAt at{};
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    at.key_head = piece->key_head;
    at.value_head = at.key_head * p.group + walk.sub;
    at.chunk = piece->chunks - 1;
    at.row = static_cast<int>(piece->row) + at.chunk * kChunkTokens;
    at.tokens = piece->tokens - at.chunk * kChunkTokens;
    at.record = int64_t{piece->first_chunk} + at.chunk;
    for (; at.chunk >= 0; --at.chunk, ++at.turn, --at.record) {
      visit(at);
      at.row -= kChunkTokens;
      at.tokens = kChunkTokens;
    }
  }
}

// ---- Warp 0: copies in
__device__ __forceinline__ void fill_chunks(const WalkParams& p, BackwardShared& s) {
  const int lane = threadIdx.x;
  const uint64_t once = evict_first_policy();
  for_chunks(p, [&](const ChunkAt& at) {
    const int stage = at.turn & 1;
    const int64_t value = at.record * p.heads_v + at.value_head;
    const uint32_t again = (at.turn & 1) ^ 1;
    if (lane == 0) {
      barrier_wait(&s.keys_empty[stage], ((at.turn >> 1) & 1) ^ 1);
      uint64_t* full = &s.keys_full[stage];
      barrier_expect_bytes(full, 4 * kTileBytes + 2 * kVectorBytes);
      tensor_load(s.k[stage], &p.k, full, 0, at.row, 0, at.key_head);
      tensor_load(s.q[stage], &p.q, full, 0, at.row, 0, at.key_head);
      bulk_load(s.vectors[stage].gate, p.gates + value * 2 * kChunkTokens, kVectorBytes, full);
      bulk_load(s.vectors[stage].rq,
                p.norms + (at.record * p.heads_k + at.key_head) * 2 * kChunkTokens, kVectorBytes,
                full);
      barrier_wait(&s.out_empty, again);
      barrier_expect_bytes(&s.out_full, 2 * kTileBytes + kRecordElements * sizeof(bf16));
      tensor_load(s.d_o, &p.v, &s.out_full, 0, at.row, 0, at.value_head, once);
    }
    __syncwarp();
    load_w(s.w, p.tiles + value * kRecordElements, &s.out_full, lane);
    if (lane != 0) return;
    barrier_wait(&s.states_empty, again);
    barrier_expect_bytes(&s.states_full, 4 * kTileBytes);
    bulk_load(s.states, p.states + value * 4 * kTileElements, 4 * kTileBytes, &s.states_full, once);
    barrier_wait(&s.e_empty, again);
    barrier_expect_bytes(&s.e_full, 2 * kTileBytes);
    bulk_load(s.e, p.e + value * 2 * kTileElements, 2 * kTileBytes, &s.e_full, once);
    if (at.chunk > 0) {
      const int64_t next = value - p.heads_v;
      bulk_prefetch(p.states + next * 4 * kTileElements, 4 * kTileBytes);
      bulk_prefetch(p.e + next * 2 * kTileElements, 2 * kTileBytes);
      tensor_prefetch(&p.v, 0, at.row - kChunkTokens, 0, at.value_head);
    }
  });
}

__device__ __forceinline__ void await_counter(const int* counter, int at_least) {
  for (SpinLimit limit; flag_acquire(counter) < at_least; limit.turn(counter)) __nanosleep(64);
}

// ---- Warp 1: d_v out
__device__ __forceinline__ void write_d_v(const WalkParams& p, BackwardShared& s) {
  const int lane = threadIdx.x % 32;
  for_chunks(p, [&](const ChunkAt& at) {
    barrier_wait(&s.solved, at.turn & 1);
    for (int half = 0; half < 2; ++half) {
      write_rows(p, s.d_v[half], at.row, at.tokens, at.value_head, half, lane);
    }
    __syncwarp();
    barrier_arrive(&s.d_v_empty);
  });
}

// ---- Warp 2: dq and dk out, in the order of the group's blocks
// How many sums block `sub` of this lane group has written; the next block waits for it.
__device__ __forceinline__ int* rows_counter(const BackwardParams& p, int sub) {
  return p.row_counters + blockIdx.x / p.walk.group * (p.walk.group - 1) + sub;
}

// The first `tokens` rows of s.rows to, or (`add`) in addition to, rows from `row` on.
__device__ __forceinline__ void write_short_rows(const cuda::ElementView& to,
                                                 const BackwardShared& s, const ChunkAt& at,
                                                 bool add, int lane) {
  uint16_t* rows = to.data + at.row * to.token + at.key_head * to.head;
#pragma unroll 1
  for (int i = lane; i < at.tokens * 16; i += 32) {
    const int row = i / 16, piece = i % 16;
    uint4 x = *reinterpret_cast<const uint4*>(reinterpret_cast<const uint8_t*>(s.rows[piece / 8]) +
                                              row * 128 + (((piece % 8) ^ (row % 8)) * 16));
    auto* out = reinterpret_cast<uint4*>(rows + row * to.token + piece * 8);
    if (add) {
      const uint4 y = __ldcg(out);
      const auto sum = [](uint32_t a, uint32_t b) {
        return pack_bf16(cuda::bf16_low(a) + cuda::bf16_low(b),
                         cuda::bf16_high(a) + cuda::bf16_high(b));
      };
      x = {sum(x.x, y.x), sum(x.y, y.y), sum(x.z, y.z), sum(x.w, y.w)};
    }
    __stcg(out, x);
  }
}

__device__ __forceinline__ void write_sums(const BackwardParams& p, BackwardShared& s) {
  const int lane = threadIdx.x % 32, sub = blockIdx.x % p.walk.group;
  const bool last = sub + 1 == p.walk.group;
  for_chunks(p.walk, [&](const ChunkAt& at) {
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const int number = 2 * at.turn + which + 1;
      const CUtensorMap* map = which == 0 ? &p.d_q_map : &p.d_k_map;
      const bool is_short = at.tokens < kChunkTokens;
      barrier_wait(&s.rows_full, which);
      if (lane == 0) {
        if (sub > 0) {
          await_counter(rows_counter(p, sub - 1), number);
          fence_global_copies();
        }
        if (!is_short && sub == 0) tensor_store(map, s.rows, 0, at.row, 0, at.key_head);
        if (!is_short && sub > 0) tensor_add(map, s.rows, 0, at.row, 0, at.key_head);
        if (!is_short) bulk_store_wait();
      }
      __syncwarp();
      if (is_short) {
        write_short_rows(which == 0 ? p.d_q : p.d_k, s, at, sub > 0, lane);
        __threadfence();
        __syncwarp();
      }
      barrier_arrive(&s.rows_empty);
      if (!last && lane == 0) {
        bulk_store_complete();
        flag_release(rows_counter(p, sub), number);
      }
    }
  });
}

// ---- Warp 3: dg and dbeta
__device__ __forceinline__ void write_scalars(const BackwardParams& p, BackwardShared& s) {
  const int lane = threadIdx.x % 32;
  for_chunks(p.walk, [&](const ChunkAt& at) {
    const uint32_t parity = at.turn & 1;
    barrier_wait(&s.dots_full, parity);
    barrier_wait(&s.sums_full, parity);
    float pairs[2], reads[2], writes[2], d_beta[2], beta[2], through = 0.0f;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int t = 2 * lane + x;
      float columns = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) columns += s.pair_columns[0][w][t] + s.pair_columns[1][w][t];
      pairs[x] = s.pair_rows[0][t] + s.pair_rows[1][t] - columns;
      reads[x] = s.row_dots[0][t] + s.row_dots[1][t];
      d_beta[x] = writes[x] = 0.0f;
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        d_beta[x] += s.value_dots[0][w][t];
        writes[x] += s.value_dots[1][w][t];
      }
      const float4 factors = s.factors.inner[lane];
      beta[x] = x ? factors.w : factors.z;
      writes[x] *= beta[x] * (x ? factors.y : factors.x);
    }
#pragma unroll
    for (int w = 0; w < 8; ++w) through += s.through[w];
    barrier_arrive(&s.sums_empty);

    cuda::sum_from(pairs, lane);
    cuda::sum_from(reads, lane);
    cuda::sum_before(writes, lane);
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int t = 2 * lane + x;
      if (t >= at.tokens) continue;
      const int64_t row = at.row + t;
      cuda::store_scalar(p.d_beta, row, at.value_head,
                         d_beta[x] * cuda::beta_slope(p.activation, beta[x]));
      const float d_log = (t > 0 ? pairs[x] : 0.0f) + reads[x] + writes[x] + through;
      const cuda::Gate gate = cuda::activate_gate(
          p.activation, cuda::load_scalar(p.g, row, at.value_head), at.value_head);
      const float d_raw = d_log * gate.slope;
      cuda::store_scalar(p.d_g, row, at.value_head, d_raw);
      sum.x += d_log * gate.log_decay;
      sum.y += d_raw;
    }
    if (p.sums == nullptr) return;
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, bit);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, bit);
    }
    if (lane == 0) p.sums[at.record * p.walk.heads_v + at.value_head] = sum;
  });
}

// ---- Squares: P, dP, N
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
    const float first = quad_sum(rows[0]), second = quad_sum(rows[1]);
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

// ---- Warpgroups 1 and 2: dS
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

// Of a 16 x 16 product x y^T the diagonal: x 16 rows as 8 k steps of fragments, put(kk, a) gives
// one; y rows [row, row + 16) of two tiles [64 rows][64]. Thread g * 4 + g / 2 has entries g, g
// + 8.
template <typename Put>
__device__ __forceinline__ float2 diagonal_products(Put&& put, uint32_t y, int row, int lane) {
  float c[2][4] = {};  // [half of the rows]
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    uint32_t a[4], b[4];
    ldmatrix_x4(b, tile_address(y + (kk / 4) * kTileBytes, row + lane % 16,
                                16 * (kk % 4) + 8 * (lane / 16)));
    put(kk, a);
    mma_bf16(c[0], a, b[0], b[2]);
    mma_bf16(c[1], a, b[1], b[3]);
  }
  const int odd = lane / 4 % 2;
  return {odd ? c[0][1] : c[0][0], odd ? c[1][3] : c[1][2]};
}
// Whether that thread is this one.
__device__ __forceinline__ bool has_diagonal(int lane) { return lane % 4 == lane / 8; }

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

__device__ __forceinline__ void run_state(const WalkParams& p, BackwardShared& s, int half) {
  const Walk walk(p);
  const StateLane own(half);
  GradientSteps steps{s, own, 4 * half + __shfl_sync(0xffffffffu, own.thread / 32, 0)};
  const GradientLane squares(own.thread, __shfl_sync(0xffffffffu, own.thread / 32, 0));
  int turn = 0;
  float state[64];
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    enter_state(state, p, *piece, walk.sub, false, half, own.thread);
    int tokens = (piece->tokens - 1) % kChunkTokens + 1;  // of the first chunk walked
    for (int left = piece->chunks; left > 0; --left, ++turn) {
      const int stage = turn & 1;
      steps.parity = turn & 1;
      barrier_wait(&s.keys_full[stage], (turn >> 1) & 1);
      if (half == 0) make_p(s, {.turn = turn, .tokens = tokens}, squares.again());
      if (tokens < kChunkTokens) barrier_wait(&s.p_ready, steps.parity);  // its rows are cleared
      tokens = kChunkTokens;
      const ReverseTiles tiles{s.k[stage], s.q[stage], s.d_o[half], s.w, s.p, s.factors};
      steps.decay = exp2_approx(s.vectors[stage].gate[kChunkTokens - 1]);
      reverse_step(state, steps.decay, tiles, own, steps);
      if (half == 0) {
        barrier_arrive(&s.keys_empty[stage]);
      } else {
        make_n(s, turn, squares.again());
      }
    }
    leave_state(state, p, *piece, walk.sub, half, own.thread);
  }
}

// ---- Warpgroup 3: gradients
// Scales rows of a product with a state by `factor`, and leaves their dots with the same rows of
// `tiles`.
__device__ __forceinline__ void finish_state_term(float (&acc)[64], float factor0, float factor1,
                                                  const bf16 (&tiles)[2][kTileElements], float* out,
                                                  const GradientLane& own) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] *= (i / 2) % 2 ? factor1 : factor0;
  const auto put = [&](int kk, uint32_t(&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = pack_bf16(acc[8 * kk + 2 * i], acc[8 * kk + 2 * i + 1]);
  };
  const float2 dots =
      diagonal_products(put, forget_value(smem_address(tiles)), 16 * own.warp, own.lane);
  if (has_diagonal(own.lane)) {
    out[own.row] = dots.x;
    out[own.row + 8] = dots.y;
  }
}

// acc = a b: a two tiles [64 tokens][64 of V], b a state image. Issued, not committed.
__device__ __forceinline__ void start_with_state(float (&acc)[64],
                                                 const bf16 (&a)[2][kTileElements],
                                                 const bf16 (&b)[2][2][kTileElements]) {
  const uint32_t rows = forget_value(smem_address(a)), state = forget_value(smem_address(b));
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    wgmma_ss<0, 1>(acc, descriptor(rows + (kk / 4) * kTileBytes + (kk % 4) * 32),
                   descriptor(state + (kk / 4) * 2 * kTileBytes + (kk % 4) * 2048, kTileBytes),
                   kk > 0);
  }
}

// acc += a b or a^T b: a a square tile, b two tiles [64 tokens][64 of K]. Issued, not committed.
template <int kTransA>
__device__ __forceinline__ void start_with_square(float (&acc)[64], const bf16 (&a)[kTileElements],
                                                  const bf16 (&b)[2][kTileElements]) {
  const uint32_t square = forget_value(smem_address(a)), rows = forget_value(smem_address(b));
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    wgmma_ss<kTransA, 1>(acc, descriptor(square + kk * (kTransA ? 2048 : 32), kTileBytes),
                         descriptor(rows + kk * 2048, kTileBytes), true);
  }
}

// acc += (f E) dS^T with a factor for each row. Issued and committed.
__device__ __forceinline__ void start_exit_term(float (&acc)[64], BackwardShared& s,
                                                const float (&factor)[2], const GradientLane& own) {
  uint32_t a[8][4];
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    ldmatrix_x4(a[kk], tile_address(smem_address(s.e[kk / 4]), 16 * own.warp + own.lane % 16,
                                    16 * (kk % 4) + 8 * (own.lane / 16)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_bf16(a[kk][i]);
      a[kk][i] = pack_bf16(factor[i % 2] * x.x, factor[i % 2] * x.y);
    }
  }
  const uint32_t state = forget_value(smem_address(s.dstates));
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    wgmma_rs<1>(acc, a[kk][0], a[kk][1], a[kk][2], a[kk][3],
                descriptor(state + (kk / 4) * 2 * kTileBytes + (kk % 4) * 2048, kTileBytes), true);
  }
  wgmma_commit();
}

// Rows of this head's part of dq or dk, for warp 2; without what lies along the raw rows when there
// is a norm, `by` r = 1 / |x|. That is linear, so it need not wait for the sum.
__device__ __forceinline__ void put_gradient_rows(float (&acc)[64],
                                                  const bf16 (&tiles)[2][kTileElements],
                                                  const float* r, float by, bool l2norm,
                                                  BackwardShared& s, uint32_t parity,
                                                  const GradientLane& own) {
  const int row = 16 * own.warp + own.lane % 16, column = 8 * (own.lane / 16);
  if (l2norm) {
    float dots[2] = {0.0f, 0.0f};
#pragma unroll
    for (int kk = 0; kk < 8; ++kk) {
      uint32_t x[4];
      ldmatrix_x4(x, tile_address(smem_address(tiles[kk / 4]), row, 16 * (kk % 4) + column));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_bf16(x[i]);
        dots[i % 2] += pair.x * acc[8 * kk + 2 * i] + pair.y * acc[8 * kk + 2 * i + 1];
      }
    }
    const float r0 = r[own.row] * by, r1 = r[own.row + 8] * by;
    const float along[2] = {-r0 * r0 * quad_sum(dots[0]), -r1 * r1 * quad_sum(dots[1])};
#pragma unroll
    for (int kk = 0; kk < 8; ++kk) {
      uint32_t x[4];
      ldmatrix_x4(x, tile_address(smem_address(tiles[kk / 4]), row, 16 * (kk % 4) + column));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_bf16(x[i]);
        acc[8 * kk + 2 * i] += along[i % 2] * pair.x;
        acc[8 * kk + 2 * i + 1] += along[i % 2] * pair.y;
      }
    }
  }
  barrier_wait(&s.rows_empty, parity);
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    const float* x = &acc[8 * kk];
    stmatrix_x4(tile_address(smem_address(s.rows[kk / 4]), row, 16 * (kk % 4) + column),
                pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                pack_bf16(x[6], x[7]));
  }
  fence_async_proxy();
  barrier_arrive(&s.rows_full);
}

__device__ __forceinline__ void run_gradients(const BackwardParams& p, BackwardShared& s) {
  const GradientLane own(threadIdx.x % 128, __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0));
  for_chunks(p.walk, [&](const ChunkAt& at) {
    const int stage = at.turn & 1;
    const uint32_t parity = at.turn & 1;
    const auto& k = s.k[stage];
    const auto& q = s.q[stage];
    const ReverseVectors& vectors = s.vectors[stage];
    barrier_wait(&s.keys_full[stage], (at.turn >> 1) & 1);
    barrier_wait(&s.p_ready, parity);  // factors; short rows are zero
    barrier_wait(&s.out_full, parity);
    barrier_wait(&s.e_full, parity);
    {
      float qk[32], out_e[32];
      start_qk(qk, q, k);
      start_qk(out_e, s.d_o, s.e);
      wgmma_wait<0>();
      settle(qk);
      settle(out_e);
      PairSums sums;
      write_dp(out_e, qk, s, vectors, sums, own.again());
      sums.store(s, 0, own.again());
    }
    fence_async_proxy();
    named_barrier(3, 128);

    {
      float acc[64];
      barrier_wait(&s.states_full, parity);
      wgmma_fence();
      start_with_state(acc, s.d_o, s.states);
      wgmma_commit();
      wgmma_wait<0>();
      settle(acc);
      barrier_arrive(&s.out_empty);
      {
        const auto again = own.again();
        const float* d = reinterpret_cast<const float*>(&s.factors.outer[again.row / 2]);
        finish_state_term(acc, d[again.row % 2], d[again.row % 2 + 16], q, s.row_dots[0], again);
      }
      wgmma_fence();
      start_with_square<0>(acc, s.dp, k);
      wgmma_commit();
      wgmma_wait<0>();
      settle(acc);
      put_gradient_rows(acc, q, vectors.rq, p.inverse_scale, p.l2norm, s, 1, own.again());
    }

    barrier_wait(&s.solved, parity);
    {
      float acc[64];
      wgmma_fence();
      start_with_state(acc, s.d_v, s.states);
      wgmma_commit();
      wgmma_wait<0>();
      settle(acc);
      barrier_arrive(&s.states_empty);
      {
        const auto again = own.again();
        finish_state_term(acc, -exp2_approx(vectors.gate[again.row]) * vectors.rk[again.row],
                          -exp2_approx(vectors.gate[again.row + 8]) * vectors.rk[again.row + 8], k,
                          s.row_dots[1], again);
      }
      float c0, c1;
      {
        const auto again = own.again();
        const float* c =
            reinterpret_cast<const float*>(&s.factors.inner[again.row / 2]) + again.row % 2;
        c0 = c[0] * c[2], c1 = c[16] * c[18];
      }
      barrier_arrive(&s.sums_full);
      start_exit_term(acc, s, {c0, c1}, own.again());
      barrier_wait(&s.n_ready, parity);
      wgmma_fence();
      start_with_square<1>(acc, s.dp, q);
      start_with_square<0>(acc, s.p, k);
      wgmma_commit();
      wgmma_wait<1>();
      barrier_arrive(&s.e_empty);
      barrier_arrive(&s.solution_empty);
      wgmma_wait<0>();
      settle(acc);
      barrier_arrive(&s.squares_empty);
      put_gradient_rows(acc, k, vectors.rk, 1.0f, p.l2norm, s, 0, own.again());
    }
    barrier_arrive(&s.keys_empty[stage]);
  });
}

__device__ __forceinline__ void backward_block(const BackwardParams& p, BackwardShared& s) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  init_barriers(s);
  clear_tile(s.w);
  fence_async_proxy();
  __syncthreads();
  if (warpgroup == 0) {
    registers_decrease<40>();
    if (warp == 0) {
      fill_chunks(p.walk, s);
    } else if (warp == 1) {
      write_d_v(p.walk, s);
    } else if (warp == 2) {
      write_sums(p, s);
    } else {
      write_scalars(p, s);
    }
  } else if (warpgroup == 3) {
    registers_increase<136>();
    run_gradients(p, s);
  } else {
    registers_increase<168>();
    run_state(p.walk, s, warpgroup - 1);
  }
}

}  // namespace gdn::sm90
