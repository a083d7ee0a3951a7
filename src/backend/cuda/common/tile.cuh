// Tiles of 16-bit elements in shared memory: rows of kPieces 16-byte pieces, swizzled so that eight
// consecutive rows of one piece column lie in different banks, plus the loads that fill them.
#pragma once

#include "backend/cuda/common/ptx.cuh"
#include "backend/cuda/common/types.h"

namespace gdn::cuda {

// Which lower bits of a row its pieces are exchanged by. A row of 4 pieces is half a bank line.
template <int kPieces>
__host__ __device__ constexpr int swizzle(int row) {
  static_assert(kPieces == 4 || kPieces % 8 == 0);
  return kPieces == 4 ? (row >> 1) & 3 : row & 7;
}

// Byte offset of piece `piece` of row `row`.
template <int kPieces>
__host__ __device__ constexpr int tile_offset(int row, int piece) {
  return (row * kPieces + (piece ^ swizzle<kPieces>(row))) * 16;
}

// How the four 8x8 matrices of an ldmatrix.x4 lie in a tile: a 2x2 square of them, numbered along
// rows (kPieceFirst: neighbours 0, 1 differ in the piece) or along columns. With kRowGap = 16 the
// lower two lie 16 rows below instead of 8.
enum class Order { kPieceFirst, kRowFirst };

// A lane's share of an ldmatrix.x4 address; row0 is a multiple of 8 and piece0 is even.
template <int kPieces, Order kOrder, int kRowGap = 8>
struct LaneTile {
  uint32_t row_offset;
  uint32_t piece;

  GDN_DEVICE explicit LaneTile(int lane) {
    const int matrix = lane >> 3;
    const int first = matrix & 1, second = matrix >> 1;
    const int row = (kOrder == Order::kPieceFirst ? second : first) * kRowGap + (lane & 7);
    row_offset = static_cast<uint32_t>(row * kPieces * 16);
    piece = static_cast<uint32_t>((kOrder == Order::kPieceFirst ? first : second) ^
                                  swizzle<kPieces>(lane & 7));
  }
  GDN_DEVICE uint32_t operator()(int row0, int piece0) const {
    return row_offset + static_cast<uint32_t>(row0 * kPieces * 16) +
           ((piece ^ static_cast<uint32_t>(piece0)) << 4);
  }
};

// Starts loading the first `rows` rows of a [64][8 kPieces] tile; the other rows become 0.
template <int kPieces, int kThreads>
GDN_DEVICE void load_rows(uint32_t tile, const uint16_t* from, int64_t stride, int rows) {
  static_assert(kTileRows * kPieces % kThreads == 0);
  GDN_UNROLL
  for (int i = 0; i < kTileRows * kPieces / kThreads; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    const int row = at / kPieces, piece = at % kPieces;
    const bool real = row < rows;
    cp_async_16(tile + static_cast<uint32_t>(tile_offset<kPieces>(row, piece)),
                real ? from + row * stride + piece * 8 : from, real ? 16 : 0);
  }
}

// Starts loading a dense [kRows][8 kPieces] tile.
template <int kRows, int kPieces, int kThreads>
GDN_DEVICE void load_dense(uint32_t tile, const uint16_t* from, int64_t stride = 8 * kPieces) {
  static_assert(kRows * kPieces % kThreads == 0);
  GDN_UNROLL
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    const int row = at / kPieces, piece = at % kPieces;
    cp_async_16(tile + static_cast<uint32_t>(tile_offset<kPieces>(row, piece)),
                from + row * stride + piece * 8, 16);
  }
}

// Starts loading `bytes` (a multiple of 16) of plain memory.
template <int kThreads>
GDN_DEVICE void load_plain(uint32_t to, const void* from, int bytes) {
  for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += kThreads * 16) {
    cp_async_16(to + static_cast<uint32_t>(at), static_cast<const char*>(from) + at, 16);
  }
}

// As load_rows, of any strides: `view` points at the tile's first element. Absent data is 0.
// The slow path stores at once; like the fast one it is visible after the next barrier.
template <int kPieces, int kThreads>
GDN_DEVICE void load_elements(unsigned char* shared, uint32_t offset, const ElementView& view,
                              int rows) {
  if (view.data != nullptr && view.rows) {
    load_rows<kPieces, kThreads>(smem_address(shared) + offset, view.data, view.token, rows);
    return;
  }
  const int valid = view.data != nullptr ? rows : 0;
  for (int at = static_cast<int>(threadIdx.x); at < kTileRows * kPieces; at += kThreads) {
    const int row = at / kPieces, piece = at % kPieces;
    uint32_t words[4] = {0, 0, 0, 0};
    if (row < valid) {
      const uint16_t* from = view.data + row * view.token + piece * 8 * view.element;
      GDN_UNROLL
      for (int j = 0; j < 4; ++j) {
        words[j] = from[2 * j * view.element] |
                   (static_cast<uint32_t>(from[(2 * j + 1) * view.element]) << 16);
      }
    }
    *reinterpret_cast<uint4*>(shared + offset + tile_offset<kPieces>(row, piece)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Waits until the load of the current pipeline step has arrived and every thread is past the step
// before; the caller then starts the next load. `stages` - 1 loads are in flight.
GDN_DEVICE void await_stage(int stages) {
  if (stages == 3) {
    cp_async_wait<1>();
  } else {
    cp_async_wait<0>();
  }
  __syncthreads();
}

// 8 elements of a row whose first is `to`.
GDN_DEVICE void store_piece(uint16_t* to, uint4 piece, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = piece;
    return;
  }
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
  GDN_UNROLL
  for (int j = 0; j < 4; ++j) {
    to[2 * j] = static_cast<uint16_t>(words[j]);
    to[2 * j + 1] = static_cast<uint16_t>(words[j] >> 16);
  }
}

// Transposes 4x4 words over the four lanes of a quad: afterwards word j of lane t is what word t of
// lane j was.
GDN_DEVICE void quad_transpose(uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  GDN_UNROLL
  for (int j = 0; j < 4; j += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[j] : w[j + 1], 1);
    if (odd) {
      w[j] = got;
    } else {
      w[j + 1] = got;
    }
  }
  GDN_UNROLL
  for (int j = 0; j < 2; ++j) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? w[j] : w[j + 2], 2);
    if (upper) {
      w[j] = got;
    } else {
      w[j + 2] = got;
    }
  }
}

}  // namespace gdn::cuda
