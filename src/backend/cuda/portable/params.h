// What the kernels of cuda-portable are given, by value, and what lies in `prepared` and `scratch`.
// T local rows, H key heads, HV value heads, C chunks. Per chunk and value head, with L = strict
// lower part of r_i r_j k_i.k_j, D = diag(beta), Gam_ij = exp(G_i - G_j) from the gate sums G of
// the chunk:
//   Z = Gam o (-L - L D Z)   so that E = Y + Z D Y, Vd = D E and U = dVd + Z^T D dVd (docs/kernels)
//   P = scale Gam o (r_i^q r_j k-norm-folded q_i.k_j), lower triangle with the diagonal
#pragma once

#include <cstdint>

#include "backend/cuda/common/tables.h"
#include "backend/cuda/common/types.h"

namespace gdn::cuda {

// Rows of the vector block W of a chunk and value head, fp32 [4][64]; rows past the chunk's end are
// 0. The norm factors r^q, r^k (1 without the L2 norm) are folded in.
enum VectorRow {
  kEntry = 0,  // exp(G_i) r_i^k         scales K S0 and K^T dY
  kBeta = 1,
  kExit = 2,   // exp(G_C - G_i) r_i^k   scales K^T Vd and K dS1
  kQuery = 3,  // scale exp(G_i) r_i^q   scales Q S0 and Q^T dO
  kVectorRows = 4,
};

inline constexpr int kSquare = kTileRows * kTileRows;
inline constexpr int kVectors = kVectorRows * kTileRows;

// Written by prepare, read by every later stage. Bytes per chunk and value head: 2 * 8192 + 1024 +
// 512
// + 4; per chunk and key head 512. At 16/48 heads and full chunks 13.2 KiB per token.
struct Prepared {
  uint16_t* z;        // bf16 [C][HV][64][64]
  uint16_t* p;        // bf16 [C][HV][64][64]
  float* vectors;     // [C][HV][4][64]
  float2* gate_sums;  // [C][HV][64] log2, inclusive, as a sum of two floats
  float* log2_decay;  // [C][HV] log2 of the chunk's whole decay
  float* norms;       // [C][H][2][64] r^q, r^k
};

// What every kernel knows.
struct Shape {
  int heads_qk, heads_v, group;
  int head0, heads;  // value heads of this launch: [head0, head0 + heads)
  const CountRow* counts;  // of this packing; grids are made for the capacity
  const SegmentRow* segments;
  const ChunkRow* chunks;
};

struct PrepareParams {
  Shape shape;
  RowView q, k;
  ScalarView g, beta;
  Activation activation;
  Prepared out;
  float scale;
  bool l2norm;
  int batch;  // value heads inverted at a time, 1..4
};

// Which parts of a segment's walk a summary may leave out (portable.h).
struct WarmUp {
  float log2_bound;  // a run of chunks that decays below this forgets what came before
};

struct ForwardWalkParams {
  Shape shape;
  const ItemRow* items;
  const int64_t* num_items;
  int stages;  // of the load pipeline, 1..3
  RowView q, k, v;
  Prepared prepared;
  StateView initial_state;  // null data: 0
  const float* entry;       // kBoundary, [HV][entry_slots][K][V]
  int64_t entry_slots, exit_slots, map_slots;
  // run
  ElementView o;
  StateView final_state;  // null data: not wanted
  // states, per chunk and value head of the launch
  uint16_t* states;  // bf16 [C][heads][V][K], entering each chunk
  uint16_t* e;       // bf16 [C][heads][64][V]
  // summary
  float* part;  // kPart, [HV][exit_slots][K][V]
  float* map;   // kMap, [HV][map_slots][K][K]
  WarmUp warm_up;
};

struct BackwardWalkParams {
  Shape shape;
  const ItemRow* items;
  const int64_t* num_items;
  int stages;
  RowView q, k;
  ElementView d_o;  // null data: 0
  Prepared prepared;
  Activation activation;
  StateView dfinal_state;
  const float* exit;  // kBoundary, [HV][exit_slots][K][V]
  int64_t entry_slots, exit_slots;
  // gradients
  const uint16_t* e;  // bf16 [C][heads][64][V]
  uint16_t* dstates;  // bf16 [C][heads][V][K], leaving each chunk
  ElementView dv;
  ScalarView dbeta;
  StateView dinitial_state;
  // summary
  float* part;  // kPart, [HV][entry_slots][K][V]
  WarmUp warm_up;
};

struct GradientParams {
  Shape shape;
  int stages;
  RowView q, k;
  ElementView d_o, dv;  // dv is read: it holds dY
  Prepared prepared;
  Activation activation;
  ScalarView g;
  const uint16_t* states;
  const uint16_t* dstates;
  const uint16_t* e;
  ElementView dq, dk;
  ScalarView dg;
  float2* sums;  // [C][HV]: this chunk's part of dA_log, ddt_bias; null without
  float scale;
  bool l2norm;
};

}  // namespace gdn::cuda
