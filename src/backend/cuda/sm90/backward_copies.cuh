// Warpgroup 0 of k_backward: copies in, factors, dq and dk out, dg and dbeta.
#pragma once

#include "backend/cuda/common/scalars.cuh"
#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/sm90/backward_shared.cuh"

namespace gdn::sm90 {

// ---- Warp 0: copies in
__device__ __forceinline__ void fill_chunks(const BackwardParams& params, BackwardShared& s) {
  const WalkParams& p = params.walk;
  const int lane = threadIdx.x;
  const bool one = elect_one();
  const uint64_t once = evict_first_policy();
  for_chunks(p, s.walk, [&](const ChunkAt& at) {
    const int stage = at.stage();
    const int64_t value = at.record * p.heads_v + at.value_head;
    const uint32_t again = at.parity() ^ 1;
    const bf16* dstates = p.states + value * 4 * kTileElements;
    if (one) {
      barrier_wait(&s.keys_empty[stage], at.stage_parity() ^ 1);
      uint64_t* full = &s.keys_full[stage];
      barrier_expect_bytes(full, 2 * kTileBytes + 2 * kVectorBytes);
      tensor_load(s.k[stage], &p.k, full, 0, at.row, 0, at.key_head);
      bulk_load(s.vectors[stage].gate, p.gates + value * 2 * kChunkTokens, kVectorBytes, full);
      bulk_load(s.vectors[stage].rq,
                p.norms + (at.record * p.heads_k + at.key_head) * 2 * kChunkTokens, kVectorBytes,
                full);

      barrier_wait(&s.values_empty, again);
      barrier_expect_bytes(&s.values_full, 2 * kTileBytes + kRecordElements * sizeof(bf16));
      tensor_load(s.v, &p.v, &s.values_full, 0, at.row, 0, at.value_head, once);
    }
    __syncwarp();
    load_w(s.w, p.tiles + value * kRecordElements, &s.values_full, lane);
    if (!one) return;
    barrier_wait(&s.d_v_empty, again);
    barrier_expect_bytes(&s.d_v_full, 2 * kTileBytes);
    tensor_load(s.d_v, &params.d_v_map, &s.d_v_full, 0, at.row, 0, at.value_head, once);
    // The place holds rows of dq until the turn before has added them to its own.
    barrier_wait(&s.before_read, again);
    barrier_wait(&s.d_o_empty, again);
    barrier_expect_bytes(&s.d_o_full, 2 * kTileBytes * (1 + params.d_o.rows));
    tensor_load(s.q[stage], &p.q, &s.d_o_full, 0, at.row, 0, at.key_head);
    if (params.d_o.rows) {
      tensor_load(s.d_o, &params.d_o_map, &s.d_o_full, 0, at.row, 0, at.value_head, once);
    }
    barrier_wait(&s.dstates_read, again);
    barrier_expect_bytes(&s.dstates_full, 4 * kTileBytes);
    bulk_load(s.dstates, dstates, 4 * kTileBytes, &s.dstates_full, once);
  });
}

// ---- Warp 1: factors, zeros in the rows past a short chunk, and what is rare
// Element (t, x) of two tiles [64 tokens][64].
__device__ __forceinline__ bf16* tile_element(bf16 (&tiles)[2][kTileElements], int t, int x) {
  return reinterpret_cast<bf16*>(reinterpret_cast<uint8_t*>(tiles[x / 64]) +
                                 tile_address(0, t, x % 64 / 8 * 8)) +
         x % 8;
}

// Rows of d_o that the copy engine does not take, one element at a time.
__device__ __forceinline__ void copy_d_o(const cuda::ElementView& from, BackwardShared& s,
                                         const ChunkAt& at, int lane) {
#pragma unroll 1
  for (int i = lane; i < kChunkTokens * kDim; i += 32) {
    const int t = i / kDim, x = i % kDim;
    uint16_t value = 0;
    if (from.data != nullptr && t < at.tokens) {
      value = from.data[(at.row + t) * from.token + at.value_head * from.head + x * from.element];
    }
    *reinterpret_cast<uint16_t*>(tile_element(s.d_o, t, x)) = value;
  }
}

// d_v of tokens whose rows hold U.
__device__ __forceinline__ void finish_d_v(const cuda::ElementView& to, BackwardShared& s,
                                           const ChunkAt& at, int lane) {
  const float* beta = s.vectors[at.stage()].beta;
#pragma unroll 1
  for (int i = lane; i < at.tokens * kDim; i += 32) {
    const int t = i / kDim, x = i % kDim;
    const float factor = d_v_factor(beta[t]);
    if (factor == 1.0f) continue;
    const bf16 d_v = __float2bfloat16_rn(factor * __bfloat162float(*tile_element(s.d_v, t, x)));
    to.data[(at.row + t) * to.token + at.value_head * to.head + x] = __bfloat16_as_ushort(d_v);
  }
}

__device__ __forceinline__ void await_counter(const int* counter, int at_least) {
  for (SpinLimit limit; flag_acquire(counter) < at_least; limit.turn(counter)) __nanosleep(64);
}

// Of how many chunks block `sub` of a lane group has written its sums; the next block waits for it.
// The last one has no counter.
__device__ __forceinline__ int* rows_counter(const BackwardParams& p, int lane_group, int sub) {
  return p.row_counters + lane_group * (p.walk.group - 1) + sub;
}

// Rows of dq that the heads before have summed, to where q of the next turn will be.
__device__ __forceinline__ void load_rows_before(const BackwardParams& p, BackwardShared& s,
                                                 const ChunkAt& at) {
  await_counter(rows_counter(p, s.walk.lane_group, s.walk.sub - 1), at.turn + 1);
  fence_global_copies();
  const int next = at.turn + 1;
  barrier_wait(&s.keys_empty[next & 1], ((next >> 1) & 1) ^ 1);
  barrier_expect_bytes(&s.before_full, 2 * kTileBytes);
  tensor_load(s.q[next & 1], &p.rows_map[0], &s.before_full, 0, at.row, 0, at.key_head);
}

__device__ __forceinline__ void make_factors(const BackwardParams& p, BackwardShared& s) {
  const int lane = threadIdx.x % 32;
  for_chunks(p.walk, s.walk, [&](const ChunkAt& at) {
    const int stage = at.stage();
    const uint32_t parity = at.parity();
    BackwardVectors& vectors = s.vectors[stage];
    barrier_wait(&s.keys_full[stage], at.stage_parity());
    bool rare = at.tokens < kChunkTokens;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int t = 2 * lane + x;
      const float gate = vectors.gate[t], rk = vectors.rk[t], beta = vectors.beta[t];
      vectors.a[t] = exp2_approx(gate) * rk;
      vectors.key[t] = rk * beta;
      vectors.column[t] = exp2_approx(vectors.gate[t | 15] - gate) * rk * beta;
      vectors.c[t] = exp2_approx(vectors.gate[kChunkTokens - 1] - gate) * rk * beta;
      rare |= d_v_factor(beta) != 1.0f;
    }
    rare = __any_sync(0xffffffffu, rare);
    if (!rare) barrier_arrive(&s.factors_full[stage]);
    if (!p.d_o.rows) {
      barrier_wait(&s.d_o_empty, parity ^ 1);
      copy_d_o(p.d_o, s, at, lane);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(&s.d_o_full);
    }
    for (uint64_t* full : {&s.values_full, &s.d_v_full, &s.d_o_full}) barrier_wait(full, parity);
    if (rare) {
      __syncwarp();
      finish_d_v(p.d_v, s, at, lane);
      for (bf16* tiles : {s.k[stage][0], s.q[stage][0], s.v[0], s.d_v[0], s.d_o[0]}) {
        clear_rows(tiles, 2, at.tokens, lane, 32);
      }
      fence_async_proxy();
      barrier_arrive(&s.factors_full[stage]);
    }
    for (uint64_t* read : {&s.values_empty, &s.d_v_empty, &s.d_o_empty}) barrier_arrive(read);
    barrier_arrive(&s.keys_empty[stage]);
    if (s.walk.sub > 0 && lane == 0) load_rows_before(p, s, at);
    __syncwarp();
  });
}

