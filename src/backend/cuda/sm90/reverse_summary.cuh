// Device code of the backward summary: the gradient C of the state that enters a segment, by the
// walk of reverse.cuh from dS = 0 (or dfinal_state) at its end.
//
// Warpgroups: 0 copies, 1 and 2 state (64 rows of V each), 3 auxiliary (Q K^T, P, per-token
// factors, zeros in the rows past a short chunk). 512 threads, one block per SM; registers 24 + 2 *
// 208 + 72 = 512 = 65,536 / 128. Barriers of a stage as in walk.cuh. Shared, KiB: 3 stages of 66.25
// (k, q, d_o 16 each, W and P 8 each, vectors 2.25) = 199.
#pragma once

#include "backend/cuda/sm90/reverse.cuh"

namespace gdn::sm90 {

inline constexpr int kReverseStages = 3;
using ReverseCursor = StageCursor<kReverseStages>;

struct alignas(1024) ReverseStage {
  bf16 k[2][kTileElements];  // [half of K][64 tokens][64]
  bf16 q[2][kTileElements];
  bf16 d_o[2][kTileElements];  // [half of V][64 tokens][64]
  bf16 w[kTileElements];       // [i / 8][j / 8][8][8], the blocks j > i stay zero
  bf16 p[kTileElements];       // [i][j]
  ReverseVectors vectors;
  ReverseFactors factors;
};

struct ReverseShared {
  ReverseStage stage[kReverseStages];
  uint64_t full[kReverseStages];
  uint64_t ready[kReverseStages];
  uint64_t empty[kReverseStages];
};
static_assert(sizeof(ReverseShared) <= 227 * 1024);

// How many of a piece's chunks the walk visits: earlier ones, whose gradients from its first
// visited chunk on are forgotten, are the last.
__device__ __forceinline__ int chunks_to_visit(const WalkParams& p, const WalkPiece& piece,
                                               int value_head) {
  const int lane = threadIdx.x % 32;
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

__device__ __forceinline__ void fill_stages(const WalkParams& p, ReverseShared& s) {
  const Walk walk(p);
  const int lane = threadIdx.x;
  const uint64_t once = evict_first_policy();
  constexpr uint32_t kBytes = 6 * kTileBytes + kRecordElements * sizeof(bf16) + 2 * kVectorBytes;
  ReverseCursor at;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int key_head = piece->key_head, value_head = key_head * p.group + walk.sub;
    for (int chunk = chunks_to_visit(p, *piece, value_head) - 1; chunk >= 0;
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
        bulk_load(stage.vectors.gate,
                  p.gates + (record * p.heads_v + value_head) * 2 * kChunkTokens, kVectorBytes,
                  full);
        bulk_load(stage.vectors.rq, p.norms + (record * p.heads_k + key_head) * 2 * kChunkTokens,
                  kVectorBytes, full);
        tensor_load(stage.d_o, &p.v, full, 0, row, 0, value_head, once);
      }
      __syncwarp();
      load_w(stage.w, p.tiles + (record * p.heads_v + value_head) * kRecordElements, full, lane);
    }
  }
}

__device__ __forceinline__ void run_auxiliary(const WalkParams& p, ReverseShared& s) {
  const Walk walk(p);
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  ReverseCursor at;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int value_head = piece->key_head * p.group + walk.sub;
    for (int chunk = chunks_to_visit(p, *piece, value_head) - 1; chunk >= 0;
         --chunk, at.advance()) {
      ReverseStage& stage = s.stage[at.index];
      barrier_wait(&s.full[at.index], at.parity);
      if (const int tokens = piece->tokens - chunk * kChunkTokens; tokens < kChunkTokens) {
        clear_rows(stage.k[0], 6, tokens, thread);
        fence_async_proxy();
        named_barrier(3, 128);
      }
      float qk[32];
      start_qk(qk, stage.q, stage.k);
      if (thread < kChunkTokens) write_factors(stage.factors, stage.vectors, thread);
      wgmma_wait<0>();
      settle(qk);
      named_barrier(3, 128);
      const int row = 16 * warp + lane / 4;
      const ReverseVectors& vectors = stage.vectors;
      const Decays decays{vectors.gate, vectors.rk, stage.factors.column};
      write_p(qk, stage.p, {decays, vectors.rq[row], vectors.rq[row + 8], warp, lane}, 0, lane);
      fence_async_proxy();
      barrier_arrive(&s.ready[at.index]);
    }
  }
}

struct SummarySteps {
  __device__ __forceinline__ void entered(const uint32_t (&)[32]) {}
  __device__ __forceinline__ void ready(const float (&)[32]) {}
  __device__ __forceinline__ void in_second() {}
  __device__ __forceinline__ void solved(const float (&)[32]) {}
  __device__ __forceinline__ void after(const float (&)[32]) {}
};

__device__ __forceinline__ void run_state(const WalkParams& p, ReverseShared& s, int half) {
  const Walk walk(p);
  const StateLane own(half);
  ReverseCursor at;
  SummarySteps steps;
  float state[64];
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int visited = chunks_to_visit(p, *piece, piece->key_head * p.group + walk.sub);
    enter_state(state, p, *piece, walk.sub, visited < piece->chunks, half, own.thread);
    for (int left = visited; left > 0; --left, at.advance()) {
      barrier_wait(&s.full[at.index], at.parity);
      barrier_wait(&s.ready[at.index], at.parity);
      ReverseStage& stage = s.stage[at.index];
      const ReverseTiles tiles{stage.k, stage.q, stage.d_o[half], stage.w, stage.p, stage.factors};
      reverse_step(state, exp2_approx(stage.vectors.gate[kChunkTokens - 1]), tiles, own, steps);
      barrier_arrive(&s.empty[at.index]);
    }
    leave_state(state, p, *piece, walk.sub, half, own.thread);
  }
}

__device__ __forceinline__ void summary_block(const WalkParams& p, ReverseShared& s) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kReverseStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.ready[i], 128);
      barrier_init(&s.empty[i], 256);
    }
    barrier_init_fence();
  }
  for (auto& stage : s.stage) clear_tile(stage.w);
  fence_async_proxy();
  __syncthreads();
  if (warpgroup == 0) {
    registers_decrease<24>();
    if (warp == 0) fill_stages(p, s);
  } else if (warpgroup == 3) {
    registers_decrease<72>();
    run_auxiliary(p, s);
  } else {
    registers_increase<208>();
    run_state(p, s, warpgroup - 1);
  }
}

}  // namespace gdn::sm90
