// Where a batch comes from, for the subcommands that take a file or a recipe.
#pragma once

#include <string>

#include "command.h"
#include "options.h"

namespace gdn::cli {

// A file's batch; `recipe` gives the dtype and whether there is a backward. Tensors of the file that
// nothing asked for are said on standard error.
Result<Batch> load_file(const std::string& path, const RecipeOptions& recipe,
                        const OperatorOptions& op);

class Input {
 public:
  // with_recipe: also --docs, --workload and how operands are made; otherwise the file is required.
  void add_to(CLI::App& app, bool with_recipe);
  // Reads or makes it.
  Result<Batch> load() const;
  const std::string& path() const { return path_; }  // empty: a recipe
  // "x.safetensors", "workload M / 8" or "docs 3,4"
  std::string name() const;

 private:
  std::string path_;
  bool with_recipe_ = false;
  DocumentOptions documents_;
  RecipeOptions recipe_;
  OperatorOptions operator_;
};

}  // namespace gdn::cli
