// Gradients of q, k and g, one block of 8 warps per (chunk, key head); the value heads of the group
// are taken one after another with dq and dk in registers, so their sum has a fixed order. Over
// tiles of kTile columns of V, warp (r, c) owns tokens [16 r, 16 r + 16) and half c of every row:
//   dP = query-scaled tril(Gam o (dO Vd^T))       N = -strict tril(Gam o (dY Vd^T))
//   dq += query o (dO S^T) + dP K
//   dk += exit o beta o (E dS^T) - entry o (dY S^T) + dP^T Q + (N + N^T) K
// with the norm factors folded in, so that the accumulators hold r o (gradient of the normalised
// row): then dq = acc - (r^q)^2 q (q . acc). dg_t sums, without any that could cancel: pairs (i, j)
// with i >= t > j, k . dk1 of tokens before t (they write the exit state), q . dq1 + k . dk2 of
// tokens from t on (they read the entry state), and decay <dS, S>.
#pragma once

#include <type_traits>

#include "backend/cuda/common/scalars.cuh"
#include "backend/cuda/common/scans.cuh"
#include "backend/cuda/common/tile.cuh"
#include "backend/cuda/portable/params.h"

namespace gdn::cuda {

inline constexpr int kGradientThreads = 256;

template <int K, int V, int kTile>
struct GradientShared {
  static constexpr int kSquareBytes = kSquare * 2;
  static constexpr int kQueryTile = 0;
  static constexpr int kKeyTile = kTileRows * K * 2;
  static constexpr int kDP = 2 * kKeyTile;
  static constexpr int kN = kDP + kSquareBytes;
  // q.k and k.k of each thread [4 tiles][q, k][half][2]: fp32, or bf16 where shared memory is
  // short. fp32 halves the error of dg with correlated keys.
  using Pair = std::conditional_t<(kTile == 64), float2, uint32_t>;
  static constexpr int kPairs = kN + kSquareBytes;
  static constexpr int kVector =
      kPairs + 16 * kGradientThreads * static_cast<int>(sizeof(Pair));  // [2][6][64]
  static constexpr int kNorms = kVector + 2 * 6 * kTileRows * 4;      // [2][64]
  static constexpr int kRows = kNorms + 2 * kTileRows * 4;            // [2 halves][4][64]
  static constexpr int kColumns = kRows + 2 * 4 * kTileRows * 4;      // [4 r][64]
  static constexpr int kDots = kColumns + 4 * kTileRows * 4;          // [2][8]
  static constexpr int kStages = kDots + 2 * 8 * 4;
  // Of a stage: tiles [64][kTile] of dO, E, dY, then [kTile][K] of S^T and dS^T.
  static constexpr int kThin = kTileRows * kTile * 2;
  static constexpr int kWide = kTile * K * 2;
  static constexpr int kStage = 3 * kThin + 2 * kWide;
  static constexpr int bytes(int stages) { return kStages + stages * kStage; }
};

// Rows of the per-head vector block in shared memory.
enum GradientVector { kGradEntry, kGradBeta, kGradExit, kGradQuery, kSumHigh, kSumLow };
// Row sums per half: of the pair matrix, q . dq1, k . dk1, k . dk2.
enum RowSum { kPairRow, kQueryDot, kExitDot, kEntryDot };

struct GradientItem {
  ChunkRow chunk;
  int64_t index;
  int key_head;
  int r, c;  // of the warp
  int warp, lane;
};

template <int K, int V, int kTile>
GDN_DEVICE void load_gradient(const GradientParams& p, const GradientItem& item, int head, int tile,
                              unsigned char* stage) {
  using Shared = GradientShared<K, V, kTile>;
  constexpr int kThreads = kGradientThreads, kThinPieces = kTile / 8, kWidePieces = K / 8;
  const uint32_t to = smem_address(stage);
  const int64_t slot = item.index * p.shape.heads + (head - p.shape.head0);
  ElementView d_o = p.d_o;
  if (d_o.data != nullptr) {
    d_o.data += item.chunk.row * d_o.token + head * d_o.head + tile * kTile * d_o.element;
  }
  load_elements<kThinPieces, kThreads>(stage, 0, d_o, item.chunk.tokens);
  load_dense<kTileRows, kThinPieces, kThreads>(to + Shared::kThin,
                                               p.e + slot * kTileRows * V + tile * kTile, V);
  ElementView d_y = p.dv;
  d_y.data += item.chunk.row * d_y.token + head * d_y.head + tile * kTile;
  load_elements<kThinPieces, kThreads>(stage, 2 * Shared::kThin, d_y, item.chunk.tokens);
  const int64_t state = slot * K * V + tile * kTile * K;
  load_dense<kTile, kWidePieces, kThreads>(to + 3 * Shared::kThin, p.states + state);
  load_dense<kTile, kWidePieces, kThreads>(to + 3 * Shared::kThin + Shared::kWide,
                                           p.dstates + state);
}

// What a warp accumulates over the tiles of one value head.
template <int K>
struct HeadSums {
  float out_e[4][4];       // dO E^T: column tile 2 j + c
  float dy_e[4][4];        // dY E^T
  float out_s[K / 16][4];  // dO S^T: column tile c K / 16 + n
  float dy_s[K / 16][4];   // dY S^T
  float e_ds[K / 16][4];   // E dS^T
  float dot;               // <dS, S>, this thread's part
};

template <int K, int V, int kTile>
GDN_DEVICE void gradient_tile(const GradientItem& item, const unsigned char* stage,
                              HeadSums<K>& sums) {
  using Shared = GradientShared<K, V, kTile>;
  constexpr int kThinPieces = kTile / 8, kHalfTiles = K / 16;
  const uint32_t out = smem_address(stage), e = out + Shared::kThin, dy = e + Shared::kThin;
  const uint32_t s = dy + Shared::kThin, ds = s + Shared::kWide;
  const LaneTile<kThinPieces, Order::kRowFirst> rows(item.lane);
  const LaneTile<kThinPieces, Order::kPieceFirst, 16> columns(item.lane);
  const LaneTile<K / 8, Order::kRowFirst> wide(item.lane);
  GDN_UNROLL
  for (int step = 0; step < kTile / 16; ++step) {
    uint32_t a_out[4], a_e[4], a_dy[4], b[4];
    ldmatrix_x4(a_out, out + rows(16 * item.r, 2 * step));
    ldmatrix_x4(a_e, e + rows(16 * item.r, 2 * step));
    ldmatrix_x4(a_dy, dy + rows(16 * item.r, 2 * step));
    GDN_UNROLL
    for (int j = 0; j < 4; j += 2) {
      if (j > item.r) break;
      ldmatrix_x4(b, e + columns(16 * j + 8 * item.c, 2 * step));
      mma_bf16(sums.out_e[j], a_out, b[0], b[1]);
      mma_bf16(sums.dy_e[j], a_dy, b[0], b[1]);
      mma_bf16(sums.out_e[j + 1], a_out, b[2], b[3]);
      mma_bf16(sums.dy_e[j + 1], a_dy, b[2], b[3]);
    }
    GDN_UNROLL
    for (int n = 0; n < kHalfTiles; n += 2) {
      ldmatrix_x4_trans(b, s + wide(16 * step, item.c * kHalfTiles + n));
      mma_bf16(sums.out_s[n], a_out, b[0], b[1]);
      mma_bf16(sums.dy_s[n], a_dy, b[0], b[1]);
      mma_bf16(sums.out_s[n + 1], a_out, b[2], b[3]);
      mma_bf16(sums.dy_s[n + 1], a_dy, b[2], b[3]);
      ldmatrix_x4_trans(b, ds + wide(16 * step, item.c * kHalfTiles + n));
      mma_bf16(sums.e_ds[n], a_e, b[0], b[1]);
      mma_bf16(sums.e_ds[n + 1], a_e, b[2], b[3]);
    }
  }
  const uint4* state = reinterpret_cast<const uint4*>(stage + 3 * Shared::kThin);
  const uint4* dstate = reinterpret_cast<const uint4*>(stage + 3 * Shared::kThin + Shared::kWide);
  for (int i = static_cast<int>(threadIdx.x); i < Shared::kWide / 16; i += kGradientThreads) {
    const uint4 x = state[i], y = dstate[i];
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
    GDN_UNROLL
    for (int j = 0; j < 4; ++j) {
      sums.dot += bf16_low(xs[j]) * bf16_low(ys[j]) + bf16_high(xs[j]) * bf16_high(ys[j]);
    }
  }
}

GDN_DEVICE void keep(float2& pair, float x, float y) { pair = make_float2(x, y); }
GDN_DEVICE void keep(uint32_t& pair, float x, float y) { pair = pack_bf16(x, y); }
GDN_DEVICE float2 both(float2 pair) { return pair; }
GDN_DEVICE float2 both(uint32_t pair) { return make_float2(bf16_low(pair), bf16_high(pair)); }

// Gates dO E^T and dY E^T to dP and N in shared memory, and leaves row and column sums of the pair
// matrix dP o (Q K^T) + N o (K K^T) without its diagonal, whose row and column sums cancel.
template <int K, int V, int kTile>
GDN_DEVICE void gradient_squares(const GradientParams& p, const GradientItem& item,
                                 unsigned char* shared, const float* vectors,
                                 const HeadSums<K>& sums) {
  using Shared = GradientShared<K, V, kTile>;
  const float* norms = reinterpret_cast<const float*>(shared + Shared::kNorms);
  const auto* pairs = reinterpret_cast<const typename Shared::Pair*>(shared + Shared::kPairs);
  float* row_sums = reinterpret_cast<float*>(shared + Shared::kRows);
  float* column_sums = reinterpret_cast<float*>(shared + Shared::kColumns);
  const int g = item.lane >> 2, t = item.lane & 3;
  float row_sum[2] = {0.0f, 0.0f};
  float row_high[2], row_low[2], row_query[2], row_key[2];
  GDN_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * item.r + g + 8 * half;
    row_high[half] = vectors[kSumHigh * kTileRows + i];
    row_low[half] = vectors[kSumLow * kTileRows + i];
    row_query[half] = p.scale * norms[i];
    row_key[half] = norms[kTileRows + i];
  }
  GDN_UNROLL
  for (int j = 0; j < 4; ++j) {
    float column[2] = {0.0f, 0.0f};
    if (j <= item.r) {
      const int first = 16 * j + 8 * item.c + 2 * t;  // the lane's two columns
      const float2 high = *reinterpret_cast<const float2*>(vectors + kSumHigh * kTileRows + first);
      const float2 low = *reinterpret_cast<const float2*>(vectors + kSumLow * kTileRows + first);
      const float2 beta = *reinterpret_cast<const float2*>(vectors + kGradBeta * kTileRows + first);
      const float2 norm = *reinterpret_cast<const float2*>(norms + kTileRows + first);
      GDN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int i = 16 * item.r + g + 8 * half;
        const float2 qk = both(pairs[(4 * j + half) * kGradientThreads + threadIdx.x]);
        const float2 kk = both(pairs[(4 * j + 2 + half) * kGradientThreads + threadIdx.x]);
        float dp[2], n[2];
        GDN_UNROLL
        for (int x = 0; x < 2; ++x) {
          const int column_index = first + x;
          const float by = x ? beta.y * norm.y : beta.x * norm.x;
          const float gam = i >= column_index
                                ? exp2_approx((row_high[half] - (x ? high.y : high.x)) +
                                              (row_low[half] - (x ? low.y : low.x)))
                                : 0.0f;
          dp[x] = gam * row_query[half] * by * sums.out_e[j][2 * half + x];
          n[x] = i > column_index ? -gam * row_key[half] * by * sums.dy_e[j][2 * half + x] : 0.0f;
          const float pair =
              i > column_index ? dp[x] * (x ? qk.y : qk.x) + n[x] * (x ? kk.y : kk.x) : 0.0f;
          row_sum[half] += pair;
          column[x] += pair;
        }
        const int at = tile_offset<8>(i, 2 * j + item.c) + 4 * t;
        *reinterpret_cast<uint32_t*>(shared + Shared::kDP + at) = pack_bf16(dp[0], dp[1]);
        *reinterpret_cast<uint32_t*>(shared + Shared::kN + at) = pack_bf16(n[0], n[1]);
      }
    }
    GDN_UNROLL
    for (int x = 0; x < 2; ++x) {
      GDN_UNROLL
      for (int bit = 4; bit <= 16; bit *= 2) {
        column[x] += __shfl_xor_sync(0xffffffffu, column[x], bit);
      }
      if (g == 0) column_sums[item.r * kTileRows + 16 * j + 8 * item.c + 2 * t + x] = column[x];
    }
  }
  GDN_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(row_sum[half]);
    if (t == 0) {
      row_sums[(item.c * 4 + kPairRow) * kTileRows + 16 * item.r + g + 8 * half] = sum;
    }
  }
}

