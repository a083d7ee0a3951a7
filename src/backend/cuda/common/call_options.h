// What a call's options mean to the kernels.
#pragma once

#include <cstdlib>
#include <limits>

#include "backend/cuda/common/views.h"
#include "gdn/problem.h"

namespace gdn::cuda {

// A run of chunks whose log2 decay is below this forgets what came before: e^-17 of it is left.
// GDN_EXACT_MAPS=1: none does.
inline float warm_up_bound() {
  const char* exact = std::getenv("GDN_EXACT_MAPS");
  const bool off = exact != nullptr && exact[0] == '1';
  return off ? -std::numeric_limits<float>::infinity() : -17.0f * kLog2E;
}

inline Activation activation_of(const Problem& problem, const Operands& in) {
  Activation activation;
  activation.A_log = problem.options.gate_in_kernel ? scalar_view(in.A_log) : ScalarView{};
  activation.dt_bias = problem.options.gate_in_kernel ? scalar_view(in.dt_bias) : ScalarView{};
  activation.beta_scale = !problem.options.beta_sigmoid      ? 0.0f
                          : problem.options.allow_neg_eigval ? 2.0f
                                                             : 1.0f;
  return activation;
}

}  // namespace gdn::cuda
