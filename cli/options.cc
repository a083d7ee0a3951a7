#include "options.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "base/counted.h"

namespace gdn::cli {
namespace {

constexpr int kMostRanks = 4096;  // each is a thread of this process

Status invalid(std::string message) { return {ErrorCode::kInvalidArgument, std::move(message)}; }

Status pair_of(const std::vector<int64_t>& given, int64_t& first, int64_t& second) {
  if (given.empty()) return Status::ok();
  first = given.front();
  second = given.back();
  return Status::ok();
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == at) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

bool parse_number(const std::string& text, int64_t& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

bool parse_number(const std::string& text, double& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && std::isfinite(value);
}

}  // namespace

CLI::Option* add_list(CLI::App& app, const std::string& name, std::vector<int64_t>& values,
                      int64_t low, size_t most, const std::string& description) {
  return app.add_option_function<std::string>(
      name,
      [&values, name, low, most](const std::string& text) {
        values.clear();
        for (const std::string& item : split(text, ',')) {
          values.push_back(0);
          if (!parse_number(item, values.back()) || values.back() < low) {
            throw CLI::ValidationError(
                name,
                fmt::format("expected integers of at least {}, apart by ',', got '{}'", low, text));
          }
        }
        if (values.size() > most) {
          throw CLI::ValidationError(
              name, fmt::format("expected at most {} integers, got '{}'", most, text));
        }
      },
      description);
}

CLI::Validator not_empty() {
  return CLI::Validator(
      [](std::string& text) {
        return text.empty() ? std::string("expected a text, got ''") : std::string();
      },
      "");
}

CLI::Validator integer(int64_t low, int64_t high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        int64_t value = 0;
        if (parse_number(text, value) && value >= low && value <= high) {
          text = std::to_string(value);  // CLI11 reads 010 as octal
          return std::string();
        }
        return high == INT64_MAX
                   ? fmt::format("expected an integer of at least {}, got '{}'", low, text)
                   : fmt::format("expected an integer from {} to {}, got '{}'", low, high, text);
      },
      "");
}

CLI::Validator number(double low) {
  return CLI::Validator(
      [low](std::string& text) {
        double value = 0;
        if (parse_number(text, value) && value >= low) return std::string();
        return std::isfinite(low)
                   ? fmt::format("expected a number of at least {}, got '{}'", low, text)
                   : fmt::format("expected a finite number, got '{}'", text);
      },
      "");
}

Result<DType> parse_dtype(const std::string& name) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  return invalid(fmt::format("dtype: expected bf16, fp32 or fp64, got '{}'", name));
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat32:
      return "fp32";
    case DType::kFloat64:
      return "fp64";
    default:
      return to_string(dtype);
  }
}

// ---- Shape --------------------------------------------------------------------------------------
void ShapeOptions::add_to(CLI::App& app, const std::string& default_heads) {
  add_list(
      app, "--heads", heads, 1, 2,
      "how many heads: H of q and k, HV of v, a multiple of H; one number for both [default: " +
          default_heads + "]")
      ->option_text("H[,HV]");
  add_list(app, "--dim", dim, 1, 2,
           "elements of a head: K of q and k, V of v; one number for both [default: 128]")
      ->option_text("K[,V]");
}

Status ShapeOptions::apply(int64_t& heads_qk, int64_t& heads_v, int64_t& dim_k,
                           int64_t& dim_v) const {
  GDN_RETURN_IF_ERROR(pair_of(heads, heads_qk, heads_v));
  GDN_RETURN_IF_ERROR(pair_of(dim, dim_k, dim_v));
  if (heads_v % heads_qk != 0) {
    return invalid(fmt::format("--heads: expected HV to be a multiple of H, got H={}, HV={}",
                               heads_qk, heads_v));
  }
  return Status::ok();
}

// ---- Operator -----------------------------------------------------------------------------------
void OperatorOptions::add_to(CLI::App& app, bool with_scale) {
  app_ = &app;
  app.option_defaults()->group("Inside the operator");
  app.add_flag("--norm,!--no-norm", norm_,
               "L2-normalise q and k inside: x / sqrt(sum x^2 + 1e-6) over each head");
  app.add_flag("--gate-in-kernel,!--no-gate-in-kernel", gate_,
               "g holds a; the log-decay is -exp(A_log) softplus(a + dt_bias), with A_log and "
               "dt_bias [HV]");
  app.add_flag("--beta-sigmoid,!--no-beta-sigmoid", sigmoid_, "beta holds b; beta = sigmoid(b)");
  app.add_flag("--neg-eigval,!--no-neg-eigval", negative_,
               "only with --beta-sigmoid: beta = 2 sigmoid(b)");
  if (with_scale) {
    app.add_option("--scale", scale_, "factor of o [default: K^-0.5]")->check(number());
  }
}