// Scales the state products, leaves their row dots with q and k, and adds them to dq and dk.
template <int K, int V, int kTile>
GDN_DEVICE void gradient_states(const GradientItem& item, unsigned char* shared,
                                const float* vectors, HeadSums<K>& sums, float (&dq)[K / 16][4],
                                float (&dk)[K / 16][4]) {
  using Shared = GradientShared<K, V, kTile>;
  constexpr int kHalfTiles = K / 16;
  float* row_sums = reinterpret_cast<float*>(shared + Shared::kRows);
  const int g = item.lane >> 2, t = item.lane & 3;
  GDN_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * item.r + g + 8 * half;
    const float query = vectors[kGradQuery * kTileRows + i];
    const float exit = vectors[kGradExit * kTileRows + i] * vectors[kGradBeta * kTileRows + i];
    const float entry = -vectors[kGradEntry * kTileRows + i];
    float dots[3] = {0.0f, 0.0f, 0.0f};
    GDN_UNROLL
    for (int n = 0; n < kHalfTiles; ++n) {
      const int at = tile_offset<K / 8>(i, item.c * kHalfTiles + n) + 4 * t;
      const uint32_t q = *reinterpret_cast<const uint32_t*>(shared + Shared::kQueryTile + at);
      const uint32_t k = *reinterpret_cast<const uint32_t*>(shared + Shared::kKeyTile + at);
      GDN_UNROLL
      for (int x = 0; x < 2; ++x) {
        const int at_x = 2 * half + x;
        const float qx = x ? bf16_high(q) : bf16_low(q), kx = x ? bf16_high(k) : bf16_low(k);
        const float from_entry = query * sums.out_s[n][at_x];
        const float to_exit = exit * sums.e_ds[n][at_x];
        const float key_entry = entry * sums.dy_s[n][at_x];
        dots[0] += qx * from_entry;
        dots[1] += kx * to_exit;
        dots[2] += kx * key_entry;
        dq[n][at_x] += from_entry;
        dk[n][at_x] += to_exit + key_entry;
      }
    }
    GDN_UNROLL
    for (int x = 0; x < 3; ++x) {
      const float sum = quad_sum(dots[x]);
      if (t == 0) row_sums[(item.c * 4 + kQueryDot + x) * kTileRows + i] = sum;
    }
  }
}

