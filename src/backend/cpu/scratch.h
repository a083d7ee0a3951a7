// The arrays of one worker. Each struct is taken from an Arena: with a null base that counts bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cpu/layout.h"
#include "backend/cpu/matrix.h"

namespace gdn::cpu {

template <typename T>
Mat<T> take_matrix(Arena& arena, int64_t rows, int64_t ld) {
  return {arena.take<T>(rows * ld), ld};
}

template <typename T>
struct PrepareScratch {
  Mat<T> k;              // [64, K]
  Mat<T> k_transposed;   // [K, 64]
  Mat<T> kk, gamma, ab;  // [64, 64]

  PrepareScratch(Arena& arena, const Dims& d)
      : k(take_matrix<T>(arena, kChunk, d.ldk)),
        k_transposed(take_matrix<T>(arena, d.k, d.ldc)),
        kk(take_matrix<T>(arena, kChunk, d.ldc)),
        gamma(take_matrix<T>(arena, kChunk, d.ldc)),
        ab(take_matrix<T>(arena, kChunk, d.ldc)) {}
};

template <typename T>
struct ForwardScratch {
  Mat<T> qk_rows;       // [128, K]: q, then k; only k in summaries
  Mat<T> k_transposed;  // [K, 64]
  Mat<T> qk, p, gamma;  // [64, 64]
  Mat<T> rows;          // [128, max(K, V)]: Q S, then K S that becomes E
  Mat<T> values;        // [64, max(K, V)]
  Mat<T> state;         // [group][K, V]
  Mat<T> map;           // [group][K, K]

  ForwardScratch(Arena& arena, const Dims& d)
      : qk_rows(take_matrix<T>(arena, 2 * kChunk, d.ldk)),
        k_transposed(take_matrix<T>(arena, d.k, d.ldc)),
        qk(take_matrix<T>(arena, kChunk, d.ldc)),
        p(take_matrix<T>(arena, kChunk, d.ldc)),
        gamma(take_matrix<T>(arena, kChunk, d.ldc)),
        rows(take_matrix<T>(arena, 2 * kChunk, std::max(d.ldk, d.ldv))),
        values(take_matrix<T>(arena, kChunk, std::max(d.ldk, d.ldv))),
        state(take_matrix<T>(arena, d.group * d.k, d.ldv)),
        map(take_matrix<T>(arena, d.group * d.k, d.ldk)) {}
};

template <typename T>
struct BackwardScratch {
  // Of the chunk, shared by the value heads.
  Mat<T> qk_rows;       // [128, K]: q, then k
  Mat<T> k_transposed;  // [K, 64]
  Mat<T> qk, kk;        // [64, 64]
  Mat<T> dq, dk;        // [64, K]: sums over the value heads
  // Of one value head.
  Mat<T> gamma, p, n, pairs;  // [64, 64]
  Mat<T> do_dy;               // [128, V]: dO, then dY
  Mat<T> weighted;            // [128, V]: scale exp(G) dO, then -exp(G) dY
  Mat<T> u;                   // [64, V]
  Mat<T> values;              // [64, V]
  Mat<T> values_transposed;   // [V, 64]
  Mat<T> dq_dk;               // [128, K]
  Mat<T> dk_end;              // [64, K]
  Mat<T> ds_transposed;       // [V, K]
  // Of the item.
  Mat<T> ds;       // [group][K, V]
  Mat<T> state;    // [group][K, V]
  T* checkpoints;  // [blocks][group][K, V]
  T* blocks;       // [chunks of a block][group][BlockPlan::elements]

  BackwardScratch(Arena& arena, const Dims& d, const BlockPlan& plan)
      : qk_rows(take_matrix<T>(arena, 2 * kChunk, d.ldk)),
        k_transposed(take_matrix<T>(arena, d.k, d.ldc)),
        qk(take_matrix<T>(arena, kChunk, d.ldc)),
        kk(take_matrix<T>(arena, kChunk, d.ldc)),
        dq(take_matrix<T>(arena, kChunk, d.ldk)),
        dk(take_matrix<T>(arena, kChunk, d.ldk)),
        gamma(take_matrix<T>(arena, kChunk, d.ldc)),
        p(take_matrix<T>(arena, kChunk, d.ldc)),
        n(take_matrix<T>(arena, kChunk, d.ldc)),
        pairs(take_matrix<T>(arena, kChunk, d.ldc)),
        do_dy(take_matrix<T>(arena, 2 * kChunk, d.ldv)),
        weighted(take_matrix<T>(arena, 2 * kChunk, d.ldv)),
        u(take_matrix<T>(arena, kChunk, d.ldv)),
        values(take_matrix<T>(arena, kChunk, d.ldv)),
        values_transposed(take_matrix<T>(arena, d.v, d.ldc)),
        dq_dk(take_matrix<T>(arena, 2 * kChunk, d.ldk)),
        dk_end(take_matrix<T>(arena, kChunk, d.ldk)),
        ds_transposed(take_matrix<T>(arena, d.v, d.ldk)),
        ds(take_matrix<T>(arena, d.group * d.k, d.ldv)),
        state(take_matrix<T>(arena, d.group * d.k, d.ldv)),
        checkpoints(arena.take<T>(plan.checkpoints * d.group * d.k * d.ldv)),
        blocks(arena.take<T>(plan.chunks * d.group * plan.elements)) {}
};

// A fold's running matrix, twice: kFoldColumns of its columns.
template <typename T>
struct FoldScratch {
  Mat<T> x, next;  // [K, 64]

  FoldScratch(Arena& arena, const Dims& d)
      : x(take_matrix<T>(arena, d.k, d.ldc)), next(take_matrix<T>(arena, d.k, d.ldc)) {}
};

}  // namespace gdn::cpu
