// What the convolution's kernels are given, by value. Pointers are device memory, strides are in
// elements and 64-bit. T rows, C channels, W taps, F fragments, R runs of rows.
#pragma once

#include <cstdint>

#include "backend/cuda/common/types.h"
#include "gdn/tensor.h"

namespace gdn::cuda {

// [T, C], or [F, W - 1, C] with a stride for fragments; unit innermost stride. Null data: absent.
struct ConvRows {
  void* data;
  int64_t row, fragment;
};

struct ConvParams {
  ConvRows x, prefix;
  ConvRows y;               // forward
  ConvRows dy, dx;          // backward
  ConvRows dprefix;         // zeros before the launch
  ScalarView weight, bias;  // [C, W] and [C]: channels are its rows, taps its heads
  const int64_t* begin;     // [F + 1] first rows of the fragments
  int64_t fragments;
  int64_t rows;   // T
  int64_t end;    // rows of all fragments
  void* partial;  // [R, W + 1, C] in the compute type: sums of a run for dweight, dbias
  int run;        // rows that a thread convolves
  int channels;
  int width;
  bool silu;
};

// Sums over the runs, in their order.
struct ConvSumParams {
  const void* partial;  // [R, W + 1, C]
  ScalarView dweight, dbias;
  int64_t runs;
  int channels;
  int width;
};

// A piece of the fragments' table, which travels as a kernel's argument: so a captured graph keeps
// its own, and no host memory must outlive the call.
struct ConvTablePiece {
  static constexpr int kMost = 480;  // of the 4 KB of arguments that a kernel may have
  int64_t* to;
  int64_t count;
  int64_t values[kMost];
};

}  // namespace gdn::cuda
