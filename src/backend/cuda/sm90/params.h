// What the sm_90a kernels are given, by value. Pointers are device memory, strides are in elements
// and 64-bit. T local rows, H key heads, HV value heads, G = HV / H, C chunks of 64 tokens, 128 = K
// = V. A chunk record is what k_prepare leaves for the walks, per (chunk, value head):
//   tile  bf16 [36][8][8]  W_ij = -e^{G_i-G_j} ((I + A B)^-1 A)_ij for i > j, else 0; A the strict
//   lower part
//                          of K K^T, B = diag(beta). Only the 8 x 8 blocks (I, J), J <= I, at I (I
//                          + 1) / 2 + J
//   gate  fp32 [2][64]     G, the inclusive sums of the log2 decays within the chunk; beta
// and per (chunk, key head)
//   norm  fp32 [2][64]     scale / |q|, 1 / |k| (scale, 1 without the L2 norm)
// Rows past the chunk's end hold G of the last token, beta 0, and zeros in the tile.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "backend/cuda/common/tables.h"
#include "backend/cuda/common/types.h"
#include "backend/cuda/sm90/pieces.h"

namespace gdn::sm90 {

inline constexpr int kDim = 128;
inline constexpr int kRecordElements =
    36 * 64;  // of a tile: the 8 x 8 blocks on and below the diagonal

struct PrepareParams {
  const __nv_bfloat16* q;  // [T, H, 128], token stride q_stride; read only with l2norm
  const __nv_bfloat16* k;  // [T, H, 128], token stride k_stride
  int64_t q_stride;
  int64_t k_stride;
  cuda::ScalarView g;     // [T, HV]
  cuda::ScalarView beta;  // [T, HV]
  cuda::Activation activation;
  const cuda::ChunkRow* chunks;  // [C]
  __nv_bfloat16* tiles;          // [C, HV, 36, 8, 8]
  float* gates;                  // [C, HV, 2, 64]
  float* norms;                  // [C, H, 2, 64]
  const int64_t* num_chunks;     // of this packing
  int64_t max_chunks;            // of the capacity
  int heads_k;
  int heads_v;
  float scale;
  bool l2norm;
};

struct WalkParams {
  CUtensorMap q;  // [T, H, 128] as tensor_map.h describes
  CUtensorMap k;
  CUtensorMap v;               // [T, HV, 128]; reverse walks: d_o
  const __nv_bfloat16* tiles;  // [C, HV, 36, 8, 8]
  const float* gates;          // [C, HV, 2, 64]
  const float* norms;          // [C, H, 2, 64]
  CUtensorMap o_map;           // [T, HV, 128], boxes of one half of V; reverse: f U
  __nv_bfloat16* o;            // the same memory, token stride o_stride
  __nv_bfloat16* states;       // [C, HV, 2, 2, 64, 64] images: dS of the state that leaves a chunk
  int64_t o_stride;
  cuda::StateView initial_state;  // null data: 0
  cuda::StateView final_state;    // null data: not wanted
  const float* enter_table;       // [HV, slots, K, V]
  float* leave_table;             // [HV, slots, K, V]; summaries: B, and M in map_table
  float* map_table;               // [HV, slots, K, K]
  int64_t enter_slots;
  int64_t leave_slots;
  int64_t map_slots;
  float* hand_over;  // [hand-overs, G, 128 * 128] states in register order
  int* flags;        // [hand-overs, G, 2]: 0 before the launch, and after it again
  float log2_bound;  // summaries: a run of chunks that decays below this forgets what was before
  const WalkPiece* pieces;     // in the order of their blocks
  const int32_t* piece_begin;  // [blocks / G + 1]
  int heads_k;
  int heads_v;
  int group;         // G
  int block_stride;  // without a common factor with the number of blocks: spreads few lane groups
                     // over the device, whose neighbouring multiprocessors share caches of code
};

}  // namespace gdn::sm90
