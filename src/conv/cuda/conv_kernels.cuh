// Device code of the convolution. A thread convolves a run of rows in kVec neighbouring channels,
// with the last W - 1 rows in registers; a warp has 32 kVec channels of the same rows. Threads
// share no rows, so these depend on their own fragment alone.
//
// kTaps: W, or 8 for any W. Tap k is the one of the row k rows before: weight[., W - 1 - k].
#pragma once

#include "backend/cuda/common/ptx.cuh"
#include "backend/cuda/common/scalars.cuh"
#include "conv/causal_conv.h"
#include "conv/cuda/conv_params.h"

namespace gdn::cuda {

inline constexpr int kConvWarps = 4;
inline constexpr int kConvAhead = 4;  // rows on their way

// What sums are made in, of rows of X (bf16: uint16_t).
template <typename X>
struct ConvCompute {
  using Type = float;
};
template <>
struct ConvCompute<double> {
  using Type = double;
};

GDN_DEVICE float conv_sigmoid(float z) {
  return __fdividef(1.0f, 1.0f + exp2_approx(-1.44269504f * z));
}
GDN_DEVICE double conv_sigmoid(double z) { return 1.0 / (1.0 + exp(-z)); }

// ---- Rows: kVec elements as they lie in memory
template <int kBytes>
struct ConvWord;
template <>
struct ConvWord<2> {
  using Type = uint16_t;
};
template <>
struct ConvWord<4> {
  using Type = uint32_t;
};
template <>
struct ConvWord<8> {
  using Type = uint2;
};
template <>
struct ConvWord<16> {
  using Type = uint4;
};

template <typename X, int kVec>
union ConvPiece {
  typename ConvWord<static_cast<int>(sizeof(X)) * kVec>::Type word;
  X element[kVec];
  uint32_t pair[sizeof(X) * kVec / 4 > 0 ? sizeof(X) * kVec / 4 : 1];

  GDN_DEVICE static ConvPiece load(const void* from) {
    ConvPiece piece;
    piece.word = *static_cast<const decltype(piece.word)*>(from);
    return piece;
  }
  GDN_DEVICE void store(void* to) const { *static_cast<decltype(word)*>(to) = word; }
};

template <typename X, int kVec, typename C>
GDN_DEVICE void unpack(const ConvPiece<X, kVec>& piece, C (&out)[kVec]) {
  GDN_UNROLL
  for (int v = 0; v < kVec; ++v) {
    if constexpr (sizeof(X) == 2) {
      out[v] = bf16_to_float(piece.element[v]);
    } else {
      out[v] = piece.element[v];
    }
  }
}
template <typename X, int kVec, typename C>
GDN_DEVICE void pack(const C (&in)[kVec], ConvPiece<X, kVec>& piece) {
  if constexpr (sizeof(X) == 2 && kVec > 1) {
    GDN_UNROLL
    for (int v = 0; v < kVec; v += 2) piece.pair[v / 2] = pack_bf16(in[v], in[v + 1]);
  } else if constexpr (sizeof(X) == 2) {
    piece.element[0] = float_to_bf16(in[0]);
  } else {
    GDN_UNROLL
    for (int v = 0; v < kVec; ++v) piece.element[v] = in[v];
  }
}

template <int kVec, typename C>
GDN_DEVICE void clear(C (&x)[kVec]) {
  GDN_UNROLL
  for (int v = 0; v < kVec; ++v) x[v] = C(0);
}

template <typename X>
GDN_DEVICE X* conv_row(const ConvRows& rows, int64_t row, int channel, int64_t fragment = 0) {
  return static_cast<X*>(rows.data) + fragment * rows.fragment + row * rows.row + channel;
}

// ---- A thread's run
// Rows are counted from the run's first one, in 32 bits.
template <typename X, int kVec, int kTaps>
struct ConvThread {
  static constexpr bool kExact = kTaps < kMaxConvWidth;
  using C = typename ConvCompute<X>::Type;
  using Piece = ConvPiece<X, kVec>;

