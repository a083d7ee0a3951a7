// One fold program over the boundary tables: X <- op(map) X + add, then out <- X, per chain and
// head. A block holds 32 columns of X in shared memory and multiplies in fp32, so a thousand steps
// lose nothing that matters.
#pragma once

#include "backend/cuda/common/ptx.cuh"
#include "backend/cuda/common/tables.h"

namespace gdn::cuda {

inline constexpr int kFoldThreads = 256;
inline constexpr int kFoldColumns = 32;
inline constexpr int kFoldSlice = 32;  // rows of op(map)^T staged at a time

struct FoldParams {
  const FoldRow* steps;
  const int64_t* chains;
  const int64_t* num_chains;
  float* tables[kNumTables];
  int heads, head_begin;
  int cols;
  bool transpose;
};

template <int kRows>
struct FoldShared {
  static constexpr int kMapStride =
      kRows + 1;                    // floats of a staged row of op(map)^T: no bank twice
  static constexpr int kState = 0;  // X [kRows][32]
  static constexpr int kMap = kRows * kFoldColumns * 4;
  static constexpr int kBytes = kMap + kFoldSlice * kMapStride * 4;
};

GDN_DEVICE float* fold_at(const FoldParams& p, const FoldRow& row, int which, int head) {
  return p.tables[row.table[which]] + row.offset[which] + head * row.stride[which];
}

template <int kRows>
__global__ void __launch_bounds__(kFoldThreads) fold_kernel(const FoldParams p) {
  using Shared = FoldShared<kRows>;
  constexpr int kThreadRows = kRows / 32;  // rows of a thread, 4 columns
  GDN_SHARED(raw);
  float* state = reinterpret_cast<float*>(raw);
  float* slice = state + Shared::kMap / 4;
  const int tid = static_cast<int>(threadIdx.x);
  const int tiles = p.cols / kFoldColumns;
  const int tile = static_cast<int>(blockIdx.x % static_cast<unsigned>(tiles));
  const int64_t rest = blockIdx.x / static_cast<unsigned>(tiles);
  const int head = static_cast<int>(rest % p.heads);  // relative to head_begin, as in FoldRef
  const int64_t chain = rest / p.heads;
  if (chain >= *p.num_chains) return;
  const int row0 = (tid >> 3) * kThreadRows, column = (tid & 7) * 4;
  float x[kThreadRows][4];
  for (int64_t at = p.chains[chain]; at < p.chains[chain + 1]; ++at) {
    const FoldRow step = p.steps[at];
    GDN_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      float4 add = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (step.table[1] != 0) {
        add = *reinterpret_cast<const float4*>(
            fold_at(p, step, 1, head) + int64_t{row0 + i} * p.cols + tile * kFoldColumns + column);
      }
      x[i][0] = add.x;
      x[i][1] = add.y;
      x[i][2] = add.z;
      x[i][3] = add.w;
    }
    if (step.table[0] != 0) {
      const float* map = fold_at(p, step, 0, head);
      for (int first = 0; first < kRows; first += kFoldSlice) {
        for (int i = tid; i < kFoldSlice * kRows; i += kFoldThreads) {
          // Rows of memory are read along; slice[k][r] = op(map)[r][first + k].
          const int k = p.transpose ? i / kRows : i % kFoldSlice;
          const int r = p.transpose ? i % kRows : i / kFoldSlice;
          slice[k * Shared::kMapStride + r] =
              p.transpose ? map[(first + k) * kRows + r] : map[r * kRows + first + k];
        }
        __syncthreads();
        for (int k = 0; k < kFoldSlice; ++k) {
          const float4 b =
              *reinterpret_cast<const float4*>(state + (first + k) * kFoldColumns + column);
          GDN_UNROLL
          for (int i = 0; i < kThreadRows; ++i) {
            const float a = slice[k * Shared::kMapStride + row0 + i];
            x[i][0] += a * b.x;
            x[i][1] += a * b.y;
            x[i][2] += a * b.z;
            x[i][3] += a * b.w;
          }
        }
        __syncthreads();
      }
    }
    GDN_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      const float4 value = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
      *reinterpret_cast<float4*>(state + (row0 + i) * kFoldColumns + column) = value;
      if (step.table[2] != 0) {
        *reinterpret_cast<float4*>(fold_at(p, step, 2, head) + int64_t{row0 + i} * p.cols +
                                   tile * kFoldColumns + column) = value;
      }
    }
    __syncthreads();
  }
}

}  // namespace gdn::cuda
