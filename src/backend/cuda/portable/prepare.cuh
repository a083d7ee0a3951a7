// prepare: per (chunk, key head) one block of 256 threads computes K K^T and Q K^T once, then for
// each value head of the group the gate sums, Z by substitution in 16-blocks and two levels of
// merges, and the gated, masked P. Writes everything of Prepared.
//   Z of [[11, .], [21, 22]]: Z21 = -(I + Z22 D2) L21 (I + D1 Z11)
#pragma once

#include "backend/cuda/common/scalars.cuh"
#include "backend/cuda/common/tile.cuh"
#include "backend/cuda/portable/params.h"

namespace gdn::cuda {

inline constexpr int kPrepareThreads = 256;
inline constexpr int kPrepareStride = 68;  // floats of a row of the fp32 squares: no bank conflicts

template <int K>
struct PrepareShared {
  static constexpr int kSquareBytes = kTileRows * kPrepareStride * 4;  // 17,408
  static constexpr int kTileBytes = kTileRows * K * 2;
  static constexpr int kInner = 0;                           // L
  static constexpr int kOuter = kSquareBytes;                // scale r r q.k
  static constexpr int kNorms = 2 * kSquareBytes;            // [2][64]
  static constexpr int kGates = kNorms + 2 * kTileRows * 4;  // [batch][3][64]: hi, lo, beta
  static constexpr int kUnion = kGates + 4 * 3 * kTileRows * 4;
  // The Q and K tiles, then, once they are used up, `batch` squares Z.
  static constexpr int bytes(int batch) {
    const int squares = batch * kSquareBytes;
    return kUnion + (squares > 2 * kTileBytes ? squares : 2 * kTileBytes);
  }
};

// An fp32 square in shared memory.
struct Square {
  float* data;
  GDN_DEVICE float& operator()(int i, int j) const { return data[i * kPrepareStride + j]; }
};

// acc[16 x 8 kTiles] += a b over kSteps * 8 columns of a; a(i, k) and b(k, j) are functors. Slots
// t and t + 4 of a step hold columns 2 t and 2 t + 1: eight rows of b then lie in 32 banks.
template <int kTiles, int kSteps, typename A, typename B>
GDN_DEVICE void small_product(float (&acc)[kTiles][4], int lane, const A& a, const B& b) {
  const int g = lane >> 2, t = lane & 3;
  GDN_UNROLL
  for (int s = 0; s < kSteps; ++s) {
    const int k = 8 * s + 2 * t;
    const uint32_t fa[4] = {to_tf32(a(g, k)), to_tf32(a(g + 8, k)), to_tf32(a(g, k + 1)),
                            to_tf32(a(g + 8, k + 1))};
    GDN_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      mma_tf32(acc[n], fa, to_tf32(b(k, 8 * n + g)), to_tf32(b(k + 1, 8 * n + g)));
    }
  }
}

// f(i, j, acc) for a warp's 16 x 8 kTiles accumulators.
template <int kTiles, typename F>
GDN_DEVICE void each_element(float (&acc)[kTiles][4], int lane, const F& f) {
  const int g = lane >> 2, t = lane & 3;
  GDN_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    GDN_UNROLL
    for (int e = 0; e < 4; ++e) f(g + 8 * (e >> 1), 8 * n + 2 * t + (e & 1), acc[n][e]);
  }
}

// Column `c` of diagonal block `b` of Z, by substitution; the blocks above it in its 32-block are
// 0.
GDN_DEVICE void substitute(const Square& inner, const float* beta, const Square& z, int b, int c) {
  float scaled[16];  // beta_j Z_jc
  GDN_UNROLL
  for (int i = 0; i < 16; ++i) {
    const float* row = &inner(16 * b + i, 16 * b);
    float sum = i > c ? row[c] : 0.0f;
    GDN_UNROLL
    for (int quad = 0; 4 * quad < i; ++quad) {
      const float4 four = *reinterpret_cast<const float4*>(row + 4 * quad);
      const float entries[4] = {four.x, four.y, four.z, four.w};
      GDN_UNROLL
      for (int j = 4 * quad; j < i && j < 4 * quad + 4; ++j) sum += entries[j & 3] * scaled[j];
    }
    const float value = i > c ? -sum : 0.0f;
    scaled[i] = beta[16 * b + i] * value;
    z(16 * b + i, 16 * b + c) = value;
    if (b & 1) z(16 * (b - 1) + i, 16 * b + c) = 0.0f;
  }
}

