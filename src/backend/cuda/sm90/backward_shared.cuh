// The shared block of k_backward, its barriers, and the order of a block's chunks.
#pragma once

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
  bf16 dp[kTileElements];       // [i][j], zero for j > i
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

}  // namespace gdn::sm90
