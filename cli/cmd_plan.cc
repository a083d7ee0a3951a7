// gdn plan: who holds which tokens, and what one rank will compute and exchange.
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "command.h"
#include "exchange_table.h"
#include "gdn/backend.h"
#include "gdn/plan.h"
#include "io/batch_file.h"
#include "io/safetensors.h"
#include "options.h"

namespace gdn::cli {
namespace {

int terminal_width() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 100;
  return std::clamp<int>(size.ws_col, 40, 200);
}

Json fragment_json(const Fragment& f) { return {f.doc, f.offset, f.length}; }

Json rank_json(const Partition& partition, int rank, const Plan& plan) {
  Json fragments = Json::array(), crossing = Json::array();
  for (const Fragment& fragment : partition.fragments(rank)) {
    fragments.push_back(fragment_json(fragment));
  }
  for (const Crossing& c : partition.crossing(rank)) {
    crossing.push_back({{"fragment", c.fragment},
                        {"predecessor_rank", c.predecessor_rank},
                        {"successor_rank", c.successor_rank}});
  }
  const int64_t bytes = size_of(DType::kFloat32);
  return {{"rank", rank},
          {"tokens", partition.local_tokens(rank)},
          {"fragments", fragments},
          {"crossing", crossing},
          {"segments", plan.segments.size()},
          {"chunks", plan.counts.chunks},
          {"sent_bytes_forward", plan.sent_elements(false) * bytes},
          {"sent_bytes_backward", plan.sent_elements(true) * bytes}};
}

Json segments_json(const Plan& plan) {
  Json segments = Json::array();
  for (const Segment& s : plan.segments) {
    segments.push_back({{"doc", s.doc},
                        {"fragment", s.fragment},
                        {"row", s.row},
                        {"length", s.length},
                        {"entry_slot", s.entry_slot},
                        {"exit_slot", s.exit_slot},
                        {"map_slot", s.map_slot}});
  }
  return segments;
}

class PlanCommand : public Command {
 public:
  CLI::App* add_to(CLI::App& app) override {
    auto* sub = app.add_subcommand(
        "plan", "Draw who holds which tokens; with --rank, what that rank computes and exchanges");
    documents_.add_to(*sub);
    sub->add_option("--cu-from", cu_from_, "take cu_seqlens [N+1] of this safetensors file")
        ->option_text("FILE")
        ->check(not_empty())
        ->excludes("--docs")
        ->excludes("--workload");
    partition_.add_to(*sub);
    sub->option_defaults()->group("Plan of one rank");
    sub->add_option("--rank", rank_, "describe the plan of this rank, 0 to W-1")
        ->transform(integer(0, INT_MAX));
    shape_.add_to(*sub, "the workload's or file's, or 2,6");
    sub->add_option(
           "--workers", workers_,
           "SMs or threads that should have work [default: as the fastest CPU backend asks]")
        ->transform(integer(1));
    sub->add_option("--tile", tile_, "tokens, a multiple of 64 [default: 0, off]")
        ->transform(integer(0));
    sub->add_option("--exchange", exchange_, "auto, allgather or a2a [default: auto]");
    sub->option_defaults()->group("Options");
    sub->add_flag("--json", json_, "as JSON");
    sub->footer("Example: gdn plan --docs 3000,4000,3240 --ranks 4 --layout zigzag --rank 1");
    return sub;
  }

  Result<int> run() override {
    BatchSpec spec;
    std::vector<int64_t> cu{0};
    if (cu_from_.empty()) {
      if (!documents_.given()) {
        return Status{ErrorCode::kInvalidArgument,
                      "expected documents: --docs LENGTHS, --workload LETTER or --cu-from FILE"};
      }
      Result<BatchSpec> made = documents_.spec();
      if (!made) return made.status();
      spec = std::move(*made);
      for (int64_t length : spec.documents) cu.push_back(cu.back() + length);
    } else {
      Result<std::vector<int64_t>> loaded = load_cu_seqlens(cu_from_);
      if (!loaded) return loaded.status();
      cu = std::move(*loaded);
      GDN_RETURN_IF_ERROR(shape_of_file(spec));
    }
    GDN_RETURN_IF_ERROR(shape_.apply(spec.heads_qk, spec.heads_v, spec.dim_k, spec.dim_v));
    const Result<Partition> partition = partition_.partition(cu);
    if (!partition) return partition.status();
    const Result<ExchangePolicy> policy = parse_exchange(exchange_);
    if (!policy) return policy.status();
    if (rank_ && *rank_ >= partition->world_size()) {
      return Status{ErrorCode::kInvalidArgument, fmt::format("--rank: expected 0 to {}, got {}",
                                                             partition->world_size() - 1, *rank_)};
    }
    const PlanOptions options{.heads_v = spec.heads_v,
                              .dim_k = spec.dim_k,
                              .dim_v = spec.dim_v,
                              .workers = workers_ > 0 ? workers_ : default_workers(spec),
                              .tile = tile_,
                              .exchange = *policy};
    return json_ ? as_json(*partition, options) : as_text(*partition, options);
  }

