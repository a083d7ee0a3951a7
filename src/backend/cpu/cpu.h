// The fast backend of host machines: chunked kernels in the operand's compute type (fp32 for bf16
// and fp32 operands, fp64 for fp64), vectorised by Highway, one item per segment and key head.
#pragma once

#include "gdn/backend.h"

namespace gdn {

const Backend& cpu_backend();  // "cpu"

}  // namespace gdn
