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
// Warpgroups: 0 copies and sums (warp 0 fills, 1 writes d_v, 2 takes partial sums, 3 writes dg and
// dbeta), 1 and 2 state (64 rows of V each), 3 gradients. 512 threads, one block per SM; registers
// 40 + 2 * 168 + 136 = 512 = 65,536 / 128.
//
// dq and dk are sums over the G value heads of a group, whose blocks walk the same pieces: block
// `sub` adds the partial sums of block sub - 1 (bf16, through a ring in L2) to its own and hands
// them on; the last one finishes the rows. So the order of the sum is fixed, and no block waits for
// a later one but to reuse the ring.
//
// Buffers are single but k and q, each loaded as soon as its last reader of the chunk before is
// done: d_o, W after the state's update and dO S^T, S after dY S^T, E after E dS^T. The next
// chunk's are prefetched to L2. Shared, KiB: k and q 2 x 32, S 32, dS 32, E, d_o, d_v, rows out 16
// each, W, P (then N), dP 8 each, sums and vectors 9.4 = 225.4.
#pragma once

#include "backend/cuda/common/scalars.cuh"
#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/common/tile.cuh"
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
  bf16 rows[2][kTileElements];  // [half of K]: finished rows of dq, dk
  bf16 w[kTileElements];        // [i / 8][j / 8][8][8], the blocks j > i stay zero
  bf16 p[kTileElements];        // [i][j]: P, then N + N^T
  bf16 dp[kTileElements];       // [i][j], the blocks j > i stay zero
  ReverseVectors vectors[2];
  ReverseFactors factors;
  float value_dots[2][8][kChunkTokens];  // per state warp: U . E, E . (dS^T k)
  float row_dots[2][kChunkTokens];       // q . dq and k . dk of their terms with S
  float pair_rows[2][kChunkTokens];      // of dP o Q K^T and N o K K^T without diagonals
  float pair_columns[2][4][kChunkTokens];
  float through[8];  // <gam_C dS, S>, per state warp
  uint64_t keys_full[2], keys_empty[2];
  uint64_t out_full, out_empty;  // d_o, W
  uint64_t e_full, e_empty;
  uint64_t states_full, states_empty;
  uint64_t p_ready;         // P and the factors; short rows are zero
  uint64_t solved;          // d_v and dS are written
  uint64_t solution_empty;  // and may be written again: gradients
  uint64_t d_v_empty;       // and: copy
  uint64_t dots_full;       // value_dots, through
  uint64_t sums_full;       // row_dots, pair_*
  uint64_t sums_empty;      // all of them
  uint64_t partial_full, partial_taken, partial_space, partial_made;
};
static_assert(sizeof(BackwardShared) <= 227 * 1024);