std::optional<bool> OperatorOptions::given(const char* name, bool value) const {
  return app_->count(name) > 0 ? std::optional(value) : std::nullopt;
}

Options OperatorOptions::options() const {
  Options options;
  if (app_->get_option_no_throw("--scale") != nullptr && app_->count("--scale") > 0) {
    options.scale = scale_;
  }
  options.qk_l2norm = norm_;
  options.gate_in_kernel = gate_;
  options.beta_sigmoid = sigmoid_;
  options.allow_neg_eigval = negative_;
  return options;
}

void OperatorOptions::apply(LoadOptions& load) const {
  load.scale = options().scale;
  load.qk_l2norm = given("--norm", norm_);
  load.gate_in_kernel = given("--gate-in-kernel", gate_);
  load.beta_sigmoid = given("--beta-sigmoid", sigmoid_);
  load.allow_neg_eigval = given("--neg-eigval", negative_);
}

Status check_operator(const Options& options) {
  if (!options.allow_neg_eigval || options.beta_sigmoid) return Status::ok();
  return invalid(
      "--neg-eigval (allow_neg_eigval): expected --beta-sigmoid beside it, as it means beta = "
      "2 sigmoid(b); a beta that is no raw b may be up to 2 without it");
}

// ---- Documents ----------------------------------------------------------------------------------
void DocumentOptions::add_to(CLI::App& app) {
  app.option_defaults()->group("Documents");
  auto* workload_option = app.add_option(
      "--workload", letter, "documents and heads of a named workload, A to N (docs/workloads.md)");
  workload_option->option_text("LETTER")->check(not_empty());
  app.add_option("--shrink", shrink, "divide the workload's document lengths by this")
      ->transform(integer(1))
      ->needs(workload_option);
  add_list(app, "--docs", lengths, 0, SIZE_MAX,
           "document lengths in tokens, e.g. 3000,4000,3240; 0 is legal")
      ->option_text("N,...")
      ->excludes(workload_option);
}

Result<BatchSpec> DocumentOptions::spec() const {
  if (!letter.empty()) return workload(letter, shrink);
  if (lengths.empty()) return invalid("expected documents: --docs LENGTHS or --workload LETTER");
  BatchSpec spec;
  spec.documents = lengths;
  spec.heads_qk = 2;
  spec.heads_v = 6;
  spec.operand = DType::kBFloat16;
  return spec;
}

// ---- Recipe -------------------------------------------------------------------------------------
void RecipeOptions::add_to(CLI::App& app) {
  app.option_defaults()->group("Operands");
  shape.add_to(app, "the workload's, or 2,6");
  app.add_option("--dtype", dtype, "of q, k, v: bf16, fp32 or fp64 [default: bf16]")
      ->check(not_empty());
  app.add_option("--gate-dtype", gate_dtype,
                 "of g and beta: bf16 or fp32 [default: fp32; fp64 with --dtype fp64]")
      ->check(not_empty());
  app.add_option("--gates", gates,
                 "recipe of g: model, slow, fla, zero, strong, mixed, spike, inf [default: model]");
  app.add_option("--keys", keys,
                 "recipe of k: normal, correlated, duplicated, zero, uniform, small, large "
                 "[default: normal]");
  app.add_option("--beta", beta,
                 "recipe of beta: sigmoid, one, two, tiny, zeros [default: sigmoid]");
  app.add_flag("--initial-state", initial_state, "also a random initial_state [N, HV, K, V]");
  app.add_flag("--dfinal-state", dfinal_state, "also a random dfinal_state [N, HV, K, V]");
  app.add_flag("--forward-only", forward_only, "no do, hence no backward");
  app.add_option("--slack", slack, "rows past the last document, filled with NaN")
      ->transform(integer(0));
  app.add_option("--seed", seed, "of all random numbers [default: 0]")->transform(integer(0));
}

Status RecipeOptions::apply(const OperatorOptions& op, BatchSpec& spec) const {
  GDN_RETURN_IF_ERROR(shape.apply(spec.heads_qk, spec.heads_v, spec.dim_k, spec.dim_v));
  for (auto [name, target] :
       {std::pair{&dtype, &spec.operand}, std::pair{&gate_dtype, &spec.gate}}) {
    if (name->empty()) continue;
    const Result<DType> parsed = parse_dtype(*name);
    if (!parsed) return parsed.status();
    *target = *parsed;
  }
  spec.options = op.options();
  GDN_RETURN_IF_ERROR(check_operator(spec.options));
  spec.gates = gates;
  spec.keys = keys;
  spec.beta = beta;
  spec.initial_state = initial_state;
  spec.dfinal_state = dfinal_state && !forward_only;
  spec.backward = !forward_only;
  spec.slack = slack;
  spec.seed = seed;
  return Status::ok();
}

