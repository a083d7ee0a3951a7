// Checks of what callers give to make a Partition, and the index of an explicit table. Every error
// names the argument, the first offending entry, what was expected and what came.
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "plan/partition_data.h"

namespace gdn {
namespace {

template <typename... Args>
Status invalid(fmt::format_string<Args...> format, Args&&... args) {
  return {ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...)};
}

// A fragment with tokens as the sort sees it: document order.
struct Key {
  int64_t offset, length;
  Partition::Holder holder;
  bool operator<(const Key& o) const {
    return std::tie(offset, holder.rank, holder.fragment) <
           std::tie(o.offset, o.holder.rank, o.holder.fragment);
  }
};

std::string entry_name(const Partition::Holder& holder) {
  return fmt::format("fragments[{}][{}]", holder.rank, holder.fragment);
}

Status check_tiling(int64_t doc, int64_t length, std::span<const Key> keys) {
  int64_t at = 0;
  const Key* last = nullptr;
  for (const Key& key : keys) {
    if (key.offset > at) break;
    if (key.offset < at) {
      return invalid(
          "{}: expected tokens that no other entry holds, got tokens [{}, {}) of document {}, "
          "where "
          "{} holds [{}, {})",
          entry_name(key.holder), key.offset, key.offset + key.length, doc,
          entry_name(last->holder), last->offset, last->offset + last->length);
    }
    at += key.length;
    last = &key;
  }
  if (at == length) return Status::ok();
  int64_t next = length;
  for (const Key& key : keys) {
    if (key.offset > at) next = std::min(next, key.offset);
  }
  return invalid(
      "fragments: expected every token of document {} (length {}) on one rank, got none that holds "
      "[{}, {})",
      doc, length, at, next);
}

}  // namespace

Status check_world_size(int64_t world_size) {
  if (world_size >= 1 && world_size <= kMaxWorldSize) return Status::ok();
  return invalid("world_size: expected 1 to {}, got {}", kMaxWorldSize, world_size);
}

Status check_cu_seqlens(std::span<const int64_t> cu_seqlens) {
  if (cu_seqlens.empty()) return invalid("cu_seqlens: expected at least 1 entry, got 0");
  if (cu_seqlens[0] != 0) return invalid("cu_seqlens[0]: expected 0, got {}", cu_seqlens[0]);
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    if (cu_seqlens[i] < cu_seqlens[i - 1]) {
      return invalid("cu_seqlens[{}]: expected at least {}, the entry before it, got {}", i,
                     cu_seqlens[i - 1], cu_seqlens[i]);
    }
    if (cu_seqlens[i] > kMaxTokens) {
      return invalid("cu_seqlens[{}]: expected at most 2^48 tokens, got {}", i, cu_seqlens[i]);
    }
  }
  return Status::ok();
}

Status check_cut_points(std::span<const int64_t> cu_seqlens, int world_size,
                        std::span<const int64_t> cut_points) {
  const int64_t row = 2 * int64_t{world_size} + 1;
  const int64_t documents = static_cast<int64_t>(cu_seqlens.size()) - 1;
  const int64_t got = static_cast<int64_t>(cut_points.size());
  // Division, not documents * row: no overflow whatever the table's size.
  if (got % row != 0 || got / row != documents) {
    return invalid("cut_points: expected 2 W + 1 = {} entries for each of {} documents, got {}",
                   row, documents, got);
  }
  for (int64_t i = 0; i < got; ++i) {
    const int64_t doc = i / row;
    const int64_t cut = i % row;
    const int64_t length = cu_seqlens[doc + 1] - cu_seqlens[doc];
    const auto fail = [&](const std::string& expected) {
      return invalid("cut_points[{}] (document {}, cut {}): expected {}, got {}", i, doc, cut,
                     expected, cut_points[i]);
    };
    if (cut == 0) {
      if (cut_points[i] != 0) return fail("0");
    } else if (cut_points[i] < cut_points[i - 1]) {
      return fail(fmt::format("at least {}, the cut before it", cut_points[i - 1]));
    } else if (cut_points[i] > length || (cut == row - 1 && cut_points[i] != length)) {
      return fail(
          fmt::format("{}{}, the document's length", cut == row - 1 ? "" : "at most ", length));
    }
  }
  return Status::ok();
}

Status check_entries(const PartitionData& data) {
  for (int rank = 0; rank < data.world_size(); ++rank) {
    for (size_t i = 0; i < data.fragments[rank].size(); ++i) {
      const Fragment& f = data.fragments[rank][i];
      const auto fail = [&](const char* field, const std::string& expected, int64_t got) {
        return invalid("fragments[{}][{}].{}: expected {}, got {}", rank, i, field, expected, got);
      };
      if (f.doc < 0 || f.doc >= data.num_documents()) {
        return fail("doc",
                    data.num_documents() == 0 ? "no entry, for there are no documents"
                                              : fmt::format("0 to {}", data.num_documents() - 1),
                    f.doc);
      }
      const int64_t length = data.document_length(f.doc);
      if (f.offset < 0 || f.offset > length) {
        return fail("offset", fmt::format("0 to {}, the length of document {}", length, f.doc),
                    f.offset);
      }
      if (f.length < 0 || f.length > length - f.offset) {
        return fail("length",
                    fmt::format("0 to {}, what is left of document {} from offset {}",
                                length - f.offset, f.doc, f.offset),
                    f.length);
      }
    }
  }
  return Status::ok();
}

Status index_table(PartitionData& data) {
  const int64_t documents = data.num_documents();
  data.holder_begin.assign(documents + 1, 0);
  for (const auto& list : data.fragments) {
    for (const Fragment& f : list) data.holder_begin[f.doc + 1] += f.length > 0;
  }
  for (int64_t doc = 0; doc < documents; ++doc) {
    data.holder_begin[doc + 1] += data.holder_begin[doc];
  }
  std::vector<Key> keys(data.holder_begin.back());
  std::vector<int64_t> next(data.holder_begin.begin(), data.holder_begin.end() - 1);
  for (int rank = 0; rank < data.world_size(); ++rank) {
    for (size_t i = 0; i < data.fragments[rank].size(); ++i) {
      const Fragment& f = data.fragments[rank][i];
      if (f.length > 0) keys[next[f.doc]++] = {f.offset, f.length, {rank, static_cast<int64_t>(i)}};
    }
  }
  for (int64_t doc = 0; doc < documents; ++doc) {
    const auto mine = std::span(keys).subspan(data.holder_begin[doc],
                                              data.holder_begin[doc + 1] - data.holder_begin[doc]);
    std::sort(mine.begin(), mine.end());
    GDN_RETURN_IF_ERROR(check_tiling(doc, data.document_length(doc), mine));
  }
  data.holders.reserve(keys.size());
  for (const Key& key : keys) data.holders.push_back(key.holder);
  return Status::ok();
}

}  // namespace gdn