__device__ __forceinline__ void init_barriers(BackwardShared& s) {
  if (threadIdx.x != 0) return;
  constexpr uint32_t kState = 8, kGradient = 4;  // warps
  for (int i = 0; i < 2; ++i) {
    barrier_init(&s.keys_full[i], 1);
    barrier_init(&s.keys_empty[i], kState + kGradient);
  }
  for (uint64_t* full : {&s.out_full, &s.e_full, &s.states_full}) barrier_init(full, 1);
  for (uint64_t* empty : {&s.out_empty, &s.e_empty, &s.states_empty}) {
    barrier_init(empty, kState + kGradient);
  }
  barrier_init(&s.p_ready, kGradient);
  barrier_init(&s.solved, kState);
  barrier_init(&s.solution_empty, kGradient);
  barrier_init(&s.d_v_empty, 1);
  barrier_init(&s.dots_full, kState);
  barrier_init(&s.sums_full, kGradient);
  barrier_init(&s.sums_empty, 1);
  barrier_init(&s.partial_full, 1);
  barrier_init(&s.partial_taken, kGradient);
  barrier_init(&s.partial_space, 1);
  barrier_init(&s.partial_made, kGradient);
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

// ---- Partial sums of dq and dk between the blocks of a group
// Edge `edge` joins block `edge` of a lane group to the next: a ring of kPartialRing chunks and two
// counters, how many were made and how many taken.
__device__ __forceinline__ int* partial_counters(const BackwardParams& p, int edge) {
  const int lane_group = blockIdx.x / p.walk.group;
  return p.partial_counters + 2 * (lane_group * (p.walk.group - 1) + edge);
}
// Sum `which` (dq, dk) of a chunk in accumulator order: [8][128 threads] uint4 of 8 elements.
__device__ __forceinline__ uint4* partial_sums(const BackwardParams& p, int edge, int turn,
                                               int which) {
  const int lane_group = blockIdx.x / p.walk.group;
  const int64_t ring = int64_t{lane_group} * (p.walk.group - 1) + edge;
  return p.partials + ((ring * kPartialRing + turn % kPartialRing) * 2 + which) * 1024;
}

__device__ __forceinline__ void await_counter(const int* counter, int at_least) {
  for (SpinLimit limit; flag_acquire(counter) < at_least; limit.turn(counter)) __nanosleep(64);
}

// ---- Warp 1: d_v out, and what this block hands on
__device__ __forceinline__ void write_d_v(const BackwardParams& p, BackwardShared& s) {
  const int lane = threadIdx.x % 32, sub = blockIdx.x % p.walk.group;
  const bool gives = sub + 1 < p.walk.group;
  for_chunks(p.walk, [&](const ChunkAt& at) {
    const uint32_t parity = at.turn & 1;
    if (gives && lane == 0) {
      await_counter(partial_counters(p, sub) + 1, at.turn + 1 - kPartialRing);
      barrier_arrive(&s.partial_space);
    }
    __syncwarp();
    barrier_wait(&s.solved, parity);
    for (int half = 0; half < 2; ++half) {
      write_rows(p.walk, s.d_v[half], at.row, at.tokens, at.value_head, half, lane);
    }
    if (lane != 0) return;
    barrier_arrive(&s.d_v_empty);
    if (gives) {
      barrier_wait(&s.partial_made, parity);
      flag_release(partial_counters(p, sub), at.turn + 1);
    }
  });
}

// ---- Warp 2: what this block is handed
__device__ __forceinline__ void take_partials(const BackwardParams& p, BackwardShared& s) {
  const int sub = blockIdx.x % p.walk.group;
  if (sub == 0 || threadIdx.x % 32 != 0) return;
  int* counters = partial_counters(p, sub - 1);
  for_chunks(p.walk, [&](const ChunkAt& at) {
    await_counter(counters, at.turn + 1);
    barrier_arrive(&s.partial_full);
    barrier_wait(&s.partial_taken, at.turn & 1);
    flag_release(counters + 1, at.turn + 1);
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
      pairs[x] = s.pair_rows[0][t] + s.pair_rows[1][t];
#pragma unroll
      for (int w = 0; w < 4; ++w) pairs[x] -= s.pair_columns[0][w][t] + s.pair_columns[1][w][t];
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
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.sums_empty);

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

// ---- Warpgroups 1 and 2: dS
// x^T . y^T per token, over the 16 rows of V of each warp: y in accumulator order, x fragments.
__device__ __forceinline__ void put_value_dots(const float (&y)[32], const bf16* tile, float* out,
                                               const StateLane& own) {
  uint32_t x[16];
  load_transposed(x, tile, own);
  float products[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 x0 = unpack_bf16(x[2 * j]), x1 = unpack_bf16(x[2 * j + 1]);
    products[2 * j] = x0.x * y[4 * j] + x1.x * y[4 * j + 2];
    products[2 * j + 1] = x0.y * y[4 * j + 1] + x1.y * y[4 * j + 3];
  }
  int token;
  const float2 sums = sum_rows(products, own.lane, token);
  *reinterpret_cast<float2*>(out + token) = sums;
}

struct GradientSteps {
  BackwardShared& s;
  const StateLane& own;
  int warp;  // of the eight
  uint32_t parity;

  __device__ __forceinline__ void entered(const uint32_t (&a)[32]) {
    barrier_wait(&s.solution_empty, parity ^ 1);
    put_state(a, s.dstates[own.half], own);
  }
  __device__ __forceinline__ void ready(const float (&d)[32]) {
    barrier_wait(&s.p_ready, parity);
    barrier_wait(&s.out_full, parity);
    barrier_wait(&s.e_full, parity);
    put_value_dots(d, s.e[own.half], s.value_dots[1][warp], own);
  }
  __device__ __forceinline__ void decayed(const float (&state)[64]) {
    barrier_wait(&s.states_full, parity);
    float sum = 0.0f;
    const int row = own.thread / 32 * 16 + own.lane / 4;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const uint32_t tile = smem_address(s.states[own.half][n / 8]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t x;
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(x)
                     : "r"(tile_address(tile, row + 8 * r, 8 * (n % 8)) + 4 * own.pair));
        const float2 entry = unpack_bf16(x);
        sum += entry.x * state[4 * n + 2 * r] + entry.y * state[4 * n + 2 * r + 1];
      }
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    if (own.lane == 0) {
      s.through[warp] = sum;
      barrier_arrive(&s.states_empty);
    }
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
    __syncwarp();
    if (own.lane == 0) {
      barrier_arrive(&s.solved);
      barrier_arrive(&s.out_empty);
    }
    put_value_dots(u, s.e[own.half], s.value_dots[0][warp], own);
    __syncwarp();
    if (own.lane == 0) {
      barrier_arrive(&s.dots_full);
      barrier_arrive(&s.e_empty);
    }
  }
};

__device__ __forceinline__ void run_state(const WalkParams& p, BackwardShared& s, int half) {
  const Walk walk(p);
  const StateLane own(half);
  GradientSteps steps{s, own, 4 * half + __shfl_sync(0xffffffffu, own.thread / 32, 0), 0};
  int turn = 0;
  float state[64];
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    enter_state(state, p, *piece, walk.sub, false, half, own.thread);
    bool is_short = piece->tokens % kChunkTokens != 0;  // the first chunk walked
    for (int left = piece->chunks; left > 0; --left, ++turn) {
      const int stage = turn & 1;
      steps.parity = turn & 1;
      barrier_wait(&s.keys_full[stage], (turn >> 1) & 1);
      if (is_short) barrier_wait(&s.p_ready, steps.parity);  // its rows are cleared
      is_short = false;
      const ReverseTiles tiles{s.k[stage], s.q[stage], s.d_o[half], s.w, s.p, s.factors};
      reverse_step(state, exp2_approx(s.vectors[stage].gate[kChunkTokens - 1]), tiles, own, steps);
      if (own.lane == 0) barrier_arrive(&s.keys_empty[stage]);
    }
    leave_state(state, p, *piece, walk.sub, half, own.thread);
  }
}

// ---- Warpgroup 3: gradients
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

// Bf16 pair n of row `row` + 8 r of two tiles [64 tokens][64]: columns 8 n + 2 (lane % 4), + 1.
__device__ __forceinline__ float2 row_pair(const bf16 (&tiles)[2][kTileElements], int n, int r,
                                           const GradientLane& own) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];"
               : "=r"(x)
               : "r"(tile_address(smem_address(tiles[n / 8]), own.row + 8 * r, 8 * (n % 8)) +
                     4 * (own.lane % 4)));
  return unpack_bf16(x);
}