  const ConvParams& p;
  int channel;  // first of kVec
  int64_t run, first;
  int rows;  // of the run
  int mine;  // of these, rows of fragments
  C weight[kTaps][kVec];
  C bias[kVec];
  C window[kTaps - 1][kVec];  // the rows before, the last one first
  int64_t fragment;
  int begin, next;  // of the fragment; far ends are cut off

  GDN_DEVICE explicit ConvThread(const ConvParams& params) : p(params) {
    const int columns = (p.channels + 32 * kVec - 1) / (32 * kVec);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    channel = (static_cast<int>(blockIdx.x % columns) * 32 + lane) * kVec;
    run = int64_t{blockIdx.x / columns} * kConvWarps + warp;
    first = run * p.run;
    rows = cut(p.rows - first, p.run);
    mine = cut(p.end - first, rows);
  }
  GDN_DEVICE bool has_work() const { return channel < p.channels && rows > 0; }
  GDN_DEVICE int width() const { return kExact ? kTaps : p.width; }
  GDN_DEVICE static int cut(int64_t x, int most) {
    return x < most ? (x < 0 ? 0 : static_cast<int>(x)) : most;
  }

  GDN_DEVICE void load_taps() {
    GDN_UNROLL
    for (int v = 0; v < kVec; ++v) {
      GDN_UNROLL
      for (int k = 0; k < kTaps; ++k) {
        weight[k][v] = k < width() ? load_scalar<C>(p.weight, channel + v, width() - 1 - k) : C(0);
      }
      bias[v] = p.bias.data != nullptr ? load_scalar<C>(p.bias, channel + v, 0) : C(0);
    }
  }

