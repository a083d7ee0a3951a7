#include "backend/cuda/common/tables.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/memory.h"

namespace gdn::cuda {
namespace {

std::array<const FoldProgram*, kNumPrograms> programs(const Plan& plan) {
  const ExchangePass &f = plan.forward, &b = plan.backward;
  return {&f.pack, &f.pack_maps, &f.fold, &f.spread,
          &b.pack, &b.pack_maps, &b.fold, &b.spread};
}

CountRow count_row(const Plan& plan) {
  CountRow row{};
  row.tokens = plan.local_tokens;
  row.segments = plan.counts.segments;
  row.chunks = plan.counts.chunks;
  row.exits = plan.counts.exit_slots + plan.counts.map_slots;
  row.entries = plan.counts.entry_slots;
  row.empty = plan.counts.empty_documents;
  const auto list = programs(plan);
  for (int i = 0; i < kNumPrograms; ++i) row.chains[i] = list[i]->chains();
  return row;
}

// Segments that `wanted` picks, twice those with a map if `maps`, longest first.
template <typename Wanted>
std::vector<ItemRow> items(const Plan& plan, bool maps, const Wanted& wanted) {
  std::vector<ItemRow> list;
  for (size_t i = 0; i < plan.segments.size(); ++i) {
    if (!wanted(plan.segments[i])) continue;
    list.push_back({static_cast<int32_t>(i), 0});
    if (maps && plan.segments[i].map_slot >= 0) list.push_back({static_cast<int32_t>(i), 1});
  }
  std::stable_sort(list.begin(), list.end(), [&](const ItemRow& a, const ItemRow& b) {
    return plan.segments[a.segment].chunks() > plan.segments[b.segment].chunks();
  });
  return list;
}

std::vector<ItemRow> run_items(const Plan& plan) {
  return items(plan, false, [](const Segment&) { return true; });
}
std::vector<ItemRow> exit_items(const Plan& plan) {
  return items(plan, true, [](const Segment& s) { return s.exit_slot >= 0; });
}
std::vector<ItemRow> entry_items(const Plan& plan) {
  return items(plan, false, [](const Segment& s) { return s.entry_slot >= 0; });
}

std::vector<SegmentRow> segment_rows(const Plan& plan) {
  std::vector<SegmentRow> rows;
  for (const Segment& s : plan.segments) {
    rows.push_back({s.row, s.first_chunk, static_cast<int32_t>(s.chunks()),
                    static_cast<int32_t>(s.length), static_cast<int32_t>(s.doc),
                    static_cast<int32_t>(s.entry_slot), static_cast<int32_t>(s.exit_slot),
                    static_cast<int32_t>(s.map_slot)});
  }
  return rows;
}

std::vector<ChunkRow> chunk_rows(const Plan& plan) {
  std::vector<ChunkRow> rows;
  rows.reserve(static_cast<size_t>(plan.counts.chunks));
  for (size_t i = 0; i < plan.segments.size(); ++i) {
    const Segment& s = plan.segments[i];
    for (int64_t done = 0; done < s.length; done += kChunk) {
      rows.push_back({s.row + done, static_cast<int32_t>(std::min(kChunk, s.length - done)),
                      static_cast<int32_t>(i)});
    }
  }
  return rows;
}

std::vector<FoldRow> fold_rows(const FoldProgram& program) {
  std::vector<FoldRow> rows;
  for (const FoldStep& step : program.steps) {
    FoldRow row{};
    const FoldRef* refs[3] = {&step.map, &step.add, &step.out};
    for (int i = 0; i < 3; ++i) {
      row.offset[i] = refs[i]->offset;
      row.stride[i] = refs[i]->head_stride;
      row.table[i] = static_cast<int32_t>(refs[i]->table);
    }
    rows.push_back(row);
  }
  return rows;
}

template <typename T>
void put(std::vector<unsigned char>& image, int64_t offset, const std::vector<T>& rows) {
  if (!rows.empty()) std::memcpy(image.data() + offset, rows.data(), rows.size() * sizeof(T));
}

}  // namespace

ResidentLayout ResidentLayout::of(const Plan& plan) {
  const auto bytes = [](int64_t rows, size_t row) { return rows * static_cast<int64_t>(row); };
  const PlanCounts& most = plan.capacity;
  ResidentLayout layout;
  BlockLayout block;
  layout.counts = block.take(sizeof(CountRow));
  layout.segments = block.take(bytes(most.segments, sizeof(SegmentRow)));
  layout.chunks = block.take(bytes(most.chunks, sizeof(ChunkRow)));
  layout.run = block.take(bytes(most.segments, sizeof(ItemRow)));
  layout.exits = block.take(bytes(most.exit_slots + most.map_slots, sizeof(ItemRow)));
  layout.entries = block.take(bytes(most.entry_slots, sizeof(ItemRow)));
  layout.empty = block.take(bytes(most.empty_documents, sizeof(int64_t)));
  const auto list = programs(plan);
  for (int i = 0; i < kNumPrograms; ++i) {
    layout.program_steps[i] = block.take(bytes(list[i]->max_steps, sizeof(FoldRow)));
    layout.program_chains[i] = block.take(bytes(list[i]->max_chains + 1, sizeof(int64_t)));
  }
  layout.bytes = block.bytes();
  return layout;
}

int program_index(const Plan& plan, const FoldProgram& program) {
  const auto list = programs(plan);
  for (int i = 0; i < kNumPrograms; ++i) {
    if (list[i] == &program) return i;
  }
  return -1;
}

std::vector<unsigned char> resident_image(const Plan& plan) {
  const ResidentLayout layout = ResidentLayout::of(plan);
  std::vector<unsigned char> image(static_cast<size_t>(layout.bytes));
  put(image, layout.counts, std::vector{count_row(plan)});
  put(image, layout.segments, segment_rows(plan));
  put(image, layout.chunks, chunk_rows(plan));
  put(image, layout.run, run_items(plan));
  put(image, layout.exits, exit_items(plan));
  put(image, layout.entries, entry_items(plan));
  put(image, layout.empty, plan.empty_documents);
  const auto list = programs(plan);
  for (int i = 0; i < kNumPrograms; ++i) {
    put(image, layout.program_steps[i], fold_rows(*list[i]));
    put(image, layout.program_chains[i], list[i]->chain_begin);
  }
  return image;
}

}  // namespace gdn::cuda
