// Launches of the convolution's kernels: the fragments' table, a pass, and for the backward the
// sums of its runs.
#include <algorithm>

#include "backend/cuda/common/launch.h"
#include "base/memory.h"
#include "conv/cuda/conv_cuda.h"
#include "conv/cuda/conv_kernels.cuh"

namespace gdn::cuda {
namespace {

constexpr int kConvTableThreads = 128;
__global__ void __launch_bounds__(kConvTableThreads)
    conv_table_kernel(const __grid_constant__ ConvTablePiece p) {
  for (int64_t i = threadIdx.x; i < p.count; i += kConvTableThreads) p.to[i] = p.values[i];
}

// Rows of a run. Longer ones read fewer rows twice and leave fewer sums; a device wants about
// 100,000 threads.
constexpr int kShortRun = 32;  // of a forward too
constexpr int kLongRun = 128;
constexpr int64_t kManyThreads = 100'000;
// Channels of a thread where rows can be moved so; the backward keeps twice as much of each in
// registers.
template <bool kBackward>
constexpr int kChannels = kBackward ? 2 : 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int backward_run(const ConvArgs& args) {
  const int64_t threads = ceil_div(args.x.shape[0], kLongRun) * args.x.shape[1] / kChannels<true>;
  return threads >= kManyThreads ? kLongRun : kShortRun;
}

struct Workspace {
  int64_t begin = 0, partial = 0, bytes = 0;

