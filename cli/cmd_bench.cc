// gdn bench: times of backends, of their stages and of other builds, by the protocol of
// docs/benchmarks.md: accuracy first, then times, then which of them may be claimed.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "base/counted.h"
#include "bench/arm.h"
#include "bench/measure.h"
#include "bench_accuracy.h"
#include "bench_input.h"
#include "bench_report.h"
#include "io/file.h"
#include "job.h"
#include "memory.h"
#include "progress.h"

namespace gdn::cli {
namespace {

using bench::Arm;
using bench::ArmOptions;
using bench::Case;
using bench::Machine;
using bench::Operation;
using bench::Protocol;

constexpr double kLong = 30;  // seconds that are announced

// On hosts, where a call may take seconds and no clock is held down: a smaller default.
Protocol host_protocol() { return {"host", 1, 2, 1, 5, 0}; }

const std::vector<std::string> kStages = {
    "prepare", "summarize", "fold", "run", "summarize_backward", "fold_backward", "run_backward"};

std::vector<std::string> split_names(const std::string& text) {
  std::vector<std::string> names(1);
  for (char c : text) {
    if (c == ',') {
      names.emplace_back();
    } else {
      names.back() += c;
    }
  }
  return names;
}

class Bench : public Command {
 public:
  CLI::App* add_to(CLI::App& app) override {
    auto* sub = app.add_subcommand(
        "bench",
        "Time backends on one device: accuracy first, then times with a cold L2 in palindromic "
        "order, with the first arm twice to show the noise. FLOP/s counts the matrix products of "
        "64-token chunks (20 forward and 42 backward times 2*64^3 per chunk and head at K=V=128)");
    input_.add_to(*sub);
    sub->option_defaults()->group("Ranks");
    sub->add_option("--layout", partition_.layout,
                    "under mpirun, where every process times one rank: contiguous, zigzag or "
                    "zigzag_per_document [default: contiguous]");
    job_.add_to(*sub);
    engine_.add_to(*sub);
    sub->get_option("--backend")
        ->description("one or several, apart by ',' [default: the fastest that takes it]");
    sub->add_option("--against", against_,
                    "another build's libgdn_c.so as a further arm, with the first backend")
        ->option_text("FILE");
    sub->option_defaults()->group("Options");
    sub->add_option("--ops", operations_,
                    "fwd, bwd, fwd+bwd, ckpt (2 forwards and a backward), or stages by name "
                    "[default: fwd,bwd,fwd+bwd]")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->option_text("NAME,...");
    sub->add_flag("--stages", stages_,
                  "each stage alone: " + fmt::format("{}", fmt::join(kStages, ", ")));
    auto* brief = sub->add_flag("--short", short_,
                                "2 runs of 8 groups of 2 blocks of 5 + 20 calls [default on GPUs]");
    auto* quick = sub->add_flag("--quick", quick_, "2 groups: for daily work");
    auto* sustained = sub->add_flag("--sustained", sustained_,
                                    "3 groups of 2 blocks of 5 s idle and 20 + 300 calls");
    brief->excludes(quick)->excludes(sustained);
    quick->excludes(sustained);
    sub->add_option("-n,--calls", calls_, "timed calls of a block, in place of the protocol's")
        ->transform(integer(1, 1'000'000));
    sub->add_option("--bar", bar_, "a tighter bar of rel-RMS than the tensors' own")
        ->check(number(0));
    sub->add_flag("--no-check", no_check_, "no accuracy check; no time is claimed then");
    sub->add_flag("--json", json_, "as JSON, with every time");
    sub->add_option("-o,--output", output_, "also write the JSON to a file")
        ->option_text("FILE")
        ->check(not_empty());
    sub->add_option("--judge", judge_,
                    "print the table of such a file instead, judged by the same rules")
        ->option_text("FILE");
    sub->footer("Example: gdn bench M --shrink 8 --quick");
    return sub;
  }

  bool speaks_of(const Status& error) const override { return job_.speaks_of(error); }