// dq += dP K, dk += dP^T Q + (N + N^T) K.
template <int K, int V, int kTile>
GDN_DEVICE void gradient_products(const GradientItem& item, const unsigned char* shared,
                                  float (&dq)[K / 16][4], float (&dk)[K / 16][4]) {
  using Shared = GradientShared<K, V, kTile>;
  constexpr int kHalfTiles = K / 16;
  const uint32_t base = smem_address(shared);
  const LaneTile<8, Order::kRowFirst> rows(item.lane);
  const LaneTile<8, Order::kPieceFirst> transposed(item.lane);
  const LaneTile<K / 8, Order::kRowFirst> wide(item.lane);
  GDN_UNROLL
  for (int s = 0; s < 4; ++s) {  // contraction over tokens [16 s, 16 s + 16)
    const bool below = s <= item.r, above = s >= item.r;
    uint32_t dp[4], n[4], dp_t[4], n_t[4];
    if (below) {
      ldmatrix_x4(dp, base + Shared::kDP + rows(16 * item.r, 2 * s));
      ldmatrix_x4(n, base + Shared::kN + rows(16 * item.r, 2 * s));
    }
    if (above) {
      ldmatrix_x4_trans(dp_t, base + Shared::kDP + transposed(16 * s, 2 * item.r));
      ldmatrix_x4_trans(n_t, base + Shared::kN + transposed(16 * s, 2 * item.r));
    }
    GDN_UNROLL
    for (int j = 0; j < kHalfTiles; j += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, base + Shared::kKeyTile + wide(16 * s, item.c * kHalfTiles + j));
      if (below) {
        mma_bf16(dq[j], dp, b[0], b[1]);
        mma_bf16(dq[j + 1], dp, b[2], b[3]);
        mma_bf16(dk[j], n, b[0], b[1]);
        mma_bf16(dk[j + 1], n, b[2], b[3]);
      }
      if (above) {
        mma_bf16(dk[j], n_t, b[0], b[1]);
        mma_bf16(dk[j + 1], n_t, b[2], b[3]);
        ldmatrix_x4_trans(b, base + Shared::kQueryTile + wide(16 * s, item.c * kHalfTiles + j));
        mma_bf16(dk[j], dp_t, b[0], b[1]);
        mma_bf16(dk[j + 1], dp_t, b[2], b[3]);
      }
    }
  }
}

