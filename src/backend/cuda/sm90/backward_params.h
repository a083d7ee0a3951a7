// What k_backward is given beside its walk, by value.
#pragma once

#include <vector_types.h>

#include "backend/cuda/sm90/params.h"

namespace gdn::sm90 {

struct BackwardParams {
  WalkParams walk;        // states: dS of every chunk; o and o_map are not used
  CUtensorMap d_o_map;    // [T, HV, 128]; with d_o.rows only
  CUtensorMap d_v_map;    // [T, HV, 128]: rows f U, f = stored_factor(beta)
  cuda::ElementView d_o;  // rows: the copy engine takes them. Null data: 0
  cuda::ElementView d_v;  // rows of tokens with f = 1 are made d_v here
  cuda::ScalarView g;
  cuda::Activation activation;
  CUtensorMap rows_map[2];    // d_q, d_k: [T, H, 128]
  cuda::ElementView rows[2];  // the same
  cuda::ScalarView d_g, d_beta;
  float2* sums;       // [C, HV] this chunk's part of dA_log, ddt_bias; null: not wanted
  int* row_counters;  // [lane groups, G - 1] chunks whose dq and dk are written: 0 before the launch
  float inverse_scale;
  bool l2norm;
};

}  // namespace gdn::sm90