// ---- Warp 2: dq and dk out, in the order of the group's blocks
// The first `tokens` rows of two tiles to, or (`add`) in addition to, rows from `row` on.
__device__ __forceinline__ void write_short_rows(const cuda::ElementView& to,
                                                 const bf16 (&tiles)[2][kTileElements],
                                                 const ChunkAt& at, bool add, int lane) {
  uint16_t* rows = to.data + at.row * to.token + at.key_head * to.head;
#pragma unroll 1
  for (int i = lane; i < at.tokens * 16; i += 32) {
    const int row = i / 16, piece = i % 16;
    const uint4 x =
        *reinterpret_cast<const uint4*>(reinterpret_cast<const uint8_t*>(tiles[piece / 8]) +
                                        row * 128 + (((piece % 8) ^ (row % 8)) * 16));
    auto* out = reinterpret_cast<uint4*>(rows + row * to.token + piece * 8);
    if (add) {
      global_add_bf16(out, x);
    } else {
      __stcg(out, x);
    }
  }
}

__device__ __forceinline__ void write_sums(const BackwardParams& p, BackwardShared& s) {
  const int lane = threadIdx.x % 32, sub = s.walk.sub;
  for_chunks(p.walk, s.walk, [&](const ChunkAt& at) {
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const bool is_dk = which == 1;
      const bool is_short = at.tokens < kChunkTokens;
      const auto& tiles = is_dk ? s.k[at.stage()] : s.d_o;
      // Rows of dq are sums already. Those of the block before are there, and its dk: dq has
      // waited for them.
      const bool add = is_dk && sub > 0;
      barrier_wait(is_dk ? &s.dk_full[at.stage()] : &s.dq_full,
                   is_dk ? at.stage_parity() : at.parity());
      if (lane == 0 && !is_short) {
        const CUtensorMap* map = &p.rows_map[which];
        if (add) {
          fence_global_copies();
          tensor_add(map, tiles, 0, at.row, 0, at.key_head);
        } else {
          tensor_store(map, tiles, 0, at.row, 0, at.key_head);
        }
        bulk_store_wait();
      }
      __syncwarp();
      if (is_short) {
        write_short_rows(p.rows[which], tiles, at, add, lane);
        __threadfence();
        __syncwarp();
      }
      barrier_arrive(is_dk ? &s.keys_empty[at.stage()] : &s.d_o_empty);
    }
    // Once a chunk: a release waits 1 to 2 us, for which this warp has no time twice.
    if (sub + 1 < p.walk.group && lane == 0) {
      bulk_store_complete();
      flag_release(rows_counter(p, s.walk.lane_group, sub), at.turn + 1);
    }
  });
}

