#include "backend/cuda/portable/portable.h"

#include <fmt/format.h>

#include <algorithm>

#include "backend/cuda/common/fold.h"
#include "backend/cuda/common/call_options.h"
#include "backend/cuda/common/launch.h"
#include "backend/cuda/common/tables.h"
#include "backend/cuda/common/upload.h"
#include "backend/cuda/common/views.h"
#include "backend/cuda/portable/kernels.h"
#include "backend/cuda/portable/layout.h"

namespace gdn {
namespace {

using namespace cuda;  // NOLINT: the whole file is about it

constexpr int kOldest = 80;  // compute capability with mma.sync of bf16 and cp.async
constexpr int kLeastShared = 99 * 1024;

std::optional<std::string> why_not_rows(const char* name, const TensorView& view) {
  if (view.numel() == 0 || pieces_aligned(view)) return std::nullopt;
  return fmt::format(
      "{}: expected a 16-byte aligned base and a token stride that is a multiple of 8 elements, "
      "got "
      "address {} and strides [{}, {}, {}]",
      name, view.data, view.stride[0], view.stride[1], view.stride[2]);
}

// What every stage derives from its arguments.
class StageCall {
 public:
  explicit StageCall(const StageArgs& stage_args)
      : args(stage_args),
        guard_(stage_args.problem.device.index),
        resident(ResidentLayout::of(stage_args.plan)),
        prepared(PreparedLayout::of(stage_args.problem, stage_args.plan).at(stage_args.prepared)) {}

  Shape shape(int head0, int heads) const {
    Shape s;
    s.heads_qk = static_cast<int>(args.problem.heads_qk);
    s.heads_v = static_cast<int>(args.problem.heads_v);
    s.group = s.heads_v / s.heads_qk;
    s.head0 = head0;
    s.heads = heads;
    s.counts = counts();
    s.segments = at<SegmentRow>(args.resident, resident.segments);
    s.chunks = at<ChunkRow>(args.resident, resident.chunks);
    return s;
  }
  Shape shape() const { return shape(0, static_cast<int>(args.problem.heads_v)); }

  KernelCall kernel(int64_t items) const {
    KernelCall call;
    call.dim = static_cast<int>(args.problem.dim_k);
    call.items = items;
    call.shared_limit = device_facts(args.problem.device.index).shared_bytes;
    call.stream = args.stream;
    return call;
  }
  const CountRow* counts() const { return at<CountRow>(args.resident, resident.counts); }
  float* table(Table which) const {
    return static_cast<float*>(args.tables[static_cast<int>(which)]);
  }

  // Rows of an item table and how many there are.
  struct Items {
    const ItemRow* rows;
    const int64_t* count;
  };
  Items run_items() const {
    return {at<ItemRow>(args.resident, resident.run), &counts()->segments};
  }
  Items exit_items() const {
    return {at<ItemRow>(args.resident, resident.exits), &counts()->exits};
  }
  Items entry_items() const {
    return {at<ItemRow>(args.resident, resident.entries), &counts()->entries};
  }

  ForwardWalkParams forward(const Shape& s, Items items, const TensorView& initial) const {
    ForwardWalkParams p{};
    p.shape = s;
    p.items = items.rows;
    p.num_items = items.count;
    p.q = row_view(args.in.q);
    p.k = row_view(args.in.k);
    p.v = row_view(args.in.v);
    p.prepared = prepared;
    p.initial_state = state_view(initial);
    p.entry_slots = args.plan.capacity.entry_slots;
    p.exit_slots = args.plan.capacity.exit_slots;
    p.map_slots = args.plan.capacity.map_slots;
    p.warm_up.log2_bound = warm_up_bound();
    return p;
  }
  BackwardWalkParams backward(const Shape& s, Items items, const BackwardArgs& call) const {
    BackwardWalkParams p{};
    p.shape = s;
    p.items = items.rows;
    p.num_items = items.count;
    p.q = row_view(args.in.q);
    p.k = row_view(args.in.k);
    p.d_o = element_view(call.d_o);
    p.prepared = prepared;
    p.activation = activation_of(args.problem, args.in);
    p.dfinal_state = state_view(call.dfinal_state);
    p.entry_slots = args.plan.capacity.entry_slots;
    p.exit_slots = args.plan.capacity.exit_slots;
    p.warm_up.log2_bound = warm_up_bound();
    return p;
  }

