#include "gdn/partition.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "plan/partition_data.h"

namespace gdn {
namespace {

constexpr std::array kLayouts{Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument,
                              Layout::kExplicit};

// local_cu and crosses from fragments and holders.
void finish(PartitionData& data) {
  data.local_cu.resize(data.fragments.size());
  for (size_t rank = 0; rank < data.fragments.size(); ++rank) {
    auto& cu = data.local_cu[rank];
    cu.reserve(data.fragments[rank].size() + 1);
    cu.push_back(0);
    for (const Fragment& f : data.fragments[rank]) cu.push_back(cu.back() + f.length);
  }
  data.crosses.resize(data.num_documents());
  for (int64_t doc = 0; doc < data.num_documents(); ++doc) {
    const int64_t begin = data.holder_begin[doc];
    for (int64_t i = begin + 1; i < data.holder_begin[doc + 1] && !data.crosses[doc]; ++i) {
      data.crosses[doc] = data.holders[i].rank != data.holders[begin].rank;
    }
    data.any_crosses |= data.crosses[doc] != 0;
  }
}

// Position in `holders` of the fragment of `doc` that holds the token at `offset`.
int64_t holder_of(const PartitionData& data, int64_t doc, int64_t offset) {
  const auto begin = data.holders.begin() + data.holder_begin[doc];
  const auto end = data.holders.begin() + data.holder_begin[doc + 1];
  const auto after = std::partition_point(begin, end, [&](const Partition::Holder& holder) {
    return data.fragment(holder).offset <= offset;
  });
  return after - data.holders.begin() - 1;
}

uint64_t mixed(uint64_t hash, int64_t value) {
  hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;  // odd, 2^64 / golden ratio
  return hash ^ (hash >> 32);
}

}  // namespace

const char* to_string(Layout layout) {
  switch (layout) {
    case Layout::kContiguous:
      return "contiguous";
    case Layout::kZigzag:
      return "zigzag";
    case Layout::kZigzagPerDocument:
      return "zigzag_per_document";
    case Layout::kExplicit:
      return "explicit";
  }
  return "unknown layout";
}

Result<Layout> parse_layout(const std::string& name) {
  for (const Layout layout : kLayouts) {
    if (name == to_string(layout)) return layout;
  }
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("layout: expected contiguous, zigzag, zigzag_per_document or explicit, "
                            "got \"{}\"",
                            name));
}

Result<Partition> Partition::make(std::span<const int64_t> cu_seqlens, int world_size,
                                  Layout layout) {
  GDN_RETURN_IF_ERROR(check_world_size(world_size));
  GDN_RETURN_IF_ERROR(check_cu_seqlens(cu_seqlens));
  auto data = std::make_shared<Data>();
  data->layout = layout;
  data->cu_seqlens.assign(cu_seqlens.begin(), cu_seqlens.end());
  switch (layout) {
    case Layout::kContiguous:
    case Layout::kZigzag:
      cut_stream(*data, world_size, layout == Layout::kZigzag);
      break;
    case Layout::kZigzagPerDocument:
      cut_documents(*data, world_size, {});
      break;
    case Layout::kExplicit:
    default:
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("layout: expected contiguous, zigzag or zigzag_per_document, got {} "
                      "(an explicit layout is made from fragments)",
                      to_string(layout)));
  }
  finish(*data);
  return Partition(std::move(data));
}

Result<Partition> Partition::make_with_cuts(std::span<const int64_t> cu_seqlens, int world_size,
                                            std::span<const int64_t> cut_points) {
  GDN_RETURN_IF_ERROR(check_world_size(world_size));
  GDN_RETURN_IF_ERROR(check_cu_seqlens(cu_seqlens));
  GDN_RETURN_IF_ERROR(check_cut_points(cu_seqlens, world_size, cut_points));
  auto data = std::make_shared<Data>();
  data->layout = Layout::kZigzagPerDocument;
  data->cu_seqlens.assign(cu_seqlens.begin(), cu_seqlens.end());
  cut_documents(*data, world_size, cut_points);
  finish(*data);
  return Partition(std::move(data));
}

