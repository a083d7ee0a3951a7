// Batches and their results as safetensors files: what the command reads and writes. Tensors are
// named as the arguments of the operator are (gdn/problem.h), d_o as "do":
//   q, k [T, H, K]   v, do [T, HV, V]   g, beta [T, HV]   cu_seqlens [N+1] I32 or I64
//   initial_state, dfinal_state [N, HV, K, V]   A_log, dt_bias [HV]
// Leading batch dimensions are taken too: [1, T, ...], or [B, T, ...] without cu_seqlens.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "check/batch.h"
#include "gdn/status.h"

namespace gdn {

// What the caller says; what it leaves open comes from the file's metadata, where save_batch put
// it, and is off otherwise.
struct LoadOptions {
  std::optional<double> scale = {};
  std::optional<bool> qk_l2norm = {}, gate_in_kernel = {}, beta_sigmoid = {}, allow_neg_eigval = {};
  std::optional<DType> operand = {};  // convert q, k, v, do to it; g, beta, states follow
  bool backward = true;               // false: ignore do and dfinal_state
  // How the caller's user sets `operand`, for the error about mixed dtypes.
  std::string how_to_convert = "name a dtype to convert to";
};

struct LoadedBatch {
  Batch batch;
  std::vector<std::string> ignored;  // tensors of the file that nothing asked for
};

// Every error names the file and the tensor, what was expected and what was found.
Result<LoadedBatch> load_batch(const std::string& path, const LoadOptions& options = {});

Status save_batch(const std::string& path, const Batch& batch,
                  std::map<std::string, std::string> metadata = {});

// o, final_state, dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial_state, those that are present.
Status save_result(const std::string& path, const BatchResult& result,
                   const std::map<std::string, std::string>& metadata = {});

// [N+1] of a file, checked: begins with 0, does not decrease.
Result<std::vector<int64_t>> load_cu_seqlens(const std::string& path);

// A row-major copy in another dtype.
HostTensor convert(const HostTensor& from, DType dtype);

}  // namespace gdn
