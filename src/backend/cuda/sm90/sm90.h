// cuda-sm90a: Hopper GPUs (H100, H200, GH200) through wgmma and the bulk copy engine. Takes bf16
// operands with K = V = 128. Device time is enqueued on the caller's stream; nothing synchronises,
// allocates or picks by timing. Its backward is that of cuda-portable, which prepares again.
//
// Documents are cut late: blocks hand states over to each other inside a launch (schedule.h), so
// that a pack is balanced without cuts and only chains longer than the mean load gain from them.
// Summaries leave out what a document has provably forgotten, as those of cuda-portable do.
#pragma once

#include "gdn/backend.h"

namespace gdn {

const Backend& cuda_sm90_backend();

}  // namespace gdn