Result<Partition> Partition::make_explicit(std::span<const int64_t> cu_seqlens,
                                           std::vector<std::vector<Fragment>> fragments) {
  GDN_RETURN_IF_ERROR(check_cu_seqlens(cu_seqlens));
  if (fragments.empty() || fragments.size() > static_cast<size_t>(kMaxWorldSize)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("fragments: expected lists of 1 to {} ranks, got {}", kMaxWorldSize,
                              fragments.size()));
  }
  auto data = std::make_shared<Data>();
  data->layout = Layout::kExplicit;
  data->cu_seqlens.assign(cu_seqlens.begin(), cu_seqlens.end());
  data->fragments = std::move(fragments);
  GDN_RETURN_IF_ERROR(check_entries(*data));
  GDN_RETURN_IF_ERROR(index_table(*data));
  finish(*data);
  return Partition(std::move(data));
}

int Partition::world_size() const { return data_->world_size(); }
Layout Partition::layout() const { return data_->layout; }
int64_t Partition::num_documents() const { return data_->num_documents(); }
int64_t Partition::num_tokens() const { return data_->cu_seqlens.back(); }
std::span<const int64_t> Partition::cu_seqlens() const { return data_->cu_seqlens; }

std::span<const Fragment> Partition::fragments(int rank) const { return data_->fragments[rank]; }

std::span<const int64_t> Partition::local_cu_seqlens(int rank) const {
  return data_->local_cu[rank];
}

int64_t Partition::local_tokens(int rank) const { return data_->local_cu[rank].back(); }

bool Partition::has_crossing() const { return data_->any_crosses; }

std::span<const Partition::Holder> Partition::holders(int64_t doc) const {
  const auto& begin = data_->holder_begin;
  return std::span(data_->holders).subspan(begin[doc], begin[doc + 1] - begin[doc]);
}

std::vector<int64_t> Partition::token_indices(int rank) const {
  std::vector<int64_t> indices(local_tokens(rank));
  auto at = indices.begin();
  for (const Fragment& f : fragments(rank)) {
    std::iota(at, at + f.length, data_->cu_seqlens[f.doc] + f.offset);
    at += f.length;
  }
  return indices;
}

std::vector<Crossing> Partition::crossing(int rank) const {
  std::vector<Crossing> result;
  const auto local = fragments(rank);
  for (size_t i = 0; i < local.size(); ++i) {
    const Fragment& f = local[i];
    if (f.length == 0 || !data_->crosses[f.doc]) continue;
    Crossing crossing;
    crossing.fragment = static_cast<int64_t>(i);
    if (f.offset > 0) {
      const Holder& before = data_->holders[holder_of(*data_, f.doc, f.offset - 1)];
      crossing.predecessor_rank = before.rank;
      crossing.predecessor_fragment = before.fragment;
    }
    if (f.offset + f.length < data_->document_length(f.doc)) {
      const Holder& after = data_->holders[holder_of(*data_, f.doc, f.offset + f.length)];
      crossing.successor_rank = after.rank;
      crossing.successor_fragment = after.fragment;
    }
    result.push_back(crossing);
  }
  return result;
}

std::vector<HaloRun> Partition::halo(int rank, int width) const {
  std::vector<HaloRun> runs;
  const auto local = fragments(rank);
  for (size_t i = 0; i < local.size(); ++i) {
    const Fragment& f = local[i];
    if (f.length == 0 || f.offset == 0) continue;
    int64_t at = std::max<int64_t>(0, f.offset - (int64_t{width} - 1));
    while (at < f.offset) {
      const Holder& holder = data_->holders[holder_of(*data_, f.doc, at)];
      const Fragment& owner = data_->fragment(holder);
      const int64_t stop = std::min(f.offset, owner.offset + owner.length);
      runs.push_back({static_cast<int64_t>(i), f.offset - at, stop - at, holder.rank,
                      data_->local_cu[holder.rank][holder.fragment] + at - owner.offset});
      at = stop;
    }
  }
  return runs;
}

uint64_t Partition::digest() const {
  uint64_t hash = mixed(static_cast<uint64_t>(data_->layout) + 1, world_size());
  hash = mixed(hash, num_documents());
  for (const int64_t token : data_->cu_seqlens) hash = mixed(hash, token);
  for (const auto& list : data_->fragments) {
    hash = mixed(hash, static_cast<int64_t>(list.size()));
    for (const Fragment& f : list) {
      hash = mixed(mixed(mixed(hash, f.doc), f.offset), f.length);
    }
  }
  return hash;
}

}  // namespace gdn
