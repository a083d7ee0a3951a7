// The scalar activations of gates and beta, forward and backward, in fp64.
//   g    = -exp(A_log) softplus(a + dt_bias)          with gate_in_kernel, else the operand
//   beta = sigmoid(b), twice that with allow_neg_eigval   with beta_sigmoid, else the operand
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/element.h"
#include "gdn/problem.h"

namespace gdn::cpu {

// x [rows, heads]
inline double read_gate(const TensorView& x, int64_t row, int64_t head) {
  return load_element(x, row * x.stride[0] + head * x.stride[1]);
}

inline double sigmoid(double x) {
  if (x >= 0) return 1.0 / (1.0 + std::exp(-x));
  const double e = std::exp(x);
  return e / (1.0 + e);
}

inline double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// One value head's activations.
class Activation {
 public:
  Activation(const Problem& problem, const Operands& in, int64_t head)
      : options_(problem.options), in_(in), head_(head) {
    if (!options_.gate_in_kernel) return;
    rate_ = std::exp(load_element(in.A_log, head * in.A_log.stride[0]));
    if (in.dt_bias.present()) bias_ = load_element(in.dt_bias, head * in.dt_bias.stride[0]);
  }

  double gate(int64_t row) const {
    const double x = read_gate(in_.g, row, head_);
    return options_.gate_in_kernel ? -rate_ * softplus(x + bias_) : x;
  }

  double beta(int64_t row) const {
    const double x = read_gate(in_.beta, row, head_);
    return options_.beta_sigmoid ? eigen_ * sigmoid(x) : x;
  }

  // d operand / d activation times the gradient of the activation.
  double gate_gradient(int64_t row, double dg) const {
    if (!options_.gate_in_kernel) return dg;
    return -dg * rate_ * sigmoid(read_gate(in_.g, row, head_) + bias_);
  }

  double beta_gradient(int64_t row, double dbeta) const {
    if (!options_.beta_sigmoid) return dbeta;
    const double s = sigmoid(read_gate(in_.beta, row, head_));
    return dbeta * eigen_ * s * (1.0 - s);
  }

 private:
  const Options& options_;
  const Operands& in_;
  int64_t head_;
  double eigen_ = options_.allow_neg_eigval ? 2.0 : 1.0;
  double rate_ = 0;
  double bias_ = 0;
};

}  // namespace gdn::cpu
