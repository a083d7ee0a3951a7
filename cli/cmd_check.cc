// gdn check: results over W ranks against the fp64 recurrence on the same rounded operands, and
// against one rank; a row per tensor, exit status 1 where a bar is missed.
#include <fmt/format.h>

#include <cmath>

#include "base/counted.h"
#include "check/accuracy.h"
#include "check/cuts.h"
#include "check/first_heads.h"
#include "check/tensor_check.h"
#include "command.h"
#include "gdn/backend.h"
#include "input.h"
#include "job.h"
#include "progress.h"

namespace gdn::cli {
namespace {

std::string worst(int64_t index, double rms) {
  return index < 0 ? "-" : fmt::format("{:.2e} (#{})", rms, index);
}

std::string text_of(const std::vector<TensorCheck>& rows, bool bitwise) {
  std::vector<std::vector<std::string>> cells{{"tensor", "rel-RMS", "max error", "worst head",
                                               "worst document", "bar", "max bar",
                                               bitwise ? "bits" : "", ""}};
  for (const TensorCheck& row : rows) {
    const Accuracy& a = row.accuracy;
    cells.push_back(
        {row.tensor, fmt::format("{:.2e}", a.rel_rms), fmt::format("{:.2e}", a.max_error),
         worst(a.worst_head, a.worst_head_rms), worst(a.worst_document, a.worst_document_rms),
         fmt::format("{:.0e}", row.bars.rel_rms), fmt::format("{:.0e}", row.bars.max_error),
         bitwise ? row.bitwise ? "equal" : "differ" : "",
         !a.reference_finite ? "FAIL: reference not finite"
         : !a.finite         ? "FAIL: not finite"
         : row.passed        ? "pass"
                             : "FAIL"});
  }
  return format_table(cells, 1, true);
}

Json json_of(const std::vector<TensorCheck>& rows) {
  Json out = Json::array();
  for (const TensorCheck& row : rows) {
    const Accuracy& a = row.accuracy;
    out.push_back({{"tensor", row.tensor},
                   {"passed", row.passed},
                   {"finite", a.finite},
                   {"reference_finite", a.reference_finite},
                   {"rel_rms", a.rel_rms},
                   {"max_error", a.max_error},
                   {"worst_head", a.worst_head},
                   {"worst_head_rel_rms", a.worst_head_rms},
                   {"worst_document", a.worst_document},
                   {"worst_document_rel_rms", a.worst_document_rms},
                   {"bar_rel_rms", row.bars.rel_rms},
                   {"bar_max_error", row.bars.max_error},
                   {"bitwise_equal", row.bitwise}});
  }
  return out;
}

class Check : public Command {
 public:
  CLI::App* add_to(CLI::App& app) override {
    auto* sub = app.add_subcommand(
        "check",
        "Run a file or a recipe over ranks and compare with the fp64 recurrence, tensor by tensor; "
        "exit status 1 if a bar is missed");
    input_.add_to(*sub, true);
    partition_.add_to(*sub);
    job_.add_to(*sub);
    engine_.add_to(*sub);
    sub->option_defaults()->group("Options");
    sub->add_option(
           "--bar", bar_,
           "the most rel-RMS against the reference of any tensor, instead of the bar of each")
        ->check(number(0));
    sub->add_option("--reference", reference_,
                    "what to compare with, in fp64: reference, token by token, or cpu, in chunks, "
                    "many times as fast")
        ->option_text("NAME [default: reference]");
    sub->add_option("--reference-heads", reference_heads_,
                    "compare the first N key heads and their value heads alone; the run under test "
                    "has all of them [default: all]")
        ->option_text("N")
        ->transform(integer(1));
    sub->add_flag("--against-one-rank", one_rank_,
                  "also compare with one rank of the same backend");
    sub->add_flag("--json", json_, "as JSON");
    sub->footer("Example: gdn check --docs 300,0,212 --ranks 3 --against-one-rank");
    return sub;
  }

