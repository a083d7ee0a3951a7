#include "conv/causal_conv.h"

#include <fmt/format.h>

#include <array>
#include <vector>

#include "base/bf16.h"
#include "base/element.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "conv/sigmoid.h"
#ifdef GDN_WITH_CUDA
#include "conv/cuda/conv_cuda.h"
#endif

namespace gdn {
namespace {

// Channels of one item of work: a row's slice is one or two cache lines, and the arrays of an item
// (8 taps, 8 window rows, 8 gradient rows of 64 floats or doubles) stay in the first-level cache.
constexpr int64_t kBlock = 64;

constexpr int64_t kMostChannels = 1 << 30;  // kernels count them in 32 bits

template <typename C>
using Row = std::array<C, kBlock>;

// One block of channels of every operand, in the compute type.
template <typename X, typename C>
class Block {
 public:
  Block(const ConvArgs& args, int64_t first)
      : args_(args),
        first_(first),
        width_(args.weight.shape[1]),
        n_(std::min(kBlock, args.x.shape[1] - first)) {
    for (int64_t c = 0; c < n_; ++c) {
      for (int64_t j = 0; j < width_; ++j) {
        weight_[j][c] = static_cast<C>(load_element(
            args.weight, (first + c) * args.weight.stride[0] + j * args.weight.stride[1]));
      }
      bias_[c] = args.bias.present()
                     ? static_cast<C>(load_element(args.bias, (first + c) * args.bias.stride[0]))
                     : C(0);
    }
  }

  void forward(const TensorView& y) {
    for (int64_t f = 0; f < fragments(); ++f) {
      for (int64_t i = 1; i < width_; ++i) load_prefix(f, i - 1, window_[slot(i)]);
      for (int64_t t = begin(f), i = 0; t < begin(f + 1); ++t, ++i) {
        load(args_.x, t, window_[slot(i)]);
        Row<C> z;
        convolve(i, z);
        if (args_.silu) {
          for (int64_t c = 0; c < n_; ++c) z[c] *= sigmoid(z[c]);
        }
        store(y, t, z);
      }
    }
    for (int64_t t = end(); t < y.shape[0]; ++t) store(y, t, Row<C>{});
  }

  void backward(const TensorView& dy, const ConvGradients& out) {
    std::array<Row<double>, kMaxConvWidth> dweight{};
    Row<double> dbias{};
    for (int64_t f = 0; f < fragments(); ++f) {
      for (int64_t i = 1; i < width_; ++i) load_prefix(f, i - 1, window_[slot(i)]);
      for (Row<C>& row : dx_) row.fill(C(0));
      const int64_t length = begin(f + 1) - begin(f);
      for (int64_t i = 0; i < length; ++i) {
        const int64_t t = begin(f) + i;
        load(args_.x, t, window_[slot(i)]);
        Row<C> dz;
        load(dy, t, dz);
        if (args_.silu) {
          Row<C> z;
          convolve(i, z);
          for (int64_t c = 0; c < n_; ++c) {
            const C s = sigmoid(z[c]);
            dz[c] *= s * (C(1) + z[c] * (C(1) - s));
          }
        }
        for (int64_t c = 0; c < n_; ++c) dbias[c] += static_cast<double>(dz[c]);
        for (int64_t j = 0; j < width_; ++j) {
          Row<C>& dx = dx_[slot(i + 1 + j)];  // of row i - (W - 1) + j
          const Row<C>& x = window_[slot(i + 1 + j)];
          for (int64_t c = 0; c < n_; ++c) {
            dx[c] += weight_[j][c] * dz[c];
            dweight[j][c] += static_cast<double>(dz[c]) * static_cast<double>(x[c]);
          }
        }
        emit(out, f, i - (width_ - 1));
      }
      for (int64_t s = std::max(length - (width_ - 1), -(width_ - 1)); s < length; ++s) {
        emit(out, f, s);
      }
    }
    for (int64_t t = end(); t < out.dx.shape[0]; ++t) store(out.dx, t, Row<C>{});
    for (int64_t c = 0; c < n_; ++c) {
      for (int64_t j = 0; j < width_ && out.dweight.present(); ++j) {
        store_element(out.dweight, (first_ + c) * out.dweight.stride[0] + j * out.dweight.stride[1],
                      dweight[j][c]);
      }
      if (out.dbias.present()) {
        store_element(out.dbias, (first_ + c) * out.dbias.stride[0], dbias[c]);
      }
    }
  }