// Row dots of an accumulator [64 tokens][128] with rows of two tiles, for rows `row` + 8 r.
__device__ __forceinline__ void dot_rows(float (&dots)[2], const float (&acc)[64],
                                         const bf16 (&tiles)[2][kTileElements],
                                         const GradientLane& own) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 x = row_pair(tiles, n, r, own);
      sum += x.x * acc[4 * n + 2 * r] + x.y * acc[4 * n + 2 * r + 1];
    }
    dots[r] = quad_sum(sum);
  }
}

// Scales rows of a product with a state by `factor`, and leaves their dots with `tiles`.
__device__ __forceinline__ void finish_state_term(float (&acc)[64], const float (&factor)[2],
                                                  const bf16 (&tiles)[2][kTileElements], float* out,
                                                  const GradientLane& own) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] *= factor[(i / 2) % 2];
  float dots[2];
  dot_rows(dots, acc, tiles, own);
  if (own.lane % 4 == 0) {
    out[own.row] = dots[0];
    out[own.row + 8] = dots[1];
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

// Sums of pair products over rows and columns, to shared memory.
struct PairSums {
  float rows[2] = {0.0f, 0.0f};
  float columns[16] = {};

  // Entry i of a thread's 8 of block j.
  __device__ __forceinline__ void add(int j, int i, float pair) {
    rows[(i / 2) % 2] += pair;
    columns[4 * j + 2 * (i / 4) + i % 2] += pair;
  }
  __device__ __forceinline__ void store(float* to_rows, float (&to_columns)[4][kChunkTokens],
                                        const GradientLane& own) {
    const float first = quad_sum(rows[0]), second = quad_sum(rows[1]);
    if (own.lane % 4 == 0) {
      to_rows[own.row] = first;
      to_rows[own.row + 8] = second;
    }
    int column;
    const float2 sums = sum_rows(columns, own.lane, column);
    *reinterpret_cast<float2*>(&to_columns[own.warp][column]) = sums;
  }
};

// What block (warp, j) of a pair matrix has below its diagonal: entry i of a thread.
__device__ __forceinline__ bool strictly_below(int j, int i, const GradientLane& own) {
  return j < own.warp ||
         16 * j + 8 * (i / 4) + 2 * (own.lane % 4) + i % 2 < own.row + 8 * ((i / 2) % 2);
}

// dP from dO E^T, and its pair sums with Q K^T.
__device__ __forceinline__ void write_dp(const float (&out_e)[32], const float (&qk)[32],
                                         BackwardShared& s, const ReverseVectors& vectors,
                                         const GradientLane& own) {
  const Decays decays{vectors.gate, vectors.rk, s.factors.column};
  const float q0 = vectors.rq[own.row], q1 = vectors.rq[own.row + 8];
  PairSums sums;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > own.warp) continue;
    float x[8];
    block_decays(x, decays, j, own.warp, own.lane, q0, q1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = 16 * j + 8 * (i / 4) + 2 * (own.lane % 4);
      const float2 beta = *reinterpret_cast<const float2*>(&vectors.beta[column]);
      x[i] *= (i % 2 ? beta.y : beta.x) * out_e[8 * j + i];
      if (strictly_below(j, i, own)) sums.add(j, i, x[i] * qk[8 * j + i]);
    }
    put_block(s.dp, x, j, own.warp, own.lane);
  }
  sums.store(s.pair_rows[0], s.pair_columns[0], own);
}

