// Where the ranks of a partition cut documents.
#pragma once

#include <cstdint>

#include "gdn/partition.h"

namespace gdn {

// Is every cut a multiple of `tokens` from its document's start?
inline bool cuts_at_multiples_of(int64_t tokens, const Partition& partition) {
  for (int rank = 0; rank < partition.world_size(); ++rank) {
    for (const Fragment& fragment : partition.fragments(rank)) {
      if (fragment.offset % tokens != 0) return false;
    }
  }
  return true;
}

}  // namespace gdn