// Rows [16 m, 16 m + 16) of Z21 of a 2 kHalf square at (r, r), by one warp; the block's barriers
// order its two steps among the warps of a head. Warps without a head only keep the barriers.
template <int kHalf>
GDN_DEVICE void merge(bool active, const Square& inner, const float* beta, const Square& z, int r,
                      int m, int lane) {
  constexpr int kTiles = kHalf / 8;
  const int low = r + kHalf;  // first row of block 2
  float acc[kTiles][4];
  if (active) {
    each_element(acc, lane, [&](int i, int j, float& x) { x = inner(low + 16 * m + i, r + j); });
    small_product<kTiles, kHalf / 8>(
        acc, lane, [&](int i, int k) { return inner(low + 16 * m + i, r + k); },
        [&](int k, int j) { return beta[r + k] * z(r + k, r + j); });
    each_element(acc, lane, [&](int i, int j, float& x) { z(low + 16 * m + i, r + j) = x; });
  }
  __syncthreads();
  if (active) {
    small_product<kTiles, kHalf / 8>(
        acc, lane, [&](int i, int k) { return z(low + 16 * m + i, low + k) * beta[low + k]; },
        [&](int k, int j) { return z(low + k, r + j); });
  }
  __syncthreads();
  if (active) {
    each_element(acc, lane, [&](int i, int j, float& x) { z(low + 16 * m + i, r + j) = -x; });
  }
  __syncthreads();
}

// Gate sums and vectors of one value head by one warp; tokens 2 lane and 2 lane + 1.
GDN_DEVICE void prepare_gates(const PrepareParams& p, const ChunkRow& chunk, int64_t slot, int head,
                              int lane, const float* norms, float* gates) {
  constexpr double kLowest = -256.0;  // log2 of a decay that fp32 cannot tell from 0
  double sum[2];
  float beta[2];
  GDN_UNROLL
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    sum[e] = 0.0;
    beta[e] = 0.0f;
    if (i < chunk.tokens) {
      const float raw = load_scalar(p.g, chunk.row + i, head);
      const double log2_gate =
          static_cast<double>(activate_gate(p.activation, raw, head).log_decay) *
          1.4426950408889634;
      sum[e] = log2_gate < kLowest ? kLowest : log2_gate;
      beta[e] = activate_beta(p.activation, load_scalar(p.beta, chunk.row + i, head));
    }
  }
  sum[1] += sum[0];
  double before = sum[1];
  GDN_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  const double total = __shfl_sync(0xffffffffu, before, 31);
  before -= sum[1];  // of the lanes before
  float* vectors = p.out.vectors + slot * kVectors;
  GDN_UNROLL
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    const double at = before + sum[e];
    const float hi = static_cast<float>(at);
    const float lo = static_cast<float>(at - hi);
    gates[i] = hi;
    gates[kTileRows + i] = lo;
    gates[2 * kTileRows + i] = beta[e];
    p.out.gate_sums[slot * kTileRows + i] = make_float2(hi, lo);
    const bool real = i < chunk.tokens;
    const float gam = exp2f(hi), rest = exp2f(static_cast<float>(total - at));
    const float rq = norms[i], rk = norms[kTileRows + i];
    vectors[kEntry * kTileRows + i] = real ? gam * rk : 0.0f;
    vectors[kBeta * kTileRows + i] = beta[e];
    vectors[kExit * kTileRows + i] = real ? rest * rk : 0.0f;
    vectors[kQuery * kTileRows + i] = real ? p.scale * gam * rq : 0.0f;
  }
  if (lane == 0) p.out.log2_decay[slot] = static_cast<float>(total);
}

