// gdn run: operands of a file over W ranks, results into another file.
#include <fmt/format.h>

#include "base/counted.h"
#include "command.h"
#include "input.h"
#include "io/batch_file.h"
#include "io/file.h"
#include "job.h"
#include "progress.h"

namespace gdn::cli {
namespace {

class Run : public Command {
 public:
  CLI::App* add_to(CLI::App& app) override {
    auto* sub = app.add_subcommand(
        "run",
        "Compute o and final_state of a file; with do or dfinal_state in it also the gradients");
    input_.add_to(*sub, false);
    sub->option_defaults()->group("Options");
    sub->add_option("-o,--output", output_,
                    "the safetensors file to write: o [T, HV, V], final_state [N, HV, K, V], and "
                    "dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial_state where they apply")
        ->option_text("FILE")
        ->required();
    sub->add_flag("--no-final-state", no_final_state_, "leave final_state out");
    partition_.add_to(*sub);
    job_.add_to(*sub);
    engine_.add_to(*sub);
    sub->footer("Example: gdn run batch.safetensors -o out.safetensors --ranks 3 --layout zigzag");
    return sub;
  }

  Result<int> run() override {
    GDN_RETURN_IF_ERROR(job_.join(partition_));
    RunOptions options;
    GDN_RETURN_IF_ERROR(job_.agree(partition_.apply(options)));
    GDN_RETURN_IF_ERROR(job_.agree(engine_.apply(options)));
    // Rank 0's process writes the file.
    GDN_RETURN_IF_ERROR(
        job_.agree(job_.speaks() ? check_output(output_, {&input_.path(), 1}) : Status::ok()));
    const Result<Batch> batch = input_.load();
    GDN_RETURN_IF_ERROR(job_.agree(batch.status()));
    Result<BatchResult> result = [&] {
      const Progress progress("running on " + counted(options.world_size, "rank"));
      return job_.run(*batch, options);
    }();
    if (!result) return result.status();
    if (!job_.speaks()) return kSuccess;
    if (no_final_state_) result->final_state = {};
    {
      const Progress progress("writing " + output_);
      GDN_RETURN_IF_ERROR(save_result(output_, *result,
                                      {{"made_by", "gdn run"},
                                       {"backend", result->backend},
                                       {"ranks", std::to_string(options.world_size)},
                                       {"layout", to_string(options.layout)}}));
    }
    print_line(fmt::format("{}: {}; {} on {} rank{}, {}", output_, summary(*batch), result->backend,
                           options.world_size, options.world_size == 1 ? "" : "s",
                           result->dq.present() ? "forward and backward" : "forward"));
    return kSuccess;
  }

  bool speaks_of(const Status& error) const override { return job_.speaks_of(error); }

 private:
  Job job_;
  Input input_;
  PartitionOptions partition_;
  EngineOptions engine_;
  std::string output_;
  bool no_final_state_ = false;
};

}  // namespace

std::unique_ptr<Command> make_run() { return std::make_unique<Run>(); }

}  // namespace gdn::cli
