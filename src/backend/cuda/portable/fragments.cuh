// The walks keep a state transposed, S^T [V][K]: a warp owns 16 rows of it as fp32 accumulators and
// never needs another warp's. An accumulator tile pair is an A fragment as it is, so every product
// of a walk has the warp's 16 rows on the left and shared tiles on the right.
#pragma once

#include "backend/cuda/common/scalars.cuh"
#include "backend/cuda/common/tile.cuh"
#include "backend/cuda/portable/params.h"

namespace gdn::cuda {

// Accumulators [16][8 kTiles] as A fragments of the product over their columns.
GDN_DEVICE void pack_fragment(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
  a[0] = pack_bf16(low[0], low[1]);
  a[1] = pack_bf16(low[2], low[3]);
  a[2] = pack_bf16(high[0], high[1]);
  a[3] = pack_bf16(high[2], high[3]);
}

// What `a` of pack_fragment is off by.
GDN_DEVICE void pack_rest(uint32_t (&rest)[4], const uint32_t (&a)[4], const float (&low)[4],
                          const float (&high)[4]) {
  rest[0] = pack_bf16(low[0] - bf16_low(a[0]), low[1] - bf16_high(a[0]));
  rest[1] = pack_bf16(low[2] - bf16_low(a[1]), low[3] - bf16_high(a[1]));
  rest[2] = pack_bf16(high[0] - bf16_low(a[2]), high[1] - bf16_high(a[2]));
  rest[3] = pack_bf16(high[2] - bf16_low(a[3]), high[3] - bf16_high(a[3]));
}

// acc[n][e] times the vector entry of its column (token).
GDN_DEVICE void scale_columns(float (&acc)[4], float2 by) {
  acc[0] *= by.x;
  acc[1] *= by.y;
  acc[2] *= by.x;
  acc[3] *= by.y;
}

// The entries of vector row `which` at a lane's two columns of token tile n.
GDN_DEVICE float2 column_pair(const float* vectors, int which, int n, int lane) {
  return *reinterpret_cast<const float2*>(vectors + which * kTileRows + 8 * n + 2 * (lane & 3));
}

// acc[16][64 tokens] += a[16][K] tile[64][K]^T, the state's product with K or Q rows.
template <int K, typename Fragment>
GDN_DEVICE void times_rows(float (&acc)[8][4], const Fragment& fragment, uint32_t tile, int lane) {
  const LaneTile<K / 8, Order::kPieceFirst> at(lane);
  GDN_UNROLL
  for (int s = 0; s < K / 16; ++s) {
    uint32_t a[4];
    fragment(a, s);
    GDN_UNROLL
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, tile + at(8 * n, 2 * s));
      mma_bf16(acc[n], a, b[0], b[1]);
      mma_bf16(acc[n + 1], a, b[2], b[3]);
    }
  }
}

// state[16][K] += a[16][64 tokens] tile[64][K].
template <int K>
GDN_DEVICE void update_state(float (&state)[K / 8][4], const uint32_t (&a)[4][4], uint32_t tile,
                             int lane) {
  const LaneTile<K / 8, Order::kRowFirst> at(lane);
  GDN_UNROLL
  for (int s = 0; s < 4; ++s) {
    GDN_UNROLL
    for (int n = 0; n < K / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, tile + at(16 * s, n));
      mma_bf16(state[n], a[s], b[0], b[1]);
      mma_bf16(state[n + 1], a[s], b[2], b[3]);
    }
  }
}

// acc[16][64] += a[16][64] square^T for a lower triangular square: column i takes rows j <= i.
GDN_DEVICE void times_lower_transposed(float (&acc)[8][4], const uint32_t (&a)[4][4],
                                       uint32_t square, int lane) {
  const LaneTile<8, Order::kPieceFirst> at(lane);
  GDN_UNROLL
  for (int s = 0; s < 4; ++s) {
    GDN_UNROLL
    for (int n = 2 * s; n < 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, square + at(8 * n, 2 * s));
      mma_bf16(acc[n], a[s], b[0], b[1]);
      mma_bf16(acc[n + 1], a[s], b[2], b[3]);
    }
  }
}

