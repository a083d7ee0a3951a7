#include "bench_input.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bench/case.h"
#include "input.h"
#include "memory.h"

namespace gdn::cli {
namespace {

bool is_letter(const std::string& word) {
  return word.size() == 1 && word[0] >= 'A' && word[0] <= 'N';
}

std::vector<int64_t> offsets(const std::vector<int64_t>& documents) {
  std::vector<int64_t> cu = {0};
  for (int64_t length : documents) cu.push_back(cu.back() + length);
  return cu;
}

// " CP4 Z" of several ranks.
std::string suffix(const BenchInput::Ranks& ranks) {
  if (ranks.world_size == 1) return "";
  return bench::name_of({"", ranks.world_size, ranks.layout, std::nullopt});
}

}  // namespace

void BenchInput::add_to(CLI::App& app) {
  app_ = &app;
  app.add_option("input", words_,
                 "workloads by letter, A to N (docs/workloads.md), or safetensors files as gdn run "
                 "takes them")
      ->option_text("LETTER|FILE ...");
  documents_.add_to(app);
  CLI::Option* shrink = app.get_option("--shrink");
  shrink->remove_needs(app.get_option("--workload"));
  shrink->excludes(app.get_option("--docs"));
  app.add_option("--proxy", proxies_,
                 "one rank of a workload over n ranks, without communication: \"G CP4 Z r3\"; "
                 "layout C contiguous, Z zigzag, D zigzag per document; without rR every rank; may "
                 "be repeated")
      ->allow_extra_args(false)  // or it would take the workloads that follow
      ->option_text("NAME");
  recipe_.add_to(app);
  operator_.add_to(app);
  app.add_flag("--both-norms", both_norms_,
               "each recipe with q and k normalised before and inside");
}

std::vector<bool> BenchInput::norms() const {
  if (both_norms_) return {false, true};
  return {operator_.options().qk_l2norm};
}

Status BenchInput::refuse_recipe_options(const std::string& file) const {
  for (const char* name :
       {"--shrink", "--heads", "--dim", "--gate-dtype", "--gates", "--keys", "--beta",
        "--initial-state", "--dfinal-state", "--slack", "--seed", "--both-norms"}) {
    if (app_->count(name) > 0) {
      return {ErrorCode::kInvalidArgument, fmt::format("{} excludes {}", file, name)};
    }
  }
  return Status::ok();
}

Status BenchInput::add_case(const std::string& name, const BatchSpec& whole,
                            const bench::Proxy& where, const std::string& of_ranks,
                            std::vector<BenchCase>& out) const {
  const Result<Partition> partition =
      Partition::make(offsets(whole.documents), where.world_size, where.layout);
  if (!partition) return partition.status();
  const int rank = where.rank.value_or(0);
  // A proxy is timed alone; a rank without tokens among others is part of the step.
  if (partition->num_tokens() == 0 ||
      (!where.workload.empty() && partition->local_tokens(rank) == 0)) {
    return {ErrorCode::kInvalidArgument, fmt::format("{}: nothing to time: no tokens", name)};
  }
  for (bool norm : norms()) {
    BatchSpec sample = whole;
    sample.documents = bench::sample_documents(whole.documents);
    GDN_RETURN_IF_ERROR(recipe_.apply(operator_, sample));
    GDN_RETURN_IF_ERROR(check_memory(sample, true));
    sample.options.qk_l2norm = norm;
    std::string key =
        fmt::format("{},{} {},{} {} {}", sample.heads_qk, sample.heads_v, sample.dim_k,
                    sample.dim_v, fmt::join(sample.documents, ","), norm);
    out.push_back(
        {name, *partition, rank, of_ranks, norm, std::move(key), std::move(sample), std::nullopt});
  }
  return Status::ok();
}

Status BenchInput::add_recipe(const std::string& name, const Result<BatchSpec>& spec,
                              const Ranks& ranks, std::vector<BenchCase>& out) const {
  GDN_RETURN_IF_ERROR(spec.status());
  return add_case(name + suffix(ranks), *spec, {"", ranks.world_size, ranks.layout, ranks.rank}, "",
                  out);
}

Status BenchInput::add_proxy(const std::string& name, std::vector<BenchCase>& out) const {
  const Result<bench::Proxy> proxy = bench::parse_proxy(name);
  GDN_RETURN_IF_ERROR(proxy.status());
  const Result<BatchSpec> spec = workload(proxy->workload, documents_.shrink);
  GDN_RETURN_IF_ERROR(spec.status());
  const std::string of_ranks = proxy->rank ? "" : shrunk(bench::name_of(*proxy));
  for (int rank = 0; rank < proxy->world_size; ++rank) {
    if (proxy->rank && *proxy->rank != rank) continue;
    bench::Proxy single = *proxy;
    single.rank = rank;
    GDN_RETURN_IF_ERROR(add_case(shrunk(bench::name_of(single)), *spec, single, of_ranks, out));
  }
  return Status::ok();
}

Status BenchInput::add_file(const std::string& path, const Ranks& ranks,
                            std::vector<BenchCase>& out) const {
  GDN_RETURN_IF_ERROR(refuse_recipe_options(path));
  Result<Batch> batch = load_file(path, recipe_, operator_);
  if (!batch) {
    const char* hint = path.size() == 1 ? ", and no workload has this letter: A to N" : "";
    return Status{batch.status().code(), batch.status().message() + hint};
  }
  const Result<Partition> partition =
      Partition::make(batch->cu_seqlens, ranks.world_size, ranks.layout);
  if (!partition) return partition.status();
  if (partition->num_tokens() == 0) {
    return {ErrorCode::kInvalidArgument, fmt::format("{}: nothing to time: no tokens", path)};
  }
  const bool norm = batch->problem.options.qk_l2norm;
  out.push_back(
      {path + suffix(ranks), *partition, ranks.rank, "", norm, path, {}, std::move(*batch)});
  return Status::ok();
}

std::vector<std::string> BenchInput::files() const {
  std::vector<std::string> out;
  for (const std::string& word : words_) {
    if (!is_letter(word)) out.push_back(word);
  }
  return out;
}

std::string BenchInput::shrunk(const std::string& name) const {
  return documents_.shrink == 1 ? name : fmt::format("{} / {}", name, documents_.shrink);
}

Result<std::vector<BenchCase>> BenchInput::cases(const Ranks& ranks) const {
  std::vector<BenchCase> out;
  if (ranks.world_size > 1 && !proxies_.empty()) {
    return Status(ErrorCode::kInvalidArgument,
                  "--proxy: expected one process, which a proxy stands for, got many");
  }
  for (const std::string& word : words_) {
    GDN_RETURN_IF_ERROR(
        is_letter(word) ? add_recipe(shrunk(word), workload(word, documents_.shrink), ranks, out)
                        : add_file(word, ranks, out));
  }
  if (documents_.given()) {
    GDN_RETURN_IF_ERROR(add_recipe(documents_.letter.empty()
                                       ? fmt::format("docs {}", fmt::join(documents_.lengths, ","))
                                       : shrunk(documents_.letter),
                                   documents_.spec(), ranks, out));
  }
  for (const std::string& name : proxies_) GDN_RETURN_IF_ERROR(add_proxy(name, out));
  if (out.empty()) {
    return Status(ErrorCode::kInvalidArgument,
                  "expected workload letters, a file, --docs LENGTHS or --proxy NAME");
  }
  return out;
}

}  // namespace gdn::cli