  const StageArgs& args;

 private:
  DeviceGuard guard_;

 public:
  const ResidentLayout resident;
  const Prepared prepared;
};

class CudaPortableBackend final : public Backend {
 public:
  const char* name() const override { return "cuda-portable"; }
  std::string description() const override {
    const DeviceFacts& facts = device_facts(current_device());
    if (facts.compute_capability == 0) return "CUDA GPUs from sm_80 on: mma.sync (none here)";
    return fmt::format("CUDA GPUs from sm_80 on: mma.sync; here {}, sm_{}, {} multiprocessors",
                       facts.name, facts.compute_capability, facts.multiprocessors);
  }
  Device::Kind device_kind() const override { return Device::Kind::kCuda; }

  std::optional<std::string> why_not(const Problem& problem) const override {
    if (problem.device.kind != Device::Kind::kCuda) {
      return fmt::format("device: expected cuda, got {}", to_string(problem.device));
    }
    if (problem.operand != DType::kBFloat16) {
      return fmt::format("q, k, v: expected bfloat16, got {}", to_string(problem.operand));
    }
    if (problem.dim_k != problem.dim_v || (problem.dim_k != 64 && problem.dim_k != 128)) {
      return fmt::format(
          "head dims: expected K = V = 64 or 128 (pad smaller ones with zeros), got K = {}, V = {}",
          problem.dim_k, problem.dim_v);
    }
    const DeviceFacts& facts = device_facts(problem.device.index);
    if (facts.compute_capability == 0) {
      return fmt::format("{}: no such device, or no driver", to_string(problem.device));
    }
    if (facts.compute_capability < kOldest) {
      return fmt::format("sm_{}: needs sm_{} or newer", facts.compute_capability, kOldest);
    }
    if (facts.shared_bytes < kLeastShared) {
      return fmt::format("{}: needs {} bytes of shared memory a block, has {}", facts.name,
                         kLeastShared, facts.shared_bytes);
    }
    return std::nullopt;
  }

  std::optional<std::string> why_not_operands(const Operands& in) const override {
    if (auto why_not = why_not_rows("q", in.q)) return why_not;
    if (auto why_not = why_not_rows("k", in.k)) return why_not;
    return why_not_rows("v", in.v);
  }

  int64_t workers() const override {
    return std::max(1, device_facts(current_device()).multiprocessors);
  }

  int64_t prepared_bytes(const Problem& problem, const Plan& plan) const override {
    return PreparedLayout::of(problem, plan).bytes;
  }
  int64_t forward_scratch_bytes(const Problem&, const Plan&) const override { return 0; }
  int64_t backward_scratch_bytes(const Problem& problem, const Plan& plan) const override {
    return BackwardScratch::of(problem, plan).bytes;
  }
  int64_t resident_bytes(const Plan& plan) const override { return ResidentLayout::of(plan).bytes; }
  Status upload(const Plan& plan, void* resident, Stream stream) const override {
    return upload_image(resident_image(plan), resident, stream);
  }

  Status prepare(const StageArgs& args) const override {
    const StageCall call(args);
    PrepareParams p{};
    p.shape = call.shape();
    p.q = row_view(args.in.q);
    p.k = row_view(args.in.k);
    p.g = scalar_view(args.in.g);
    p.beta = scalar_view(args.in.beta);
    p.activation = activation_of(args.problem, args.in);
    p.out = call.prepared;
    p.scale = static_cast<float>(args.problem.scale());
    p.l2norm = args.problem.options.qk_l2norm;
    return launch_prepare(call.kernel(args.plan.capacity.chunks), p);
  }

  Status summarize(const StageArgs& args, const TensorView& initial_state) const override {
    const StageCall call(args);
    ForwardWalkParams p = call.forward(call.shape(), call.exit_items(), initial_state);
    p.part = call.table(Table::kPart);
    p.map = call.table(Table::kMap);
    return launch_forward_summary(
        call.kernel(args.plan.capacity.exit_slots + args.plan.capacity.map_slots), p);
  }

  Status fold(const StageArgs& args, const FoldProgram& program) const override {
    const DeviceGuard guard(args.problem.device.index);
    return cuda::fold(args, program);
  }

