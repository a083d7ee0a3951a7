// The forward recurrence over the chunks of a segment, one block per (item, value head), one warp
// per 16 columns of the state. Per chunk, with the vectors of params.h:
//   Y = V - entry o (K S)     E = Y + Z (beta o Y)     O = query o (Q S) + P (beta o E)
//   S <- decay S + K^T (exit o beta o E)
// kRun writes O and final states, kStates writes S before each chunk and E, kSummary leaves the
// exit state in kPart, or with v = 0 from the identity M in kMap.
#pragma once

#include "backend/cuda/portable/fragments.cuh"

namespace gdn::cuda {

enum class Walk { kRun, kStates, kSummary };

template <int K, int V>
struct ForwardStage {
  static constexpr int kThreads = 2 * V;
  static constexpr int kKey = 0;
  static constexpr int kValue = kKey + kTileRows * K * 2;
  static constexpr int kZ = kValue + kTileRows * V * 2;
  static constexpr int kVector = kZ + kSquare * 2;
  static constexpr int kQueryTile = kVector + kVectors * 4;  // run only, from here
  static constexpr int kP = kQueryTile + kTileRows * K * 2;
  static constexpr int bytes(bool run) { return run ? kP + kSquare * 2 : kQueryTile; }
};

// What a block walks.
struct ForwardItem {
  SegmentRow segment;
  int head, key_head;
  bool is_map;
  int first;  // chunk of the segment where the walk begins
};

template <int K, int V, Walk kWalk>
GDN_DEVICE void load_forward(const ForwardWalkParams& p, const ForwardItem& item, int chunk,
                             unsigned char* stage) {
  using Stage = ForwardStage<K, V>;
  constexpr int kThreads = Stage::kThreads;
  const int64_t row = item.segment.row + int64_t{kTileRows} * chunk;
  const int left = item.segment.length - kTileRows * chunk;
  const int rows = left < kTileRows ? left : kTileRows;
  const int64_t slot = (item.segment.first_chunk + chunk) * p.shape.heads_v + item.head;
  const uint32_t to = smem_address(stage);
  load_rows<K / 8, kThreads>(to + Stage::kKey, p.k.data + row * p.k.stride + item.key_head * K,
                             p.k.stride, rows);
  load_rows<V / 8, kThreads>(to + Stage::kValue, p.v.data + row * p.v.stride + item.head * V,
                             p.v.stride, item.is_map ? 0 : rows);
  load_dense<kTileRows, 8, kThreads>(to + Stage::kZ, p.prepared.z + slot * kSquare);
  load_plain<kThreads>(to + Stage::kVector, p.prepared.vectors + slot * kVectors, kVectors * 4);
  if constexpr (kWalk == Walk::kRun) {
    load_rows<K / 8, kThreads>(to + Stage::kQueryTile,
                               p.q.data + row * p.q.stride + item.key_head * K, p.q.stride, rows);
    load_dense<kTileRows, 8, kThreads>(to + Stage::kP, p.prepared.p + slot * kSquare);
  }
}

// One chunk, from the tiles in `stage`.
template <int K, int V, Walk kWalk>
GDN_DEVICE void forward_step(const ForwardWalkParams& p, const ForwardItem& item, int chunk,
                             unsigned char* stage, float decay, float (&state)[K / 8][4], int warp,
                             int lane) {
  using Stage = ForwardStage<K, V>;
  const uint32_t tiles = smem_address(stage);
  const float* vectors = reinterpret_cast<const float*>(stage + Stage::kVector);
  const auto fragment = [&](uint32_t(&a)[4], int s) {
    pack_fragment(a, state[2 * s], state[2 * s + 1]);
  };
  const int64_t index = item.segment.first_chunk + chunk;
  if constexpr (kWalk == Walk::kStates) {
    const int64_t slot = index * p.shape.heads + (item.head - p.shape.head0);
    store_state_bf16<K>(state, p.states + slot * K * V, warp, lane);
  }
  float out[8][4] = {};
  if constexpr (kWalk == Walk::kRun) times_rows<K>(out, fragment, tiles + Stage::kQueryTile, lane);
  float e[8][4] = {};
  times_rows<K>(e, fragment, tiles + Stage::kKey, lane);

  // Y, then E; beta o Y as fragments, and what its rounding to bf16 left out: with keys that point
  // one way E is a small difference of Y and Z (beta o Y).
  uint32_t words[4][4], rest[4][4];
  load_columns<V>(words, tiles + Stage::kValue, warp, lane);
  GDN_UNROLL
  for (int s = 0; s < 4; ++s) {
    float scaled[2][4];
    GDN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * s + half;
      const float2 entry = column_pair(vectors, kEntry, n, lane);
      const float2 beta = column_pair(vectors, kBeta, n, lane);
      const uint32_t upper = words[s][2 * half], lower = words[s][2 * half + 1];
      e[n][0] = bf16_low(upper) - entry.x * e[n][0];
      e[n][1] = bf16_high(upper) - entry.y * e[n][1];
      e[n][2] = bf16_low(lower) - entry.x * e[n][2];
      e[n][3] = bf16_high(lower) - entry.y * e[n][3];
      GDN_UNROLL
      for (int i = 0; i < 4; ++i) scaled[half][i] = e[n][i];
      scale_columns(scaled[half], beta);
    }
    pack_fragment(words[s], scaled[0], scaled[1]);
    pack_rest(rest[s], words[s], scaled[0], scaled[1]);
  }
  times_lower_transposed(e, words, tiles + Stage::kZ, lane);
  times_lower_transposed(e, rest, tiles + Stage::kZ, lane);
  if constexpr (kWalk == Walk::kStates) {
    const int64_t slot = index * p.shape.heads + (item.head - p.shape.head0);
    uint16_t* to = p.e + slot * kTileRows * V;
    store_columns<V>(e, stage + Stage::kValue, warp, lane, [&](int token, int piece, uint4 value) {
      *reinterpret_cast<uint4*>(to + token * V + piece * 8) = value;
    });
  }