// Row norms by 4 threads a row, then L and the ungated P from the two products.
template <int K>
GDN_DEVICE void prepare_squares(const PrepareParams& p, unsigned char* shared, uint32_t q_tile,
                                uint32_t k_tile, const unsigned char* tiles) {
  using Shared = PrepareShared<K>;
  constexpr int kPieces = K / 8;
  const int tid = static_cast<int>(threadIdx.x), warp = tid >> 5, lane = tid & 31;
  float* norms = reinterpret_cast<float*>(shared + Shared::kNorms);
  const int row = tid >> 2;
  float squares[2] = {0.0f, 0.0f};
  GDN_UNROLL
  for (int x = 0; x < 2; ++x) {
    for (int piece = tid & 3; piece < kPieces; piece += 4) {
      const uint4 w = *reinterpret_cast<const uint4*>(tiles + x * Shared::kTileBytes +
                                                      tile_offset<kPieces>(row, piece));
      const uint32_t words[4] = {w.x, w.y, w.z, w.w};
      GDN_UNROLL
      for (int j = 0; j < 4; ++j) {
        squares[x] += bf16_low(words[j]) * bf16_low(words[j]);
        squares[x] += bf16_high(words[j]) * bf16_high(words[j]);
      }
    }
    squares[x] += __shfl_xor_sync(0xffffffffu, squares[x], 1);
    squares[x] += __shfl_xor_sync(0xffffffffu, squares[x], 2);
    if ((tid & 3) == 0) {
      norms[x * kTileRows + row] = p.l2norm ? 1.0f / sqrtf(squares[x] + 1e-6f) : 1.0f;
    }
  }
  __syncthreads();

  // Warp (r, c): rows [16 r, 16 r + 16), columns [32 c, 32 c + 32) of both squares.
  const int r = warp & 3, c = warp >> 2;
  const LaneTile<kPieces, Order::kRowFirst> rows(lane);
  const LaneTile<kPieces, Order::kPieceFirst> columns(lane);
  float kk[4][4] = {}, qk[4][4] = {};
  GDN_UNROLL
  for (int s = 0; s < K / 16; ++s) {
    uint32_t ak[4], aq[4];
    ldmatrix_x4(ak, k_tile + rows(16 * r, 2 * s));
    ldmatrix_x4(aq, q_tile + rows(16 * r, 2 * s));
    GDN_UNROLL
    for (int n = 0; n < 4; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, k_tile + columns(32 * c + 8 * n, 2 * s));
      mma_bf16(kk[n], ak, b[0], b[1]);
      mma_bf16(kk[n + 1], ak, b[2], b[3]);
      mma_bf16(qk[n], aq, b[0], b[1]);
      mma_bf16(qk[n + 1], aq, b[2], b[3]);
    }
  }
  const Square inner{reinterpret_cast<float*>(shared + Shared::kInner)};
  const Square outer{reinterpret_cast<float*>(shared + Shared::kOuter)};
  each_element(kk, lane, [&](int i, int j, float x) {
    const int row_i = 16 * r + i, col_j = 32 * c + j;
    inner(row_i, col_j) =
        row_i > col_j ? x * norms[kTileRows + row_i] * norms[kTileRows + col_j] : 0.0f;
  });
  each_element(qk, lane, [&](int i, int j, float x) {
    const int row_i = 16 * r + i, col_j = 32 * c + j;
    outer(row_i, col_j) =
        row_i >= col_j ? x * p.scale * norms[row_i] * norms[kTileRows + col_j] : 0.0f;
  });
}

// Z and P of one value head, gated, to global memory: 4 columns of a row at a time.
GDN_DEVICE void write_squares(const PrepareParams& p, int64_t slot, const float* gates,
                              const Square& z, const Square& outer) {
  for (int at = static_cast<int>(threadIdx.x); at < kTileRows * 16; at += kPrepareThreads) {
    const int i = at >> 4, first = (at & 15) * 4;
    uint2 zs = make_uint2(0, 0), ps = make_uint2(0, 0);
    if (first <= i) {
      const float4 high = *reinterpret_cast<const float4*>(gates + first);
      const float4 low = *reinterpret_cast<const float4*>(gates + kTileRows + first);
      const float4 z4 = *reinterpret_cast<const float4*>(&z(i, first));
      const float4 p4 = *reinterpret_cast<const float4*>(&outer(i, first));
      const float highs[4] = {high.x, high.y, high.z, high.w};
      const float lows[4] = {low.x, low.y, low.z, low.w};
      float zz[4] = {z4.x, z4.y, z4.z, z4.w}, pp[4] = {p4.x, p4.y, p4.z, p4.w};
      GDN_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int j = first + e;
        const float gam =
            j <= i ? exp2_approx((gates[i] - highs[e]) + (gates[kTileRows + i] - lows[e])) : 0.0f;
        zz[e] = j < i ? gam * zz[e] : 0.0f;
        pp[e] = j <= i ? gam * pp[e] : 0.0f;
      }
      zs = make_uint2(pack_bf16(zz[0], zz[1]), pack_bf16(zz[2], zz[3]));
      ps = make_uint2(pack_bf16(pp[0], pp[1]), pack_bf16(pp[2], pp[3]));
    }
    const int64_t to = slot * kSquare + i * kTileRows + first;
    *reinterpret_cast<uint2*>(p.out.z + to) = zs;
    *reinterpret_cast<uint2*>(p.out.p + to) = ps;
  }
}

