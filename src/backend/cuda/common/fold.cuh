// One fold program over the boundary tables: X <- op(map) X + add, then out <- X, per chain and
// head. A block holds 16 columns of X in shared memory and multiplies in fp32, so a thousand steps
// lose nothing that matters. A step is 2,048 multiply-adds of every thread; while it computes with
// one slice of the map it has the next one on the way, also over the end of a step.
#pragma once

#include "backend/cuda/common/ptx.cuh"
#include "backend/cuda/common/tables.h"

namespace gdn::cuda {

inline constexpr int kFoldThreads = 128;
inline constexpr int kFoldColumns = 16;
inline constexpr int kFoldSlice = 32;  // rows of op(map)^T staged at a time

struct FoldParams {
  const FoldRow* steps;
  const int64_t* chains;
  const int64_t* num_chains;
  float* tables[kNumTables];
  int heads;
  int cols;
  bool transpose;
};

template <int kRows>
struct FoldShared {
  static constexpr int kState = 0;                      // X [kRows][16]
  static constexpr int kSlices = kRows * kFoldColumns;  // 2 of op(map)^T: [2][32][kRows], swizzled
  static constexpr int kSlice = kFoldSlice * kRows;
  static constexpr int kBytes = (kSlices + 2 * kSlice) * 4;
};

GDN_DEVICE float* fold_at(const FoldParams& p, const FoldRow& row, int which, int head) {
  return p.tables[row.table[which]] + row.offset[which] + head * row.stride[which];
}

// Row k of a slice has its groups of four r at r / 4 ^ k / 4: no two lanes that store transposed
// have one bank, and four rows of a thread stay side by side.
template <int kRows>
GDN_DEVICE int fold_place(int k, int r) {
  return k * kRows + ((r / 4) ^ (k / 4)) * 4 + r % 4;
}

// Slice [first, first + 32) of op(map)^T, on the way to shared memory.
template <int kRows>
struct FoldStaged {
  static constexpr int kLoads = kFoldSlice * kRows / 4 / kFoldThreads;
  float4 x[kLoads];

  GDN_DEVICE void load(const float* map, bool transpose, int first, int tid) {
    GDN_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int at = i * kFoldThreads + tid;
      const float* from =
          transpose ? map + (first + at / (kRows / 4)) * kRows + at % (kRows / 4) * 4
                    : map + at / (kFoldSlice / 4) * kRows + first + at % (kFoldSlice / 4) * 4;
      x[i] = *reinterpret_cast<const float4*>(from);
    }
  }
  GDN_DEVICE void store(float* slice, bool transpose, int tid) const {
    GDN_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int at = i * kFoldThreads + tid;
      if (transpose) {
        const int k = at / (kRows / 4), r = at % (kRows / 4) * 4;
        *reinterpret_cast<float4*>(slice + fold_place<kRows>(k, r)) = x[i];
      } else {
        const int r = at / (kFoldSlice / 4), k = at % (kFoldSlice / 4) * 4;
        slice[fold_place<kRows>(k, r)] = x[i].x;
        slice[fold_place<kRows>(k + 1, r)] = x[i].y;
        slice[fold_place<kRows>(k + 2, r)] = x[i].z;
        slice[fold_place<kRows>(k + 3, r)] = x[i].w;
      }
    }
  }
};

// x += op(map) X over one slice: rows [row, row + kThreadRows) by columns [column, column + 4).
template <int kRows, int kThreadRows>
GDN_DEVICE void fold_multiply(float (&x)[kThreadRows][4], const float* slice, const float* state,
                              int row, int column) {
  GDN_UNROLL
  for (int k = 0; k < kFoldSlice; ++k) {
    const float4 b = *reinterpret_cast<const float4*>(state + k * kFoldColumns + column);
    const float* a = slice + fold_place<kRows>(k, row);
    GDN_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      x[i][0] += a[i] * b.x;
      x[i][1] += a[i] * b.y;
      x[i][2] += a[i] * b.z;
      x[i][3] += a[i] * b.w;
    }
  }
}

template <int kRows>
__global__ void __launch_bounds__(kFoldThreads) fold_kernel(const FoldParams p) {
  using Shared = FoldShared<kRows>;
  constexpr int kThreadRows = kRows / 32;  // rows of a thread, 4 columns
  GDN_SHARED(raw);
  float* state = reinterpret_cast<float*>(raw);
  float* slices = state + Shared::kSlices;
  const int tid = static_cast<int>(threadIdx.x);
  const int tiles = p.cols / kFoldColumns;
  const int tile = static_cast<int>(blockIdx.x % static_cast<unsigned>(tiles));
  const int64_t rest = blockIdx.x / static_cast<unsigned>(tiles);
  const int head = static_cast<int>(rest % p.heads);  // relative to head_begin, as in FoldRef
  const int64_t chain = rest / p.heads;
  if (chain >= *p.num_chains) return;
  const int row = (tid / 4) * kThreadRows, column = tid % 4 * 4;
  const int64_t place = int64_t{row} * p.cols + tile * kFoldColumns + column;
  const int64_t begin = p.chains[chain], end = p.chains[chain + 1];
  FoldStaged<kRows> staged;
  int buffer = 0;
  FoldRow next = p.steps[begin];
  for (int64_t at = begin; at < end; ++at) {
    const FoldRow step = next;
    if (at + 1 < end) next = p.steps[at + 1];
    float4 add[kThreadRows];
    float x[kThreadRows][4] = {};
    GDN_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      add[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (step.table[1] != 0) {
        add[i] = *reinterpret_cast<const float4*>(fold_at(p, step, 1, head) + place + i * p.cols);
      }
    }
    const bool next_has_map = at + 1 < end && next.table[0] != 0;
    if (step.table[0] != 0) {
      const float* map = fold_at(p, step, 0, head);
      for (int first = 0; first < kRows; first += kFoldSlice, buffer ^= 1) {
        float* slice = slices + buffer * Shared::kSlice;
        staged.store(slice, p.transpose, tid);
        __syncthreads();  // of X too
        if (first + kFoldSlice < kRows) {
          staged.load(map, p.transpose, first + kFoldSlice, tid);
        } else if (next_has_map) {
          staged.load(fold_at(p, next, 0, head), p.transpose, 0, tid);
        }
        fold_multiply<kRows>(x, slice, state + first * kFoldColumns, row, column);
      }
      __syncthreads();  // X has been read
    } else if (next_has_map) {
      staged.load(fold_at(p, next, 0, head), p.transpose, 0, tid);
    }
    GDN_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      const float4 value = make_float4(add[i].x + x[i][0], add[i].y + x[i][1], add[i].z + x[i][2],
                                       add[i].w + x[i][3]);
      *reinterpret_cast<float4*>(state + (row + i) * kFoldColumns + column) = value;
      if (step.table[2] != 0) {
        *reinterpret_cast<float4*>(fold_at(p, step, 2, head) + place + i * p.cols) = value;
      }
    }
  }
}

}  // namespace gdn::cuda