// ---- Partition ----------------------------------------------------------------------------------
void PartitionOptions::add_to(CLI::App& app) {
  app.option_defaults()->group("Ranks");
  auto* ranks = app.add_option("--ranks", world_size, "W: how many share the tokens [default: 1]")
                    ->transform(integer(1, kMostRanks));
  auto* layout_option = app.add_option(
      "--layout", layout, "contiguous, zigzag or zigzag_per_document [default: contiguous]");
  app.add_option("--fragments", fragments,
                 "an explicit layout: doc:offset:length in tokens, fragments apart by ',', ranks "
                 "by '/', e.g. 0:0:64,1:0:10/0:64:36")
      ->option_text("D:O:L,...")
      ->check(not_empty())
      ->excludes(ranks)
      ->excludes(layout_option);
}

Status PartitionOptions::apply(RunOptions& run) const {
  run.world_size = world_size;
  if (!fragments.empty()) {
    auto parsed = parse_fragments(fragments);
    if (!parsed) return parsed.status();
    if (parsed->size() > kMostRanks) {
      return invalid(fmt::format("--fragments: expected at most {} ranks, got {}", kMostRanks,
                                 parsed->size()));
    }
    run.layout = Layout::kExplicit;
    run.fragments = std::move(*parsed);
    run.world_size = static_cast<int>(run.fragments.size());
    return Status::ok();
  }
  const Result<Layout> parsed = parse_layout(layout);
  if (!parsed || *parsed == Layout::kExplicit) {  // an explicit one has no name but its fragments
    return invalid(fmt::format(
        "--layout: expected contiguous, zigzag or zigzag_per_document, got '{}'", layout));
  }
  run.layout = *parsed;
  return Status::ok();
}

Result<Partition> PartitionOptions::partition(std::span<const int64_t> cu_seqlens) const {
  RunOptions run;
  GDN_RETURN_IF_ERROR(apply(run));
  return run.layout == Layout::kExplicit
             ? Partition::make_explicit(cu_seqlens, std::move(run.fragments))
             : Partition::make(cu_seqlens, run.world_size, run.layout);
}

Result<std::vector<std::vector<Fragment>>> parse_fragments(const std::string& text) {
  std::vector<std::vector<Fragment>> ranks;
  for (const std::string& rank : split(text, '/')) {
    ranks.emplace_back();
    if (rank.empty()) continue;
    for (const std::string& item : split(rank, ',')) {
      const std::vector<std::string> numbers = split(item, ':');
      Fragment fragment;
      if (numbers.size() != 3 || !parse_number(numbers[0], fragment.doc) ||
          !parse_number(numbers[1], fragment.offset) ||
          !parse_number(numbers[2], fragment.length)) {
        return invalid(fmt::format("--fragments: expected doc:offset:length, got '{}' on rank {}",
                                   item, ranks.size() - 1));
      }
      ranks.back().push_back(fragment);
    }
  }
  return ranks;
}

// ---- Engine -------------------------------------------------------------------------------------
void EngineOptions::add_to(CLI::App& app) {
  app.option_defaults()->group("Engine");
  app.add_option("--backend", backend,
                 "force one by name (gdn info lists them) [default: the fastest that takes it]")
      ->check(not_empty());
  app.add_option("--tile", tile,
                 "tokens, a multiple of 64: results independent of the number of ranks where cuts "
                 "are multiples of it [default: 0, off]")
      ->transform(integer(0));
  app.add_option("--exchange", exchange,
                 "auto, allgather or a2a: how boundary states travel [default: auto]");
  auto* nothing =
      app.add_flag("--recompute", recompute, "save nothing for the backward; it recomputes");
  app.add_flag("--keep-prepared", keep_prepared,
               "also save each chunk's inverse and gates, which the backward else makes again")
      ->excludes(nothing);
}

Status EngineOptions::apply(RunOptions& run) const {
  const Result<ExchangePolicy> policy = parse_exchange(exchange);
  if (!policy) return policy.status();
  run.context.backend = backend;
  run.context.tile = tile;
  run.context.exchange = *policy;
  run.context.keep_prepared = keep_prepared;
  run.keep_saved = !recompute;
  return Status::ok();
}

std::string summary(const Batch& batch) {
  const Problem& p = batch.problem;
  std::string out = fmt::format("{}, {}, H={}, HV={}, ", counted(batch.num_documents(), "document"),
                                counted(p.tokens, "token"), p.heads_qk, p.heads_v);
  out += p.dim_k == p.dim_v ? fmt::format("K=V={}", p.dim_k)
                            : fmt::format("K={}, V={}", p.dim_k, p.dim_v);
  out += fmt::format(", {}", dtype_name(p.operand));
  if (p.options.qk_l2norm) out += ", norm inside";
  if (p.options.gate_in_kernel) out += ", gate inside";
  if (p.options.beta_sigmoid) {
    out += p.options.allow_neg_eigval ? ", 2 sigmoid inside" : ", sigmoid inside";
  }
  return out;
}

}  // namespace gdn::cli
