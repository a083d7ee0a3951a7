// The operator's operands and options. Shapes: T local rows (tokens), H key heads, HV value heads
// (HV % H == 0; the key head of value head h is h / (HV / H)), K and V head dims, N documents.
//
//   S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T      S in R^{K x V}
//   o_t = scale * S_t^T q_t
#pragma once

#include <cstdint>
#include <optional>

#include "gdn/status.h"
#include "gdn/tensor.h"

namespace gdn {

struct Options {
  std::optional<double> scale;   // default K^-0.5
  bool qk_l2norm = false;        // q, k <- x * rsqrt(sum x^2 + 1e-6), inside
  bool gate_in_kernel = false;   // g holds a; log-decay = -exp(A_log) * softplus(a + dt_bias)
  bool beta_sigmoid = false;     // beta holds b; beta = sigmoid(b)
  bool allow_neg_eigval = false; // only with beta_sigmoid: beta = 2 sigmoid(b)

  bool operator==(const Options&) const = default;
};

// q, k, v: one dtype of bf16, fp32, fp64. Innermost stride 1, head stride = head dim, any token
// stride that is a multiple of 8 elements on CUDA. Rows at and past the last document are not read.
struct Operands {
  TensorView q;        // [T, H, K]
  TensorView k;        // [T, H, K]
  TensorView v;        // [T, HV, V]
  TensorView g;        // [T, HV] natural-log decay <= 0, -inf allowed; fp32, bf16 or fp64
  TensorView beta;     // [T, HV] in [0, 2]; fp32, bf16 or fp64
  TensorView A_log;    // [HV] fp32 or fp64; with gate_in_kernel
  TensorView dt_bias;  // [HV] fp32 or fp64; with gate_in_kernel, may be absent (0)
};

// States are fp32 (fp64 for fp64 operands), any strides: [N, HV, V, K] memory is passed as a
// transposed view. N counts the documents of the whole partition; a rank reads and writes only the
// rows of documents that start (initial) or end (final) on it. Rank 0 owns documents without tokens.
struct ForwardArgs {
  Operands in;
  TensorView initial_state;  // [N, HV, K, V]; absent: 0
  TensorView o;              // [T, HV, V], dtype of v; rows past the last document become 0
  TensorView final_state;    // [N, HV, K, V]; absent: not wanted
};

struct BackwardArgs {
  Operands in;
  TensorView initial_state;  // as in the forward
  TensorView d_o;            // [T, HV, V], dtype of v, any strides; absent: 0
  TensorView dfinal_state;   // [N, HV, K, V]; absent: 0

  // Gradients, each of its operand's shape; dtype of the operand (dg, dbeta: of g, beta).
  // Rows past the last document become 0.
  TensorView dq, dk, dv, dg, dbeta;
  TensorView dA_log, ddt_bias;  // [HV] fp32 or fp64: this rank's partial sums; overwritten
  TensorView dinitial_state;    // [N, HV, K, V]; absent: not wanted
};

// What a call is about, without pointers: enough for every byte query and every refusal.
struct Problem {
  int64_t tokens = 0;    // T: local rows, slack included
  int64_t heads_qk = 0;  // H
  int64_t heads_v = 0;   // HV
  int64_t dim_k = 0;     // K
  int64_t dim_v = 0;     // V
  DType operand = DType::kFloat32;  // of q, k, v
  Device device;
  Options options;

  int64_t group() const { return heads_v / heads_qk; }
  DType state() const {  // dtype of states, maps, sums
    return operand == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }
  double scale() const;

  bool operator==(const Problem&) const = default;
};

}  // namespace gdn
