// A token's operands as the recurrence wants them (fp64, normalised, activated), and the way back
// of their gradients: docs/math.md, section 5.
#pragma once

#include <cstdint>

#include "gdn/problem.h"

namespace gdn::reference {

inline constexpr double kNormEpsilon = 1e-6;

// Reads row `row` of a [T, heads, n] view.
void load_vector(const TensorView& view, int64_t row, int64_t head, double* out);
void store_vector(const TensorView& view, int64_t row, int64_t head, const double* in);

// Reads a q or k vector; with `norm` scaled by the returned 1 / sqrt(sum x^2 + 1e-6), else by 1.
double load_key(const TensorView& view, int64_t row, int64_t head, bool norm, double* out);

// dx <- r (dx - x (x . dx)), for x the normalised vector and r what load_key returned.
void norm_backward(const double* x, double r, int64_t n, double* dx);

// The log-decay of one token and head, and its derivatives.
struct Gate {
  double log_decay = 0;
  double decay = 1;       // exp(log_decay)
  double by_operand = 1;  // d log_decay / d g: 1, or -exp(A_log) sigmoid(a + dt_bias)
};
Gate load_gate(const Options& options, const Operands& in, int64_t row, int64_t head);

struct Beta {
  double beta = 0;
  double by_operand = 1;  // d beta / d beta operand: 1, or full sigmoid (1 - sigmoid)
};
Beta load_beta(const Options& options, const Operands& in, int64_t row, int64_t head);

}  // namespace gdn::reference