  Result<int> run() override {
    GDN_RETURN_IF_ERROR(job_.join(partition_));
    RunOptions options;
    GDN_RETURN_IF_ERROR(job_.agree(partition_.apply(options)));
    GDN_RETURN_IF_ERROR(job_.agree(engine_.apply(options)));
    const Result<Batch> batch = input_.load();
    GDN_RETURN_IF_ERROR(job_.agree(batch.status()));
    GDN_RETURN_IF_ERROR(job_.agree(check_reference(*batch)));
    const Result<Partition> partition = partition_.partition(batch->cu_seqlens);
    GDN_RETURN_IF_ERROR(job_.agree(partition.status()));

    Progress progress("checking", one_rank_ ? 3 : 2);
    const Result<BatchResult> result = job_.run(*batch, options);
    if (!result) return result.status();
    if (!job_.speaks()) return kSuccess;  // rank 0 compares
    progress.advance();
    const int64_t all_heads = batch->problem.heads_qk;
    const int64_t heads = reference_heads_.value_or(all_heads);
    const Result<std::vector<TensorCheck>> rows =
        heads == all_heads ? against_reference(*batch, *result)
                           : against_reference(first_heads(*batch, heads),
                                               first_heads(*result, batch->problem, heads));
    if (!rows) return rows.status();
    progress.advance();

    std::vector<TensorCheck> one;
    if (one_rank_) {
      RunOptions single = options;
      single.world_size = 1;
      single.layout = Layout::kContiguous;
      single.fragments.clear();
      single.context.backend = result->backend;
      const Result<BatchResult> alone = job_.run_here(*batch, single);
      if (!alone) return alone.status();
      const DType operand = batch->problem.operand;
      one = check_results(*result, *alone, batch->cu_seqlens, [&](const std::string& tensor) {
        Bars bar = bars(operand, tensor);
        if (operand == DType::kBFloat16) {
          bar.rel_rms = bar_between_ranks(find_backend(result->backend)->device_kind(),
                                          cuts_at_multiples_of(kChunk, *partition));
        }
        return bar;
      });
    }
    const bool passed = all_passed(*rows) && all_passed(one);
    if (json_) {
      Json out{{"input", input_.name()},
               {"problem", summary(*batch)},
               {"backend", result->backend},
               {"ranks", partition->world_size()},
               {"layout", to_string(partition->layout())},
               {"passed", passed},
               {"reference", reference_},
               {"reference_heads", heads},
               {"against_reference", json_of(*rows)}};
      if (one_rank_) out["against_one_rank"] = json_of(one);
      print_json(out);
    } else {
      print_line(fmt::format("{}: {}", input_.name(), summary(*batch)));
      print_line(fmt::format(
          "{} on {}, {}, {}against the fp64 {}:", result->backend,
          counted(partition->world_size(), "rank"), to_string(partition->layout()),
          heads == all_heads ? "" : fmt::format("first {} of {} key heads ", heads, all_heads),
          reference_ == "cpu" ? "cpu backend" : reference_));
      print_line(text_of(*rows, false));
      if (one_rank_) {
        print_line("against one rank of the same backend:");
        print_line(text_of(one, true));
      }
      print_line(passed ? "passed" : "FAILED");
    }
    return passed ? kSuccess : kCheckFailed;
  }

  bool speaks_of(const Status& error) const override { return job_.speaks_of(error); }

 private:
  Status check_reference(const Batch& batch) const {
    if (reference_ != "reference" && reference_ != "cpu") {
      return {ErrorCode::kInvalidArgument,
              fmt::format("--reference: expected reference or cpu, got '{}'", reference_)};
    }
    const int64_t most = batch.problem.heads_qk;
    if (!reference_heads_ || *reference_heads_ <= most) return Status::ok();
    return {ErrorCode::kInvalidArgument,
            fmt::format("--reference-heads: expected at most {}, the key heads there are, got {}",
                        most, *reference_heads_)};
  }

  Result<std::vector<TensorCheck>> against_reference(const Batch& batch,
                                                     const BatchResult& result) const {
    RunOptions exact;
    exact.context.backend = reference_;
    const Result<BatchResult> reference = run_batch(widen(batch), exact);
    if (!reference) return reference.status();
    return check_results(result, *reference, batch.cu_seqlens, [&](const std::string& tensor) {
      Bars bar = bars(batch.problem.operand, tensor);
      bar.rel_rms = bar_.value_or(bar.rel_rms);
      return bar;
    });
  }

  Job job_;
  Input input_;
  PartitionOptions partition_;
  EngineOptions engine_;
  std::optional<double> bar_;
  std::string reference_ = "reference";
  std::optional<int64_t> reference_heads_;
  bool one_rank_ = false, json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_check() { return std::make_unique<Check>(); }

}  // namespace gdn::cli
