// Cuts a rank's fragments into segments and numbers their boundary slots. Private to src/plan/.
#pragma once

#include <vector>

#include "gdn/plan.h"

namespace gdn {

// Fills plan.segments, segment_reason and counts but for empty_documents. segment_begin: index of
// the first segment of each local fragment, [fragments + 1].
void cut_segments(const Partition& partition, Plan& plan, std::vector<int64_t>& segment_begin);

// How many segments a fragment is cut in at most; `inside`: it neither starts nor ends its
// document.
int64_t most_pieces(bool inside, const PlanOptions& options);

// In tile mode every fragment of every rank must start at a multiple of the tile.
Status check_tiles(const Partition& partition, int64_t tile);

}  // namespace gdn
