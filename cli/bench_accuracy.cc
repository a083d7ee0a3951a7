#include "bench_accuracy.h"

#include <fmt/format.h>

#include <algorithm>

#include "check/run_batch.h"
#include "check/tensor_check.h"
#include "input.h"
#include "progress.h"

namespace gdn::cli {

using bench::Operation;

Result<BenchAccuracy::Sample*> BenchAccuracy::sample_of(BenchCase& one) {
  const auto found = samples_.find(one.key);
  if (found != samples_.end()) return &found->second;
  Sample sample;
  if (one.loaded) {
    sample.batch = std::move(*one.loaded);
  } else {
    const Progress progress("making");
    Result<Batch> made = make_batch(one.recipe);
    if (!made) return made.status();
    sample.batch = std::move(*made);
  }
  if (options_.check && job_.speaks()) {
    const Progress progress("computing the reference");
    RunOptions exact;
    exact.context.backend = "reference";
    Result<BatchResult> reference = run_batch(widen(sample.batch), exact);
    if (!reference) return reference.status();
    sample.reference = std::move(*reference);
  }
  return &samples_.emplace(one.key, std::move(sample)).first->second;
}

Result<std::string> BenchAccuracy::check(Sample& sample, const NamedArm& arm) {
  if (!options_.check) return std::string();
  const auto known = sample.failures.find(arm.name);
  if (known != sample.failures.end()) return known->second;
  const Result<BatchResult> result = [&] {
    const Progress progress("checking " + arm.name);
    return job_.many_processes() ? over_ranks(sample, arm) : alone(sample, arm);
  }();
  if (!result) return result.status();
  std::string failed = job_.speaks() ? judge(sample, arm, *result) : "";
  if (job_.many_processes()) {  // rank 0's verdict is everybody's
    const Status verdict =
        job_.agree(failed.empty() ? Status::ok() : Status(ErrorCode::kInternal, failed));
    if (!verdict && verdict.code() != ErrorCode::kInternal) return verdict;
    failed = verdict.message();
  }
  failed_ |= !failed.empty();
  return sample.failures[arm.name] = failed.empty() ? "" : "fails the accuracy check: " + failed;
}

// The sample's results by this process's machine.
Result<BatchResult> BenchAccuracy::alone(Sample& sample, const NamedArm& arm) {
  const auto partition = Partition::make(sample.batch.cu_seqlens, 1, Layout::kContiguous);
  if (!partition) return partition.status();
  Result<bench::Case> made = bench::Case::make(machine_, *partition, 0, sample.batch, true);
  if (!made) return made.status();
  Result<std::unique_ptr<bench::Arm>> running = bench::make_arm(machine_, *made, arm.options);
  if (!running) return running.status();
  GDN_RETURN_IF_ERROR(machine_.complete([&] {
    return (*running)->call(made->training ? Operation::kForwardBackward : Operation::kForward);
  }));
  return made->download(machine_);
}

// The same over the ranks of all processes; rank 0 gets them.
Result<BatchResult> BenchAccuracy::over_ranks(const Sample& sample, const NamedArm& arm) {
  RunOptions options = options_.ranks;
  options.context = arm.options.context;
  return job_.run(sample.batch, options);
}

// The tensors that miss their bars.
std::string BenchAccuracy::judge(const Sample& sample, const NamedArm& arm,
                                 const BatchResult& result) {
  const auto checks = check_results(
      result, sample.reference, sample.batch.cu_seqlens, [&](const std::string& tensor) {
        Bars bar = bars(sample.batch.problem.operand, tensor);
        bar.rel_rms = std::min(bar.rel_rms, options_.bar.value_or(bar.rel_rms));
        return bar;
      });
  std::string text, failed;
  Json accuracy = Json::array();
  for (const TensorCheck& check : checks) {
    text += fmt::format(" {} {:.2e}", check.tensor, check.accuracy.rel_rms);
    if (!check.passed) failed += (failed.empty() ? "" : ", ") + check.tensor;
    accuracy.push_back({{"tensor", check.tensor},
                        {"rel_rms", check.accuracy.rel_rms},
                        {"max_error", check.accuracy.max_error},
                        {"worst_head_rel_rms", check.accuracy.worst_head_rms},
                        {"worst_document_rel_rms", check.accuracy.worst_document_rms},
                        {"passed", check.passed}});
  }
  options_.say(fmt::format("{}, {}: rel-RMS{}{}", summary(sample.batch), arm.name, text,
                           failed.empty() ? "" : "; FAILED: " + failed));
  json_.push_back({{"arm", arm.name}, {"problem", summary(sample.batch)}, {"tensors", accuracy}});
  return failed;
}

}  // namespace gdn::cli
