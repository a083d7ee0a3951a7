// What a block walks: the rows of its work table.
#pragma once

#include <cstdint>

namespace gdn::sm90 {

inline constexpr int kChunkTokens = 64;

// Where a walk's state comes from or goes to.
enum class StateKind : int32_t {
  kNone,      // enters: zero; leaves: dropped
  kIdentity,  // enters: the walk of a map, with v = 0; leaves: map table slot `index`
  kDocument,  // initial_state or final_state row `index`
  kSlot,      // boundary table slot `index`
  kHandOver,  // another block of this launch, hand-over buffer `index`
};

// A run of chunks of one key head, walked by G blocks, one per value head of the group.
struct WalkPiece {
  int64_t row;          // first local row
  int32_t first_chunk;  // its chunk record
  int32_t chunks;       // > 0
  int32_t tokens;       // of all its chunks; only the last chunk may be short
  int32_t key_head;
  StateKind enter;
  int32_t enter_index;
  StateKind leave;
  int32_t leave_index;
  int32_t padding[2];
};
static_assert(sizeof(WalkPiece) == 48);

}  // namespace gdn::sm90