// dg of one value head, by one warp.
template <int K, int V, int kTile>
GDN_DEVICE void gradient_gates(const GradientParams& p, const GradientItem& item,
                               const unsigned char* shared, int head, int parity) {
  using Shared = GradientShared<K, V, kTile>;
  const float* row_sums = reinterpret_cast<const float*>(shared + Shared::kRows);
  const float* column_sums = reinterpret_cast<const float*>(shared + Shared::kColumns);
  const float* dots = reinterpret_cast<const float*>(shared + Shared::kDots) + parity * 8;
  const auto row = [&](int which, int i) {
    return row_sums[which * kTileRows + i] + row_sums[(4 + which) * kTileRows + i];
  };
  float pairs[2], reads[2], writes[2];
  GDN_UNROLL
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * item.lane + e;
    float column = 0.0f;
    GDN_UNROLL
    for (int r = 0; r < 4; ++r) column += column_sums[r * kTileRows + i];
    pairs[e] = row(kPairRow, i) - column;
    reads[e] = row(kQueryDot, i) + row(kEntryDot, i);
    writes[e] = row(kExitDot, i);
  }
  sum_from(pairs, item.lane);
  sum_from(reads, item.lane);
  sum_before(writes, item.lane);
  const int64_t slot = item.index * p.shape.heads_v + head;
  float through = 0.0f;
  GDN_UNROLL
  for (int w = 0; w < 8; ++w) through += dots[w];
  through *= exp2f(p.prepared.log2_decay[slot]);
  float2 sum = make_float2(0.0f, 0.0f);
  GDN_UNROLL
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * item.lane + e;
    if (i >= item.chunk.tokens) continue;
    const float crossing = i > 0 ? pairs[e] : 0.0f;
    const float d_log = crossing + reads[e] + writes[e] + through;
    const Gate gate = activate_gate(p.activation, load_scalar(p.g, item.chunk.row + i, head), head);
    const float d_raw = d_log * gate.slope;
    store_scalar(p.dg, item.chunk.row + i, head, d_raw);
    sum.x += d_log * gate.log_decay;
    sum.y += d_raw;
  }
  if (p.sums == nullptr) return;
  GDN_UNROLL
  for (int bit = 1; bit < 32; bit *= 2) {
    sum.x += __shfl_xor_sync(0xffffffffu, sum.x, bit);
    sum.y += __shfl_xor_sync(0xffffffffu, sum.y, bit);
  }
  if (item.lane == 0) p.sums[slot] = sum;
}

