#include "backend/reference/reference.h"

#include <fmt/format.h>

#include "backend/reference/stages.h"
#include "base/element.h"
#include "base/memory.h"
#include "base/thread_pool.h"

namespace gdn {
namespace {

int64_t bytes_for_all_workers(int64_t elements) {
  return align_up(num_threads() * elements * size_of(DType::kFloat64));
}

class ReferenceBackend final : public Backend {
 public:
  const char* name() const override { return "reference"; }
  std::string description() const override {
    return fmt::format("any CPU: fp64, token by token, {} threads", num_threads());
  }
  Device::Kind device_kind() const override { return Device::Kind::kCpu; }

  std::optional<std::string> why_not(const Problem& problem) const override {
    if (problem.device.kind != Device::Kind::kCpu) {
      return fmt::format("device: expected cpu, got {}", to_string(problem.device));
    }
    if (!is_floating(problem.operand)) {
      return fmt::format("q, k, v: expected bfloat16, float32 or float64, got {}",
                         to_string(problem.operand));
    }
    return std::nullopt;
  }
  std::optional<std::string> why_not_operands(const Operands&) const override {
    return std::nullopt;
  }

  // Whole fragments: cuts would add maps and folds to what is meant to be the plain recurrence.
  int64_t workers() const override { return 1; }

  int64_t prepared_bytes(const Problem&, const Plan&) const override { return 0; }
  int64_t forward_scratch_bytes(const Problem& problem, const Plan&) const override {
    return bytes_for_all_workers(reference::forward_scratch_elements(problem));
  }
  int64_t backward_scratch_bytes(const Problem& problem, const Plan& plan) const override {
    return bytes_for_all_workers(reference::backward_scratch_elements(problem, plan));
  }
  int64_t resident_bytes(const Plan&) const override { return 0; }
  Status upload(const Plan&, void*, Stream) const override { return Status::ok(); }

  // Gates, norms and activations are recomputed from the operands where they are needed.
  Status prepare(const StageArgs&) const override { return Status::ok(); }
  Status summarize(const StageArgs& args, const TensorView& initial_state) const override {
    return reference::summarize(args, initial_state);
  }
  Status fold(const StageArgs& args, const FoldProgram& program) const override {
    return reference::fold(args, program);
  }
  Status run(const StageArgs& args, const TensorView& initial_state, const TensorView& o,
             const TensorView& final_state) const override {
    return reference::run(args, initial_state, o, final_state);
  }
  Status summarize_backward(const StageArgs& args, const BackwardArgs& call) const override {
    return reference::summarize_backward(args, call);
  }
  Status run_backward(const StageArgs& args, const BackwardArgs& call,
                      const void* entry) const override {
    return reference::run_backward(args, call, entry);
  }
};

}  // namespace

const Backend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace gdn