  Status run(const StageArgs& args, const TensorView& initial_state, const TensorView& o,
             const TensorView& final_state) const override {
    const StageCall call(args);
    ForwardWalkParams p = call.forward(call.shape(), call.run_items(), initial_state);
    p.entry = call.table(Table::kBoundary);
    p.o = element_view(o);
    p.final_state = state_view(final_state);
    GDN_RETURN_IF_ERROR(launch_forward_run(call.kernel(call.args.plan.capacity.segments), p));
    GDN_RETURN_IF_ERROR(copy_empty_documents(args, initial_state, final_state));
    return zero_slack(args, o);
  }

  Status summarize_backward(const StageArgs& args, const BackwardArgs& call_args) const override {
    const StageCall call(args);
    BackwardWalkParams p = call.backward(call.shape(), call.entry_items(), call_args);
    p.part = call.table(Table::kPart);
    return launch_backward_summary(call.kernel(args.plan.capacity.entry_slots), p);
  }

  Status run_backward(const StageArgs& args, const BackwardArgs& call_args,
                      const void* entry) const override {
    const StageCall call(args);
    const BackwardScratch scratch = BackwardScratch::of(args.problem, args.plan);
    const int key_heads = static_cast<int>(args.problem.heads_qk);
    const int group = static_cast<int>(args.problem.group());
    for (int first = 0; first < key_heads; first += scratch.key_heads) {
      const int count = std::min(scratch.key_heads, key_heads - first);
      GDN_RETURN_IF_ERROR(backward_slice(call, call_args, scratch,
                                         call.shape(first * group, count * group), entry));
    }
    if (args.problem.options.gate_in_kernel) {
      GDN_RETURN_IF_ERROR(sum_over_chunks(args, at<float2>(args.scratch, scratch.sums),
                                          call_args.dA_log, call_args.ddt_bias));
    }
    GDN_RETURN_IF_ERROR(
        copy_empty_documents(args, call_args.dfinal_state, call_args.dinitial_state));
    for (const TensorView* view :
         {&call_args.dq, &call_args.dk, &call_args.dv, &call_args.dg, &call_args.dbeta}) {
      GDN_RETURN_IF_ERROR(zero_slack(args, *view));
    }
    return Status::ok();
  }

 private:
  // States again, their gradients, then dq, dk and dg, for some key heads with their groups.
  static Status backward_slice(const StageCall& call, const BackwardArgs& args,
                               const BackwardScratch& scratch, const Shape& shape,
                               const void* entry) {
    const StageArgs& stage = call.args;
    ForwardWalkParams states = call.forward(shape, call.run_items(), args.initial_state);
    states.entry = static_cast<const float*>(entry);
    states.states = at<uint16_t>(stage.scratch, scratch.states);
    states.e = at<uint16_t>(stage.scratch, scratch.e);
    GDN_RETURN_IF_ERROR(
        launch_forward_states(call.kernel(call.args.plan.capacity.segments), states));

    BackwardWalkParams walk = call.backward(shape, call.run_items(), args);
    walk.exit = call.table(Table::kBoundary);
    walk.e = states.e;
    walk.dstates = at<uint16_t>(stage.scratch, scratch.dstates);
    walk.dv = element_view(args.dv);
    walk.dbeta = scalar_view(args.dbeta);
    walk.dinitial_state = state_view(args.dinitial_state);
    GDN_RETURN_IF_ERROR(
        launch_backward_gradients(call.kernel(call.args.plan.capacity.segments), walk));

    GradientParams p{};
    p.shape = shape;
    p.q = walk.q;
    p.k = walk.k;
    p.d_o = walk.d_o;
    p.dv = walk.dv;
    p.prepared = call.prepared;
    p.activation = walk.activation;
    p.g = scalar_view(stage.in.g);
    p.states = states.states;
    p.dstates = walk.dstates;
    p.e = states.e;
    p.dq = element_view(args.dq);
    p.dk = element_view(args.dk);
    p.dg = scalar_view(args.dg);
    p.sums =
        stage.problem.options.gate_in_kernel ? at<float2>(stage.scratch, scratch.sums) : nullptr;
    p.scale = static_cast<float>(stage.problem.scale());
    p.l2norm = stage.problem.options.qk_l2norm;
    return launch_gradients(call.kernel(stage.plan.capacity.chunks), p);
  }
};

}  // namespace

const Backend& cuda_portable_backend() {
  static const CudaPortableBackend backend;
  return backend;
}

}  // namespace gdn
