// cuda-portable: any GPU from sm_80 on, through mma.sync and cp.async. Takes bf16 operands with K =
// V = 64 or 128. Device time is enqueued on the caller's stream; nothing synchronises, allocates or
// picks by timing.
//
// Summaries leave out what a document has provably forgotten: where a segment's last chunks decay
// by more than e^-17 in all, B starts from 0 before them and M is 0 (likewise C from the left). A
// state is off by at most 4.2e-8 of its norm by that. GDN_EXACT_MAPS=1 in the environment switches
// it off.
#pragma once

#include "gdn/backend.h"

namespace gdn {

const Backend& cuda_portable_backend();

}  // namespace gdn
