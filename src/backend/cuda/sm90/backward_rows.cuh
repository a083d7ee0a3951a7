// Rows of dq and dk of a chunk: tokens by a half of K, made by a warpgroup.
#pragma once

#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/sm90/backward_shared.cuh"

namespace gdn::sm90 {

// threadIdx.x of the warpgroup, read anew: what is made from it is not kept in registers.
__device__ __forceinline__ uint32_t fresh_thread() { return fresh_thread_index() % 128; }

// What a thread of a warpgroup with row accumulators is.
struct GradientLane {
  int lane, warp;
  int row;  // rows `row` and `row + 8` of every accumulator
  uint32_t
      fragment;  // bytes to its row of ldmatrix and stmatrix, 16 x 16 entries from (16 warp, 0)

  __device__ __forceinline__ explicit GradientLane(uint32_t of_warpgroup)
      : lane(of_warpgroup % 32),
        warp(__shfl_sync(0xffffffffu, of_warpgroup / 32, 0)),
        row(16 * warp + lane / 4),
        fragment(tile_address(0, 16 * warp + lane % 16, 8 * (lane / 16))) {}

  // The same for entries from (16 warp, 16 step) of a tile.
  __device__ __forceinline__ uint32_t at(uint32_t tile, int step) const {
    return tile + (fragment ^ (step * 32));
  }
};

__device__ __forceinline__ void scale_rows(float (&acc)[32], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) acc[i] *= factor[(i / 2) % 2];
}

// This thread's entries of a tile, two in each, where it has accumulators of the same rows.
struct RowEntries {
  uint32_t pairs[16];

  __device__ __forceinline__ RowEntries(uint32_t tile, const GradientLane& own) {
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      uint32_t x[4];
      ldmatrix_x4(x, own.at(tile, kk));
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[4 * kk + i] = x[i];
    }
  }
};

// Dots of this warp's rows with the same rows of a tile. In fp32: dg takes differences of them.
__device__ __forceinline__ void put_row_dots(const float (&acc)[32], const RowEntries& x,
                                             float* out, const GradientLane& own) {
  float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 pair = unpack_bf16(x.pairs[i]);
    dots[i % 4] += pair.x * acc[2 * i];
    dots[i % 4] += pair.y * acc[2 * i + 1];
  }
  const float first = cuda::quad_sum(dots[0] + dots[2]);
  const float second = cuda::quad_sum(dots[1] + dots[3]);
  if (own.lane % 4 != 0) return;
  out[own.row] = first;
  out[own.row + 8] = second;
}

// acc += along x, row by row, x the rows of a tile.
__device__ __forceinline__ void add_rows(float (&acc)[32], const float (&along)[2],
                                         const RowEntries& x) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 pair = unpack_bf16(x.pairs[i]);
    acc[2 * i] += along[i % 2] * pair.x;
    acc[2 * i + 1] += along[i % 2] * pair.y;
  }
}

__device__ __forceinline__ void put_rows(const float (&acc)[32], uint32_t tile,
                                         const GradientLane& own) {
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    const float* x = &acc[8 * kk];
    stmatrix_x4(own.at(tile, kk), pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  }
}

// acc (+)= a b: a two tiles [64 tokens][64 of V], b a state image's tiles of a half of K. Issued.
template <bool kAdd>
__device__ __forceinline__ void start_with_state(float (&acc)[32], uint32_t a, uint32_t b) {
  const Operand rows = operand(a), state = operand(b, kTileBytes);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    wgmma_ss<0, 1>(acc, rows.at((kk / 4) * kTileBytes + (kk % 4) * 32),
                   state.at((kk / 4) * 2 * kTileBytes + (kk % 4) * 2048), kAdd || kk > 0);
  }
  wgmma_commit();
}

// acc += a b or a^T b: a a square tile, b a tile [64 tokens][64 of K]. Issued.
template <int kTransA>
__device__ __forceinline__ void start_with_square(float (&acc)[32], const bf16* a, uint32_t b) {
  const Operand square = operand(smem_address(a), kTileBytes), rows = operand(b, kTileBytes);
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    wgmma_ss<kTransA, 1>(acc, square.at(kk * (kTransA ? 2048 : 32)), rows.at(kk * 2048), true);
  }
  wgmma_commit();
}

// With the norm inside, what the rows are along x leaves them, r their factors (times `by`). It is
// linear, so it need not wait for the sum over a group. `dots` [half of K] and the named barrier
// are shared with the warpgroup of the other half.
__device__ __forceinline__ void take_norm(float (&acc)[32], uint32_t tile, const float* r, float by,
                                          float (&dots)[2][kChunkTokens], int half, int barrier) {
  {
    const GradientLane own(fresh_thread());
    put_row_dots(acc, RowEntries(tile, own), dots[half], own);
  }
  named_barrier(barrier, 256);
  const GradientLane own(fresh_thread());
  float along[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = own.row + 8 * i;
    const float f = r[row] * by;
    along[i] = -f * f * (dots[0][row] + dots[1][row]);
  }
  add_rows(acc, along, RowEntries(tile, own));
}

