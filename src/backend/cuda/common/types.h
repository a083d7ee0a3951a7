// Views of operands as kernels take them, by value. Strides count elements and are 64-bit.
#pragma once

#include <vector_types.h>

#include <cstdint>

#include "gdn/tensor.h"

namespace gdn::cuda {

inline constexpr int kTileRows = 64;  // tokens of a chunk
inline constexpr float kLog2E = 1.4426950408889634f;

// Rows of bf16 elements: row r begins `stride` elements after row r - 1.
struct RowView {
  const uint16_t* data;
  int64_t stride;
};

// Bf16 elements with a stride for each of token, head and element. `rows`: unit element stride and
// rows that are 16-byte aligned, so that pieces move whole.
struct ElementView {
  uint16_t* data;
  int64_t token, head, element;
  bool rows;
};

// A [rows, heads] operand.
struct ScalarView {
  void* data;
  int64_t row, head;
  DType dtype;
};

// [N, HV, K, V] fp32 of any strides; absent: null.
struct StateView {
  float* data;
  int64_t doc, head, k, v;
};

// What turns the operands g and beta into log-decays and step sizes.
struct Activation {
  ScalarView A_log, dt_bias;  // [1, HV]; A_log absent: g is the log-decay; dt_bias absent: 0
  float beta_scale;           // of the sigmoid, 1 or 2; 0: beta is taken as it is
};

}  // namespace gdn::cuda