  Result<int> run() override {
    GDN_RETURN_IF_ERROR(job_.join(partition_));
    std::vector<Operation> operations;
    std::vector<BenchCase> cases;
    // Judging a file needs no other process: it ends here on all.
    GDN_RETURN_IF_ERROR(job_.agree(set_up(operations, cases)));
    GDN_RETURN_IF_ERROR(job_.agree_on(judge_, "--judge"));
    if (!judge_.empty()) return job_.speaks() ? judge_file() : kSuccess;
    if (job_.many_processes()) {
      machine_ = bench::make_ranks_machine(std::move(machine_), *job_.host());
    }
    protocol_ = choose_protocol();
    GDN_RETURN_IF_ERROR(agree_on_loops(operations, cases));

    report_ = {{"device", machine_->description()},
               {"protocol", bench::describe(protocol_)},
               {"reduced", protocol_.reduced()},
               {"power_cap", machine_->why_no_power_cap().empty() ? "read by NVML"
                                                                  : machine_->why_no_power_cap()},
               {"checked", no_check_ ? "no" : kCheckedOn},
               {"rows", Json::array()}};
    say(header());
    accuracy_.emplace(job_, *machine_,
                      BenchAccuracy::Options{!no_check_, bar_, run_options_,
                                             [this](const std::string& line) { say(line); }});
    for (BenchCase& one : cases) {
      const Status status = time_case(one, operations);
      if (!status && !report_["rows"].empty()) GDN_RETURN_IF_ERROR(print_report().status());
      GDN_RETURN_IF_ERROR(status);
    }
    return print_report();
  }

 private:
  static constexpr const char* kCheckedOn =
      "all heads of documents of 1200, 800 and 48 tokens (shorter packs and files: their own) "
      "against the fp64 recurrence";

  std::string header() const {
    return fmt::format("{}\n{}; power cap: {}\naccuracy: {}", machine_->description(),
                       bench::describe(protocol_), report_["power_cap"].get<std::string>(),
                       no_check_ ? "not checked" : kCheckedOn);
  }
  void say(const std::string& text) const {
    if (json_ || !job_.speaks()) return;
    print_line(text);
    std::fflush(stdout);  // seen even where the program is ended by a time limit
  }

  // What may fail on one process alone.
  Status set_up(std::vector<Operation>& operations, std::vector<BenchCase>& cases) {
    if (!output_.empty() && job_.speaks()) {
      std::vector<std::string> inputs = input_.files();
      if (!judge_.empty()) inputs.push_back(judge_);
      GDN_RETURN_IF_ERROR(check_output(output_, inputs));
    }
    if (!judge_.empty()) return Status::ok();
    GDN_RETURN_IF_ERROR(parse_operations(operations));
    GDN_RETURN_IF_ERROR(check_ranks(operations));
    GDN_RETURN_IF_ERROR(engine_.apply(run_options_));
    GDN_RETURN_IF_ERROR(partition_.apply(run_options_));
    BenchInput::Ranks ranks{run_options_.world_size, run_options_.layout, 0};
    if (job_.many_processes()) ranks.rank = job_.host()->rank();
    Result<std::vector<BenchCase>> made = input_.cases(ranks);
    if (!made) return made.status();
    cases = std::move(*made);
    return choose_machine();
  }

  Status check_ranks(const std::vector<Operation>& operations) const {
    const auto invalid = [](const char* message) {
      return Status(ErrorCode::kInvalidArgument, message);
    };
    if (!job_.many_processes()) {
      return partition_.layout == PartitionOptions{}.layout
                 ? Status::ok()
                 : invalid(
                       "--layout: expected the processes of an mpirun, one rank each; a single "
                       "rank without its messages is --proxy");
    }
    if (job_.over_nccl()) {
      return invalid("--comm nccl: expected ranks on hosts; bench/ranks_gpus.sh times GPUs");
    }
    // A rank has some stages, and another has not.
    if (std::any_of(operations.begin(), operations.end(), bench::is_stage)) {
      return invalid("--stages: expected one process (--proxy for a rank's stages), got many");
    }
    return against_.empty() ? Status::ok() : invalid("--against: expected one process, got many");
  }

  // Processes meet at every call: what the loops below go over must be the same on all of them.
  Status agree_on_loops(const std::vector<Operation>& operations,
                        const std::vector<BenchCase>& cases) {
    std::string names;
    for (Operation operation : operations) names += fmt::format("{},", bench::to_string(operation));
    GDN_RETURN_IF_ERROR(job_.agree_on(std::to_string(cases.size()), "how many shapes and norms"));
    GDN_RETURN_IF_ERROR(job_.agree_on(names, "--ops"));
    GDN_RETURN_IF_ERROR(job_.agree_on(std::to_string(backends_.size()), "how many backends"));
    GDN_RETURN_IF_ERROR(job_.agree_on(bench::describe(protocol_), "protocol (--quick, --calls)"));
    return job_.agree_on(no_check_ ? "no" : "yes", "--no-check");
  }

