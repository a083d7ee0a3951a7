// Products of k_backward whose rows are tokens and whose columns are K, whole (acc[64], two tiles)
// or a half of it (acc[32], one): what dq and dk are made of.
#pragma once

#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/sm90/backward_shared.cuh"

namespace gdn::sm90 {

// threadIdx.x of the warpgroup, read anew: what is made from it is not kept in registers.
__device__ __forceinline__ int fresh_thread() { return fresh_thread_index() % 128; }

// What a thread of a warpgroup with row accumulators is.
struct GradientLane {
  int lane, warp;
  int row;  // rows `row` and `row + 8` of every accumulator
  uint32_t
      fragment;  // bytes to its row of ldmatrix and stmatrix, 16 x 16 entries from (16 warp, 0)

  __device__ __forceinline__ explicit GradientLane(int of_warpgroup)
      : lane(of_warpgroup % 32),
        warp(__shfl_sync(0xffffffffu, of_warpgroup / 32, 0)),
        row(16 * warp + lane / 4),
        fragment(tile_address(0, 16 * warp + lane % 16, 8 * (lane / 16))) {}

  // The same for entries from (16 warp, 16 step) of a tile.
  __device__ __forceinline__ uint32_t at(uint32_t tile, int step) const {
    return tile + (fragment ^ (step * 32));
  }
};

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&acc)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] *= factor[(i / 2) % 2];
}

// Dots of this thread's two rows with the same rows of the tiles from `tiles` on. In fp32: dg takes
// differences of them.
template <int kCount>
__device__ __forceinline__ float2 row_dots(const float (&acc)[kCount], uint32_t tiles,
                                           const GradientLane& own) {
  float dots[2] = {0.0f, 0.0f};
#pragma unroll
  for (int kk = 0; kk < kCount / 8; ++kk) {
    uint32_t x[4];
    ldmatrix_x4(x, own.at(tiles + (kk / 4) * kTileBytes, kk % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_bf16(x[i]);
      dots[i % 2] += pair.x * acc[8 * kk + 2 * i] + pair.y * acc[8 * kk + 2 * i + 1];
    }
  }
  return {cuda::quad_sum(dots[0]), cuda::quad_sum(dots[1])};
}
__device__ __forceinline__ void put_row_dots(float2 dots, float* out, const GradientLane& own) {
  if (own.lane % 4 != 0) return;
  out[own.row] = dots.x;
  out[own.row + 8] = dots.y;
}

// acc += along x, row by row, x the rows of the tiles from `tiles` on.
template <int kCount>
__device__ __forceinline__ void add_rows(float (&acc)[kCount], const float (&along)[2],
                                         uint32_t tiles, const GradientLane& own) {
#pragma unroll
  for (int kk = 0; kk < kCount / 8; ++kk) {
    uint32_t x[4];
    ldmatrix_x4(x, own.at(tiles + (kk / 4) * kTileBytes, kk % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_bf16(x[i]);
      acc[8 * kk + 2 * i] += along[i % 2] * pair.x;
      acc[8 * kk + 2 * i + 1] += along[i % 2] * pair.y;
    }
  }
}

template <int kCount>
__device__ __forceinline__ void put_rows(const float (&acc)[kCount], uint32_t tiles,
                                         const GradientLane& own) {
#pragma unroll
  for (int kk = 0; kk < kCount / 8; ++kk) {
    const float* x = &acc[8 * kk];
    stmatrix_x4(own.at(tiles + (kk / 4) * kTileBytes, kk % 4), pack_bf16(x[0], x[1]),
                pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  }
}

// acc = a b: a two tiles [64 tokens][64 of V], b a state image from the first tile of K wanted on.
// Issued.
template <int kCount>
__device__ __forceinline__ void start_with_state(float (&acc)[kCount], uint32_t a, uint32_t b) {
  const Operand rows = operand(a), state = operand(b, kTileBytes);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    wgmma_ss<0, 1>(acc, rows.at((kk / 4) * kTileBytes + (kk % 4) * 32),
                   state.at((kk / 4) * 2 * kTileBytes + (kk % 4) * 2048), kk > 0);
  }
  wgmma_commit();
}

// acc += a b or a^T b: a a square tile, b tiles [64 tokens][64 of K]. Issued.
template <int kTransA, int kCount>
__device__ __forceinline__ void start_with_square(float (&acc)[kCount],
                                                  const bf16 (&a)[kTileElements], uint32_t b) {
  const Operand square = operand(smem_address(a), kTileBytes), rows = operand(b, kTileBytes);
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    wgmma_ss<kTransA, 1>(acc, square.at(kk * (kTransA ? 2048 : 32)), rows.at(kk * 2048), true);
  }
  wgmma_commit();
}

}  // namespace gdn::sm90