 private:
  int64_t fragments() const {
    return std::max<int64_t>(0, static_cast<int64_t>(args_.fragment_begin.size()) - 1);
  }
  int64_t begin(int64_t f) const { return args_.fragment_begin[static_cast<size_t>(f)]; }
  int64_t end() const { return fragments() > 0 ? begin(fragments()) : 0; }
  // Where row i of a fragment (i >= -(W - 1)) lies in a ring of W rows; also i + W, i + 2 W, ...
  int64_t slot(int64_t i) const { return (i + width_) % width_; }

  const X* at(const TensorView& view, int64_t t) const {
    return view.as<const X>() + t * view.stride[0] + first_;
  }
  void load(const TensorView& view, int64_t t, Row<C>& row) const {
    const X* from = at(view, t);
    for (int64_t c = 0; c < n_; ++c) row[c] = static_cast<C>(from[c]);
  }
  void store(const TensorView& view, int64_t t, const Row<C>& row) const {
    X* to = view.as<X>() + t * view.stride[0] + first_;
    for (int64_t c = 0; c < n_; ++c) to[c] = X(row[c]);
  }
  // Row j - (W - 1) of fragment f.
  void load_prefix(int64_t f, int64_t j, Row<C>& row) const {
    const TensorView& p = args_.prefix;
    if (!p.present()) return row.fill(C(0));
    const X* from = p.as<const X>() + f * p.stride[0] + j * p.stride[1] + first_;
    for (int64_t c = 0; c < n_; ++c) row[c] = static_cast<C>(from[c]);
  }
  void convolve(int64_t i, Row<C>& z) const {
    z = bias_;
    for (int64_t j = 0; j < width_; ++j) {
      const Row<C>& x = window_[slot(i + 1 + j)];
      for (int64_t c = 0; c < n_; ++c) z[c] += weight_[j][c] * x[c];
    }
  }
  // The gradient of row s of fragment f is complete: writes it and clears its place in the ring.
  void emit(const ConvGradients& out, int64_t f, int64_t s) {
    Row<C>& dx = dx_[slot(s + width_)];
    if (s >= 0) {
      store(out.dx, begin(f) + s, dx);
    } else if (out.dprefix.present()) {
      const TensorView& p = out.dprefix;
      X* to = p.as<X>() + f * p.stride[0] + (s + width_ - 1) * p.stride[1] + first_;
      for (int64_t c = 0; c < n_; ++c) to[c] = X(dx[c]);
    }
    dx.fill(C(0));
  }

