// Single elements of gates, sums and states, whatever their dtype and strides, and the activations
// of g and beta with their derivatives.
#pragma once

#include "backend/cuda/common/ptx.cuh"
#include "backend/cuda/common/types.h"

namespace gdn::cuda {

template <typename C = float>
GDN_DEVICE C load_scalar(const ScalarView& view, int64_t row, int64_t head) {
  const int64_t at = row * view.row + head * view.head;
  switch (view.dtype) {
    case DType::kBFloat16:
      return bf16_to_float(static_cast<const uint16_t*>(view.data)[at]);
    case DType::kFloat64:
      return static_cast<C>(static_cast<const double*>(view.data)[at]);
    default:
      return static_cast<const float*>(view.data)[at];
  }
}

template <typename C>
GDN_DEVICE void store_scalar(const ScalarView& view, int64_t row, int64_t head, C x) {
  const int64_t at = row * view.row + head * view.head;
  switch (view.dtype) {
    case DType::kBFloat16:
      static_cast<uint16_t*>(view.data)[at] = float_to_bf16(static_cast<float>(x));
      break;
    case DType::kFloat64:
      static_cast<double*>(view.data)[at] = x;
      break;
    default:
      static_cast<float*>(view.data)[at] = static_cast<float>(x);
      break;
  }
}

GDN_DEVICE float& state_at(const StateView& view, int64_t doc, int64_t head, int i, int j) {
  return view.data[doc * view.doc + head * view.head + i * view.k + j * view.v];
}

GDN_DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
GDN_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The natural log-decay of an element, and its derivative by the operand.
struct Gate {
  float log_decay;
  float slope;
};
GDN_DEVICE Gate activate_gate(const Activation& act, float raw, int64_t head) {
  if (act.A_log.data == nullptr) return {raw, 1.0f};
  const float bias = act.dt_bias.data != nullptr ? load_scalar(act.dt_bias, 0, head) : 0.0f;
  const float rate = -expf(load_scalar(act.A_log, 0, head));
  const float x = raw + bias;
  return {rate * softplus(x), rate * sigmoid(x)};
}

GDN_DEVICE float activate_beta(const Activation& act, float raw) {
  return act.beta_scale > 0.0f ? act.beta_scale * sigmoid(raw) : raw;
}
// d beta / d raw, from the activated beta.
GDN_DEVICE float beta_slope(const Activation& act, float beta) {
  return act.beta_scale > 0.0f ? beta * (1.0f - beta / act.beta_scale) : 1.0f;
}

}  // namespace gdn::cuda