// ---- Warp 3: dg and dbeta
__device__ __forceinline__ void write_scalars(const BackwardParams& p, BackwardShared& s) {
  const int lane = threadIdx.x % 32;
  for_chunks(p.walk, s.walk, [&](const ChunkAt& at) {
    const int stage = at.stage();
    barrier_wait(&s.keys_full[stage], at.stage_parity());
    float g[2], beta[2];  // early: one comes from memory, the other's place is wanted
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int t = min(2 * lane + x, at.tokens - 1);
      g[x] = cuda::load_scalar(p.g, at.row + t, at.value_head);
      beta[x] = s.vectors[stage].beta[2 * lane + x];
    }
    barrier_arrive(&s.keys_empty[stage]);
    barrier_wait(&s.sums_full, at.parity());
    float pairs[2], reads[2], writes[2], dots[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int t = 2 * lane + x;
      float columns = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (w < t / 16) continue;
        const int block = w * (w + 1) / 2 + t / 16;
        columns += s.pair_columns[0][block][t % 16] + s.pair_columns[1][block][t % 16];
      }
      pairs[x] = s.pair_rows[0][t] + s.pair_rows[1][t] - columns;
      const float row = s.row_dots[0][0][t] + s.row_dots[1][0][t];
      reads[x] = s.query_dots[0][t] + s.query_dots[1][t] + row;
      writes[x] = s.row_dots[0][1][t] + s.row_dots[1][1][t] - row;
      dots[x] = 0.0f;
#pragma unroll
      for (int w = 0; w < 8; ++w) dots[x] += s.beta_dots[w][t];
    }
    float all = (&s.through[0][0])[lane] + (&s.through[4][0])[lane];
    barrier_arrive(&s.sums_empty);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) all += __shfl_xor_sync(0xffffffffu, all, bit);
    cuda::sum_from(pairs, lane);
    cuda::sum_from(reads, lane);
    cuda::sum_before(writes, lane);
    if (lane == 0) pairs[0] = 0.0f;  // nothing of the chunk is before its first token
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int x = 0; x < 2; ++x) pairs[x] += reads[x] + writes[x] + all;
#pragma unroll 1
    for (int x = 0; x < 2; ++x) {
      const int t = 2 * lane + x;
      if (t >= at.tokens) break;
      const auto own = [&](const float(&of)[2]) { return x == 0 ? of[0] : of[1]; };
      const int64_t row = at.row + t;
      const float d_log = own(pairs);
      const float d_beta = __fdividef(own(dots), stored_factor(own(beta)));
      cuda::store_scalar(p.d_beta, row, at.value_head,
                         d_beta * cuda::beta_slope(p.activation, own(beta)));
      const cuda::Gate gate = cuda::activate_gate(p.activation, own(g), at.value_head);
      const float d_raw = d_log * gate.slope;
      cuda::store_scalar(p.d_g, row, at.value_head, d_raw);
      sum.x += d_log * gate.log_decay;
      sum.y += d_raw;
    }
    __syncwarp();
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
