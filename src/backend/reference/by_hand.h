// Test support: a plan written by hand (one rank, documents cut in given segments) and the order of
// stages that a driver would run, so that the backend is tested without planner and driver.
#pragma once

#include <functional>
#include <vector>

#include "check/batch.h"
#include "gdn/backend.h"
#include "gdn/plan.h"

namespace gdn::reference {

// cuts[doc]: lengths of its segments, summing to its length; empty for a document without tokens.
Plan plan_by_hand(const Batch& batch, const std::vector<std::vector<int64_t>>& cuts);

// Every document one segment.
Plan plan_uncut(const Batch& batch);

// Boundary tables after a run, in the state dtype: what a test may look at.
struct Boundaries {
  HostTensor maps, entry_states, exit_gradients;  // [HV, slots, K, K or V]
};

// Forward, and (unless switched off) backward where the batch has d_o or dfinal_state, on `backend`
// (null: the reference). Outputs and workspace start as NaN. `views` may exchange the views that
// the stages are given, e.g. for strided ones.
struct Views {
  ForwardArgs forward;
  BackwardArgs backward;
};
BatchResult run_by_hand(const Batch& batch, const Plan& plan, Boundaries* boundaries = nullptr,
                        const std::function<void(Views&)>& views = {},
                        const Backend* backend = nullptr, bool backward = true);

}  // namespace gdn::reference
