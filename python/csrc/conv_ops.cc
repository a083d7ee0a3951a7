// Ops of the causal convolution; conv.py exchanges the rows before a fragment.
#include <torch/csrc/stable/library.h>

#include "conv/causal_conv.h"
#include "views.h"

namespace gdn_torch {
namespace {

// Fragments of the rows: cu_seqlens, or one per batch entry.
std::vector<int64_t> fragments_of(const Tensor& x, const MaybeTensor& cu_seqlens) {
  if (cu_seqlens) return int64_values("cu_seqlens", *cu_seqlens);
  if (x.dim() != 2 && x.dim() != 3) static_cast<void>(rows_view("x", x, 1));  // says what is wrong
  const bool batched = x.dim() == 3;
  const int64_t batch = batched ? x.size(0) : 1;
  std::vector<int64_t> begin(static_cast<size_t>(batch) + 1);
  for (size_t i = 0; i < begin.size(); ++i) {
    begin[i] = static_cast<int64_t>(i) * x.size(batched ? 1 : 0);
  }
  return begin;
}

gdn::ConvArgs args_of(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                      const MaybeTensor& prefix, std::span<const int64_t> fragments, bool silu) {
  gdn::ConvArgs args;
  args.x = rows_view("x", x, 1);
  args.weight = view_of("weight", weight);
  args.bias = view_of("bias", bias);
  args.prefix = view_of("prefix", prefix);
  args.fragment_begin = fragments;
  args.silu = silu;
  return args;
}

Tensor conv(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
            const MaybeTensor& prefix, const MaybeTensor& cu_seqlens, bool silu) {
  const std::vector<int64_t> fragments = fragments_of(x, cu_seqlens);
  const gdn::ConvArgs args = args_of(x, weight, bias, prefix, fragments, silu);
  const auto guard = guard_for(args.x.device);
  const Tensor y = empty_like_shape(x);
  const Tensor workspace = aligned_bytes(gdn::conv_workspace_bytes(args, false), args.x.device);
  check(gdn::causal_conv(args, rows_view("y", y, 1), memory_of(workspace),
                         current_stream(args.x.device)));
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> conv_backward(const Tensor& x, const Tensor& weight,
                                                         const MaybeTensor& bias,
                                                         const MaybeTensor& prefix,
                                                         const MaybeTensor& cu_seqlens, bool silu,
                                                         const Tensor& dy) {
  const std::vector<int64_t> fragments = fragments_of(x, cu_seqlens);
  const gdn::ConvArgs args = args_of(x, weight, bias, prefix, fragments, silu);
  const auto guard = guard_for(args.x.device);
  const Tensor none = empty({0}, gdn::DType::kFloat32, args.x.device);
  const Tensor dx = empty_like_shape(x);
  const Tensor dweight = empty_like_shape(weight);
  const Tensor dbias = bias ? empty_like_shape(*bias) : none;
  const Tensor dprefix = prefix ? empty_like_shape(*prefix) : none;
  gdn::ConvGradients out;
  out.dx = rows_view("dx", dx, 1);
  out.dweight = view_of("dweight", dweight);
  if (bias) out.dbias = view_of("dbias", dbias);
  if (prefix) out.dprefix = view_of("dprefix", dprefix);
  const Tensor workspace = aligned_bytes(gdn::conv_workspace_bytes(args, true), args.x.device);
  check(gdn::causal_conv_backward(args, rows_view("dy", dy, 1), out, memory_of(workspace),
                                  current_stream(args.x.device)));
  return {dx, dweight, dbias, dprefix};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(gdn_kcp, m) {
  m.def(
      "conv(Tensor x, Tensor weight, Tensor? bias, Tensor? prefix, Tensor? cu_seqlens, "
      "bool silu) -> Tensor");
  m.def(
      "conv_backward(Tensor x, Tensor weight, Tensor? bias, Tensor? prefix, "
      "Tensor? cu_seqlens, bool silu, Tensor dy) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(gdn_kcp, CompositeExplicitAutograd, m) {
  m.impl("conv", TORCH_BOX(&conv));
  m.impl("conv_backward", TORCH_BOX(&conv_backward));
}

}  // namespace gdn_torch
