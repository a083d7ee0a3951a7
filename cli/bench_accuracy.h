// What `gdn bench` holds its arms to before any of them gets a time: their results on a sample of
// each shape, against the fp64 reference.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "bench/arm.h"
#include "bench_input.h"
#include "job.h"

namespace gdn::cli {

struct NamedArm {
  std::string name;
  bench::ArmOptions options;
  bool again = false;
};

class BenchAccuracy {
 public:
  struct Options {
    bool check = true;          // else every arm passes, and no reference is made
    std::optional<double> bar;  // of rel-RMS, where it is tighter than the tensors' own
    RunOptions ranks;           // how the processes of the job share a sample
    std::function<void(const std::string&)> say;  // a line for people
  };
  // A sample's operands in host memory, what they should give, and how each arm did on them.
  struct Sample {
    Batch batch;
    BatchResult reference;
    std::map<std::string, std::string> failures;  // by arm; empty: passed
  };

  // All outlive this.
  BenchAccuracy(Job& job, bench::Machine& machine, Options options)
      : job_(job), machine_(machine), options_(std::move(options)) {}

  // The sample of a case, made once for all cases that share it.
  Result<Sample*> sample_of(BenchCase& one);
  // Why the arm gets no time; empty where its outputs on the sample are right.
  Result<std::string> check(Sample& sample, const NamedArm& arm);

  bool failed() const { return failed_; }        // some arm has
  const Json& as_json() const { return json_; }  // an entry for each arm and sample checked

 private:
  Result<BatchResult> alone(Sample& sample, const NamedArm& arm);
  Result<BatchResult> over_ranks(const Sample& sample, const NamedArm& arm);
  std::string judge(const Sample& sample, const NamedArm& arm, const BatchResult& result);

  Job& job_;
  bench::Machine& machine_;
  Options options_;
  std::map<std::string, Sample> samples_;
  Json json_ = Json::array();
  bool failed_ = false;
};

}  // namespace gdn::cli
