// Small kernels beside the stages: zero rows past the last document, states of documents without
// tokens, and the last step of the sums over tokens.
#pragma once

#include "backend/cuda/common/scalars.cuh"
#include "backend/cuda/common/tile.cuh"

namespace gdn::cuda {

inline constexpr int kRowThreads = 256;

// `bytes` zero bytes at the start of each of `rows` rows.
struct ZeroRowsParams {
  unsigned char* data;
  int64_t rows, row_bytes, bytes, element_bytes;  // bytes: a multiple of element_bytes (2, 4 or 8)
};

static __global__ void zero_rows_kernel(const ZeroRowsParams p) {
  const int64_t per_row = p.bytes / p.element_bytes;
  const int64_t at = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  if (at >= p.rows * per_row) return;
  unsigned char* to = p.data + at / per_row * p.row_bytes + at % per_row * p.element_bytes;
  if (p.element_bytes == 2) {
    *reinterpret_cast<uint16_t*>(to) = 0;
  } else if (p.element_bytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = 0;
  } else {
    *reinterpret_cast<uint64_t*>(to) = 0;
  }
}

// Rows of bf16 heads, a piece of 8 elements a thread; null from.data: 0.
struct CopyRowsParams {
  ElementView from, to;
  int64_t rows;
  int heads, pieces;  // of a row
};

static __global__ void copy_rows_kernel(const CopyRowsParams p) {
  const int64_t at = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  const int piece = static_cast<int>(at % p.pieces);
  const int64_t head = at / p.pieces % p.heads, row = at / p.pieces / p.heads;
  if (row >= p.rows) return;
  const uint16_t* from = p.from.data + row * p.from.token + head * p.from.head;
  uint16_t* to = p.to.data + row * p.to.token + head * p.to.head;
  for (int i = 8 * piece; i < 8 * piece + 8; ++i) {
    to[i * p.to.element] = p.from.data != nullptr ? from[i * p.from.element] : uint16_t{0};
  }
}

// to <- from (0 where absent) for the listed documents.
struct CopyStatesParams {
  const int64_t* documents;
  StateView from, to;
  int64_t count;
  int heads, dim_k, dim_v;
};

static __global__ void copy_states_kernel(const CopyStatesParams p) {
  int64_t at = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  const int64_t matrix = int64_t{p.dim_k} * p.dim_v;
  if (at >= p.count * p.heads * matrix) return;
  const int j = static_cast<int>(at % p.dim_v), i = static_cast<int>(at / p.dim_v % p.dim_k);
  at /= matrix;
  const int head = static_cast<int>(at % p.heads);
  const int64_t doc = p.documents[at / p.heads];
  state_at(p.to, doc, head, i, j) =
      p.from.data != nullptr ? state_at(p.from, doc, head, i, j) : 0.0f;
}

// dA_log and ddt_bias of one head a block: the sum over chunks in a fixed order, in fp64.
struct SumParams {
  const float2* sums;  // [C][HV]
  int64_t chunks;
  int heads;
  ScalarView dA_log, ddt_bias;  // [1, HV]; null data: not wanted
};

static __global__ void __launch_bounds__(kRowThreads) sum_kernel(const SumParams p) {
  GDN_SHARED(raw);
  double2* partial = reinterpret_cast<double2*>(raw);
  const int tid = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.x);
  double x = 0.0, y = 0.0;
  for (int64_t c = tid; c < p.chunks; c += kRowThreads) {
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