  Status parse_operations(std::vector<Operation>& operations) {
    std::vector<std::string> names = operations_;
    if (stages_) names.insert(names.end(), kStages.begin(), kStages.end());
    if (names.empty()) names = {"fwd", "bwd", "fwd+bwd"};
    for (const std::string& name : names) {
      const Result<Operation> operation = bench::parse_operation(name);
      if (!operation) return operation.status();
      operations.push_back(*operation);
    }
    return Status::ok();
  }

  Protocol choose_protocol() const {
    Protocol protocol = short_       ? bench::short_protocol()
                        : quick_     ? bench::quick_protocol()
                        : sustained_ ? bench::sustained_protocol()
                        : machine_->device().kind == Device::Kind::kCpu ? host_protocol()
                                                                        : bench::short_protocol();
    if (calls_ > 0 && calls_ != protocol.timed) {
      protocol.timed = calls_;
      protocol.name = "shortened";
    }
    return protocol;
  }

  // The device of the backends named; without a name the GPU, where there is one.
  Status choose_machine() {
    const std::string names = wanted_backend(engine_.backend);
    backends_ = split_names(names);
    std::optional<Device::Kind> kind;
    for (const std::string& name : backends_) {
      if (name.empty()) continue;
      GDN_RETURN_IF_ERROR(check_backend_name(name));
      const Device::Kind of = find_backend(name)->device_kind();
      if (kind && *kind != of) {
        return {ErrorCode::kInvalidArgument,
                fmt::format("--backend {}: expected backends of one device", names)};
      }
      kind = of;
    }
    if (job_.many_processes() && kind == Device::Kind::kCuda) {
      return {ErrorCode::kInvalidArgument,
              fmt::format("--backend {}: expected one of hosts under mpirun", names)};
    }
    if (kind != Device::Kind::kCpu && !job_.many_processes()) {
      Result<std::unique_ptr<Machine>> cuda = bench::make_cuda_machine();
      if (cuda) {
        machine_ = std::move(*cuda);
        return Status::ok();
      }
      if (kind) return cuda.status();
    }
    machine_ = bench::make_host_machine();
    return Status::ok();
  }

  std::vector<NamedArm> arms_of(const std::string& first) const {
    std::vector<NamedArm> arms;
    ArmOptions options{run_options_.context, run_options_.keep_saved, ""};
    for (const std::string& name : backends_) {
      options.context.backend = name;
      arms.push_back({name.empty() ? first : name, options, false});
      if (arms.size() == 1) arms.push_back({arms[0].name + " again", options, true});
    }
    if (!against_.empty()) {
      options.context.backend = arms[0].options.context.backend;
      options.library = against_;
      arms.push_back({fmt::format("{} of {}", arms[0].name, against_), options, false});
    }
    return arms;
  }

  // One arm of a case: running, or why not.
  struct Runner {
    NamedArm named;
    std::unique_ptr<Arm> arm;
    std::string why_not;
    double first_seconds = 0;  // of its first call, which is not timed
  };

  Status time_case(BenchCase& one, const std::vector<Operation>& operations) {
    const Result<BenchAccuracy::Sample*> found = accuracy_->sample_of(one);
    GDN_RETURN_IF_ERROR(job_.agree(found.status()));
    BenchAccuracy::Sample& sample = **found;
    if (machine_->device().kind == Device::Kind::kCpu) {
      GDN_RETURN_IF_ERROR(job_.agree(check_memory(
          sample.batch, one.partition.local_tokens(one.rank), one.partition.num_documents())));
    }
    Result<Case> what = Case::make(*machine_, one.partition, one.rank, sample.batch, false);
    GDN_RETURN_IF_ERROR(job_.agree(what.status()));
    what->communicator = job_.comm();
    std::vector<Runner> runners;
    GDN_RETURN_IF_ERROR(make_runners(*what, sample, runners));
    say_bytes(one, *what, runners);
    if (machine_->device().kind == Device::Kind::kCpu) {
      say_duration(one.name, operations, what->training, runners);
    }
    for (Operation operation : operations) {
      if (bench::needs_backward(operation) && !what->training) continue;
      GDN_RETURN_IF_ERROR(add_row(one, *what, operation, runners));
    }
    return Status::ok();
  }

