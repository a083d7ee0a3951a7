// Tensor maps for the copy engine: [T, H, 128] bf16 with any token stride that is a multiple of 8
// elements, seen as {64, T, 2, H}; a box of {64, 64, halves, 1} is that many swizzled 64 x 64
// tiles: 2 for q, k, v, 1 for o.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gdn/status.h"

namespace gdn::sm90 {

Status make_tensor_map(const void* data, int64_t tokens, int64_t heads, int64_t token_stride,
                       int halves, CUtensorMap* map);

}  // namespace gdn::sm90
