// The stages as parallel loops over independent items; see backend/cpu/stage_call.h for the items.
#include <fmt/format.h>

#include <cstring>

#include "backend/cpu/cpu.h"
#include "backend/cpu/stage_call.h"
#include "base/element.h"
#include "base/thread_pool.h"

namespace gdn {
namespace {

using cpu::StageCall;

// Rows [begin, rows) of x [rows, heads] or [rows, heads, dim] become 0.
void zero_rows(const TensorView& x, int64_t begin) {
  const int64_t inner = x.rank == 3 ? x.shape[2] : 1;
  for (int64_t i = begin; i < x.shape[0]; ++i) {
    for (int64_t h = 0; h < x.shape[1]; ++h) {
      for (int64_t j = 0; j < inner; ++j) {
        store_element(x, i * x.stride[0] + h * x.stride[1] + j * x.stride[2], 0);
      }
    }
  }
}

// to[doc] = from[doc] (or 0) for documents without tokens.
void pass_states(const Plan& plan, const TensorView& from, const TensorView& to) {
  if (!to.present()) return;
  for (const int64_t doc : plan.empty_documents) {
    for (int64_t h = 0; h < to.shape[1]; ++h) {
      for (int64_t i = 0; i < to.shape[2]; ++i) {
        for (int64_t j = 0; j < to.shape[3]; ++j) {
          const auto at = [&](const TensorView& x) {
            return doc * x.stride[0] + h * x.stride[1] + i * x.stride[2] + j * x.stride[3];
          };
          store_element(to, at(to), from.present() ? load_element(from, at(from)) : 0);
        }
      }
    }
  }
}

class CpuBackend final : public Backend {
 public:
  const char* name() const override { return "cpu"; }

  std::string description() const override {
    return fmt::format("chunked kernels on host threads: {}, {} threads", cpu::target_name(),
                       num_threads());
  }

  Device::Kind device_kind() const override { return Device::Kind::kCpu; }

  std::optional<std::string> why_not(const Problem& p) const override {
    if (p.device.kind != Device::Kind::kCpu) {
      return fmt::format("needs operands in host memory, got {}", to_string(p.device));
    }
    if (p.operand != DType::kBFloat16 && p.operand != DType::kFloat32 &&
        p.operand != DType::kFloat64) {
      return fmt::format("takes bfloat16, float32 and float64 operands, got {}",
                         to_string(p.operand));
    }
    for (const auto& [dim, what] : {std::pair{p.dim_k, "K"}, std::pair{p.dim_v, "V"}}) {
      if (dim <= 0 || dim % 16 != 0 || dim > cpu::kMaxDim) {
        return fmt::format("takes head dims that are multiples of 16 up to {}, got {} = {}",
                           cpu::kMaxDim, what, dim);
      }
    }
    return std::nullopt;
  }

  std::optional<std::string> why_not_operands(const Operands& in) const override {
    for (const auto& [view, what] : {std::pair{&in.q, "q"}, {&in.k, "k"}, {&in.v, "v"}}) {
      if (view->numel() > 0 && view->stride[2] != 1) {
        return fmt::format("{}: takes unit innermost strides, got {}", what, view->stride[2]);
      }
    }
    return std::nullopt;
  }

  // Not the thread count: how documents are cut, and so every bit of a result, must not depend on
  // the machine. Heads and documents give the threads their work.
  int64_t workers() const override { return 1; }

  int64_t prepared_bytes(const Problem& p, const Plan& plan) const override {
    return align_up(plan.capacity.chunks * p.heads_v * cpu::PreparedRecord::kElements *
                    size_of(p.state()));
  }
  int64_t forward_scratch_bytes(const Problem& p, const Plan&) const override {
    return num_threads() * cpu::forward_worker_bytes(p);
  }
  int64_t backward_scratch_bytes(const Problem& p, const Plan& plan) const override {
    return num_threads() * cpu::backward_worker_bytes(p, plan) + gate_sum_bytes(p, plan);
  }
  int64_t resident_bytes(const Plan&) const override { return 0; }
  Status upload(const Plan&, void*, Stream) const override { return Status::ok(); }

  Status prepare(const StageArgs& args) const override {
    const StageCall call = forward_call(args);
    parallel_for(args.plan.counts.chunks * call.dims.heads_qk,
                 [&](int64_t item, int worker) { cpu::prepare_item(call, item, worker); });
    return Status::ok();
  }

