#include "backend/reference/operands.h"

#include <algorithm>
#include <cmath>

#include "backend/reference/recurrence.h"
#include "base/element.h"

namespace gdn::reference {
namespace {

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// Both branches keep their relative accuracy: neither subtracts.
double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}

double gate_operand(const TensorView& view, int64_t row, int64_t head) {
  return load_element(view, row * view.stride[0] + head * view.stride[1]);
}

}  // namespace

void load_vector(const TensorView& view, int64_t row, int64_t head, double* out) {
  load_row(view.data, view.dtype, row * view.stride[0] + head * view.stride[1], view.stride[2],
           view.shape[2], out);
}

void store_vector(const TensorView& view, int64_t row, int64_t head, const double* in) {
  store_row(view.data, view.dtype, row * view.stride[0] + head * view.stride[1], view.stride[2],
            view.shape[2], in);
}

double load_key(const TensorView& view, int64_t row, int64_t head, bool norm, double* out) {
  load_vector(view, row, head, out);
  if (!norm) return 1;
  const int64_t n = view.shape[2];
  const double r = 1 / std::sqrt(dot(out, out, n) + kNormEpsilon);
  for (int64_t i = 0; i < n; ++i) out[i] *= r;
  return r;
}

void norm_backward(const double* x, double r, int64_t n, double* dx) {
  const double along = dot(x, dx, n);
  for (int64_t i = 0; i < n; ++i) dx[i] = r * (dx[i] - x[i] * along);
}

Gate load_gate(const Options& options, const Operands& in, int64_t row, int64_t head) {
  Gate gate;
  const double g = gate_operand(in.g, row, head);
  if (options.gate_in_kernel) {
    const double A = std::exp(load_element(in.A_log, head * in.A_log.stride[0]));
    const double bias =
        in.dt_bias.present() ? load_element(in.dt_bias, head * in.dt_bias.stride[0]) : 0.0;
    gate.log_decay = -A * softplus(g + bias);
    gate.by_operand = -A * sigmoid(g + bias);
  } else {
    gate.log_decay = g;
  }
  gate.decay = std::exp(gate.log_decay);
  return gate;
}

Beta load_beta(const Options& options, const Operands& in, int64_t row, int64_t head) {
  const double b = gate_operand(in.beta, row, head);
  if (!options.beta_sigmoid) return {.beta = b, .by_operand = 1};
  const double full = options.allow_neg_eigval ? 2 : 1;
  return {.beta = full * sigmoid(b), .by_operand = full * sigmoid(b) * sigmoid(-b)};
}

}  // namespace gdn::reference
