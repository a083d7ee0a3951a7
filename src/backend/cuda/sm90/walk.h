// Launches of the walks. `blocks` = G times the number of lane groups of the work table.
#pragma once

#include "backend/cuda/sm90/backward_params.h"
#include "backend/cuda/sm90/params.h"
#include "gdn/status.h"
#include "gdn/tensor.h"

namespace gdn::sm90 {

// o, and the states that pieces leave behind.
Status launch_walk(const WalkParams& params, int blocks, Stream stream);

// Only the states that pieces leave behind: q and o are not touched.
Status launch_summary(const WalkParams& params, int blocks, Stream stream);

// S and E of every chunk, from the pieces of a run.
Status launch_states(const WalkParams& params, int blocks, Stream stream);

// The gradients of states that pieces, walked from their ends, leave behind.
Status launch_reverse_summary(const WalkParams& params, int blocks, Stream stream);

// Every gradient; pieces are walked from their ends.
Status launch_backward(const BackwardParams& params, int blocks, Stream stream);

}  // namespace gdn::sm90