// N + N^T from dY E^T, and the pair sums of N with K K^T.
__device__ __forceinline__ void write_n(const float (&dy_e)[32], const float (&kk)[32],
                                        BackwardShared& s, const ReverseVectors& vectors,
                                        const GradientLane& own) {
  const Decays decays{vectors.gate, vectors.rk, s.factors.column};
  const float k0 = -vectors.rk[own.row], k1 = -vectors.rk[own.row + 8];
  const uint32_t tile = smem_address(s.p);
  PairSums sums;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > own.warp) continue;
    float x[8];
    block_decays(x, decays, j, own.warp, own.lane, k0, k1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = 16 * j + 8 * (i / 4) + 2 * (own.lane % 4);
      const float2 beta = *reinterpret_cast<const float2*>(&vectors.beta[column]);
      const bool below = strictly_below(j, i, own);
      x[i] = below ? x[i] * (i % 2 ? beta.y : beta.x) * dy_e[8 * j + i] : 0.0f;
      if (below) sums.add(j, i, x[i] * kk[8 * j + i]);
    }
    // 8 x 8 matrices (row half, column half): 0 (0, 0), 1 (1, 0), 2 (0, 1), 3 (1, 1).
    uint32_t m[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                     pack_bf16(x[6], x[7])};
    if (j == own.warp) {  // each entry has one of N and N^T at most, so bits may be joined
      m[0] |= cuda::movmatrix_trans(m[0]);
      m[2] = cuda::movmatrix_trans(m[1]);
      m[3] |= cuda::movmatrix_trans(m[3]);
    } else {
      // Block (j, warp) is the transpose: matrix (c, r) is that of (r, c).
      stmatrix_x4_trans(tile_address(tile, 16 * j + own.lane % 8 + 8 * (own.lane / 16),
                                     16 * own.warp + 8 * ((own.lane / 8) % 2)),
                        m[0], m[1], m[2], m[3]);
    }
    stmatrix_x4(tile_address(tile, 16 * own.warp + own.lane % 16, 16 * j + 8 * (own.lane / 16)),
                m[0], m[1], m[2], m[3]);
  }
  sums.store(s.pair_rows[1], s.pair_columns[1], own);
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

// Adds what the block before has summed up: its loads are issued by fetch, ahead of use.
struct Partial {
  uint4 x[8];