// Ends a gradient: projects out the norm's direction and leaves the rows in `tile`, which holds the
// raw rows until every warp has read its own.
template <int K>
GDN_DEVICE void finish_rows(const GradientItem& item, bool l2norm, const float* norms,
                            const float* projections, unsigned char* tile,
                            const float (&acc)[K / 16][4]) {
  constexpr int kHalfTiles = K / 16;
  const int g = item.lane >> 2, t = item.lane & 3;
  GDN_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * item.r + g + 8 * half;
    const float along =
        l2norm ? norms[i] * norms[i] * (projections[i] + projections[kTileRows + i]) : 0.0f;
    GDN_UNROLL
    for (int n = 0; n < kHalfTiles; ++n) {
      uint32_t* at = reinterpret_cast<uint32_t*>(
          tile + tile_offset<K / 8>(i, item.c * kHalfTiles + n) + 4 * t);
      const uint32_t x = *at;
      *at = pack_bf16(acc[n][2 * half] - along * bf16_low(x),
                      acc[n][2 * half + 1] - along * bf16_high(x));
    }
  }
}

// Row dots of a gradient with its raw rows, this warp's half.
template <int K>
GDN_DEVICE void project_rows(const GradientItem& item, const unsigned char* tile,
                             const float (&acc)[K / 16][4], float* projections) {
  constexpr int kHalfTiles = K / 16;
  const int g = item.lane >> 2, t = item.lane & 3;
  GDN_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * item.r + g + 8 * half;
    float dot = 0.0f;
    GDN_UNROLL
    for (int n = 0; n < kHalfTiles; ++n) {
      const uint32_t x = *reinterpret_cast<const uint32_t*>(
          tile + tile_offset<K / 8>(i, item.c * kHalfTiles + n) + 4 * t);
      dot += acc[n][2 * half] * bf16_low(x) + acc[n][2 * half + 1] * bf16_high(x);
    }
    const float sum = quad_sum(dot);
    if (t == 0) projections[item.c * kTileRows + i] = sum;
  }
}

