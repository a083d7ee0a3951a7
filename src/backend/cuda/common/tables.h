// The plan's tables as kernels read them, and where they lie in the resident block. The layout is a
// pure function of the plan's capacity; upload() copies one host image of it. Launches are made for
// the capacity: blocks past the counts that lie first in the block have nothing to do.
#pragma once

#include <cstdint>
#include <vector>

#include "gdn/plan.h"

namespace gdn::cuda {

inline constexpr int kNumPrograms = 8;

// How many rows of each table this packing has.
struct CountRow {
  int64_t tokens;    // local rows; slack rows follow
  int64_t segments;  // and items of a run
  int64_t chunks;
  int64_t exits;  // items
  int64_t entries;
  int64_t empty;
  int64_t chains[kNumPrograms];
};

struct SegmentRow {
  int64_t row;  // first local row
  int64_t first_chunk;
  int32_t chunks;
  int32_t length;  // tokens
  int32_t doc;
  int32_t entry_slot;  // as in gdn::Segment, -1: none
  int32_t exit_slot;
  int32_t map_slot;
};

struct ChunkRow {
  int64_t row;     // first local row
  int32_t tokens;  // 1..kChunk
  int32_t segment;
};

struct FoldRow {
  int64_t offset[3];  // map, add, out
  int64_t stride[3];  // per head
  int32_t table[3];   // Table, 0: absent
};

// Work items of the walks, longest first. B of segments and M of segments are separate items.
struct ItemRow {
  int32_t segment;
  int32_t is_map;
};

// Byte offsets into the resident block.
struct ResidentLayout {
  int64_t counts = 0;                         // CountRow
  int64_t segments = 0;                       // SegmentRow[segments]
  int64_t chunks = 0;                         // ChunkRow[chunks]
  int64_t run = 0;                            // ItemRow[run_items]: all segments
  int64_t exits = 0;                          // ItemRow[exit_items]: B and M wanted
  int64_t entries = 0;                        // ItemRow[entry_items]: C wanted
  int64_t empty = 0;                          // int64[empty documents]
  int64_t program_steps[kNumPrograms] = {};   // FoldRow[steps]
  int64_t program_chains[kNumPrograms] = {};  // int64[chains + 1]
  int64_t bytes = 0;

  static ResidentLayout of(const Plan& plan);
};

// Which program of the plan this is (by address); -1: none of them.
int program_index(const Plan& plan, const FoldProgram& program);

// The host image of the resident block.
std::vector<unsigned char> resident_image(const Plan& plan);

template <typename T>
const T* at(const void* base, int64_t offset) {
  return reinterpret_cast<const T*>(static_cast<const unsigned char*>(base) + offset);
}
template <typename T>
T* at(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<unsigned char*>(base) + offset);
}

}  // namespace gdn::cuda
