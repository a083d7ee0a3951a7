// Small kernels beside the stages: zero rows past the last document, states of documents without
// tokens, and the last step of the sums over tokens.
#pragma once

#include "backend/cuda/common/scalars.cuh"
#include "backend/cuda/common/tile.cuh"

namespace gdn::cuda {

inline constexpr int kRowThreads = 256;

// Rows [*first, rows) become 0: in each `runs` runs of `bytes` bytes, `run_bytes` apart.
struct ZeroRowsParams {
  unsigned char* data;
  const int64_t* first;
  int64_t rows, row_bytes, runs, run_bytes, bytes;
  int64_t unit;  // 2, 4, 8 or 16 bytes, which all starts and lengths are multiples of
};

static __global__ void zero_rows_kernel(const ZeroRowsParams p) {
  const int64_t per_run = p.bytes / p.unit, first = *p.first;
  const int64_t units = (p.rows - first) * p.runs * per_run;
  for (int64_t i = int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < units;
       i += int64_t{gridDim.x} * kRowThreads) {
    const int64_t run = i / per_run;
    unsigned char* to = p.data + (first + run / p.runs) * p.row_bytes + run % p.runs * p.run_bytes +
                        i % per_run * p.unit;
    if (p.unit == 2) {
      *reinterpret_cast<uint16_t*>(to) = 0;
    } else if (p.unit == 4) {
      *reinterpret_cast<uint32_t*>(to) = 0;
    } else if (p.unit == 8) {
      *reinterpret_cast<uint64_t*>(to) = 0;
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
  }
}

// Rows of bf16 heads, a piece of 8 elements a thread; null from.data: 0.
struct CopyRowsParams {
  ElementView from, to;
  const int64_t* rows;
  int heads, pieces;  // of a row
};

static __global__ void copy_rows_kernel(const CopyRowsParams p) {
  const int64_t pieces = *p.rows * p.heads * p.pieces;
  for (int64_t at = int64_t{blockIdx.x} * kRowThreads + threadIdx.x; at < pieces;
       at += int64_t{gridDim.x} * kRowThreads) {
    const int piece = static_cast<int>(at % p.pieces);
    const int64_t head = at / p.pieces % p.heads, row = at / p.pieces / p.heads;
    const uint16_t* from = p.from.data + row * p.from.token + head * p.from.head;
    uint16_t* to = p.to.data + row * p.to.token + head * p.to.head;
    for (int i = 8 * piece; i < 8 * piece + 8; ++i) {
      to[i * p.to.element] = p.from.data != nullptr ? from[i * p.from.element] : uint16_t{0};
    }
  }
}

// to <- from (0 where absent) for the listed documents.
struct CopyStatesParams {
  const int64_t* documents;
  StateView from, to;
  const int64_t* count;
  int heads, dim_k, dim_v;
};

static __global__ void copy_states_kernel(const CopyStatesParams p) {
  const int64_t matrix = int64_t{p.dim_k} * p.dim_v, elements = *p.count * p.heads * matrix;
  for (int64_t at = int64_t{blockIdx.x} * kRowThreads + threadIdx.x; at < elements;
       at += int64_t{gridDim.x} * kRowThreads) {
    const int j = static_cast<int>(at % p.dim_v), i = static_cast<int>(at / p.dim_v % p.dim_k);
    const int head = static_cast<int>(at / matrix % p.heads);
    const int64_t doc = p.documents[at / matrix / p.heads];
    state_at(p.to, doc, head, i, j) =
        p.from.data != nullptr ? state_at(p.from, doc, head, i, j) : 0.0f;
  }
}

// dA_log and ddt_bias of one head a block: the sum over chunks in a fixed order, in fp64.
struct SumParams {
  const float2* sums;  // [C][HV]
  const int64_t* chunks;
  int heads;
  ScalarView dA_log, ddt_bias;  // [1, HV]; null data: not wanted
};

static __global__ void __launch_bounds__(kRowThreads) sum_kernel(const SumParams p) {
  GDN_SHARED(raw);
  double2* partial = reinterpret_cast<double2*>(raw);
  const int tid = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.x);
  double x = 0.0, y = 0.0;
  const int64_t chunks = *p.chunks;
  for (int64_t c = tid; c < chunks; c += kRowThreads) {
    const float2 part = p.sums[c * p.heads + head];
    x += part.x;
    y += part.y;
  }
  partial[tid] = make_double2(x, y);
  for (int half = kRowThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (tid < half) {
      partial[tid].x += partial[tid + half].x;
      partial[tid].y += partial[tid + half].y;
    }
  }
  if (tid != 0) return;
  if (p.dA_log.data != nullptr) {
    store_scalar(p.dA_log, 0, head, static_cast<float>(partial[0].x));
  }
  if (p.ddt_bias.data != nullptr) {
    store_scalar(p.ddt_bias, 0, head, static_cast<float>(partial[0].y));
  }
}

}  // namespace gdn::cuda
