// What k_backward is given beside its walk, by value.
#pragma once

#include <vector_types.h>

#include "backend/cuda/sm90/params.h"

namespace gdn::sm90 {

struct BackwardParams {
  WalkParams walk;  // v: d_o; o: d_v; initial_state: dfinal_state; final_state: dinitial_state
  cuda::ScalarView g;
  cuda::Activation activation;
  CUtensorMap d_q_map, d_k_map;  // [T, H, 128]
  cuda::ElementView d_q, d_k;    // the same rows
  cuda::ScalarView d_g, d_beta;
  float2* sums;       // [C, HV] this chunk's part of dA_log, ddt_bias; null: not wanted
  int* row_counters;  // [lane groups, G - 1] sums of dq and dk written: 0 before the launch
  float inverse_scale;
  bool l2norm;
};

}  // namespace gdn::sm90