  // The fragment that has row i, which is one of a fragment.
  GDN_DEVICE int64_t fragment_of(int i) const {
    int64_t low = 0, high = p.fragments;  // begin[low] <= first + i < begin[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (p.begin[middle] <= first + i) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
  GDN_DEVICE int end_of(int64_t of) const { return cut(p.begin[of + 1] - first, 1 << 30); }

  // Goes to row i, with what its fragment has before it.
  GDN_DEVICE void enter(int i) {
    fragment = fragment_of(i);
    next = end_of(fragment);
    const int64_t at = p.begin[fragment] - first;
    begin = at < -kTaps ? -kTaps : static_cast<int>(at);
    GDN_UNROLL
    for (int k = 0; k < kTaps - 1; ++k) {
      clear(window[k]);
      if (k >= width() - 1) continue;
      const int s = i - 1 - k;
      if (s >= begin) {
        unpack(Piece::load(conv_row<X>(p.x, first + s, channel)), window[k]);
      } else if (p.prefix.data != nullptr) {
        const int row = width() - 1 - (begin - s);
        unpack(Piece::load(conv_row<X>(p.prefix, row, channel, fragment)), window[k]);
      }
    }
  }

  GDN_DEVICE void convolve(const C (&x)[kVec], C (&z)[kVec]) const {
    GDN_UNROLL
    for (int v = 0; v < kVec; ++v) {
      z[v] = bias[v] + weight[0][v] * x[v];
      GDN_UNROLL
      for (int k = 1; k < kTaps; ++k) {
        if (k < width()) z[v] += weight[k][v] * window[k - 1][v];
      }
    }
  }
  GDN_DEVICE void push(const C (&x)[kVec]) {
    GDN_UNROLL
    for (int v = 0; v < kVec; ++v) {
      GDN_UNROLL
      for (int k = kTaps - 2; k > 0; --k) window[k][v] = window[k - 1][v];
      window[0][v] = x[v];
    }
  }

  // The kConvAhead rows from `from` on, which are all there.
  GDN_DEVICE static void load_ahead(const X* from, int64_t stride, Piece (&pieces)[kConvAhead]) {
    GDN_UNROLL
    for (int i = 0; i < kConvAhead; ++i) pieces[i] = Piece::load(from + i * stride);
  }
  GDN_DEVICE static void put(X* to, const C (&x)[kVec]) {
    Piece piece;
    pack(x, piece);
    piece.store(to);
  }
  // Zeros in the run's rows behind the last fragment.
  GDN_DEVICE void put_zeros(const ConvRows& to) const {
    const C zeros[kVec] = {};
    for (int i = mine; i < rows; ++i) put(conv_row<X>(to, first + i, channel), zeros);
  }
};

template <typename X, int kVec, int kTaps>
__global__ void __launch_bounds__(32 * kConvWarps)
    conv_kernel(const __grid_constant__ ConvParams p) {
  using Thread = ConvThread<X, kVec, kTaps>;
  using C = typename Thread::C;
  Thread own(p);
  if (!own.has_work()) return;
  own.put_zeros(p.y);
  if (own.mine == 0) return;
  own.load_taps();
  own.enter(0);
  const X* x_at = conv_row<X>(p.x, own.first, own.channel);
  X* y_at = conv_row<X>(p.y, own.first, own.channel);
  const auto step = [&](const typename Thread::Piece& piece) {
    C x[kVec], z[kVec];
    unpack(piece, x);
    own.convolve(x, z);
    GDN_UNROLL
    for (int v = 0; v < kVec; ++v) {
      if (p.silu) z[v] *= conv_sigmoid(z[v]);
    }
    own.put(y_at, z);
    own.push(x);
    x_at += p.x.row;
    y_at += p.y.row;
  };
#pragma unroll 1
  for (int i = 0; i < own.mine;) {
    if (i == own.next) own.enter(i);
    if (i + kConvAhead <= min(own.mine, own.next)) {
      typename Thread::Piece xs[kConvAhead];
      own.load_ahead(x_at, p.x.row, xs);
      GDN_UNROLL
      for (int ahead = 0; ahead < kConvAhead; ++ahead) step(xs[ahead]);
      i += kConvAhead;
    } else {
      step(Thread::Piece::load(x_at));
      ++i;
    }
  }
}

// dx of the run's rows, dprefix of the fragments that begin in it, and its part of dweight and
// dbias. It goes W - 1 rows further, as far as their fragment does, for what these give its own.
template <typename X, int kVec, int kTaps>
__global__ void __launch_bounds__(32 * kConvWarps)
    conv_backward_kernel(const __grid_constant__ ConvParams p) {
  using Thread = ConvThread<X, kVec, kTaps>;
  using C = typename Thread::C;
  Thread own(p);
  if (!own.has_work()) return;
  own.put_zeros(p.dx);
  const int width = own.width(), back = width - 1;
  C dweight[kTaps][kVec] = {}, dbias[kVec] = {};
  C rows[kTaps][kVec] = {};  // gradients of this row, the one before, ..., so far
  // Row s of dx, or of dprefix where it is before its fragment.
  const auto put_row = [&](int s, const C(&d)[kVec]) {
    if (s >= own.begin) {
      if (s >= 0 && s < own.mine) own.put(conv_row<X>(p.dx, own.first + s, own.channel), d);
    } else if (own.begin >= 0 && p.dprefix.data != nullptr) {
      own.put(conv_row<X>(p.dprefix, back - (own.begin - s), own.channel, own.fragment), d);
    }
  };
  if (own.mine > 0) {
    own.load_taps();
    own.enter(0);
    const int stop = min(own.mine + back, own.end_of(own.fragment_of(own.mine - 1)));
    const X* x_at = conv_row<X>(p.x, own.first, own.channel);
    const X* dy_at = conv_row<X>(p.dy, own.first, own.channel);
    X* dx_at = conv_row<X>(p.dx, own.first - back, own.channel);
    // To rows[back] what comes last for its row, after which put() takes it.
    const auto step = [&](const typename Thread::Piece& x_piece,
                          const typename Thread::Piece& dy_piece, bool counts, auto&& put) {
      C x[kVec], d[kVec];
      unpack(x_piece, x);
      unpack(dy_piece, d);
      if (p.silu) {
        C z[kVec];
        own.convolve(x, z);
        GDN_UNROLL
        for (int v = 0; v < kVec; ++v) {
          const C sigmoid = conv_sigmoid(z[v]);
          d[v] *= sigmoid * (C(1) + z[v] * (C(1) - sigmoid));
        }
      }
      GDN_UNROLL
      for (int v = 0; v < kVec; ++v) {
        const C counted = counts ? d[v] : C(0);
        dbias[v] += counted;
        dweight[0][v] += counted * x[v];
        GDN_UNROLL
        for (int k = 0; k < kTaps; ++k) {
          if (k >= width) break;
          if (k > 0) dweight[k][v] += counted * own.window[k - 1][v];
          rows[k][v] += own.weight[k][v] * d[v];
        }
      }
      put();
      GDN_UNROLL
      for (int v = 0; v < kVec; ++v) {
        GDN_UNROLL
        for (int k = kTaps - 1; k > 0; --k) rows[k][v] = rows[k - 1][v];
        rows[0][v] = C(0);
      }
      own.push(x);
      x_at += p.x.row;
      dy_at += p.dy.row;
      dx_at += p.dx.row;
    };
#pragma unroll 1
    for (int i = 0; i < stop;) {
      if (i == own.next) own.enter(i);
      if (Thread::kExact && i - back >= max(own.begin, 0) &&
          i + kConvAhead <= min(own.mine, own.next - 1)) {
        typename Thread::Piece xs[kConvAhead], dys[kConvAhead];
        own.load_ahead(x_at, p.x.row, xs);
        own.load_ahead(dy_at, p.dy.row, dys);
        GDN_UNROLL
        for (int ahead = 0; ahead < kConvAhead; ++ahead) {
          step(xs[ahead], dys[ahead], true, [&] { own.put(dx_at, rows[kTaps - 1]); });
        }
        i += kConvAhead;
      } else {
        const bool ends = i + 1 == own.next;  // the fragment, with its last W - 1 rows
        step(Thread::Piece::load(x_at), Thread::Piece::load(dy_at), i < own.mine, [&] {
          GDN_UNROLL
          for (int k = 0; k < kTaps; ++k) {
            if (k == back || (ends && k < back)) put_row(i - k, rows[k]);
            if (ends) clear(rows[k]);
          }
        });
        ++i;
      }
    }
  }
  C* partial = static_cast<C*>(p.partial) + own.run * (width + 1) * p.channels + own.channel;
  GDN_UNROLL
  for (int v = 0; v < kVec; ++v) {
    GDN_UNROLL
    for (int k = 0; k < kTaps; ++k) {
      if (k < width) partial[int64_t{back - k} * p.channels + v] = dweight[k][v];
    }
    partial[int64_t{width} * p.channels + v] = dbias[v];
  }
}

// A block sums 32 channels of one tap (or of the bias, the last): each warp every eighth run, then
// the first warp over the warps.
inline constexpr int kConvSumWarps = 8;
template <typename C>
__global__ void __launch_bounds__(32 * kConvSumWarps)
    conv_sum_kernel(const __grid_constant__ ConvSumParams p) {
  GDN_SHARED_BYTES(raw_shared, 16);
  auto* sums = reinterpret_cast<double*>(raw_shared);  // [warps][32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tap = static_cast<int>(blockIdx.x % (p.width + 1));
  const int channel = static_cast<int>(blockIdx.x / (p.width + 1)) * 32 + lane;
  double sum = 0.0;
  if (channel < p.channels) {
    const C* from = static_cast<const C*>(p.partial) + int64_t{tap} * p.channels + channel;
    for (int64_t run = warp; run < p.runs; run += kConvSumWarps) {
      sum += static_cast<double>(from[run * (p.width + 1) * p.channels]);
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp != 0 || channel >= p.channels) return;
  for (int w = 1; w < kConvSumWarps; ++w) sum += sums[32 * w + lane];
  if (tap < p.width) {
    if (p.dweight.data != nullptr) store_scalar(p.dweight, channel, tap, sum);
  } else if (p.dbias.data != nullptr) {
    store_scalar(p.dbias, channel, 0, sum);
  }
}

}  // namespace gdn::cuda
