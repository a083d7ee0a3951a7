// What k_backward is given beside its walk, by value.
#pragma once

#include <vector_types.h>

#include "backend/cuda/sm90/params.h"

namespace gdn::sm90 {

inline constexpr int kPartialRing = 4;  // chunks a block may be ahead of the next of its group

struct BackwardParams {
  WalkParams walk;  // v: d_o; o: d_v; initial_state: dfinal_state; final_state: dinitial_state
  cuda::ScalarView g;
  cuda::Activation activation;
  cuda::ElementView d_q, d_k;  // [T, H, 128]
  cuda::ScalarView d_g, d_beta;
  float2* sums;           // [C, HV] this chunk's part of dA_log, ddt_bias; null: not wanted
  uint4* partials;        // [lane groups, G - 1, kPartialRing, 2, 8, 128]
  int* partial_counters;  // [lane groups, G - 1, 2]: 0 before the launch
  float inverse_scale;
  bool l2norm;
};

}  // namespace gdn::sm90
