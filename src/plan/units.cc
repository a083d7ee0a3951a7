#include "plan/units.h"

namespace gdn {
namespace {

class Maker {
 public:
  Maker(const Partition& partition, const Plan& plan, const std::vector<int64_t>& segment_begin)
      : partition_(partition), plan_(plan), segment_begin_(segment_begin) {
    for (int direction : {kForward, kBackward}) {
      table_.sent[direction].resize(partition.world_size());
      table_.returned[direction].resize(partition.world_size());
    }
    table_.document_begin.push_back(0);
  }

  void add_document(int64_t doc) {
    const auto holders = partition_.holders(doc);
    bool crosses = false;
    for (const auto& holder : holders) crosses |= holder.rank != holders[0].rank;
    if (crosses) {
      for (const auto& holder : holders) add_units(holder);
      close_document();
    } else if (!holders.empty() && holders[0].rank == plan_.rank) {
      open_chain(kAbsent);
      for (const auto& holder : holders) {
        add_segments(segment_begin_[holder.fragment], segment_begin_[holder.fragment + 1]);
      }
    }
  }

  UnitTable done() { return std::move(table_); }

 private:
  void add_units(const Partition::Holder& holder) {
    const int64_t tile = plan_.options.tile;
    const Fragment& f = partition_.fragments(holder.rank)[holder.fragment];
    const int64_t count = tile > 0 ? (f.length + tile - 1) / tile : 1;
    for (int64_t i = 0; i < count; ++i) {
      if (holder.rank == plan_.rank) {
        const int64_t first = segment_begin_[holder.fragment];
        open_chain(static_cast<int64_t>(table_.units.size()));
        add_segments(tile > 0 ? first + i : first,
                     tile > 0 ? first + i + 1 : segment_begin_[holder.fragment + 1]);
      }
      table_.units.push_back({holder.rank});
    }
  }

  // Lays out the records of the document's units, now that its first and last unit are known.
  void close_document() {
    const int64_t begin = table_.document_begin.back();
    const int64_t end = static_cast<int64_t>(table_.units.size());
    const int64_t map = plan_.options.dim_k * plan_.options.dim_k;
    const int64_t state = plan_.options.dim_k * plan_.options.dim_v;
    const auto take = [](int64_t& cursor, int64_t elements) {
      const int64_t at = cursor;
      cursor += elements;
      return at;
    };
    for (int64_t i = begin; i < end; ++i) {
      Unit& unit = table_.units[i];
      const bool first = i == begin, last = i + 1 == end;
      auto& forward = table_.sent[kForward][unit.rank];
      if (!first && !last) unit.map = take(forward, map);
      if (!last) {
        unit.part[kForward] = take(forward, state);
        unit.returned[kBackward] = take(table_.returned[kBackward][unit.rank], state);
      }
      if (!first) {
        unit.part[kBackward] = take(table_.sent[kBackward][unit.rank], state);
        unit.returned[kForward] = take(table_.returned[kForward][unit.rank], state);
      }
    }
    table_.document_begin.push_back(end);
  }

  void open_chain(int64_t unit) {
    const int64_t at = static_cast<int64_t>(table_.chain_segments.size());
    table_.chains.push_back({unit, at, at});
  }

  void add_segments(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) table_.chain_segments.push_back(i);
    table_.chains.back().end = static_cast<int64_t>(table_.chain_segments.size());
  }

  const Partition& partition_;
  const Plan& plan_;
  const std::vector<int64_t>& segment_begin_;
  UnitTable table_;
};

}  // namespace

UnitTable make_units(const Partition& partition, const Plan& plan,
                     const std::vector<int64_t>& segment_begin) {
  Maker maker(partition, plan, segment_begin);
  for (int64_t doc = 0; doc < partition.num_documents(); ++doc) maker.add_document(doc);
  return maker.done();
}

}  // namespace gdn