  const ConvArgs& args_;
  int64_t first_;
  int64_t width_;
  int64_t n_;
  std::array<Row<C>, kMaxConvWidth> weight_{};
  std::array<Row<C>, kMaxConvWidth> window_{};
  std::array<Row<C>, kMaxConvWidth> dx_{};
  Row<C> bias_{};
};

Status invalid(std::string message) { return {ErrorCode::kInvalidArgument, std::move(message)}; }

Status check_device(const char* name, const TensorView& view, const TensorView& x) {
  if (!view.present() || view.device == x.device) return Status::ok();
  return invalid(fmt::format("{}: expected on {}, as x, got {}", name, to_string(x.device),
                             to_string(view.device)));
}

Status check_rows(const char* name, const TensorView& view, const TensorView& x) {
  if (view.rank != 2 || view.shape != x.shape) {
    return invalid(
        fmt::format("{}: expected {}, got {}", name, shape_string(x), shape_string(view)));
  }
  if (view.dtype != x.dtype) {
    return invalid(
        fmt::format("{}: expected {}, got {}", name, to_string(x.dtype), to_string(view.dtype)));
  }
  if (view.shape[1] > 1 && view.stride[1] != 1 && view.numel() > 0) {
    return invalid(fmt::format("{}: expected unit innermost stride, got {}", name, view.stride[1]));
  }
  return check_device(name, view, x);
}

// [F, W - 1, C] like x, unit innermost stride; absent passes.
Status check_prefix(const char* name, const TensorView& view, const ConvArgs& a) {
  if (!view.present()) return Status::ok();
  const auto fragments = static_cast<int64_t>(a.fragment_begin.size()) - 1;
  const int64_t ahead = a.weight.shape[1] - 1, channels = a.x.shape[1];
  if (view.rank != 3 || view.shape[0] != fragments || view.shape[1] != ahead ||
      view.shape[2] != channels || view.dtype != a.x.dtype) {
    return invalid(fmt::format("{}: expected {} [{}, {}, {}], got {} {}", name,
                               to_string(a.x.dtype), fragments, ahead, channels,
                               to_string(view.dtype), shape_string(view)));
  }
  if (channels > 1 && view.stride[2] != 1 && view.numel() > 0) {
    return invalid(fmt::format("{}: expected unit innermost stride, got {}", name, view.stride[2]));
  }
  return check_device(name, view, a.x);
}

// [C], or [C, W], of any floating dtype; absent passes.
Status check_taps(const char* name, const TensorView& view, int rank, const ConvArgs& a) {
  if (!view.present()) return Status::ok();
  const int64_t channels = a.x.shape[1], width = a.weight.shape[1];
  if (view.rank != rank || view.shape[0] != channels || (rank == 2 && view.shape[1] != width) ||
      !is_floating(view.dtype)) {
    const std::string shape =
        rank == 2 ? fmt::format("[{}, {}]", channels, width) : fmt::format("[{}]", channels);
    return invalid(fmt::format("{}: expected {} of bfloat16, float32 or float64, got {} {}", name,
                               shape, to_string(view.dtype), shape_string(view)));
  }
  return check_device(name, view, a.x);
}

Status check(const ConvArgs& a) {
  GDN_RETURN_IF_ERROR(check_num_threads());
  if (a.x.rank != 2) return invalid(fmt::format("x: expected [T, C], got {}", shape_string(a.x)));
  if (!is_floating(a.x.dtype)) {
    return invalid(
        fmt::format("x: expected bfloat16, float32 or float64, got {}", to_string(a.x.dtype)));
  }
#ifndef GDN_WITH_CUDA
  if (a.x.device.kind != Device::Kind::kCpu) {
    return {ErrorCode::kUnsupported,
            "x: expected on cpu (this build has no CUDA kernels), got " + to_string(a.x.device)};
  }
#endif
  GDN_RETURN_IF_ERROR(check_rows("x", a.x, a.x));
  if (a.x.shape[1] > kMostChannels) {
    return invalid(
        fmt::format("x: expected at most {} channels, got {}", kMostChannels, a.x.shape[1]));
  }
  if (a.weight.rank != 2 || a.weight.shape[0] != a.x.shape[1] || a.weight.shape[1] < 1 ||
      a.weight.shape[1] > kMaxConvWidth || !is_floating(a.weight.dtype)) {
    return invalid(fmt::format("weight: expected [{}, W] with W of 1 to {}, got {}", a.x.shape[1],
                               kMaxConvWidth, shape_string(a.weight)));
  }
  GDN_RETURN_IF_ERROR(check_device("weight", a.weight, a.x));
  GDN_RETURN_IF_ERROR(check_taps("bias", a.bias, 1, a));
  if (a.fragment_begin.empty()) {
    return invalid("cu_seqlens: expected [N + 1] offsets, got none");
  }
  GDN_RETURN_IF_ERROR(check_prefix("prefix", a.prefix, a));
  int64_t last = 0;
  for (size_t i = 0; i < a.fragment_begin.size(); ++i) {
    const int64_t at = a.fragment_begin[i];
    if ((i == 0 && at != 0) || at < last || at > a.x.shape[0]) {
      return invalid(fmt::format(
          "cu_seqlens: expected to start at 0, not to decrease, and to end at most at T = {}, got "
          "{} at entry {}",
          a.x.shape[0], at, i));
    }
    last = at;
  }
  return Status::ok();
}

Status check(const ConvArgs& a, const TensorView& dy, const ConvGradients& out) {
  GDN_RETURN_IF_ERROR(check(a));
  GDN_RETURN_IF_ERROR(check_rows("dy", dy, a.x));
  GDN_RETURN_IF_ERROR(check_rows("dx", out.dx, a.x));
  GDN_RETURN_IF_ERROR(check_taps("dweight", out.dweight, 2, a));
  GDN_RETURN_IF_ERROR(check_taps("dbias", out.dbias, 1, a));
  GDN_RETURN_IF_ERROR(check_prefix("dprefix", out.dprefix, a));
  const TensorView& d = out.dprefix;
  if (d.present() && d.numel() > 0 &&
      (d.stride[1] != d.shape[2] || d.stride[0] != d.shape[1] * d.shape[2])) {
    return invalid(fmt::format("dprefix: expected row-major, got strides [{}, {}, {}]", d.stride[0],
                               d.stride[1], d.stride[2]));
  }
  return Status::ok();
}

template <typename Body>
void for_each_block(const ConvArgs& args, const Body& body) {
  const int64_t blocks = (args.x.shape[1] + kBlock - 1) / kBlock;
  parallel_for(blocks, [&](int64_t block, int) {
    const int64_t first = block * kBlock;
    switch (args.x.dtype) {
      case DType::kBFloat16:
        return body(Block<BFloat16, float>(args, first));
      case DType::kFloat32:
        return body(Block<float, float>(args, first));
      default:
        return body(Block<double, double>(args, first));
    }
  });
}

#ifdef GDN_WITH_CUDA
bool on_gpu(const ConvArgs& args) { return args.x.device.kind == Device::Kind::kCuda; }
#endif

Status check_workspace(const ConvArgs& args, bool backward, const Memory& workspace) {
  const int64_t bytes = conv_workspace_bytes(args, backward);
  return bytes > 0 ? check_memory("workspace", workspace, bytes) : Status::ok();
}

}  // namespace

int64_t conv_workspace_bytes(const ConvArgs& args, bool backward) {
#ifdef GDN_WITH_CUDA
  if (on_gpu(args)) return cuda::conv_workspace_bytes(args, backward);
#endif
  return 0;
}

Status causal_conv(const ConvArgs& args, const TensorView& y, Memory workspace, Stream stream) {
  GDN_RETURN_IF_ERROR(check(args));
  GDN_RETURN_IF_ERROR(check_rows("y", y, args.x));
  GDN_RETURN_IF_ERROR(check_workspace(args, false, workspace));
#ifdef GDN_WITH_CUDA
  if (on_gpu(args)) return cuda::conv(args, y, workspace, stream);
#endif
  for_each_block(args, [&](auto block) { block.forward(y); });
  return Status::ok();
}

Status causal_conv_backward(const ConvArgs& args, const TensorView& dy, const ConvGradients& out,
                            Memory workspace, Stream stream) {
  GDN_RETURN_IF_ERROR(check(args, dy, out));
  GDN_RETURN_IF_ERROR(check_workspace(args, true, workspace));
#ifdef GDN_WITH_CUDA
  if (on_gpu(args)) return cuda::conv_backward(args, dy, out, workspace, stream);
#endif
  for_each_block(args, [&](auto block) { block.backward(dy, out); });
  return Status::ok();
}

}  // namespace gdn
