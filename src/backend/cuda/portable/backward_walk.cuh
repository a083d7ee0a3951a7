// The backward recurrence over the chunks of a segment, last chunk first; blocks and warps as in
// forward_walk.cuh. Per chunk, dS the gradient of the state that leaves it:
//   dVd = exit o (K dS) + P^T dO     U = dVd + Z^T (beta o dVd)     dV = dY = beta o U
//   dbeta = U . E (rows)             dS <- decay dS + Q^T (query o dO) - K^T (entry o dY)
// kGradients writes dS before each step, dV, dbeta and dinitial_state; kSummary leaves C in kPart.
#pragma once

#include "backend/cuda/portable/fragments.cuh"

namespace gdn::cuda {

enum class BackWalk { kGradients, kSummary };

template <int K, int V>
struct BackwardStage {
  static constexpr int kThreads = 2 * V;
  static constexpr int kKey = 0;
  static constexpr int kQueryTile = kKey + kTileRows * K * 2;
  static constexpr int kOut = kQueryTile + kTileRows * K * 2;  // dO, then dY on its way out
  static constexpr int kZ = kOut + kTileRows * V * 2;
  static constexpr int kP = kZ + kSquare * 2;
  static constexpr int kVector = kP + kSquare * 2;
  static constexpr int kE = kVector + kVectors * 4;  // gradients only, from here
  static constexpr int bytes(bool gradients) { return gradients ? kE + kTileRows * V * 2 : kE; }
  // After the stages: partial sums of dbeta, [2][warps][64].
  static constexpr int kPartials = 2 * (V / 16) * kTileRows * 4;
  static constexpr int total(bool gradients, int stages) {
    return stages * bytes(gradients) + (gradients ? kPartials : 0);
  }
};

struct BackwardItem {
  SegmentRow segment;
  int head, key_head;
};

template <int K, int V, BackWalk kWalk>
GDN_DEVICE void load_backward(const BackwardWalkParams& p, const BackwardItem& item, int chunk,
                              unsigned char* stage) {
  using Stage = BackwardStage<K, V>;
  constexpr int kThreads = Stage::kThreads;
  const int64_t row = item.segment.row + int64_t{kTileRows} * chunk;
  const int left = item.segment.length - kTileRows * chunk;
  const int rows = left < kTileRows ? left : kTileRows;
  const int64_t index = item.segment.first_chunk + chunk;
  const int64_t slot = index * p.shape.heads_v + item.head;
  const uint32_t to = smem_address(stage);
  load_rows<K / 8, kThreads>(to + Stage::kKey, p.k.data + row * p.k.stride + item.key_head * K,
                             p.k.stride, rows);
  load_rows<K / 8, kThreads>(to + Stage::kQueryTile,
                             p.q.data + row * p.q.stride + item.key_head * K, p.q.stride, rows);
  ElementView d_o = p.d_o;
  if (d_o.data != nullptr) d_o.data += row * d_o.token + item.head * d_o.head;
  load_elements<V / 8, kThreads>(stage, Stage::kOut, d_o, rows);
  load_dense<kTileRows, 8, kThreads>(to + Stage::kZ, p.prepared.z + slot * kSquare);
  load_dense<kTileRows, 8, kThreads>(to + Stage::kP, p.prepared.p + slot * kSquare);
  load_plain<kThreads>(to + Stage::kVector, p.prepared.vectors + slot * kVectors, kVectors * 4);
  if constexpr (kWalk == BackWalk::kGradients) {
    const int64_t part = index * p.shape.heads + (item.head - p.shape.head0);
    load_dense<kTileRows, V / 8, kThreads>(to + Stage::kE, p.e + part * kTileRows * V);
  }
}

// One exchange of reduce_columns: lanes that differ in `kBit` each keep one half of 2 kHalf sums.
template <int kHalf, int kBit>
GDN_DEVICE void halve_columns(float (&x)[16], int lane) {
  const bool upper = lane & kBit;
  GDN_UNROLL
  for (int i = 0; i < kHalf; ++i) {
    const float given = upper ? x[i] : x[i + kHalf];
    const float kept = upper ? x[i + kHalf] : x[i];
    x[i] = kept + __shfl_xor_sync(0xffffffffu, given, kBit);
  }
}

// Sums 16 column values over the 8 lanes of each column pair; afterwards values 0, 1 of a lane are
// the sums of columns 2 lane and 2 lane + 1.
GDN_DEVICE void reduce_columns(float (&x)[16], int lane) {
  halve_columns<8, 16>(x, lane);
  halve_columns<4, 8>(x, lane);
  halve_columns<2, 4>(x, lane);
}

// Adds the warps' parts of one chunk's dbeta and stores it.
template <int V>
GDN_DEVICE void store_dbeta(const BackwardWalkParams& p, const BackwardItem& item, int chunk,
                            const float* partials) {
  const int token = static_cast<int>(threadIdx.x);
  if (token >= kTileRows || token >= item.segment.length - kTileRows * chunk) return;
  float sum = 0.0f;
  GDN_UNROLL
  for (int w = 0; w < V / 16; ++w) sum += partials[w * kTileRows + token];
  const int64_t slot = (item.segment.first_chunk + chunk) * p.shape.heads_v + item.head;
  const float beta = p.prepared.vectors[slot * kVectors + kBeta * kTileRows + token];
  store_scalar(p.dbeta, item.segment.row + int64_t{kTileRows} * chunk + token, item.head,
               sum * beta_slope(p.activation, beta));
}

template <int K, int V, BackWalk kWalk>
GDN_DEVICE void backward_step(const BackwardWalkParams& p, const BackwardItem& item, int chunk,
                              unsigned char* stage, float* partials, float decay,
                              float (&state)[K / 8][4], int warp, int lane) {
  using Stage = BackwardStage<K, V>;
  constexpr bool kGradients = kWalk == BackWalk::kGradients;
  const uint32_t tiles = smem_address(stage);
  const float* vectors = reinterpret_cast<const float*>(stage + Stage::kVector);
  const auto fragment = [&](uint32_t(&a)[4], int s) {
    pack_fragment(a, state[2 * s], state[2 * s + 1]);
  };
  if constexpr (kGradients) {
    const int64_t slot =
        (item.segment.first_chunk + chunk) * p.shape.heads + (item.head - p.shape.head0);
    store_state_bf16<K>(state, p.dstates + slot * K * V, warp, lane);
  }
  float u[8][4] = {};
  times_rows<K>(u, fragment, tiles + Stage::kKey, lane);
  GDN_UNROLL
  for (int n = 0; n < 8; ++n) scale_columns(u[n], column_pair(vectors, kExit, n, lane));
  uint32_t d_o[4][4];
  load_columns<V>(d_o, tiles + Stage::kOut, warp, lane);
  times_lower(u, d_o, tiles + Stage::kP, lane);

  // dVd complete; U from beta o dVd.
  uint32_t words[4][4];
  GDN_UNROLL
  for (int s = 0; s < 4; ++s) {
    float scaled[2][4];
    GDN_UNROLL
    for (int half = 0; half < 2; ++half) {
      GDN_UNROLL
      for (int i = 0; i < 4; ++i) scaled[half][i] = u[2 * s + half][i];
      scale_columns(scaled[half], column_pair(vectors, kBeta, 2 * s + half, lane));
    }
    pack_fragment(words[s], scaled[0], scaled[1]);
  }
  times_lower(u, words, tiles + Stage::kZ, lane);

  if constexpr (kGradients) {
    load_columns<V>(words, tiles + Stage::kE, warp, lane);
    float dots[16];
    GDN_UNROLL
    for (int n = 0; n < 8; ++n) {
      const uint32_t upper = words[n / 2][2 * (n & 1)], lower = words[n / 2][2 * (n & 1) + 1];
      dots[2 * n] = u[n][0] * bf16_low(upper) + u[n][2] * bf16_low(lower);
      dots[2 * n + 1] = u[n][1] * bf16_high(upper) + u[n][3] * bf16_high(lower);
    }
    reduce_columns(dots, lane);
    *reinterpret_cast<float2*>(partials + warp * kTileRows + 2 * lane) =
        make_float2(dots[0], dots[1]);
  }

  // dY, and the two updates of dS.
  GDN_UNROLL
  for (int n = 0; n < 8; ++n) scale_columns(u[n], column_pair(vectors, kBeta, n, lane));
  if constexpr (kGradients) {
    const int left = item.segment.length - kTileRows * chunk;
    uint16_t* to = p.dv.data + (item.segment.row + int64_t{kTileRows} * chunk) * p.dv.token +
                   item.head * p.dv.head;
    store_columns<V>(u, stage + Stage::kOut, warp, lane, [&](int token, int piece, uint4 value) {
      if (token < left) {
        store_piece(to + token * p.dv.token + piece * 8, value, p.dv.rows);
      }
    });
  }
  GDN_UNROLL
  for (int s = 0; s < 4; ++s) {
    float scaled[2][4];
    GDN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * s + half;
      const float2 entry = column_pair(vectors, kEntry, n, lane);
      scale_columns(u[n], make_float2(-entry.x, -entry.y));
      const float2 query = column_pair(vectors, kQuery, n, lane);
      const uint32_t upper = d_o[s][2 * half], lower = d_o[s][2 * half + 1];
      scaled[half][0] = query.x * bf16_low(upper);
      scaled[half][1] = query.y * bf16_high(upper);
      scaled[half][2] = query.x * bf16_low(lower);
      scaled[half][3] = query.y * bf16_high(lower);
    }
    pack_fragment(words[s], u[2 * s], u[2 * s + 1]);
    pack_fragment(d_o[s], scaled[0], scaled[1]);
  }
  GDN_UNROLL
  for (int n = 0; n < K / 8; ++n) {
    GDN_UNROLL
    for (int i = 0; i < 4; ++i) state[n][i] *= decay;
  }
  update_state<K>(state, d_o, tiles + Stage::kQueryTile, lane);
  update_state<K>(state, words, tiles + Stage::kKey, lane);
}

