// One rank's operands and outputs on a machine: what every arm of a row is given.
#pragma once

#include <vector>

#include "bench/machine.h"
#include "check/batch.h"

namespace gdn::bench {

struct Case {
  Partition partition;
  int rank = 0;
  Problem problem;  // of the local rows
  ForwardArgs forward;
  BackwardArgs backward;
  bool training = false;  // is there a backward?
  // Of all the partition's ranks; null: messages to other ranks are dropped.
  Communicator* communicator = nullptr;
  std::vector<Storage> storage;

  // The rows of `sample` repeat up to the rank's own count, its states up to the partition's
  // documents; slack rows of the sample come last. final_state: asked for too.
  static Result<Case> make(Machine& machine, const Partition& partition, int rank,
                           const Batch& sample, bool final_state);

  // What the last calls left in the outputs.
  Result<BatchResult> download(Machine& machine) const;
};

// 2,048 rows, or the documents themselves where they are shorter: what is made and checked in place
// of long documents. Empty where there are no tokens.
std::vector<int64_t> sample_documents(const std::vector<int64_t>& documents);

}  // namespace gdn::bench