  // Vd = beta o E, for the output and for the state.
  GDN_UNROLL
  for (int n = 0; n < 8; ++n) scale_columns(e[n], column_pair(vectors, kBeta, n, lane));
  if constexpr (kWalk == Walk::kRun) {
    GDN_UNROLL
    for (int s = 0; s < 4; ++s) {
      pack_fragment(words[s], e[2 * s], e[2 * s + 1]);
      scale_columns(out[2 * s], column_pair(vectors, kQuery, 2 * s, lane));
      scale_columns(out[2 * s + 1], column_pair(vectors, kQuery, 2 * s + 1, lane));
    }
    times_lower_transposed(out, words, tiles + Stage::kP, lane);
  }
  GDN_UNROLL
  for (int n = 0; n < 8; ++n) scale_columns(e[n], column_pair(vectors, kExit, n, lane));
  GDN_UNROLL
  for (int s = 0; s < 4; ++s) pack_fragment(words[s], e[2 * s], e[2 * s + 1]);
  GDN_UNROLL
  for (int n = 0; n < K / 8; ++n) {
    GDN_UNROLL
    for (int i = 0; i < 4; ++i) state[n][i] *= decay;
  }
  update_state<K>(state, words, tiles + Stage::kKey, lane);

  if constexpr (kWalk == Walk::kRun) {
    const int left = item.segment.length - kTileRows * chunk;
    uint16_t* to = p.o.data + (item.segment.row + int64_t{kTileRows} * chunk) * p.o.token +
                   item.head * p.o.head;
    store_columns<V>(out, stage + Stage::kValue, warp, lane,
                     [&](int token, int piece, uint4 value) {
                       if (token < left)
                         store_piece(to + token * p.o.token + piece * 8, value, p.o.rows);
                     });
  }
}

// The state before the first chunk of the walk.
template <int K, int V, Walk kWalk>
GDN_DEVICE void enter_state(const ForwardWalkParams& p, const ForwardItem& item,
                            float (&state)[K / 8][4], int warp, int lane) {
  const SegmentRow& segment = item.segment;
  if (kWalk == Walk::kSummary && item.is_map) {
    each_state<K>(state, warp, lane, [](int i, int j, float& x) { x = i == j ? 1.0f : 0.0f; });
  } else if (item.first == 0 && segment.entry_slot < 0 && p.initial_state.data != nullptr) {
    each_state<K>(state, warp, lane, [&](int i, int j, float& x) {
      x = state_at(p.initial_state, segment.doc, item.head, i, j);
    });
  } else if (kWalk != Walk::kSummary && segment.entry_slot >= 0) {
    const float* from = p.entry + (item.head * p.entry_slots + segment.entry_slot) * K * V;
    each_state<K>(state, warp, lane, [&](int i, int j, float& x) { x = from[i * V + j]; });
  } else {
    each_state<K>(state, warp, lane, [](int, int, float& x) { x = 0.0f; });
  }
}

