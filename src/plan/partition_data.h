// What a Partition holds, and the two ways to fill it: generated layouts in stream order, and
// explicit tables. Private to src/plan/.
#pragma once

#include <vector>

#include "gdn/partition.h"

namespace gdn {

// Far beyond any real job, so that no later sum, round-up or row count overflows: tokens times a
// row of 2^15 elements still fits in 63 bits.
inline constexpr int kMaxWorldSize = 1 << 20;
inline constexpr int64_t kMaxTokens = int64_t{1} << 48;

struct PartitionData {
  Layout layout = Layout::kContiguous;
  std::vector<int64_t> cu_seqlens;               // [N + 1]
  std::vector<std::vector<Fragment>> fragments;  // [W][fragments of the rank]
  std::vector<std::vector<int64_t>> local_cu;    // [W][fragments + 1]
  std::vector<Partition::Holder> holders;        // with tokens, in document order
  std::vector<int64_t> holder_begin;             // [N + 1] into holders
  std::vector<uint8_t> crosses;                  // [N] tokens on two or more ranks
  bool any_crosses = false;

  int world_size() const { return static_cast<int>(fragments.size()); }
  int64_t num_documents() const { return static_cast<int64_t>(cu_seqlens.size()) - 1; }
  int64_t document_length(int64_t doc) const { return cu_seqlens[doc + 1] - cu_seqlens[doc]; }
  const Fragment& fragment(const Partition::Holder& holder) const {
    return fragments[holder.rank][holder.fragment];
  }
};

struct Partition::Data : PartitionData {};

// Fill fragments, holders and holder_begin from cu_seqlens. Pieces come in stream order, which is
// also the local order of every generated layout: rank r's first part lies before its second one.
void cut_stream(PartitionData& data, int world_size, bool zigzag);
// cut_points: [N][2W + 1], or empty for near-equal pieces.
void cut_documents(PartitionData& data, int world_size, std::span<const int64_t> cut_points);

Status check_cu_seqlens(std::span<const int64_t> cu_seqlens);
Status check_world_size(int64_t world_size);
Status check_cut_points(std::span<const int64_t> cu_seqlens, int world_size,
                        std::span<const int64_t> cut_points);
// Entries of data.fragments lie inside their documents.
Status check_entries(const PartitionData& data);
// Fills holders and holder_begin from data.fragments; an error where they do not tile a document.
Status index_table(PartitionData& data);

}  // namespace gdn