  Status make_runners(const Case& what, BenchAccuracy::Sample& sample,
                      std::vector<Runner>& runners) {
    std::string first;
    if (backends_[0].empty()) {
      const Result<const Backend*> picked = pick_backend(what.problem);
      if (!picked) return picked.status();
      first = (*picked)->name();
    }
    for (const NamedArm& named : arms_of(first)) {
      Runner runner{named, nullptr, ""};
      Result<std::unique_ptr<Arm>> made = bench::make_arm(*machine_, what, named.options);
      const Status status = job_.agree(made.status());
      if (status) {
        runner.arm = std::move(*made);
        // A twin is the code of the arm before it.
        const Result<std::string> failure = named.again
                                                ? Result<std::string>(runners.back().why_not)
                                                : accuracy_->check(sample, named);
        if (!failure) return failure.status();
        runner.why_not = *failure;
      } else if (runners.empty() || status.code() != ErrorCode::kUnsupported) {
        return status;
      } else {
        runner.why_not = status.message();
      }
      if (runner.why_not.empty()) {  // fills the saved set and the tables that stages start from
        const Progress progress("first call of " + named.name);
        const auto start = std::chrono::steady_clock::now();
        GDN_RETURN_IF_ERROR(machine_->complete([&] {
          return runner.arm->call(what.training ? Operation::kForwardBackward
                                                : Operation::kForward);
        }));
        runner.first_seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      }
      runners.push_back(std::move(runner));
    }
    return Status::ok();
  }

  void say_bytes(const BenchCase& one, const Case& what, const std::vector<Runner>& runners) {
    const double kib = 1.0 / 1024 / static_cast<double>(std::max<int64_t>(1, what.problem.tokens));
    for (const Runner& runner : runners) {
      if (runner.arm == nullptr || runner.named.again) continue;
      const bench::ArmFacts& facts = runner.arm->facts();
      say(fmt::format(
          "{}: {}, {}: {}KiB/token: saved {:.2f}, workspace {:.1f} forward, {:.1f} backward",
          one.name, counted(what.problem.tokens, "token"), runner.named.name,
          facts.segments < 0 ? "" : counted(facts.segments, "segment") + "; ",
          static_cast<double>(facts.saved_bytes) * kib,
          static_cast<double>(facts.forward_workspace_bytes) * kib,
          static_cast<double>(facts.backward_workspace_bytes) * kib));
    }
  }

  // About how long the rows of a case will take, where that is long. Stages are not counted.
  void say_duration(const std::string& name, const std::vector<Operation>& operations,
                    bool training, const std::vector<Runner>& runners) {
    const int calls = 2 * protocol_.runs * protocol_.groups * (protocol_.warm_up + protocol_.timed);
    double seconds = 0;
    for (Operation operation : operations) {
      if (bench::is_stage(operation) || (bench::needs_backward(operation) && !training)) continue;
      double share = 1;  // of the first call, which was a whole one
      if (training && operation == Operation::kForward) share = 0.4;
      if (training && operation == Operation::kCheckpoint) share = 1.4;
      for (const Runner& runner : runners) seconds += calls * share * runner.first_seconds;
    }
    if (seconds < kLong) return;
    say(fmt::format("{}: its times take about {:.0f} minute{}; fewer --calls or --ops take less",
                    name, std::max(1.0, seconds / 60), seconds < 90 ? "" : "s"));
  }

