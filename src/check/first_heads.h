// The first key heads of a batch or a result, with the value heads that read them. A head's numbers
// depend on no other head's, and dq, dk sum over value heads of their own, so the first heads of a
// result are the result of the first heads.
#pragma once

#include <cstdint>

#include "check/batch.h"

namespace gdn {

// In memory of their own, 1 <= key_heads <= H.
Batch first_heads(const Batch& batch, int64_t key_heads);
// `problem`: the one that the result is of, all heads.
BatchResult first_heads(const BatchResult& result, const Problem& problem, int64_t key_heads);

}  // namespace gdn
