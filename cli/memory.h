// Whether a batch fits this machine, asked before it is allocated: a mistyped length, or a small
// file that claims much without holding it, must not end in a killed process.
#pragma once

#include "check/batch.h"
#include "gdn/status.h"

namespace gdn::cli {

// Operands that are to be made, and beside them `other` bytes; with `results` also what forward and
// backward give.
Status check_memory(const BatchSpec& spec, bool results, double other = 0);

// Operands that are there, and their results.
Status check_memory(const Batch& batch);
// The same of so many tokens and documents like the batch's.
Status check_memory(const Batch& like, int64_t tokens, int64_t documents);

}  // namespace gdn::cli
