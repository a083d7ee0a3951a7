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

// The gradients of states that pieces, walked from their ends, leave behind.
Status launch_reverse_summary(const WalkParams& params, int blocks, Stream stream);

// The same over all segments; also dS of every chunk, and the rows f U (reverse_walk.cuh) in o.
Status launch_reverse_states(const WalkParams& params, int blocks, Stream stream);

// Every other gradient, from what the last has left; pieces are walked from their beginnings.
Status launch_backward(const BackwardParams& params, int blocks, Stream stream);

}  // namespace gdn::sm90
