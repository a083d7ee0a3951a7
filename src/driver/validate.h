// Checks that need no operands; those that do are gdn::validate in gdn/gdn.h.
#pragma once

#include "gdn/gdn.h"

namespace gdn {

// Dimensions, dtypes and options that make sense, whatever the backend.
Status validate(const Problem& problem);

// The problem's local row count against what the partition gives this rank, or its capacity.
Status validate_rows(const Problem& problem, const Plan& plan);

}  // namespace gdn