  Status add_row(const BenchCase& one, const Case& what, Operation operation,
                 std::vector<Runner>& runners) {
    int64_t chunks = 0, tokens = job_.many_processes() ? 0 : what.problem.tokens;
    for (int rank = 0; rank < one.partition.world_size(); ++rank) {
      if (!job_.many_processes() && rank != one.rank) continue;
      for (const Fragment& f : one.partition.fragments(rank)) {
        chunks += (f.length + kChunk - 1) / kChunk;
        if (job_.many_processes()) tokens += f.length;
      }
    }
    const Problem& p = what.problem;
    const double flop = bench::products_flop(operation, chunks * p.heads_v, p.dim_k, p.dim_v);
    Json row{{"shape", one.name},
             {"norm", one.norm},
             {"gates", one.loaded ? "of the file" : one.recipe.gates},
             {"tokens", tokens},
             {"operation", bench::to_string(operation)},
             {"arms", Json::array()}};
    if (!one.of_ranks.empty()) row["of_ranks"] = one.of_ranks;
    std::vector<bench::TimedCall> calls;
    std::vector<size_t> timed;
    for (const Runner& runner : runners) {
      Json arm{{"name", runner.named.name}, {"process", 0}};
      std::string why_not = runner.why_not;
      if (why_not.empty()) why_not = runner.arm->offers(operation).message();
      if (runner.named.again && !why_not.empty()) continue;  // as the arm before it
      if (why_not.empty()) {
        timed.push_back(row["arms"].size());
        calls.push_back({[&runner, operation] { return runner.arm->call(operation); }, {}});
      } else {
        arm["why_no_time"] = why_not;
      }
      if (runner.named.again) arm["again"] = true;
      if (no_check_) arm["unchecked"] = true;
      if (flop > 0) arm["flop"] = flop;
      if (runner.arm != nullptr) {
        const bench::ArmFacts& facts = runner.arm->facts();
        arm["backend"] = facts.backend;
        if (facts.segments >= 0) arm["segments"] = facts.segments;
        arm["saved_bytes"] = facts.saved_bytes;
        arm["forward_workspace_bytes"] = facts.forward_workspace_bytes;
        arm["backward_workspace_bytes"] = facts.backward_workspace_bytes;
      }
      row["arms"].push_back(std::move(arm));
    }
    if (!calls.empty()) {
      Progress progress("timing",
                        2 * protocol_.runs * protocol_.groups * static_cast<int64_t>(calls.size()));
      const auto samples = bench::measure(*machine_, protocol_, calls, [&] { progress.advance(); });
      if (!samples) return samples.status();
      for (size_t i = 0; i < timed.size(); ++i) {
        row["arms"][timed[i]].update(json_of((*samples)[i]));
      }
    }
    report_["rows"].push_back(std::move(row));
    judge(report_);
    say(line_of(report_["rows"].back()));
    return Status::ok();
  }

  Result<int> print_report() {
    const bool failed = accuracy_ && accuracy_->failed();
    if (!job_.speaks()) return failed ? kCheckFailed : kSuccess;
    if (accuracy_ && !accuracy_->as_json().empty()) report_["accuracy"] = accuracy_->as_json();
    if (!output_.empty()) {
      Result<AtomicFile> file = AtomicFile::create(output_);
      if (!file) return file.status();
      const std::string text = report_.dump(1) + "\n";
      GDN_RETURN_IF_ERROR(file->write(std::as_bytes(std::span(text))));
      GDN_RETURN_IF_ERROR(file->commit());
    }
    if (json_) {
      print_json(report_);
    } else {
      print_line("");
      print_line(table_of(report_) + slowest_ranks(report_));
      print_line(report_.value("protocol", ""));
    }
    return failed ? kCheckFailed : kSuccess;
  }

  Result<int> judge_file() {
    Result<Json> read = read_report(judge_);
    if (!read) return read.status();
    report_ = std::move(*read);
    judge(report_);
    for (const char* name : {"device", "power_cap", "checked"}) {
      if (report_.contains(name)) {
        say(fmt::format("{}: {}", name, report_[name].get<std::string>()));
      }
    }
    return print_report();
  }

  Job job_;
  BenchInput input_;
  PartitionOptions partition_;
  EngineOptions engine_;
  RunOptions run_options_;
  std::vector<std::string> operations_, backends_;
  std::string against_, output_, judge_;
  std::optional<double> bar_;
  int calls_ = 0;
  bool stages_ = false, short_ = false, quick_ = false, sustained_ = false;
  bool no_check_ = false, json_ = false;

  std::unique_ptr<Machine> machine_;
  Protocol protocol_;
  std::optional<BenchAccuracy> accuracy_;
  Json report_;
};

}  // namespace

std::unique_ptr<Command> make_bench() { return std::make_unique<Bench>(); }

}  // namespace gdn::cli
