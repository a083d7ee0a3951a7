// Shapes of one problem as the kernels see them, and where their arrays lie in prepared and scratch
// memory. T below is the compute type (state dtype).
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/memory.h"
#include "gdn/backend.h"

namespace gdn::cpu {

// Rows of scratch matrices are padded by one cache line: without it the rows of a 128-wide matrix
// fall into a quarter of the L1 sets.
constexpr int64_t kPadBytes = 64;

constexpr int64_t kMaxDim = 256;      // of K and V
constexpr int64_t kFoldColumns = 64;  // of a state or map that one item of a fold takes

struct Dims {
  int64_t k = 0, v = 0;  // K, V
  int64_t heads_qk = 0, heads_v = 0;
  int64_t group = 0;                  // value heads per key head
  int64_t ldk = 0, ldv = 0, ldc = 0;  // row lengths of matrices K, V and kChunk wide

  static Dims of(const Problem& p) {
    const int64_t pad = kPadBytes / size_of(p.state());
    return {p.dim_k,   p.dim_v,       p.heads_qk,    p.heads_v,
            p.group(), p.dim_k + pad, p.dim_v + pad, kChunk + pad};
  }
};

// ---- Prepared ---------------------------------------------------------------------------------
// One record per (chunk, value head), chunk-major:
//   Z [64, 64]  strictly lower, upper half 0: E = Y + Z (beta o Y) solves the chunk (docs/math.md)
//   gate_high, gate_low [64]  in-chunk inclusive sums of g as an unevaluated sum of two T
//   beta [64]   after the activation; 0 past the segment's end
// 4,288 elements: 268 bytes per token and value head in fp32.
struct PreparedRecord {
  static constexpr int64_t kZ = 0;
  static constexpr int64_t kGateHigh = kChunk * kChunk;
  static constexpr int64_t kGateLow = kGateHigh + kChunk;
  static constexpr int64_t kBeta = kGateLow + kChunk;
  static constexpr int64_t kElements = kBeta + kChunk;
};

// ---- Backward blocks --------------------------------------------------------------------------
// The backward recomputes a segment's states in blocks of this many chunks and keeps, per chunk and
// value head of the item, S_in transposed [V, ldk] and E [64, ldv]. Blocks fill at most 24 MiB per
// worker (76 chunks of 4,864 tokens at fp32, K = V = 128 and groups of 3), so that
// memory does not grow with the segment but for one checkpoint [K, ldv] per block.
struct BlockPlan {
  int64_t chunks = 0;       // per block
  int64_t checkpoints = 0;  // blocks of the longest segment
  int64_t elements = 0;     // T per chunk and value head

  static BlockPlan of(const Problem& problem, const Plan& plan) {
    const Dims d = Dims::of(problem);
    const int64_t longest = std::max<int64_t>(1, (plan.capacity.longest + kChunk - 1) / kChunk);
    BlockPlan b;
    b.elements = d.v * d.ldk + kChunk * d.ldv;
    const int64_t bytes = b.elements * d.group * size_of(problem.state());
    b.chunks = std::min(longest, std::max<int64_t>(4, (int64_t{24} << 20) / bytes));
    b.checkpoints = (longest + b.chunks - 1) / b.chunks;
    return b;
  }
};

// Hands out consecutive 256-byte aligned arrays of T from one block; with a null base it only
// counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t elements) {
    const int64_t at = layout_.take(elements * static_cast<int64_t>(sizeof(T)));
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  int64_t bytes() const { return layout_.bytes(); }

 private:
  char* base_;
  BlockLayout layout_;
};

}  // namespace gdn::cpu
