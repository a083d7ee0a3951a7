// The convolution of rows on a GPU: arguments have been checked, and all lie on args.x's device.
#pragma once

#include "conv/causal_conv.h"

namespace gdn::cuda {

int64_t conv_workspace_bytes(const ConvArgs& args, bool backward);
Status conv(const ConvArgs& args, const TensorView& y, Memory workspace, Stream stream);
Status conv_backward(const ConvArgs& args, const TensorView& dy, const ConvGradients& out,
                     Memory workspace, Stream stream);

}  // namespace gdn::cuda