template <int K, int V, Walk kWalk>
GDN_DEVICE void leave_state(const ForwardWalkParams& p, const ForwardItem& item,
                            float (&state)[K / 8][4], int warp, int lane) {
  const SegmentRow& segment = item.segment;
  if constexpr (kWalk == Walk::kSummary) {
    float* to = item.is_map ? p.map + (item.head * p.map_slots + segment.map_slot) * K * K
                            : p.part + (item.head * p.exit_slots + segment.exit_slot) * K * V;
    each_state<K>(state, warp, lane, [&](int i, int j, float& x) { to[i * V + j] = x; });
  } else if (kWalk == Walk::kRun && segment.exit_slot < 0 && p.final_state.data != nullptr) {
    each_state<K>(state, warp, lane, [&](int i, int j, float& x) {
      state_at(p.final_state, segment.doc, item.head, i, j) = x;
    });
  }
}

template <int K, int V, Walk kWalk>
__global__ void __launch_bounds__(2 * V, 1) forward_walk_kernel(const ForwardWalkParams p) {
  static_assert(K == V, "a map walk has K columns");
  using Stage = ForwardStage<K, V>;
  constexpr int kBytes = Stage::bytes(kWalk == Walk::kRun);
  GDN_SHARED(raw);
  unsigned char* shared = reinterpret_cast<unsigned char*>(raw);
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t at = blockIdx.x / static_cast<unsigned>(p.shape.heads);
  if (at >= *p.num_items) return;
  const ItemRow row = p.items[at];
  ForwardItem item;
  item.segment = p.shape.segments[row.segment];
  item.head = p.shape.head0 + static_cast<int>(blockIdx.x % static_cast<unsigned>(p.shape.heads));
  item.key_head = item.head / p.shape.group;
  item.is_map = kWalk == Walk::kSummary && row.is_map != 0;
  item.first = 0;
  const int chunks = item.segment.chunks;
  float state[K / 8][4];
  if constexpr (kWalk == Walk::kSummary) {
    const int within =
        decayed_within(p.warm_up, p.prepared, p.shape.heads_v, item.head, chunks, lane,
                       [&](int i) { return item.segment.first_chunk + chunks - 1 - i; });
    if (within >= 0) item.first = item.is_map ? chunks : chunks - within;
    if (item.first == chunks) {
      each_state<K>(state, warp, lane, [](int, int, float& x) { x = 0.0f; });
      leave_state<K, V, kWalk>(p, item, state, warp, lane);
      return;
    }
    // A walk that begins later starts from 0 although its segment starts a document.
  }
  enter_state<K, V, kWalk>(p, item, state, warp, lane);

  const int ahead = p.stages - 1;
  for (int i = 0; i < ahead; ++i) {
    if (item.first + i < chunks) {
      load_forward<K, V, kWalk>(p, item, item.first + i, shared + i * kBytes);
    }
    cp_async_commit();
  }
  const int64_t slot = item.segment.first_chunk * p.shape.heads_v + item.head;
  float log2_decay = p.prepared.log2_decay[slot + item.first * p.shape.heads_v];
  int current = 0;
  for (int chunk = item.first; chunk < chunks; ++chunk) {
    if (ahead == 0) {
      __syncthreads();
      load_forward<K, V, kWalk>(p, item, chunk, shared);
      cp_async_commit();
    }
    await_stage(p.stages);
    if (ahead > 0) {
      const int next = current + ahead < p.stages ? current + ahead : current - 1;
      if (chunk + ahead < chunks) {
        load_forward<K, V, kWalk>(p, item, chunk + ahead, shared + next * kBytes);
      }
      cp_async_commit();
    }
    const float decay = exp2f(log2_decay);
    if (chunk + 1 < chunks) {
      log2_decay = p.prepared.log2_decay[slot + int64_t{chunk + 1} * p.shape.heads_v];
    }
    forward_step<K, V, kWalk>(p, item, chunk, shared + current * kBytes, decay, state, warp, lane);
    current = current + 1 < p.stages ? current + 1 : 0;
  }
  leave_state<K, V, kWalk>(p, item, state, warp, lane);
}

}  // namespace gdn::cuda
