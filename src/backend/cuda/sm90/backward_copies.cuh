// Warpgroup 0 of k_backward: copies in, d_v, dq and dk out, dg and dbeta.
#pragma once

#include "backend/cuda/common/scalars.cuh"
#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/sm90/backward_shared.cuh"

namespace gdn::sm90 {

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
// How many sums block `sub` of a lane group has written; the next block waits for it.
__device__ __forceinline__ int* rows_counter(const BackwardParams& p, int lane_group, int sub) {
  return p.row_counters + lane_group * (p.walk.group - 1) + sub;
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
  const Walk walk(p.walk);
  const int lane = threadIdx.x % 32, sub = walk.sub;
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
          await_counter(rows_counter(p, walk.lane_group, sub - 1), number);
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
        flag_release(rows_counter(p, walk.lane_group, sub), number);
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

}  // namespace gdn::sm90
