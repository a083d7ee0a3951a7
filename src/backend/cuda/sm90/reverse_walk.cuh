// Device code of the reverse walks, by the steps of reverse.cuh. kSummary: the gradient C of the
// state that enters a segment, from dS = 0 (or dfinal_state) at its end. kStates: the same over all
// segments from their exit gradients; it leaves dS of every chunk (of the state that leaves it) and
// the rows f U, f = stored_factor(beta), for k_backward.
//
// Warpgroups: 0 copies (warp 0 fills stages, warps 1 and 2 write results), 1 and 2 state (64 rows
// of V each), 3 auxiliary (Q K^T, P, per-token factors, zeros in the rows past a short chunk). 512
// threads, one block per SM; registers 32 + 2 * 200 + 80 = 512 = 65,536 / 128. Barriers of a
// stage as in walk.cuh. Shared, KiB: a stage is 66.25 (k, q, d_o 16 each, W and P 8 each,
// vectors 2.25); kSummary 3 stages = 199, kStates 2 stages + dS 2 x 32 + U 16 = 213.
#pragma once

#include "backend/cuda/sm90/reverse.cuh"

namespace gdn::sm90 {

enum class ReverseKind { kSummary, kStates };

template <ReverseKind kKind>
inline constexpr int kReverseStages = kKind == ReverseKind::kStates ? 2 : 3;
template <ReverseKind kKind>
using ReverseCursor = StageCursor<kReverseStages<kKind>>;

struct alignas(1024) ReverseStage {
  bf16 k[2][kTileElements];  // [half of K][64 tokens][64]
  bf16 q[2][kTileElements];
  bf16 d_o[2][kTileElements];  // [half of V][64 tokens][64]
  bf16 w[kTileElements];       // [i / 8][j / 8][8][8], the blocks j > i stay zero
  bf16 p[kTileElements];       // [i][j]
  ReverseVectors vectors;
  ReverseFactors factors;
};

template <ReverseKind kKind>
struct ReverseShared {
  ReverseStage stage[kReverseStages<kKind>];
  bf16 result[kKind == ReverseKind::kStates ? 2 : 0][kTileElements];        // [half of V]: rows f U
  bf16 states[kKind == ReverseKind::kStates ? 2 : 0][2][2][kTileElements];  // [turn][half][tile]
  uint64_t full[kReverseStages<kKind>];
  uint64_t ready[kReverseStages<kKind>];
  uint64_t empty[kReverseStages<kKind>];
  uint64_t result_full[2];
  uint64_t result_empty[2];
};
static_assert(sizeof(ReverseShared<ReverseKind::kSummary>) <= 227 * 1024);
static_assert(sizeof(ReverseShared<ReverseKind::kStates>) <= 227 * 1024);

// How many of a piece's chunks a summary visits: earlier ones, whose gradients from its first
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
template <ReverseKind kKind>
__device__ __forceinline__ int visited_chunks(const WalkParams& p, const WalkPiece& piece,
                                              int value_head) {
  return kKind == ReverseKind::kSummary ? chunks_to_visit(p, piece, value_head) : piece.chunks;
}

template <ReverseKind kKind>
__device__ __forceinline__ void fill_stages(const WalkParams& p, ReverseShared<kKind>& s) {
  const Walk walk(p);
  const int lane = threadIdx.x;
  constexpr uint32_t kBytes = 6 * kTileBytes + kRecordElements * sizeof(bf16) + 2 * kVectorBytes;
  ReverseCursor<kKind> at;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int key_head = piece->key_head, value_head = key_head * p.group + walk.sub;
    for (int chunk = visited_chunks<kKind>(p, *piece, value_head) - 1; chunk >= 0;
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
        tensor_load(stage.d_o, &p.v, full, 0, row, 0, value_head);
      }
      __syncwarp();
      load_w(stage.w, p.tiles + (record * p.heads_v + value_head) * kRecordElements, full, lane);
    }
  }
}

// dS images [C, HV, half of V][2 tiles], and rows f U: one warp per state warpgroup.
__device__ __forceinline__ void write_results(const WalkParams& p,
                                              ReverseShared<ReverseKind::kStates>& s, int half) {
  const Walk walk(p);
  const int lane = threadIdx.x % 32;
  int turn = 0;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int value_head = piece->key_head * p.group + walk.sub;
    for (int chunk = piece->chunks - 1; chunk >= 0; --chunk, ++turn) {
      const int64_t record = int64_t{piece->first_chunk + chunk} * p.heads_v + value_head;
      barrier_wait(&s.result_full[half], turn & 1);
      if (lane == 0) {
        bulk_store(p.states + (record * 2 + half) * 2 * kTileElements, s.states[turn & 1][half],
                   2 * kTileBytes);
      }
      write_rows(p, s.result[half], static_cast<int>(piece->row) + chunk * kChunkTokens,
                 piece->tokens - chunk * kChunkTokens, value_head, half, lane);
      if (lane == 0) bulk_store_wait();
      __syncwarp();
      barrier_arrive(&s.result_empty[half]);
    }
  }
}