  Status summarize(const StageArgs& args, const TensorView& initial_state) const override {
    StageCall call = forward_call(args);
    call.initial_state = initial_state;
    call.head_parts = head_parts(args.plan, call.dims);
    parallel_for(head_items(call),
                 [&](int64_t item, int worker) { cpu::summarize_item(call, item, worker); });
    return Status::ok();
  }

  Status fold(const StageArgs& args, const FoldProgram& program) const override {
    StageCall call = forward_call(args);
    call.program = &program;
    const int64_t blocks = (program.cols + cpu::kFoldColumns - 1) / cpu::kFoldColumns;
    parallel_for(program.chains() * (program.head_end - program.head_begin) * blocks,
                 [&](int64_t item, int worker) { cpu::fold_item(call, item, worker); });
    return Status::ok();
  }

  Status run(const StageArgs& args, const TensorView& initial_state, const TensorView& o,
             const TensorView& final_state) const override {
    StageCall call = forward_call(args);
    call.initial_state = initial_state;
    call.o = o;
    call.final_state = final_state;
    call.head_parts = head_parts(args.plan, call.dims);
    parallel_for(head_items(call),
                 [&](int64_t item, int worker) { cpu::run_item(call, item, worker); });
    zero_rows(o, args.plan.local_tokens);
    pass_states(args.plan, initial_state, final_state);
    return Status::ok();
  }

  Status summarize_backward(const StageArgs& args, const BackwardArgs& grads) const override {
    StageCall call = backward_call(args, grads);
    call.head_parts = head_parts(args.plan, call.dims);
    parallel_for(head_items(call), [&](int64_t item, int worker) {
      cpu::summarize_backward_item(call, item, worker);
    });
    return Status::ok();
  }

  Status run_backward(const StageArgs& args, const BackwardArgs& grads,
                      const void* entry) const override {
    StageCall call = backward_call(args, grads);
    call.entry = entry;
    if (args.problem.options.gate_in_kernel) {
      call.gate_sums = static_cast<double*>(call.worker_scratch(num_threads()));
    }
    parallel_for(head_items(call),
                 [&](int64_t item, int worker) { cpu::run_backward_item(call, item, worker); });
    for (const TensorView* x : {&grads.dq, &grads.dk, &grads.dv, &grads.dg, &grads.dbeta}) {
      zero_rows(*x, args.plan.local_tokens);
    }
    pass_states(args.plan, grads.dfinal_state, grads.dinitial_state);
    if (call.gate_sums) add_gate_sums(call);
    return Status::ok();
  }

 private:
  static int64_t gate_sum_bytes(const Problem& p, const Plan& plan) {
    if (!p.options.gate_in_kernel) return 0;
    return align_up(plan.capacity.segments * p.heads_v * 2 * static_cast<int64_t>(sizeof(double)));
  }

  static StageCall forward_call(const StageArgs& args) {
    StageCall call;
    call.args = &args;
    call.dims = cpu::Dims::of(args.problem);
    call.worker_bytes = cpu::forward_worker_bytes(args.problem);
    return call;
  }

  static StageCall backward_call(const StageArgs& args, const BackwardArgs& grads) {
    StageCall call = forward_call(args);
    call.worker_bytes = cpu::backward_worker_bytes(args.problem, args.plan);
    call.blocks = cpu::BlockPlan::of(args.problem, args.plan);
    call.grads = &grads;
    return call;
  }

  // Value heads of a key head share q and k, but where key heads are few each is an item of its
  // own.
  static int64_t head_parts(const Plan& plan, const cpu::Dims& dims) {
    const int64_t items = plan.counts.segments * dims.heads_qk;
    return items < 4 * num_threads() ? dims.group : 1;
  }

  static int64_t head_items(const StageCall& call) {
    return call.args->plan.counts.segments * call.dims.heads_qk * call.head_parts;
  }

  // dA_log, ddt_bias: sums over the segments in order.
  static void add_gate_sums(const StageCall& call) {
    const int64_t segments = call.args->plan.counts.segments;
    const TensorView* out[] = {&call.grads->dA_log, &call.grads->ddt_bias};
    for (int64_t head = 0; head < call.dims.heads_v; ++head) {
      for (int which = 0; which < 2; ++which) {
        if (!out[which]->present()) continue;
        double sum = 0;
        for (int64_t i = 0; i < segments; ++i) {
          sum += call.gate_sums[2 * (i * call.dims.heads_v + head) + which];
        }
        store_element(*out[which], head * out[which]->stride[0], sum);
      }
    }
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace gdn
