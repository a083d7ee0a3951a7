// Options that several subcommands share, and what they mean to the library.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "check/batch.h"
#include "check/run_batch.h"
#include "command.h"
#include "io/batch_file.h"

namespace gdn::cli {

// An option of integers apart by ',', at most `most` of them; an empty place is an error.
CLI::Option* add_list(CLI::App& app, const std::string& name, std::vector<int64_t>& values,
                      int64_t low, size_t most, const std::string& description);
// For check(): what `--name "$unset"` gives is no value.
CLI::Validator not_empty();
// For transform(): integers from low to high, refused in those words; leading zeros are decimal.
CLI::Validator integer(int64_t low, int64_t high = INT64_MAX);
// For check(): finite numbers, of at least `low`.
CLI::Validator number(double low = -std::numeric_limits<double>::infinity());

Result<DType> parse_dtype(const std::string& name);  // bf16, fp32, fp64
const char* dtype_name(DType dtype);

// H, HV, K and V of a problem: --heads, --dim.
struct ShapeOptions {
  std::vector<int64_t> heads, dim;

  void add_to(CLI::App& app, const std::string& default_heads);
  // One number stands for both. What is not given stays as it is.
  Status apply(int64_t& heads_qk, int64_t& heads_v, int64_t& dim_k, int64_t& dim_v) const;
};

// What the operator does inside: --norm, --gate-in-kernel, --beta-sigmoid, --neg-eigval, --scale.
struct OperatorOptions {
  void add_to(CLI::App& app, bool with_scale = true);
  Options options() const;
  void apply(LoadOptions& load) const;  // only what was given

 private:
  std::optional<bool> given(const char* name, bool value) const;

  bool norm_ = false, gate_ = false, sigmoid_ = false, negative_ = false;
  double scale_ = 0;
  CLI::App* app_ = nullptr;
};

// Refuses options that do not go together, in the words of the command.
Status check_operator(const Options& options);

// Which documents: --workload and --shrink, or --docs.
struct DocumentOptions {
  std::string letter;
  int64_t shrink = 1;
  std::vector<int64_t> lengths;

  void add_to(CLI::App& app);
  bool given() const { return !letter.empty() || !lengths.empty(); }
  // The workload's shape, or --docs with H=2, HV=6, K=V=128, bf16.
  Result<BatchSpec> spec() const;
};

// How the operands are made: shape, dtype, recipes, optional tensors, seed.
struct RecipeOptions {
  ShapeOptions shape;
  std::string dtype, gate_dtype;
  std::string gates = "model", keys = "normal", beta = "sigmoid";
  bool initial_state = false, dfinal_state = false, forward_only = false;
  int64_t slack = 0;
  uint64_t seed = 0;

  void add_to(CLI::App& app);
  Status apply(const OperatorOptions& op, BatchSpec& spec) const;
};

// Who computes it: --ranks, --layout, --fragments.
struct PartitionOptions {
  int world_size = 1;
  std::string layout = "contiguous";
  std::string fragments;

  void add_to(CLI::App& app);
  Status apply(RunOptions& run) const;
  Result<Partition> partition(std::span<const int64_t> cu_seqlens) const;
};

// ... and how: --backend, --tile, --exchange, --recompute, --keep-prepared.
struct EngineOptions {
  std::string backend, exchange = "auto";
  int64_t tile = 0;
  bool recompute = false, keep_prepared = false;

  void add_to(CLI::App& app);
  Status apply(RunOptions& run) const;
};

// "0:0:100,1:0:50/0:100:28": fragments doc:offset:length, ranks apart by '/'.
Result<std::vector<std::vector<Fragment>>> parse_fragments(const std::string& text);

// "4 documents, 4096 tokens, H=2, HV=6, K=V=128, bfloat16, norm in kernel"
std::string summary(const Batch& batch);

}  // namespace gdn::cli