  static Workspace of(const ConvArgs& args, bool backward) {
    Workspace workspace;
    BlockLayout block;
    workspace.begin = block.take(static_cast<int64_t>(args.fragment_begin.size()) * 8);
    if (backward) {
      const int64_t runs = ceil_div(args.x.shape[0], backward_run(args));
      const int64_t element = args.x.dtype == DType::kFloat64 ? 8 : 4;
      workspace.partial = block.take(runs * (args.weight.shape[1] + 1) * args.x.shape[1] * element);
    }
    workspace.bytes = block.bytes();
    return workspace;
  }
};

ConvRows rows_of(const TensorView& view) {
  if (!view.present()) return {nullptr, 0, 0};
  if (view.rank == 3) return {view.data, view.stride[1], view.stride[0]};
  return {view.data, view.stride[0], 0};
}

ScalarView taps_of(const TensorView& view) {
  if (!view.present()) return {nullptr, 0, 0, DType::kFloat32};
  return {view.data, view.stride[0], view.rank == 2 ? view.stride[1] : 0, view.dtype};
}

// Whether pieces of `bytes` of these rows can be moved whole.
bool aligned(const ConvRows& rows, int64_t element, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(rows.data) % bytes == 0 && rows.row * element % bytes == 0 &&
         rows.fragment * element % bytes == 0;
}

Status copy_table(const ConvArgs& args, int64_t* to, Stream stream) {
  const auto& begin = args.fragment_begin;
  for (size_t at = 0; at < begin.size(); at += ConvTablePiece::kMost) {
    ConvTablePiece piece{};
    piece.to = to + at;
    piece.count = static_cast<int64_t>(std::min<size_t>(begin.size() - at, ConvTablePiece::kMost));
    std::copy_n(begin.begin() + static_cast<std::ptrdiff_t>(at), piece.count, piece.values);
    const LaunchShape shape{.blocks = 1, .threads = kConvTableThreads};
    GDN_RETURN_IF_ERROR(launch("conv_table", conv_table_kernel, shape, stream, piece));
  }
  return Status::ok();
}

// What both directions are given, and the table on its way.
Status common_params(const ConvArgs& args, const Workspace& layout, Memory workspace, Stream stream,
                     ConvParams* p) {
  auto* base = static_cast<std::byte*>(workspace.data);
  auto* begin = reinterpret_cast<int64_t*>(base + layout.begin);
  GDN_RETURN_IF_ERROR(copy_table(args, begin, stream));
  p->x = rows_of(args.x);
  p->prefix = rows_of(args.prefix);
  p->weight = taps_of(args.weight);
  p->bias = taps_of(args.bias);
  p->begin = begin;
  p->fragments = std::max<int64_t>(0, static_cast<int64_t>(args.fragment_begin.size()) - 1);
  p->rows = args.x.shape[0];
  p->end = p->fragments > 0 ? args.fragment_begin.back() : 0;
  p->partial = base + layout.partial;
  p->channels = static_cast<int>(args.x.shape[1]);
  p->width = static_cast<int>(args.weight.shape[1]);
  p->silu = args.silu;
  return Status::ok();
}

template <bool kBackward, typename X, int kVec, int kTaps>
Status launch_taps(const ConvParams& p, Stream stream) {
  const LaunchShape shape{
      .blocks = ceil_div(p.channels, 32 * kVec) * ceil_div(ceil_div(p.rows, p.run), kConvWarps),
      .threads = 32 * kConvWarps};
  if constexpr (kBackward) {
    return launch("conv_backward", conv_backward_kernel<X, kVec, kTaps>, shape, stream, p);
  } else {
    return launch("conv", conv_kernel<X, kVec, kTaps>, shape, stream, p);
  }
}
template <bool kBackward, typename X, int kVec>
Status launch_vec(const ConvParams& p, Stream stream) {
  switch (p.width) {
    case 2:
      return launch_taps<kBackward, X, kVec, 2>(p, stream);
    case 3:
      return launch_taps<kBackward, X, kVec, 3>(p, stream);
    case 4:
      return launch_taps<kBackward, X, kVec, 4>(p, stream);
    default:
      return launch_taps<kBackward, X, kVec, kMaxConvWidth>(p, stream);
  }
}
// kVec channels a thread where all rows allow it, else one.
template <bool kBackward, typename X, int kVec>
Status launch_rows(const ConvParams& p, Stream stream) {
  constexpr int64_t kElement = sizeof(X), kBytes = kElement * kVec;
  bool whole = p.channels % kVec == 0;
  for (const ConvRows* rows : {&p.x, &p.prefix, &p.y, &p.dy, &p.dx, &p.dprefix}) {
    whole = whole && (rows->data == nullptr || aligned(*rows, kElement, kBytes));
  }
  return whole ? launch_vec<kBackward, X, kVec>(p, stream) : launch_vec<kBackward, X, 1>(p, stream);
}

template <bool kBackward>
Status launch_conv(const ConvParams& p, DType dtype, Stream stream) {
  switch (dtype) {
    case DType::kBFloat16:
      return launch_rows<kBackward, uint16_t, kChannels<kBackward>>(p, stream);
    case DType::kFloat32:
      return launch_rows<kBackward, float, kChannels<kBackward>>(p, stream);
    default:
      return launch_rows<kBackward, double, 2>(p, stream);
  }
}

template <typename C>
Status launch_sums(const ConvSumParams& p, Stream stream) {
  const LaunchShape shape{.blocks = ceil_div(p.channels, 32) * (p.width + 1),
                          .threads = 32 * kConvSumWarps,
                          .shared_bytes = 32 * kConvSumWarps * sizeof(double)};
  return launch("conv_sum", conv_sum_kernel<C>, shape, stream, p);
}

}  // namespace

int64_t conv_workspace_bytes(const ConvArgs& args, bool backward) {
  return Workspace::of(args, backward).bytes;
}

Status conv(const ConvArgs& args, const TensorView& y, Memory workspace, Stream stream) {
  const DeviceGuard guard(args.x.device.index);
  ConvParams p{};
  GDN_RETURN_IF_ERROR(common_params(args, Workspace::of(args, false), workspace, stream, &p));
  p.y = rows_of(y);
  p.run = kShortRun;
  return launch_conv<false>(p, args.x.dtype, stream);
}

Status conv_backward(const ConvArgs& args, const TensorView& dy, const ConvGradients& out,
                     Memory workspace, Stream stream) {
  const DeviceGuard guard(args.x.device.index);
  if (out.dprefix.present() && out.dprefix.numel() > 0) {  // of fragments without rows
    GDN_RETURN_IF_ERROR(
        zero(out.dprefix.data, out.dprefix.numel() * size_of(out.dprefix.dtype), stream));
  }
  ConvParams p{};
  GDN_RETURN_IF_ERROR(common_params(args, Workspace::of(args, true), workspace, stream, &p));
  p.dy = rows_of(dy);
  p.dx = rows_of(out.dx);
  p.dprefix = rows_of(out.dprefix);
  p.run = backward_run(args);
  GDN_RETURN_IF_ERROR(launch_conv<true>(p, args.x.dtype, stream));
  ConvSumParams sums{};
  sums.partial = p.partial;
  sums.dweight = taps_of(out.dweight);
  sums.dbias = taps_of(out.dbias);
  sums.runs = ceil_div(p.rows, p.run);
  sums.channels = p.channels;
  sums.width = p.width;
  return args.x.dtype == DType::kFloat64 ? launch_sums<double>(sums, stream)
                                         : launch_sums<float>(sums, stream);
}

}  // namespace gdn::cuda
