// gdn bench: times of forward and of forward with backward on one rank of this machine's CPU.
#include <fmt/format.h>

#include <algorithm>

#include "base/thread_pool.h"
#include "command.h"
#include "input.h"
#include "progress.h"
#include "timing.h"

namespace gdn::cli {
namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

struct Figure {
  std::string name;
  double seconds = 0, fastest = 0, slowest = 0;
  double gflops = 0, tokens_per_second = 0;
};

Figure figure(const std::string& name, const std::vector<double>& seconds, double flop,
              int64_t tokens) {
  const double middle = median(seconds);
  return {name,
          middle,
          *std::min_element(seconds.begin(), seconds.end()),
          *std::max_element(seconds.begin(), seconds.end()),
          flop / middle * 1e-9,
          static_cast<double>(tokens) / middle};
}

class Bench : public Command {
 public:
  CLI::App* add_to(CLI::App& app) override {
    auto* sub = app.add_subcommand(
        "bench",
        "Time forward and forward+backward on one rank of the CPU. GFLOP/s counts the matrix "
        "products of 64-token chunks (20 and 62 times 2*64^3 per chunk and head at K=V=128)");
    input_.add_to(*sub, true);
    engine_.add_to(*sub);
    sub->option_defaults()->group("Options");
    sub->add_option("-n,--repetitions", repetitions_,
                    "timed calls of each kind, after one that is not counted; the median is shown "
                    "[default: 5]")
        ->check(at_least(1));
    sub->add_flag("--json", json_, "as JSON, with every time");
    return sub;
  }

  Result<int> run() override {
    RunOptions options;
    GDN_RETURN_IF_ERROR(engine_.apply(options));
    const Result<Batch> batch = input_.load();
    if (!batch) return batch.status();
    const int64_t tokens = batch->cu_seqlens.back();
    if (tokens == 0) return Status{ErrorCode::kInvalidArgument, "nothing to time: no tokens"};
    const bool training = batch->d_o.present() || batch->dfinal_state.present();
    const Result<Timing> timing = [&] {
      Progress progress("timing", (repetitions_ + 1) * (training ? 2 : 1));
      int calls = 0;
      return time_batch(*batch, options.context, repetitions_, options.keep_saved, [&] {
        if (calls++ > 0) progress.advance();
      });
    }();
    if (!timing) return timing.status();
    const Problem& p = batch->problem;
    const auto chunk_heads = static_cast<double>(timing->chunk_heads);
    std::vector<Figure> figures{figure("forward", timing->forward_seconds,
                                       chunk_heads * forward_flop(p.dim_k, p.dim_v), tokens)};
    if (training) {
      figures.push_back(figure("forward+backward", timing->training_seconds,
                               chunk_heads * training_flop(p.dim_k, p.dim_v), tokens));
    }
    if (json_) {
      print_json(json_of(*batch, *timing, figures));
      return kSuccess;
    }
    print_line(fmt::format("{}: {}", input_.name(), summary(*batch)));
    print_line(
        fmt::format("{}, {} threads, median of {}", timing->backend, num_threads(), repetitions_));
    std::vector<std::vector<std::string>> cells{
        {"", "ms", "fastest", "slowest", "GFLOP/s", "tokens/s"}};
    for (const Figure& f : figures) {
      cells.push_back({f.name, fmt::format("{:.2f}", f.seconds * 1e3),
                       fmt::format("{:.2f}", f.fastest * 1e3),
                       fmt::format("{:.2f}", f.slowest * 1e3), fmt::format("{:.1f}", f.gflops),
                       fmt::format("{:.0f}", f.tokens_per_second)});
    }
    print_line(format_table(cells));
    const auto per_token = [&](int64_t bytes) {
      return static_cast<double>(bytes) / static_cast<double>(tokens) / 1024;
    };
    print_line(
        fmt::format("KiB per token: saved {:.2f}, forward workspace {:.2f}, backward "
                    "workspace {:.2f}",
                    per_token(timing->saved_bytes), per_token(timing->forward_workspace_bytes),
                    per_token(timing->backward_workspace_bytes)));
    return kSuccess;
  }

 private:
  Json json_of(const Batch& batch, const Timing& timing, const std::vector<Figure>& figures) const {
    Json list = Json::array();
    for (const Figure& f : figures) {
      const auto& all = f.name == "forward" ? timing.forward_seconds : timing.training_seconds;
      list.push_back({{"name", f.name},
                      {"median_seconds", f.seconds},
                      {"gflops", f.gflops},
                      {"tokens_per_second", f.tokens_per_second},
                      {"seconds", all}});
    }
    return {{"input", input_.name()},
            {"problem", summary(batch)},
            {"tokens", batch.cu_seqlens.back()},
            {"chunk_heads", timing.chunk_heads},
            {"backend", timing.backend},
            {"threads", num_threads()},
            {"repetitions", repetitions_},
            {"figures", list},
            {"saved_bytes", timing.saved_bytes},
            {"forward_workspace_bytes", timing.forward_workspace_bytes},
            {"backward_workspace_bytes", timing.backward_workspace_bytes}};
  }

  Input input_;
  EngineOptions engine_;
  int repetitions_ = 5;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_bench() { return std::make_unique<Bench>(); }

}  // namespace gdn::cli
