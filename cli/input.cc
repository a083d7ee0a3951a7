#include "input.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "memory.h"
#include "progress.h"

namespace gdn::cli {

Result<Batch> load_file(const std::string& path, const RecipeOptions& recipe,
                        const OperatorOptions& op) {
  LoadOptions options;
  options.backward = !recipe.forward_only;
  options.how_to_convert = "convert with --dtype bf16, fp32 or fp64";
  op.apply(options);
  if (!recipe.dtype.empty()) {
    const Result<DType> dtype = parse_dtype(recipe.dtype);
    if (!dtype) return dtype.status();
    options.operand = *dtype;
  }
  const Progress progress("reading " + path);
  Result<LoadedBatch> loaded = load_batch(path, options);
  if (!loaded) return loaded.status();
  GDN_RETURN_IF_ERROR(check_operator(loaded->batch.problem.options));
  if (const Status fits = check_memory(loaded->batch); !fits) {
    return Status{fits.code(), path + ": " + fits.message()};
  }
  if (!loaded->ignored.empty()) {
    print_note(fmt::format("{}: ignored {}", path, fmt::join(loaded->ignored, ", ")));
  }
  return std::move(loaded->batch);
}

void Input::add_to(CLI::App& app, bool with_recipe) {
  with_recipe_ = with_recipe;
  auto* file = app.add_option(
      "input", path_,
      "safetensors file with q, k [T, H, K], v [T, HV, V], g (natural-log decay), beta [T, HV], "
      "cu_seqlens [N+1] (I32 or I64); optional do [T, HV, V], initial_state, dfinal_state "
      "[N, HV, K, V] fp32, A_log, dt_bias [HV]. A batch dimension before T is taken too");
  file->option_text("FILE")->check(not_empty());
  if (with_recipe) {
    documents_.add_to(app);
    recipe_.add_to(app);
    for (const char* name :
         {"--docs", "--workload", "--heads", "--dim", "--gate-dtype", "--gates", "--keys", "--beta",
          "--initial-state", "--dfinal-state", "--slack", "--seed"}) {
      file->excludes(name);
    }
  } else {
    file->required();
    app.option_defaults()->group("Operands");
    app.add_option("--dtype", recipe_.dtype,
                   "convert q, k, v, do to bf16, fp32 or fp64 first [default: as in the file]")
        ->check(not_empty());
    app.add_flag("--forward-only", recipe_.forward_only, "ignore do and dfinal_state");
  }
  operator_.add_to(app);
}

Result<Batch> Input::load() const {
  if (path_.empty()) {
    Result<BatchSpec> spec = documents_.spec();
    if (!spec) {
      return documents_.given() ? spec.status()
                                : Status{ErrorCode::kInvalidArgument,
                                         "expected a file, --docs LENGTHS or --workload LETTER"};
    }
    GDN_RETURN_IF_ERROR(recipe_.apply(operator_, *spec));
    GDN_RETURN_IF_ERROR(check_memory(*spec, true));
    const Progress progress("making");
    return make_batch(*spec);
  }
  return load_file(path_, recipe_, operator_);
}

std::string Input::name() const {
  if (!path_.empty()) return path_;
  if (documents_.letter.empty()) return fmt::format("docs {}", fmt::join(documents_.lengths, ","));
  return documents_.shrink == 1
             ? fmt::format("workload {}", documents_.letter)
             : fmt::format("workload {} / {}", documents_.letter, documents_.shrink);
}

}  // namespace gdn::cli
