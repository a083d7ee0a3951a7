// Packed batches of operands in host memory, made from a recipe: what tests, benchmarks and the
// command run on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/host_tensor.h"
#include "gdn/problem.h"
#include "gdn/status.h"

namespace gdn {

struct Batch {
  Problem problem;                  // tokens may exceed cu_seqlens.back(): slack rows
  std::vector<int64_t> cu_seqlens;  // [N+1]
  HostTensor q, k, v, g, beta;      // shapes as in gdn/problem.h
  HostTensor A_log, dt_bias;        // [HV] where the problem's options want them
  HostTensor initial_state;         // [N, HV, K, V] or absent
  HostTensor d_o;                   // [T, HV, V] or absent: no backward
  HostTensor dfinal_state;          // [N, HV, K, V] or absent

  int64_t num_documents() const { return static_cast<int64_t>(cu_seqlens.size()) - 1; }
  Operands operands() const {
    return {q.view, k.view, v.view, g.view, beta.view, A_log.view, dt_bias.view};
  }
};

// Global results of a batch, rows in the batch's own order.
struct BatchResult {
  HostTensor o, final_state;
  HostTensor dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial_state;
  std::string backend;  // which one ran
};

// The tensors of a result, in the order they are shown.
struct ResultTensor {
  enum class Rows : uint8_t { kTokens, kDocuments, kNone };  // what axis 0 counts, besides heads
  const char* name;
  HostTensor BatchResult::*member;
  int head_axis;
  Rows rows;
};
inline constexpr ResultTensor kResultTensors[] = {
    {"o", &BatchResult::o, 1, ResultTensor::Rows::kTokens},
    {"final_state", &BatchResult::final_state, 1, ResultTensor::Rows::kDocuments},
    {"dq", &BatchResult::dq, 1, ResultTensor::Rows::kTokens},
    {"dk", &BatchResult::dk, 1, ResultTensor::Rows::kTokens},
    {"dv", &BatchResult::dv, 1, ResultTensor::Rows::kTokens},
    {"dg", &BatchResult::dg, 1, ResultTensor::Rows::kTokens},
    {"dbeta", &BatchResult::dbeta, 1, ResultTensor::Rows::kTokens},
    {"dA_log", &BatchResult::dA_log, 0, ResultTensor::Rows::kNone},
    {"ddt_bias", &BatchResult::ddt_bias, 0, ResultTensor::Rows::kNone},
    {"dinitial_state", &BatchResult::dinitial_state, 1, ResultTensor::Rows::kDocuments},
};

// Gate recipes: "model" (A in [1, 16), dt in [1e-3, 1e-1], as Mamba and Qwen start), "slow"
// (g about -0.01), "fla" (logsigmoid(normal) / 16), "zero", "strong" (-30 to -70 per token),
// "mixed" (heads of -88 beside heads of -1e-4), "spike" (slow, one -1e4 mid-chunk), "inf" (slow,
// some -inf). Key recipes: "normal", "correlated" (0.95), "duplicated", "zero" (some all-zero
// rows), "uniform" ([0, 1) before any norm), "small" and "large" (q and k 1e-3 and 1e3 times as
// long).
struct BatchSpec {
  std::vector<int64_t> documents;  // lengths, 0 allowed
  int64_t heads_qk = 2, heads_v = 4, dim_k = 128, dim_v = 128;
  DType operand = DType::kFloat32;
  DType gate = DType::kFloat32;  // of g and beta (fp64 where operand is fp64, unless bf16 is asked)
  Options options;               // qk_l2norm off: q, k are made already normalised
  std::string gates = "model";
  std::string keys = "normal";
  std::string beta = "sigmoid";  // or "one", "two", "tiny" (1e-10), "zeros" (some exactly 0)
  bool initial_state = false;
  bool backward = true;  // d_o
  bool dfinal_state = false;
  int64_t slack = 0;  // rows past the last document, filled with NaN
  uint64_t seed = 0;
};

Result<Batch> make_batch(const BatchSpec& spec);

// Documents and heads of workload letters "A".."N" (docs/workloads.md), lengths divided by
// `shrink`.
Result<BatchSpec> workload(const std::string& letter, int64_t shrink = 1);

// The same numbers in fp64, q, k, v, g and beta widened from their rounded values.
Batch widen(const Batch& batch);

}  // namespace gdn