template <ReverseKind kKind>
__device__ __forceinline__ void run_auxiliary(const WalkParams& p, ReverseShared<kKind>& s) {
  const Walk walk(p);
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  ReverseCursor<kKind> at;
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int value_head = piece->key_head * p.group + walk.sub;
    for (int chunk = visited_chunks<kKind>(p, *piece, value_head) - 1; chunk >= 0;
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
  __device__ __forceinline__ void solved(const float (&)[32]) {}
};

struct StatesSteps {
  ReverseShared<ReverseKind::kStates>& s;
  const StateLane& own;
  const ReverseFactors& factors;
  int turn;

  // The last image of this turn has left when the rows of the turn between have been taken.
  __device__ __forceinline__ void entered(const uint32_t (&a)[32]) {
    put_state(a, s.states[turn & 1][own.half], own);
  }
  __device__ __forceinline__ void solved(const float (&u)[32]) {
    barrier_wait(&s.result_empty[own.half], (turn & 1) ^ 1);
    const uint32_t tile = smem_address(s.result[own.half]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t x[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 inner = factors.inner[8 * j + 4 * h + own.pair];
        const float f0 = stored_factor(inner.z), f1 = stored_factor(inner.w);
        const float* at = &u[8 * j + 4 * h];
        x[2 * h] = pack_bf16(f0 * at[0], f1 * at[1]);
        x[2 * h + 1] = pack_bf16(f0 * at[2], f1 * at[3]);
      }
      stmatrix_x4_trans(tile_address(tile, 16 * j + own.token, own.column), x[0], x[1], x[2], x[3]);
    }
    fence_async_proxy();
    barrier_arrive(&s.result_full[own.half]);
  }
};

template <ReverseKind kKind>
__device__ __forceinline__ void run_state(const WalkParams& p, ReverseShared<kKind>& s, int half) {
  const Walk walk(p);
  const StateLane own(half);
  ReverseCursor<kKind> at;
  int turn = 0;
  float state[64];
  for (int index = walk.begin; index < walk.end; ++index) {
    const WalkPiece* piece = p.pieces + index;
    const int visited = visited_chunks<kKind>(p, *piece, piece->key_head * p.group + walk.sub);
    enter_state(state, p, *piece, walk.sub, visited < piece->chunks, half, own.thread);
    for (int left = visited; left > 0; --left, at.advance(), ++turn) {
      barrier_wait(&s.full[at.index], at.parity);
      barrier_wait(&s.ready[at.index], at.parity);
      ReverseStage& stage = s.stage[at.index];
      const ReverseTiles tiles{stage.k, stage.q, stage.d_o[half], stage.w, stage.p, stage.factors};
      const float decay = exp2_approx(stage.vectors.gate[kChunkTokens - 1]);
      if constexpr (kKind == ReverseKind::kStates) {
        StatesSteps steps{s, own, stage.factors, turn};
        reverse_step(state, decay, tiles, own, steps);
      } else {
        SummarySteps steps;
        reverse_step(state, decay, tiles, own, steps);
      }
      barrier_arrive(&s.empty[at.index]);
    }
    leave_state(state, p, *piece, walk.sub, half, own.thread);
  }
}

template <ReverseKind kKind>
__device__ __forceinline__ void reverse_block(const WalkParams& p, ReverseShared<kKind>& s) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  init_ring(s, kReverseStages<kKind>);
  for (auto& stage : s.stage) clear_tile(stage.w);
  fence_async_proxy();
  __syncthreads();
  if (warpgroup == 0) {
    registers_decrease<32>();
    if (warp == 0) {
      fill_stages(p, s);
    } else if (warp < 3) {
      if constexpr (kKind == ReverseKind::kStates) write_results(p, s, warp - 1);
    }
  } else if (warpgroup == 3) {
    registers_decrease<80>();
    run_auxiliary(p, s);
  } else {
    registers_increase<200>();
    run_state(p, s, warpgroup - 1);
  }
}

}  // namespace gdn::sm90
