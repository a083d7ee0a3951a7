// A plan's segments as the walks see them.
#pragma once

#include "backend/cuda/sm90/schedule.h"
#include "gdn/plan.h"

namespace gdn::sm90 {

enum class Direction { kForward, kReverse };

// Every segment, entered from its document's state or its boundary slot (forward: entry slots,
// reverse: exit slots), left into its document's state or nowhere.
std::vector<Chain> run_chains(const Plan& plan, Direction direction);

// Segments whose effect others need, each into a slot: forward B, and as a walk of its own M;
// reverse C.
std::vector<Chain> summary_chains(const Plan& plan, Direction direction);

}  // namespace gdn::sm90
