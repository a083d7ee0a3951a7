// Launches of the walks. `blocks` = G times the number of lane groups of the work table.
#pragma once

#include "backend/cuda/sm90/params.h"
#include "gdn/status.h"
#include "gdn/tensor.h"

namespace gdn::sm90 {

// o, and the states that pieces leave behind.
Status launch_walk(const WalkParams& params, int blocks, Stream stream);

// Only the states that pieces leave behind: q and o are not touched.
Status launch_summary(const WalkParams& params, int blocks, Stream stream);

}  // namespace gdn::sm90