// acc[16][64] += a[16][64] square for a lower triangular square: column j takes rows i >= j.
GDN_DEVICE void times_lower(float (&acc)[8][4], const uint32_t (&a)[4][4], uint32_t square,
                            int lane) {
  const LaneTile<8, Order::kRowFirst> at(lane);
  GDN_UNROLL
  for (int s = 0; s < 4; ++s) {
    GDN_UNROLL
    for (int n = 0; n < 2 * s + 2; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, square + at(16 * s, n));
      mma_bf16(acc[n], a[s], b[0], b[1]);
      mma_bf16(acc[n + 1], a[s], b[2], b[3]);
    }
  }
}

// A warp's 16 columns of a [64][V] tile, transposed: word 4 s + i of the result is a[s][i] of an A
// fragment [16][64 tokens], so words (4 s, 4 s + 1) are token tile 2 s, (4 s + 2, 4 s + 3) tile 2 s
// + 1.
template <int V>
GDN_DEVICE void load_columns(uint32_t (&words)[4][4], uint32_t tile, int warp, int lane) {
  const LaneTile<V / 8, Order::kPieceFirst> at(lane);
  GDN_UNROLL
  for (int s = 0; s < 4; ++s) ldmatrix_x4_trans(words[s], tile + at(16 * s, 2 * warp));
}

// Accumulators [16][64 tokens] as bf16 rows [token][16]: through the warp's own 16 columns of a
// tile in shared memory, whose former contents the warp no longer needs. to(token, piece, value)
// stores.
template <int V, typename Store>
GDN_DEVICE void store_columns(const float (&acc)[8][4], unsigned char* tile, int warp, int lane,
                              const Store& to) {
  __syncwarp();
  GDN_UNROLL
  for (int n = 0; n < 8; ++n) {
    GDN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = movmatrix_trans(pack_bf16(acc[n][2 * half], acc[n][2 * half + 1]));
      *reinterpret_cast<uint32_t*>(tile + tile_offset<V / 8>(8 * n + (lane >> 2), 2 * warp + half) +
                                   4 * (lane & 3)) = word;
    }
  }
  __syncwarp();
  GDN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int token = (lane >> 1) + 16 * i, piece = 2 * warp + (lane & 1);
    to(token, piece, *reinterpret_cast<const uint4*>(tile + tile_offset<V / 8>(token, piece)));
  }
}

// A warp's rows of S^T as bf16 [V][K], 64 bytes of a row at a time.
template <int K>
GDN_DEVICE void store_state_bf16(const float (&state)[K / 8][4], uint16_t* to, int warp, int lane) {
  GDN_UNROLL
  for (int q = 0; q < K / 32; ++q) {
    GDN_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t w[4];
      GDN_UNROLL
      for (int j = 0; j < 4; ++j) {
        w[j] = pack_bf16(state[4 * q + j][2 * half], state[4 * q + j][2 * half + 1]);
      }
      quad_transpose(w, lane);
      const int row = 16 * warp + 8 * half + (lane >> 2);
      *reinterpret_cast<uint4*>(to + row * K + 8 * (4 * q + (lane & 3))) =
          make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// f(i, j, x): x is row i (of K) and column j (of V) of the state.
template <int K, typename F>
GDN_DEVICE void each_state(float (&state)[K / 8][4], int warp, int lane, const F& f) {
  GDN_UNROLL
  for (int n = 0; n < K / 8; ++n) {
    GDN_UNROLL
    for (int e = 0; e < 4; ++e) {
      f(8 * n + 2 * (lane & 3) + (e & 1), 16 * warp + (lane >> 2) + 8 * (e >> 1), state[n][e]);
    }
  }
}

// The smallest number of chunks at one end of a segment whose decay is below the bound, or -1.
// chunk(i): the chunk at distance i from that end. Every lane returns the same.
template <typename Chunk>
GDN_DEVICE int decayed_within(const WarmUp& warm_up, const Prepared& prepared, int heads_v,
                              int head, int chunks, int lane, const Chunk& chunk) {
  float before = 0.0f;
  for (int first = 0; first < chunks; first += 32) {
    const int i = first + lane;
    float sum = i < chunks ? prepared.log2_decay[chunk(i) * heads_v + head] : 0.0f;
    GDN_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    sum += before;
    const unsigned below = __ballot_sync(0xffffffffu, i < chunks && sum < warm_up.log2_bound);
    if (below != 0) return first + __ffs(static_cast<int>(below));
    before = __shfl_sync(0xffffffffu, sum, 31);
  }
  return -1;
}

}  // namespace gdn::cuda