template <int K>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const PrepareParams p) {
  using Shared = PrepareShared<K>;
  GDN_SHARED(raw);
  unsigned char* shared = reinterpret_cast<unsigned char*>(raw);
  const int tid = static_cast<int>(threadIdx.x), warp = tid >> 5, lane = tid & 31;
  const int key_head = static_cast<int>(blockIdx.x) % p.shape.heads_qk;
  const int64_t index = static_cast<int64_t>(blockIdx.x) / p.shape.heads_qk;
  if (index >= p.shape.counts->chunks) return;
  const ChunkRow chunk = p.shape.chunks[index];

  unsigned char* tiles = shared + Shared::kUnion;
  const uint32_t q_tile = smem_address(tiles), k_tile = q_tile + Shared::kTileBytes;
  load_rows<K / 8, kPrepareThreads>(q_tile, p.q.data + chunk.row * p.q.stride + key_head * K,
                                    p.q.stride, chunk.tokens);
  load_rows<K / 8, kPrepareThreads>(k_tile, p.k.data + chunk.row * p.k.stride + key_head * K,
                                    p.k.stride, chunk.tokens);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  prepare_squares<K>(p, shared, q_tile, k_tile, tiles);

  const float* norms = reinterpret_cast<const float*>(shared + Shared::kNorms);
  float* gates = reinterpret_cast<float*>(shared + Shared::kGates);
  const Square inner{reinterpret_cast<float*>(shared + Shared::kInner)};
  const Square outer{reinterpret_cast<float*>(shared + Shared::kOuter)};
  if (tid < 2 * kTileRows) {
    p.out.norms[(index * p.shape.heads_qk + key_head) * 2 * kTileRows + tid] = norms[tid];
  }
  for (int first = 0; first < p.shape.group; first += p.batch) {
    const int heads = p.shape.group - first < p.batch ? p.shape.group - first : p.batch;
    const int head0 = key_head * p.shape.group + first;
    const int64_t slot0 = index * p.shape.heads_v + head0;
    if (warp < heads) {
      prepare_gates(p, chunk, slot0 + warp, head0 + warp, lane, norms,
                    gates + warp * 3 * kTileRows);
    }
    __syncthreads();  // gates written; the tiles (first) and squares (then) below are free
    const auto z_of = [&](int h) {
      return Square{reinterpret_cast<float*>(tiles + h * Shared::kSquareBytes)};
    };
    const auto beta_of = [&](int h) { return gates + (h * 3 + 2) * kTileRows; };
    if (tid < heads * 64)
      substitute(inner, beta_of(tid >> 6), z_of(tid >> 6), (tid >> 4) & 3, tid & 15);
    __syncthreads();
    const int h = warp >> 1, m = warp & 1;  // two warps a head
    const bool active = h < heads;
    const Square z = z_of(active ? h : 0);
    const float* beta = beta_of(active ? h : 0);
    merge<16>(active, inner, beta, z, 32 * m, 0, lane);
    merge<32>(active, inner, beta, z, 0, m, lane);
    for (int i = 0; i < heads; ++i) {
      write_squares(p, slot0 + i, gates + i * 3 * kTileRows, z_of(i), outer);
    }
    __syncthreads();
  }
}

}  // namespace gdn::cuda
