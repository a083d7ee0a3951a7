// Depthwise causal convolution over packed documents, forward and backward, on the host or on a
// GPU: what stands before the operator in a GDN layer. Fragments come with the rows before them, so
// that a document cut over ranks is convolved as if it were whole.
//   z[t, c] = bias[c] + sum_j weight[c, j] x[t - (W - 1) + j, c];  y = z or z * sigmoid(z)
// Every sum has a fixed order: results do not depend on threads or on a document's neighbours, but
// for the last bits of dweight and dbias on a GPU, whose order depends on T and C.
#pragma once

#include <cstdint>
#include <span>

#include "gdn/gdn.h"
#include "gdn/status.h"
#include "gdn/tensor.h"

namespace gdn {

inline constexpr int kMaxConvWidth = 8;

// T local rows, C channels, W taps, F fragments. x: bf16, fp32 or fp64, unit innermost stride.
// Arithmetic is in fp32 (fp64 for fp64 x), the sigmoid to 1e-6. All tensors on x's device,
// fragment_begin on the host.
struct ConvArgs {
  TensorView x;                             // [T, C]
  TensorView weight;                        // [C, W], any floating dtype, 1 <= W <= kMaxConvWidth
  TensorView bias;                          // [C], may be absent (0)
  TensorView prefix;                        // [F, W - 1, C] like x: rows before; absent: 0
  std::span<const int64_t> fragment_begin;  // [F + 1] local rows; rows past the last are not read
  bool silu = true;
};

struct ConvGradients {
  TensorView dx;       // [T, C] like x; 0 past the last fragment
  TensorView dweight;  // [C, W], sums over this rank's rows; absent: not wanted
  TensorView dbias;    // [C], may be absent
  TensorView dprefix;  // [F, W - 1, C], row-major, may be absent
};

// Bytes of the workspace of a pass: 0 on the host; on a GPU 8 (F + 1), and for the backward sums of
// runs of rows: (W + 1) C 4 bytes for every 128 of T (or 32, where that is little), twice for fp64;
// each rounded up to 256.
int64_t conv_workspace_bytes(const ConvArgs& args, bool backward);

// Errors: kInvalidArgument names the argument, kUnsupported a GPU where the build has no kernels,
// kWorkspaceTooSmall, kDevice (a GPU that the kernels were not compiled for). On a GPU in the
// stream's order, and may be captured.
Status causal_conv(const ConvArgs& args, const TensorView& y, Memory workspace = {},
                   Stream stream = {});
Status causal_conv_backward(const ConvArgs& args, const TensorView& dy, const ConvGradients& out,
                            Memory workspace = {}, Stream stream = {});

}  // namespace gdn
