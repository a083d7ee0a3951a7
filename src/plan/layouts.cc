// The generated layouts. Empty pieces are dropped, and a piece that continues its rank's last
// fragment extends it.
#include <algorithm>

#include "plan/partition_data.h"
#include "plan/share.h"

namespace gdn {
namespace {

// Rank of part p of 2W: r holds parts r and 2W - 1 - r.
int zigzag_rank(int64_t part, int world_size) {
  return static_cast<int>(part < world_size ? part : 2 * int64_t{world_size} - 1 - part);
}

// Takes pieces in stream order.
class Builder {
 public:
  Builder(PartitionData& data, int world_size) : data_(data) {
    data_.fragments.resize(world_size);
    data_.holder_begin.reserve(data_.cu_seqlens.size());
    data_.holder_begin.push_back(0);
  }

  void add(int rank, const Fragment& piece) {
    if (piece.length == 0) return;
    close_documents_before(piece.doc);
    auto& mine = data_.fragments[rank];
    if (!mine.empty() && mine.back().doc == piece.doc &&
        mine.back().offset + mine.back().length == piece.offset) {
      mine.back().length += piece.length;
      return;
    }
    data_.holders.push_back({rank, static_cast<int64_t>(mine.size())});
    mine.push_back(piece);
  }

  // Room for documents that every rank holds in two fragments.
  void reserve(int64_t documents) {
    for (auto& mine : data_.fragments) mine.reserve(2 * documents);
    data_.holders.reserve(2 * documents * std::ssize(data_.fragments));
  }

  void finish() { close_documents_before(data_.num_documents()); }

 private:
  void close_documents_before(int64_t doc) {
    while (static_cast<int64_t>(data_.holder_begin.size()) <= doc) {
      data_.holder_begin.push_back(static_cast<int64_t>(data_.holders.size()));
    }
  }

  PartitionData& data_;
};

}  // namespace

void cut_stream(PartitionData& data, int world_size, bool zigzag) {
  Builder builder(data, world_size);
  const int64_t parts = zigzag ? 2 * int64_t{world_size} : world_size;
  const int64_t tokens = data.cu_seqlens.back();
  int64_t doc = 0;
  int64_t at = 0;  // global token
  for (int64_t part = 0; part < parts; ++part) {
    const int rank = zigzag ? zigzag_rank(part, world_size) : static_cast<int>(part);
    const int64_t end = share_begin(part + 1, parts, tokens);
    while (at < end) {
      while (data.cu_seqlens[doc + 1] <= at) ++doc;
      const int64_t stop = std::min(end, data.cu_seqlens[doc + 1]);
      builder.add(rank, {doc, at - data.cu_seqlens[doc], stop - at});
      at = stop;
    }
  }
  builder.finish();
}

void cut_documents(PartitionData& data, int world_size, std::span<const int64_t> cut_points) {
  Builder builder(data, world_size);
  const int64_t parts = 2 * int64_t{world_size};
  if (cut_points.empty()) {
    int64_t whole = 0;  // documents without an empty piece
    for (int64_t doc = 0; doc < data.num_documents(); ++doc) {
      whole += data.document_length(doc) >= parts;
    }
    builder.reserve(whole);
  }
  for (int64_t doc = 0; doc < data.num_documents(); ++doc) {
    const int64_t length = data.document_length(doc);
    if (length == 0) continue;
    const int64_t* cuts = cut_points.empty() ? nullptr : &cut_points[doc * (parts + 1)];
    // Cut p is p * step + floor(p * rem / parts), walked without a division per piece.
    const int64_t step = length / parts;
    const int64_t rem = length % parts;
    int64_t carry = 0;
    int64_t at = 0;
    for (int64_t part = 0; part < parts && at < length; ++part) {
      int64_t end = at + step;
      carry += rem;
      if (carry >= parts) {
        carry -= parts;
        ++end;
      }
      if (cuts) end = cuts[part + 1];
      builder.add(zigzag_rank(part, world_size), {doc, at, end - at});
      at = end;
    }
  }
  builder.finish();
}

}  // namespace gdn
