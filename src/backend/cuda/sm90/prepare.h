// Launch of k_prepare: fills tiles, gates and norms of every chunk.
#pragma once

#include "backend/cuda/sm90/params.h"
#include "gdn/status.h"
#include "gdn/tensor.h"

namespace gdn::sm90 {

Status launch_prepare(const PrepareParams& params, Stream stream);

}  // namespace gdn::sm90