  // null: 0
  __device__ __forceinline__ void fetch(const uint4* from, int thread) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = from != nullptr ? __ldcg(from + i * 128 + thread) : uint4{0, 0, 0, 0};
    }
  }
  __device__ __forceinline__ void add_to(float (&acc)[64]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 pair = unpack_bf16(words[w]);
        acc[8 * i + 2 * w] += pair.x;
        acc[8 * i + 2 * w + 1] += pair.y;
      }
    }
  }
  __device__ static __forceinline__ void give(uint4* to, const float (&acc)[64], int thread) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* at = &acc[8 * i];
      __stcg(to + i * 128 + thread, {pack_bf16(at[0], at[1]), pack_bf16(at[2], at[3]),
                                     pack_bf16(at[4], at[5]), pack_bf16(at[6], at[7])});
    }
  }
};

// The rows of dq or dk: without what lies along the rows themselves when there is a norm, r 1 /
// |x|.
__device__ __forceinline__ void write_gradient_rows(const cuda::ElementView& to, float (&acc)[64],
                                                    const bf16 (&tiles)[2][kTileElements],
                                                    const float (&r)[2], bool l2norm,
                                                    BackwardShared& s, const ChunkAt& at,
                                                    const GradientLane& own) {
  if (l2norm) {
    float dots[2];
    dot_rows(dots, acc, tiles, own);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float along = r[half] * r[half] * dots[half];
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const float2 x = row_pair(tiles, n, half, own);
        acc[4 * n + 2 * half] -= along * x.x;
        acc[4 * n + 2 * half + 1] -= along * x.y;
      }
    }
  }
  named_barrier(3, 128);  // the rows before these have been read
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    const float* x = &acc[8 * kk];
    stmatrix_x4(tile_address(smem_address(s.rows[kk / 4]), 16 * own.warp + own.lane % 16,
                             16 * (kk % 4) + 8 * (own.lane / 16)),
                pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                pack_bf16(x[6], x[7]));
  }
  named_barrier(3, 128);
  uint16_t* rows = to.data + at.row * to.token + at.key_head * to.head;
#pragma unroll 2
  for (int i = own.thread; i < at.tokens * 16; i += 128) {
    const int row = i / 16, piece = i % 16;
    const auto* from = reinterpret_cast<const uint8_t*>(s.rows[piece / 8]) + row * 128 +
                       (((piece % 8) ^ (row % 8)) * 16);
    cuda::store_piece(rows + row * to.token + piece * 8, *reinterpret_cast<const uint4*>(from),
                      to.rows);
  }
}

