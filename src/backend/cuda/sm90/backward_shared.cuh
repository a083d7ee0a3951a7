// The shared block of k_backward, its barriers, and the order of a block's chunks.
#pragma once

#include "backend/cuda/sm90/backward_params.h"
#include "backend/cuda/sm90/reverse.cuh"

namespace gdn::sm90 {

inline constexpr int kBackwardThreads = 640;

// Per-token numbers of a chunk: as copied in, and made from these.
struct BackwardVectors {
  float gate[kChunkTokens];
  float beta[kChunkTokens];
  float rq[kChunkTokens];
  float rk[kChunkTokens];
  float a[kChunkTokens];       // e^{G_t} / |k_t|
  float c[kChunkTokens];       // e^{G_C-G_t} beta_t / |k_t|
  float key[kChunkTokens];     // beta_t / |k_t|
  float column[kChunkTokens];  // and that times e^{G_end of its 16-block - G_t}
};

struct BackwardShared {
  bf16 k[2][2][kTileElements];        // [turn][half of K][64 tokens][64]; then rows of dk
  bf16 q[2][2][kTileElements];        // the next turn's: before it, rows of dq of the heads before
  bf16 states[2][2][kTileElements];   // [half of V][tile of K][64 of V][64 of K]: S
  bf16 dstates[2][2][kTileElements];  // dS
  bf16 v[2][kTileElements];           // [half of V][64 tokens][64]: V, then E
  bf16 c_e[2][kTileElements];         // c E
  bf16 d_o[2][kTileElements];         // then rows of dq: [half of K]
  bf16 d_v[2][kTileElements];         // rows f U
  bf16 w[kTileElements];              // [i / 8][j / 8][8][8], the blocks j > i stay zero
  bf16 dp[kTileElements];             // [i][j]; 16 x 16 blocks j > i stay zero
  bf16 n[kTileElements];              // N + N^T
  BackwardVectors vectors[2];
  float query_dots[2][kChunkTokens];    // per half of K: q . dq of dO S^T
  float row_dots[2][2][kChunkTokens];   // k . dk of dY S^T; and of E dS^T too
  float norm_dots[2][2][kChunkTokens];  // of all of dq, of dk
  float pair_rows[2][kChunkTokens];     // of dP o Q K^T without its diagonal, of N o K K^T
  float pair_columns[2][10][16];        // of 16 x 16 blocks (0, 0), (1, 0), (1, 1), (2, 0), ...
  float beta_dots[8][kChunkTokens];     // per state warp: E . f U
  float through[8][8];                  // per state warp: parts of gam_C <dS, S>
  Walk walk;

  uint64_t keys_full[2], keys_empty[2];  // k, vectors; empty: q too, rows of dk have left
  uint64_t before_full, before_read;     // rows of dq of the heads before
  uint64_t factors_full[2];              // what make_factors does; short rows are zero
  uint64_t values_full, values_empty;    // V, W; empty: E has been read
  uint64_t d_o_full, d_o_empty;          // full: d_o and q; empty: rows of dq have left
  uint64_t d_v_full, d_v_empty;
  uint64_t dstates_full, dstates_read;
  uint64_t states_ready, states_empty;
  uint64_t e_ready, c_e_empty;            // E and c E
  uint64_t squares_ready, squares_empty;  // dP and N; ready: d_o has been read too
  uint64_t sums_full, sums_empty;         // *_dots, pair_*, through
  uint64_t dq_full, dk_full[2];  // rows; two of dk, since the next may be made before they leave
};
static_assert(sizeof(BackwardShared) <= 227 * 1024);

__device__ __forceinline__ void init_barriers(BackwardShared& s, bool d_o_by_hand) {
  if (threadIdx.x != 0) return;
  // Every thread arrives, for what it has written or read itself. Who waits for a phase must also
  // be waited for before the next one can complete, or it takes that for an older one and waits on:
  // lab/sm90/backward_protocol.py plays the roles in random order to check that.
  constexpr uint32_t kWarp = 32, kState = 256, kGradients = 256;
  for (int i = 0; i < 2; ++i) {
    barrier_init(&s.keys_full[i], 1);
    barrier_init(&s.keys_empty[i], kState + kGradients + 3 * kWarp);
    barrier_init(&s.factors_full[i], kWarp);
    barrier_init(&s.dk_full[i], kGradients);
  }
  for (uint64_t* full : {&s.values_full, &s.d_v_full, &s.dstates_full, &s.before_full}) {
    barrier_init(full, 1);
  }
  barrier_init(&s.d_o_full, d_o_by_hand ? 2 : 1);
  barrier_init(&s.before_read, kState);
  barrier_init(&s.values_empty, kState + kGradients + kWarp);
  barrier_init(&s.d_o_empty, 2 * kWarp);
  barrier_init(&s.d_v_empty, kState + kGradients + kWarp);
  barrier_init(&s.dstates_read, kState + kGradients);
  barrier_init(&s.states_ready, kState);
  barrier_init(&s.states_empty, kState + kGradients);
  barrier_init(&s.e_ready, kState);
  barrier_init(&s.c_e_empty, kGradients);
  barrier_init(&s.squares_ready, kState + kGradients);
  barrier_init(&s.squares_empty, kState + kGradients);
  barrier_init(&s.sums_full, kState + kGradients);
  barrier_init(&s.sums_empty, kWarp);
  barrier_init(&s.dq_full, kState);
  barrier_init_fence();
}

// A chunk of a block's walk, in walking order.
struct ChunkAt {
  int turn;  // counts the block's chunks
  int key_head, value_head;
  int row;         // first local row
  int tokens;      // 1..64
  int64_t record;  // of the chunk; times heads and plus the head for its images

  __device__ __forceinline__ int stage() const { return turn & 1; }
  __device__ __forceinline__ uint32_t parity() const { return turn & 1; }
  __device__ __forceinline__ uint32_t stage_parity() const { return (turn >> 1) & 1; }
};

// Calls visit(ChunkAt) for every chunk of the block.
template <typename Visit>
__device__ __forceinline__ void for_chunks(const WalkParams& p, const Walk& walk, Visit&& visit) {
  ChunkAt at{};
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    // The same in every lane, which the compiler knows of a shuffle.
    const auto same = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };
    at.key_head = same(piece->key_head);
    at.value_head = at.key_head * p.group + walk.sub;
    at.row = same(static_cast<int>(piece->row));
    at.record = same(piece->first_chunk);
#pragma unroll 1
    for (int left = same(piece->tokens); left > 0; left -= kChunkTokens, ++at.turn, ++at.record) {
      at.tokens = min(left, kChunkTokens);
      visit(at);
      at.row += kChunkTokens;
    }
  }
}

}  // namespace gdn::sm90