// The gradient of the state after the last chunk of the walk.
template <int K, int V, BackWalk kWalk>
GDN_DEVICE void enter_dstate(const BackwardWalkParams& p, const BackwardItem& item, bool whole,
                             float (&state)[K / 8][4], int warp, int lane) {
  const SegmentRow& segment = item.segment;
  if (whole && segment.exit_slot < 0 && p.dfinal_state.data != nullptr) {
    each_state<K>(state, warp, lane, [&](int i, int j, float& x) {
      x = state_at(p.dfinal_state, segment.doc, item.head, i, j);
    });
  } else if (kWalk == BackWalk::kGradients && segment.exit_slot >= 0) {
    const float* from = p.exit + (item.head * p.exit_slots + segment.exit_slot) * K * V;
    each_state<K>(state, warp, lane, [&](int i, int j, float& x) { x = from[i * V + j]; });
  } else {
    each_state<K>(state, warp, lane, [](int, int, float& x) { x = 0.0f; });
  }
}

template <int K, int V, BackWalk kWalk>
__global__ void __launch_bounds__(2 * V, 1) backward_walk_kernel(const BackwardWalkParams p) {
  using Stage = BackwardStage<K, V>;
  constexpr bool kGradients = kWalk == BackWalk::kGradients;
  constexpr int kBytes = Stage::bytes(kGradients);
  constexpr int kHalf = (V / 16) * kTileRows;  // floats of one chunk's partial sums
  GDN_SHARED(raw);
  unsigned char* shared = reinterpret_cast<unsigned char*>(raw);
  float* partials = reinterpret_cast<float*>(shared + p.stages * kBytes);
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t at = blockIdx.x / static_cast<unsigned>(p.shape.heads);
  if (at >= *p.num_items) return;
  const ItemRow row = p.items[at];
  BackwardItem item;
  item.segment = p.shape.segments[row.segment];
  item.head = p.shape.head0 + static_cast<int>(blockIdx.x % static_cast<unsigned>(p.shape.heads));
  item.key_head = item.head / p.shape.group;

  int end = item.segment.chunks;  // the walk covers chunks [0, end)
  if constexpr (kWalk == BackWalk::kSummary) {
    const int within = decayed_within(p.warm_up, p.prepared, p.shape.heads_v, item.head, end, lane,
                                      [&](int i) { return item.segment.first_chunk + i; });
    if (within >= 0) end = within;
  }
  float state[K / 8][4];
  enter_dstate<K, V, kWalk>(p, item, end == item.segment.chunks, state, warp, lane);

  const int ahead = p.stages - 1;
  for (int i = 0; i < ahead; ++i) {
    if (end - 1 - i >= 0) {
      load_backward<K, V, kWalk>(p, item, end - 1 - i, shared + i * kBytes);
    }
    cp_async_commit();
  }
  const int64_t slot = item.segment.first_chunk * p.shape.heads_v + item.head;
  float log2_decay = p.prepared.log2_decay[slot + int64_t{end - 1} * p.shape.heads_v];
  int current = 0, parity = 0;
  for (int chunk = end - 1; chunk >= 0; --chunk) {
    if (ahead == 0) {
      __syncthreads();
      load_backward<K, V, kWalk>(p, item, chunk, shared);
      cp_async_commit();
    }
    await_stage(p.stages);
    if (ahead > 0) {
      const int next = current + ahead < p.stages ? current + ahead : current - 1;
      if (chunk - ahead >= 0) {
        load_backward<K, V, kWalk>(p, item, chunk - ahead, shared + next * kBytes);
      }
      cp_async_commit();
    }
    if (kGradients && chunk + 1 < end) {
      store_dbeta<V>(p, item, chunk + 1, partials + (parity ^ 1) * kHalf);
    }
    const float decay = exp2f(log2_decay);
    if (chunk > 0) log2_decay = p.prepared.log2_decay[slot + int64_t{chunk - 1} * p.shape.heads_v];
    backward_step<K, V, kWalk>(p, item, chunk, shared + current * kBytes, partials + parity * kHalf,
                               decay, state, warp, lane);
    current = current + 1 < p.stages ? current + 1 : 0;
    parity ^= 1;
  }
  if constexpr (kGradients) {
    __syncthreads();
    store_dbeta<V>(p, item, 0, partials + (parity ^ 1) * kHalf);
    if (item.segment.entry_slot < 0 && p.dinitial_state.data != nullptr) {
      each_state<K>(state, warp, lane, [&](int i, int j, float& x) {
        state_at(p.dinitial_state, item.segment.doc, item.head, i, j) = x;
      });
    }
  } else {
    float* to = p.part + (item.head * p.entry_slots + item.segment.entry_slot) * K * V;
    each_state<K>(state, warp, lane, [&](int i, int j, float& x) { to[i * V + j] = x; });
  }
}

}  // namespace gdn::cuda