__device__ __forceinline__ void run_gradients(const BackwardParams& p, BackwardShared& s) {
  const GradientLane own(threadIdx.x % 128, __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0));
  const int sub = blockIdx.x % p.walk.group;
  const bool takes = sub > 0, gives = sub + 1 < p.walk.group;
  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (own.again().lane == 0) barrier_arrive(barrier);
  };
  for_chunks(p.walk, [&](const ChunkAt& at) {
    const int stage = at.turn & 1;
    const uint32_t parity = at.turn & 1;
    const auto& k = s.k[stage];
    const auto& q = s.q[stage];
    const ReverseVectors& vectors = s.vectors[stage];
    barrier_wait(&s.keys_full[stage], (at.turn >> 1) & 1);
    if (at.tokens < kChunkTokens) {
      barrier_wait(&s.out_full, parity);
      clear_rows(s.k[stage][0], 2, at.tokens, own.thread);
      clear_rows(s.q[stage][0], 2, at.tokens, own.thread);
      clear_rows(s.d_o[0], 2, at.tokens, own.thread);
      fence_async_proxy();
      named_barrier(3, 128);
    }
    {
      float qk[32];
      start_qk(qk, q, k);
      barrier_wait(&s.sums_empty, parity ^ 1);  // the last factors, dots and sums have been read
      if (own.thread < kChunkTokens) write_factors(s.factors, vectors, own.thread);
      wgmma_wait<0>();
      settle(qk);
      named_barrier(3, 128);
      write_p(qk, s.p, vectors.rq, {vectors.gate, vectors.rk, s.factors.column}, own.warp,
              own.lane);
      fence_async_proxy();
      arrive(&s.p_ready);

      barrier_wait(&s.out_full, parity);
      barrier_wait(&s.e_full, parity);
      float out_e[32];
      start_qk(out_e, s.d_o, s.e);
      wgmma_wait<0>();
      settle(out_e);
      write_dp(out_e, qk, s, vectors, own.again());
    }
    fence_async_proxy();
    named_barrier(3, 128);

    {
      float acc[64];
      Partial partial;
      barrier_wait(&s.states_full, parity);
      wgmma_fence();
      start_with_state(acc, s.d_o, s.states);
      wgmma_commit();
      wgmma_wait<0>();
      settle(acc);
      arrive(&s.out_empty);
      {
        const float* d =
            reinterpret_cast<const float*>(&s.factors.outer[own.row / 2]) + own.row % 2;
        finish_state_term(acc, {d[0], d[16]}, q, s.row_dots[0], own.again());
      }
      wgmma_fence();
      start_with_square<0>(acc, s.dp, k);
      wgmma_commit();
      if (takes) barrier_wait(&s.partial_full, parity);
      partial.fetch(takes ? partial_sums(p, sub - 1, at.turn, 0) : nullptr, own.thread);
      wgmma_wait<0>();
      settle(acc);
      partial.add_to(acc);
      if (gives) {
        barrier_wait(&s.partial_space, parity);
        Partial::give(partial_sums(p, sub, at.turn, 0), acc, own.thread);
      } else {
        const float r[2] = {vectors.rq[own.row] * p.inverse_scale,
                            vectors.rq[own.row + 8] * p.inverse_scale};
        write_gradient_rows(p.d_q, acc, q, r, p.l2norm, s, at, own.again());
      }
    }

    barrier_wait(&s.solved, parity);
    {
      float dy_e[32], kk[32];
      start_qk(dy_e, s.d_v, s.e);
      start_qk(kk, k, k);
      wgmma_wait<0>();
      settle(dy_e);
      settle(kk);
      write_n(dy_e, kk, s, vectors, own.again());
    }
    fence_async_proxy();
    named_barrier(3, 128);

    {
      float acc[64];
      Partial partial;
      wgmma_fence();
      start_with_state(acc, s.d_v, s.states);
      wgmma_commit();
      wgmma_wait<0>();
      settle(acc);
      arrive(&s.states_empty);
      {
        const float f0 = -exp2_approx(vectors.gate[own.row]) * vectors.rk[own.row];
        const float f1 = -exp2_approx(vectors.gate[own.row + 8]) * vectors.rk[own.row + 8];
        finish_state_term(acc, {f0, f1}, k, s.row_dots[1], own.again());
        arrive(&s.sums_full);
        const float* c =
            reinterpret_cast<const float*>(&s.factors.inner[own.row / 2]) + own.row % 2;
        start_exit_term(acc, s, {c[0] * c[2], c[16] * c[18]}, own.again());
      }
      start_with_square<1>(acc, s.dp, q);
      start_with_square<0>(acc, s.p, k);
      wgmma_commit();
      partial.fetch(takes ? partial_sums(p, sub - 1, at.turn, 1) : nullptr, own.thread);
      wgmma_wait<1>();
      arrive(&s.e_empty);
      arrive(&s.solution_empty);
      wgmma_wait<0>();
      settle(acc);
      partial.add_to(acc);
      if (takes) arrive(&s.partial_taken);
      if (gives) {
        Partial::give(partial_sums(p, sub, at.turn, 1), acc, own.thread);
        arrive(&s.partial_made);
      } else {
        const float r[2] = {vectors.rk[own.row], vectors.rk[own.row + 8]};
        write_gradient_rows(p.d_k, acc, k, r, p.l2norm, s, at, own.again());
      }
    }
    arrive(&s.keys_empty[stage]);
  });
}

__device__ __forceinline__ void backward_block(const BackwardParams& p, BackwardShared& s) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  init_barriers(s);
  clear_tile(s.w);
  clear_tile(s.dp);
  fence_async_proxy();
  __syncthreads();
  if (warpgroup == 0) {
    registers_decrease<40>();
    if (warp == 0) {
      fill_chunks(p.walk, s);
    } else if (warp == 1) {
      write_d_v(p, s);
    } else if (warp == 2) {
      take_partials(p, s);
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