template <int K>
GDN_DEVICE void store_rows(const ElementView& view, const ChunkRow& chunk, int head,
                           const unsigned char* tile) {
  constexpr int kPieces = K / 8;
  uint16_t* to = view.data + chunk.row * view.token + head * view.head;
  for (int at = static_cast<int>(threadIdx.x); at < chunk.tokens * kPieces;
       at += kGradientThreads) {
    const int row = at / kPieces, piece = at % kPieces;
    store_piece(to + row * view.token + piece * 8,
                *reinterpret_cast<const uint4*>(tile + tile_offset<kPieces>(row, piece)),
                view.rows);
  }
}

// q.k and k.k of the warp's elements below and on the diagonal. Both the row and the column sums of
// the pair matrix read what is kept, so that its rounding cancels where it must.
template <int K, int V, int kTile>
GDN_DEVICE void keep_pairs(const GradientItem& item, unsigned char* shared) {
  using Shared = GradientShared<K, V, kTile>;
  const uint32_t q_tile = smem_address(shared) + Shared::kQueryTile;
  const uint32_t k_tile = smem_address(shared) + Shared::kKeyTile;
  auto* pairs = reinterpret_cast<typename Shared::Pair*>(shared + Shared::kPairs);
  const LaneTile<K / 8, Order::kRowFirst> rows(item.lane);
  const LaneTile<K / 8, Order::kPieceFirst, 16> columns(item.lane);
  float qk[4][4] = {}, kk[4][4] = {};
  GDN_UNROLL
  for (int s = 0; s < K / 16; ++s) {
    uint32_t aq[4], ak[4], b[4];
    ldmatrix_x4(aq, q_tile + rows(16 * item.r, 2 * s));
    ldmatrix_x4(ak, k_tile + rows(16 * item.r, 2 * s));
    GDN_UNROLL
    for (int j = 0; j < 4; j += 2) {
      ldmatrix_x4(b, k_tile + columns(16 * j + 8 * item.c, 2 * s));
      mma_bf16(qk[j], aq, b[0], b[1]);
      mma_bf16(kk[j], ak, b[0], b[1]);
      mma_bf16(qk[j + 1], aq, b[2], b[3]);
      mma_bf16(kk[j + 1], ak, b[2], b[3]);
    }
  }
  GDN_UNROLL
  for (int j = 0; j < 4; ++j) {
    GDN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * j * kGradientThreads + static_cast<int>(threadIdx.x);
      keep(pairs[at + half * kGradientThreads], qk[j][2 * half], qk[j][2 * half + 1]);
      keep(pairs[at + (2 + half) * kGradientThreads], kk[j][2 * half], kk[j][2 * half + 1]);
    }
  }
}