 private:
  static int64_t default_workers(const BatchSpec& spec) {
    const Problem problem{.heads_qk = spec.heads_qk,
                          .heads_v = spec.heads_v,
                          .dim_k = spec.dim_k,
                          .dim_v = spec.dim_v,
                          .operand = DType::kBFloat16,
                          .device = {},
                          .options = {}};
    const Result<const Backend*> backend = pick_backend(problem);
    return backend ? (*backend)->workers() : 1;
  }

  // Heads and dims of q and v where the file has them: the last two axes of each.
  Status shape_of_file(BatchSpec& spec) const {
    spec.heads_qk = 2;
    spec.heads_v = 6;
    const Result<SafetensorsFile> file = SafetensorsFile::open(cu_from_);
    if (!file) return file.status();
    const auto take = [&](const char* name, int64_t& heads, int64_t& dim) {
      const SafetensorsEntry* entry = file->find(name);
      if (entry == nullptr || entry->shape.size() < 3) return;
      heads = entry->shape[entry->shape.size() - 2];
      dim = entry->shape.back();
    };
    take("q", spec.heads_qk, spec.dim_k);
    take("v", spec.heads_v, spec.dim_v);
    if (spec.heads_qk > 0 && spec.heads_v > 0 && spec.dim_k > 0 && spec.dim_v > 0) {
      return Status::ok();
    }
    return {ErrorCode::kIo,
            fmt::format("{}: expected heads and dims of at least 1 in q and v, got "
                        "H={}, K={}, HV={}, V={}",
                        cu_from_, spec.heads_qk, spec.dim_k, spec.heads_v, spec.dim_v)};
  }

  Result<int> as_text(const Partition& partition, const PlanOptions& options) const {
    // Bad options are said even where no rank is described.
    const Result<Plan> plan = Plan::make(partition, rank_.value_or(0), options);
    if (!plan) return plan.status();
    print_line(draw(partition, terminal_width()));
    print_line(
        "letters: A all tokens of the column, a some, # and + the same of several documents, . "
        "none");
    if (rank_) print_line(describe(*plan));
    if (partition.world_size() > 1 && partition.layout() != Layout::kExplicit) {
      const auto rows = exchange_rows(partition.cu_seqlens(), partition.layout(),
                                      partition.world_size(), options);
      if (!rows) return rows.status();
      print_line(text_of(*rows));
    }
    return kSuccess;
  }

  Result<int> as_json(const Partition& partition, const PlanOptions& options) const {
    Json ranks = Json::array();
    Json out{{"world_size", partition.world_size()},
             {"layout", to_string(partition.layout())},
             {"cu_seqlens",
              std::vector<int64_t>(partition.cu_seqlens().begin(), partition.cu_seqlens().end())},
             {"heads_v", options.heads_v},
             {"workers", options.workers},
             {"tile", options.tile}};
    for (int rank = 0; rank < partition.world_size(); ++rank) {
      const Result<Plan> plan = Plan::make(partition, rank, options);
      if (!plan) return plan.status();
      ranks.push_back(rank_json(partition, rank, *plan));
      if (rank_ == rank) ranks.back()["segment_list"] = segments_json(*plan);
      out["exchange"] = to_string(plan->exchange);
      out["exchange_reason"] = plan->exchange_reason;
    }
    out["ranks"] = std::move(ranks);
    if (partition.world_size() > 1 && partition.layout() != Layout::kExplicit) {
      const auto rows = exchange_rows(partition.cu_seqlens(), partition.layout(),
                                      partition.world_size(), options);
      if (!rows) return rows.status();
      out["exchange_by_ranks"] = json_of(*rows);
      out["all_to_all_from_ranks"] = crossover(*rows);
    }
    print_json(out);
    return kSuccess;
  }

  DocumentOptions documents_;
  PartitionOptions partition_;
  ShapeOptions shape_;
  std::string cu_from_, exchange_ = "auto";
  std::optional<int> rank_;
  int64_t workers_ = 0, tile_ = 0;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_plan() { return std::make_unique<PlanCommand>(); }

}  // namespace gdn::cli
