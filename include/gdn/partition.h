// Which rank holds which tokens: host-side arithmetic over the global cu_seqlens, no device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gdn/status.h"

namespace gdn {

// Tokens [offset, offset + length) of document `doc`, held by one rank.
struct Fragment {
  int64_t doc = 0;
  int64_t offset = 0;
  int64_t length = 0;

  bool operator==(const Fragment&) const = default;
};

enum class Layout {
  kContiguous,         // the packed stream cut in W near-equal intervals
  kZigzag,             // the stream cut in 2W parts; rank r holds part r, then part 2W-1-r
  kZigzagPerDocument,  // every document cut in 2W pieces; rank r holds pieces r and 2W-1-r of each
  kExplicit,           // the caller's fragments
};

const char* to_string(Layout layout);
Result<Layout> parse_layout(const std::string& name);  // "contiguous", "zigzag", ...

// A local fragment with tokens of a document that spans two or more ranks, and its neighbours in
// document order (which may lie on the same rank).
struct Crossing {
  int64_t fragment = 0;          // index into fragments(rank)
  int predecessor_rank = -1;     // holder of the tokens just before; -1: the document starts here
  int64_t predecessor_fragment = -1;  // index into fragments(predecessor_rank)
  int successor_rank = -1;       // holder of the tokens just after; -1: the document ends here
  int64_t successor_fragment = -1;

  bool operator==(const Crossing&) const = default;
};

// One run of rows that a causal convolution of width `width` needs from another fragment:
// the `length` (< width) tokens just before local fragment `fragment`, in document order.
struct HaloRun {
  int64_t fragment = 0;        // local fragment that needs the rows
  int64_t rows_before = 0;     // distance from the fragment's first token to the run's first token
  int64_t length = 0;
  int owner_rank = 0;          // who holds them
  int64_t owner_row = 0;       // first row of the run among the owner's local rows

  bool operator==(const HaloRun&) const = default;
};

// Immutable, cheap to copy (shared), equal on every rank. Documents without tokens belong to no
// fragment, except where an explicit table names them. Neighbouring fragments of one document that
// follow each other on the same rank are one fragment in the generated layouts.
class Partition {
 public:
  // cu_seqlens: [N+1], first 0, non-decreasing. N >= 0, world_size >= 1.
  static Result<Partition> make(std::span<const int64_t> cu_seqlens, int world_size, Layout layout);

  // kZigzagPerDocument with given cuts: cut_points holds, per document, 2W+1 offsets into it, from
  // 0 to its length, non-decreasing.
  static Result<Partition> make_with_cuts(std::span<const int64_t> cu_seqlens, int world_size,
                                          std::span<const int64_t> cut_points);

  // fragments[rank], in local order; together they tile every document exactly once.
  static Result<Partition> make_explicit(std::span<const int64_t> cu_seqlens,
                                         std::vector<std::vector<Fragment>> fragments);

  int world_size() const;
  Layout layout() const;
  int64_t num_documents() const;
  int64_t num_tokens() const;                       // cu_seqlens[N]
  std::span<const int64_t> cu_seqlens() const;      // global, [N+1]

  std::span<const Fragment> fragments(int rank) const;
  std::span<const int64_t> local_cu_seqlens(int rank) const;  // [fragments + 1]
  int64_t local_tokens(int rank) const;
  std::vector<int64_t> token_indices(int rank) const;  // global row of every local row
  std::vector<Crossing> crossing(int rank) const;      // in local fragment order
  std::vector<HaloRun> halo(int rank, int width) const;
  bool has_crossing() const;                           // does any document span two ranks?

  // Fragments of a document that hold tokens, in document order, as (rank, index into
  // fragments(rank)).
  struct Holder {
    int rank = 0;
    int64_t fragment = 0;
    bool operator==(const Holder&) const = default;
  };
  std::span<const Holder> holders(int64_t doc) const;

  // A 64-bit digest of everything above: ranks compare it before they exchange anything.
  uint64_t digest() const;

 private:
  struct Data;
  explicit Partition(std::shared_ptr<const Data> data) : data_(std::move(data)) {}
  std::shared_ptr<const Data> data_;
};

}  // namespace gdn
