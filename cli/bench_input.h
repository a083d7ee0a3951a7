// What `gdn bench` times: workloads by letter, --docs, single ranks of a partition, or files.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/proxy.h"
#include "command.h"
#include "options.h"

namespace gdn::cli {

struct BenchCase {
  std::string name;  // "M", "M / 4", "docs 3,4", "G CP4 Z r3", "x.safetensors", "M CP4 Z"
  Partition partition;
  int rank = 0;
  std::string of_ranks;  // "G CP4 Z" where it is one of all ranks of that name
  bool norm = false;
  std::string key;              // equal where the samples are
  BatchSpec recipe;             // of the sample: 2,048 rows (see bench::sample_documents)
  std::optional<Batch> loaded;  // a file's, in place of the recipe
};

class BenchInput {
 public:
  void add_to(CLI::App& app);
  // The ranks that time together, one process each; world_size 1: there is but one process.
  struct Ranks {
    int world_size = 1;
    Layout layout = Layout::kContiguous;
    int rank = 0;
  };
  // Every row asked for; nothing is made yet.
  Result<std::vector<BenchCase>> cases(const Ranks& ranks) const;
  std::vector<std::string> files() const;  // among the inputs

 private:
  Status refuse_recipe_options(const std::string& file) const;
  Status add_case(const std::string& name, const BatchSpec& whole, const bench::Proxy& where,
                  const std::string& of_ranks, std::vector<BenchCase>& out) const;
  Status add_recipe(const std::string& name, const Result<BatchSpec>& spec, const Ranks& ranks,
                    std::vector<BenchCase>& out) const;
  Status add_proxy(const std::string& name, std::vector<BenchCase>& out) const;
  Status add_file(const std::string& path, const Ranks& ranks, std::vector<BenchCase>& out) const;
  std::vector<bool> norms() const;
  std::string shrunk(const std::string& name) const;

  CLI::App* app_ = nullptr;
  std::vector<std::string> words_, proxies_;
  bool both_norms_ = false;
  DocumentOptions documents_;
  RecipeOptions recipe_;
  OperatorOptions operator_;
};

}  // namespace gdn::cli