// Columns [64 half, 64 half + 64) of dq, before dP K: until then this is all that reads S and d_o.
__device__ __forceinline__ void begin_dq(float (&acc)[32], BackwardShared& s, int turn, int half,
                                         const GradientLane& own) {
  const BackwardVectors& vectors = s.vectors[turn & 1];
  barrier_wait(&s.d_o_full, turn & 1);
  barrier_wait(&s.states_ready, turn & 1);
  start_with_state<false>(acc, smem_address(s.d_o), smem_address(s.states[0][half]));
  wgmma_wait<0>();
  settle(acc);
  barrier_arrive(&s.squares_ready);
  float f[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = own.row + 8 * i;
    f[i] = exp2_approx(vectors.gate[row]) * vectors.rq[row];
  }
  scale_rows(acc, f);
  barrier_wait(&s.sums_empty, (turn & 1) ^ 1);
  put_row_dots(acc, RowEntries(smem_address(s.q[turn & 1][half]), own), s.query_dots[half], own);
}
template <bool kNorm>
__device__ __forceinline__ void end_dq(float (&acc)[32], const BackwardParams& p, BackwardShared& s,
                                       int turn, int half, const GradientLane& own) {
  const int stage = turn & 1;
  barrier_wait(&s.squares_ready, turn & 1);
  wgmma_fence();
  start_with_square<0>(acc, s.dp, smem_address(s.k[stage][half]));
  wgmma_wait<0>();
  settle(acc);
  barrier_arrive(&s.squares_empty);
  if constexpr (kNorm) {
    take_norm(acc, smem_address(s.q[stage][half]), s.vectors[stage].rq, p.inverse_scale,
              s.norm_dots[0], half, 3);
  }
  if (s.walk.sub > 0) {
    // In fp32: each bf16 of a sum in L2 is rounded twice, once by itself.
    barrier_wait(&s.before_full, turn & 1);
    add_rows(acc, {1.0f, 1.0f}, RowEntries(smem_address(s.q[stage ^ 1][half]), own));
  }
  barrier_arrive(&s.before_read);
  put_rows(acc, smem_address(s.d_o[half]), own);
  fence_async_proxy();
  barrier_arrive(&s.dq_full);
}

// Columns [64 half, 64 half + 64) of dk.
template <bool kNorm>
__device__ __forceinline__ void make_dk(BackwardShared& s, int turn, int half) {
  const int stage = turn & 1;
  const uint32_t parity = turn & 1;
  const BackwardVectors& vectors = s.vectors[stage];
  const uint32_t k = smem_address(s.k[stage][half]);
  float acc[32] = {};
  // dY S^T, then E dS^T: one code, since little of it fits in the multiprocessor's cache.
#pragma unroll 1
  for (int terms = 0; terms < 2; ++terms) {
    const bool writes = terms == 1;
    if (writes) barrier_wait(&s.dstates_full, parity);
    start_with_state<true>(acc, smem_address(writes ? s.c_e : s.d_v),
                           smem_address(writes ? s.dstates[0][half] : s.states[0][half]));
    const GradientLane own(fresh_thread());
    const RowEntries keys(k, own);
    wgmma_wait<0>();
    settle(acc);
    barrier_arrive(writes ? &s.c_e_empty : &s.d_v_empty);
    barrier_arrive(writes ? &s.dstates_read : &s.states_empty);
    if (!writes) {
      float f[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = own.row + 8 * i;
        f[i] = -exp2_approx(vectors.gate[row]) * vectors.rk[row] * d_v_factor(vectors.beta[row]);
      }
      scale_rows(acc, f);
    }
    put_row_dots(acc, keys, s.row_dots[half][terms], own);
  }
  barrier_arrive(&s.sums_full);
  barrier_wait(&s.squares_ready, parity);
  wgmma_fence();
  start_with_square<1>(acc, s.dp, smem_address(s.q[stage][half]));
  start_with_square<0>(acc, s.n, k);
  wgmma_wait<0>();
  settle(acc);
  barrier_arrive(&s.squares_empty);
  if constexpr (kNorm) take_norm(acc, k, vectors.rk, 1.0f, s.norm_dots[1], half, 4);
  barrier_wait(&s.squares_empty, parity);  // every product with k is done
  put_rows(acc, k, GradientLane(fresh_thread()));
  fence_async_proxy();
  barrier_arrive(&s.dk_full[stage]);
  barrier_arrive(&s.keys_empty[stage]);
}

}  // namespace gdn::sm90