template <int K, int V, int kTile>
__global__ void __launch_bounds__(kGradientThreads, 1) gradient_kernel(const GradientParams p) {
  using Shared = GradientShared<K, V, kTile>;
  constexpr int kTiles = V / kTile, kHalfTiles = K / 16;
  GDN_SHARED(raw);
  unsigned char* shared = reinterpret_cast<unsigned char*>(raw);
  const int tid = static_cast<int>(threadIdx.x);
  const int key_heads = p.shape.heads / p.shape.group;
  GradientItem item;
  item.index = static_cast<int64_t>(blockIdx.x) / key_heads;
  if (item.index >= p.shape.counts->chunks) return;
  item.key_head = p.shape.head0 / p.shape.group + static_cast<int>(blockIdx.x) % key_heads;
  item.chunk = p.shape.chunks[item.index];
  item.warp = tid >> 5;
  item.lane = tid & 31;
  item.r = item.warp & 3;
  item.c = item.warp >> 2;

  const int64_t row = item.chunk.row;
  load_rows<K / 8, kGradientThreads>(smem_address(shared) + Shared::kQueryTile,
                                     p.q.data + row * p.q.stride + item.key_head * K, p.q.stride,
                                     item.chunk.tokens);
  load_rows<K / 8, kGradientThreads>(smem_address(shared) + Shared::kKeyTile,
                                     p.k.data + row * p.k.stride + item.key_head * K, p.k.stride,
                                     item.chunk.tokens);
  float* norms = reinterpret_cast<float*>(shared + Shared::kNorms);
  if (tid < 2 * kTileRows) {
    norms[tid] =
        p.prepared.norms[(item.index * p.shape.heads_qk + item.key_head) * 2 * kTileRows + tid];
  }
  cp_async_commit();

  const int steps = p.shape.group * kTiles, ahead = p.stages - 1;
  unsigned char* stages = shared + Shared::kStages;
  const auto load = [&](int step, int stage) {
    load_gradient<K, V, kTile>(p, item, item.key_head * p.shape.group + step / kTiles,
                               step % kTiles, stages + stage * Shared::kStage);
  };
  for (int i = 0; i < ahead; ++i) {
    if (i < steps) load(i, i);
    cp_async_commit();
  }
  float dq[kHalfTiles][4] = {}, dk[kHalfTiles][4] = {};
  HeadSums<K> sums;
  int current = 0;
  for (int step = 0; step < steps; ++step) {
    const int in_group = step / kTiles, tile = step % kTiles, parity = in_group & 1;
    const int head = item.key_head * p.shape.group + in_group;
    if (ahead == 0) {
      __syncthreads();
      load(step, 0);
      cp_async_commit();
    }
    await_stage(p.stages);
    if (ahead > 0) {
      if (step + ahead < steps) {
        load(step + ahead, current + ahead < p.stages ? current + ahead : current - 1);
      }
      cp_async_commit();
    }
    if (step == 0) keep_pairs<K, V, kTile>(item, shared);
    float* vectors = reinterpret_cast<float*>(shared + Shared::kVector) + parity * 6 * kTileRows;
    if (tile == 0) {
      const int64_t slot = item.index * p.shape.heads_v + head;
      if (tid < kVectors) vectors[tid] = p.prepared.vectors[slot * kVectors + tid];
      if (tid < kTileRows) {
        const float2 pair = p.prepared.gate_sums[slot * kTileRows + tid];
        vectors[kSumHigh * kTileRows + tid] = pair.x;
        vectors[kSumLow * kTileRows + tid] = pair.y;
      }
      sums = {};
    }
    gradient_tile<K, V, kTile>(item, stages + current * Shared::kStage, sums);
    current = current + 1 < p.stages ? current + 1 : 0;
    if (tile + 1 < kTiles) continue;

    float dot = sums.dot;
    GDN_UNROLL
    for (int bit = 1; bit < 32; bit *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, bit);
    if (item.lane == 0) {
      reinterpret_cast<float*>(shared + Shared::kDots)[parity * 8 + item.warp] = dot;
    }
    __syncthreads();  // the head's vectors are there; the last head's squares are used up
    gradient_squares<K, V, kTile>(p, item, shared, vectors, sums);
    gradient_states<K, V, kTile>(item, shared, vectors, sums, dq, dk);
    __syncthreads();
    if (item.warp == 0) gradient_gates<K, V, kTile>(p, item, shared, head, parity);
    gradient_products<K, V, kTile>(item, shared, dq, dk);
  }

  // The row sums' place serves the projections.
  __syncthreads();
  float* projections = reinterpret_cast<float*>(shared + Shared::kRows);
  if (p.l2norm) {
    project_rows<K>(item, shared + Shared::kQueryTile, dq, projections);
    project_rows<K>(item, shared + Shared::kKeyTile, dk, projections + 2 * kTileRows);
    __syncthreads();
  }
  finish_rows<K>(item, p.l2norm, norms, projections, shared + Shared::kQueryTile, dq);
  finish_rows<K>(item, p.l2norm, norms + kTileRows, projections + 2 * kTileRows,
                 shared + Shared::kKeyTile, dk);
  __syncthreads();
  store_rows<K>(p.dq, item.chunk, item.key_head, shared + Shared::kQueryTile);
  store_rows<K>(p.dk, item.chunk, item.key_head, shared + Shared::kKeyTile);
}

}  // namespace gdn::cuda
