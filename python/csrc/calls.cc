#include "calls.h"

#include <torch/csrc/stable/ops.h>

#include <mutex>

namespace gdn_torch {
namespace {

using gdn::ErrorCode;

gdn::Operands operands_of(const Inputs& in) {
  gdn::Operands operands;
  operands.q = rows_view("q", in.q, 2);
  operands.k = rows_view("k", in.k, 2);
  operands.v = rows_view("v", in.v, 2);
  operands.g = rows_view("g", in.g, 1);
  operands.beta = rows_view("beta", in.beta, 1);
  operands.A_log = view_of("A_log", in.A_log);
  operands.dt_bias = view_of("dt_bias", in.dt_bias);
  return operands;
}

// Every operand has a batch dimension, the same one, or none has.
void check_batches(const Inputs& in) {
  const int64_t rank = in.q.dim();
  const auto same = [&](const char* name, const Tensor& t, int64_t less) {
    if (t.dim() != rank - less) {
      raise(ErrorCode::kInvalidArgument, std::string(name) + ": expected " +
                                             std::to_string(rank - less) +
                                             " dimensions beside q's " + std::to_string(rank) +
                                             ", got " + std::to_string(t.dim()));
    }
    if (rank == 4 && (t.size(0) != in.q.size(0) || t.size(1) != in.q.size(1))) {
      raise(ErrorCode::kInvalidArgument,
            std::string(name) + ": expected q's [B, T] = [" + std::to_string(in.q.size(0)) + ", " +
                std::to_string(in.q.size(1)) + "], got [" + std::to_string(t.size(0)) + ", " +
                std::to_string(t.size(1)) + "]");
    }
  };
  same("k", in.k, 0);
  same("v", in.v, 0);
  same("g", in.g, 1);
  same("beta", in.beta, 1);
}

gdn::TensorView present_view(const char* name, const Tensor& tensor) {
  return tensor.numel() > 0 ? view_of(name, tensor) : gdn::TensorView{};
}

std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

Tensor nothing(const gdn::Problem& problem) { return empty({0}, problem.state(), problem.device); }

// The same tensor for every call with this state dtype and device: to make one takes microseconds.
// For what never leaves the package; the functional ops, whose results are traced, make their own.
Tensor shared_nothing(const gdn::Problem& problem) {
  struct Known {
    gdn::DType dtype;
    gdn::Device device;
    Tensor tensor;
  };
  static std::mutex mutex;
  static auto* known = new std::vector<Known>;  // to the end of the process
  const std::lock_guard lock(mutex);
  for (const Known& k : *known) {
    if (k.dtype == problem.state() && k.device == problem.device) return k.tensor;
  }
  known->push_back({problem.state(), problem.device, nothing(problem)});
  return known->back().tensor;
}

// Columns [first, first + heads dim) of `row` as [.., heads, dim].
Tensor columns(const Tensor& row, int64_t first, int64_t heads, int64_t dim) {
  std::vector<int64_t> sizes = sizes_of(row);
  sizes.back() = heads;
  sizes.push_back(dim);
  const auto row_strides = row.strides();
  std::vector<int64_t> strides(row_strides.begin(), row_strides.end());
  strides.back() = dim;
  strides.push_back(1);
  AtenTensorHandle view = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(row.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                     strides.data(), row.storage_offset() + first, &view));
  return Tensor(view);
}

// dq, dk, dv of one packed row.
void packed_gradients(const Inputs& in, const gdn::Problem& p, Gradients& out) {
  std::vector<int64_t> shape = sizes_of(in.q);
  shape.pop_back();
  const int64_t qk = p.heads_qk * p.dim_k;
  shape.back() = 2 * qk + p.heads_v * p.dim_v;
  const Tensor row = empty(shape, p.operand, p.device);
  out.dq = columns(row, 0, p.heads_qk, p.dim_k);
  out.dk = columns(row, qk, p.heads_qk, p.dim_k);
  out.dv = columns(row, 2 * qk, p.heads_v, p.dim_v);
}

// The saved set as the core wants it: a copy where a hook that moved it lost the alignment.
Tensor usable_saved(const Tensor& saved, gdn::Device device) {
  if (reinterpret_cast<uintptr_t>(saved.data_ptr()) % 256 == 0) return saved;
  Tensor aligned = aligned_bytes(saved.numel(), device);
  torch::stable::copy_(aligned, saved);
  return aligned;
}

Tensor workspace_for(const MaybeTensor& given, int64_t bytes, gdn::Device device) {
  if (!given) return aligned_bytes(bytes, device);
  if (!(device_of(*given) == device)) {
    raise(ErrorCode::kInvalidArgument, "workspace: expected on " + gdn::to_string(device) +
                                           ", got " + gdn::to_string(device_of(*given)));
  }
  return *given;
}

std::vector<Tensor> kept_inputs(const Inputs& in) {
  std::vector<Tensor> kept = {in.q, in.k, in.v, in.g, in.beta};
  for (const MaybeTensor* t : {&in.A_log, &in.dt_bias, &in.initial_state}) {
    if (*t) kept.push_back(**t);
  }
  return kept;
}

}  // namespace

gdn::Problem problem_of(const Inputs& in) {
  const gdn::TensorView q = rows_view("q", in.q, 2);
  const gdn::TensorView v = rows_view("v", in.v, 2);
  gdn::Problem problem;
  problem.tokens = q.shape[0];
  problem.heads_qk = q.shape[1];
  problem.dim_k = q.shape[2];
  problem.heads_v = v.shape[1];
  problem.dim_v = v.shape[2];
  problem.operand = q.dtype;
  problem.device = q.device;
  problem.options.scale = in.scale;
  problem.options.qk_l2norm = in.flags & kL2Norm;
  problem.options.gate_in_kernel = in.flags & kGateInKernel;
  problem.options.beta_sigmoid = in.flags & kBetaSigmoid;
  problem.options.allow_neg_eigval = in.flags & kNegEigval;
  return problem;
}

std::shared_ptr<Session> session_for(int64_t session, const MaybeTensor& cu_seqlens,
                                     const Inputs& in) {
  const gdn::TensorView q = rows_view("q", in.q, 2);
  check_batches(in);
  const int64_t batch = in.q.dim() == 4 ? in.q.size(0) : 1;
  if (session == 0 && cu_seqlens && batch != 1) {
    raise(ErrorCode::kInvalidArgument,
          "q: expected batch size 1 with cu_seqlens, got " + std::to_string(batch));
  }
  auto found = session_at(session, cu_seqlens, batch, batch > 0 ? q.shape[0] / batch : 0);
  if (session != 0 && !found->has_capacity() && q.shape[0] != found->local_tokens()) {
    raise(ErrorCode::kInvalidArgument,
          "q, k, v: expected " + std::to_string(found->local_tokens()) +
              " rows, as the partition gives rank " + std::to_string(found->rank()) + ", got " +
              std::to_string(q.shape[0]));
  }
  if (session == 0 && cu_seqlens && found->partition().num_tokens() > q.shape[0]) {
    raise(ErrorCode::kInvalidArgument,
          "cu_seqlens: expected a last entry of at most T = " + std::to_string(q.shape[0]) +
              ", got " + std::to_string(found->partition().num_tokens()));
  }
  return found;
}

Forward start_forward(Session& session, const Inputs& in, const MaybeTensor& workspace,
                      const MaybeTensor& again, bool save, bool want_final, bool functional) {
  const gdn::Problem problem = problem_of(in);
  const auto guard = guard_for(problem.device);
  const bool v_first = in.flags & kStateVFirst;
  auto pending = std::make_shared<Pending>();
  pending->prepared = session.prepare(problem, in.flags);
  const gdn::Stream stream = current_stream(problem.device);
  pending->stream = stream;
  pending->read.emplace(pending->prepared, stream);
  if (session.is_cached()) keep_if_captured(pending->prepared, stream);
  const gdn::Context& context = pending->prepared->context;

  gdn::ForwardArgs args;
  args.in = operands_of(in);
  args.initial_state = state_view("initial_state", in.initial_state, v_first);

  const Tensor none = functional ? nothing(problem) : shared_nothing(problem);
  Forward out{empty_like_shape(in.v), none, none, pending};
  args.o = rows_view("o", out.o, 2);
  if (want_final) {
    const int64_t documents = context.documents();
    const std::vector<int64_t> shape = {documents, problem.heads_v,
                                        v_first ? problem.dim_v : problem.dim_k,
                                        v_first ? problem.dim_k : problem.dim_v};
    // Documents that end on other ranks stay 0 here.
    const bool partial = session.partition().world_size() > 1;
    out.final_state = partial ? zeros(shape, problem.state(), problem.device)
                              : empty(shape, problem.state(), problem.device);
    args.final_state = state_view("final_state", out.final_state, v_first);
  }
  const Tensor block = workspace_for(workspace, pending->prepared->bytes.forward, problem.device);
  pending->blocks = {block};
  pending->kept = kept_inputs(in);
  pending->kept.insert(pending->kept.end(), {out.o, out.final_state});
  if (again) {
    out.saved = usable_saved(*again, problem.device);
    pending->call = value_of(
        gdn::Call::forward_again(context, args, memory_of(block), memory_of(out.saved), stream));
    return out;
  }
  gdn::Memory kept;
  if (save) {
    out.saved = aligned_bytes(pending->prepared->bytes.saved, problem.device);
    pending->blocks.push_back(out.saved);
    kept = memory_of(out.saved);
  }
  pending->call =
      value_of(gdn::Call::forward(context, args, memory_of(block), save ? &kept : nullptr, stream));
  return out;
}

Gradients start_backward(Session& session, const Inputs& in, const MaybeTensor& d_o,
                         const MaybeTensor& dfinal_state, const MaybeTensor& saved,
                         const MaybeTensor& workspace, bool packed, bool functional) {
  const gdn::Problem problem = problem_of(in);
  const auto guard = guard_for(problem.device);
  const bool v_first = in.flags & kStateVFirst;
  auto pending = std::make_shared<Pending>();
  pending->prepared = session.prepare(problem, in.flags);
  const gdn::Stream stream = current_stream(problem.device);
  pending->stream = stream;
  pending->read.emplace(pending->prepared, stream);
  if (session.is_cached()) keep_if_captured(pending->prepared, stream);
  const Prepared& prepared = *pending->prepared;

  gdn::BackwardArgs args;
  args.in = operands_of(in);
  args.initial_state = state_view("initial_state", in.initial_state, v_first);
  args.dfinal_state = state_view("dfinal_state", dfinal_state, v_first);
  pending->kept = kept_inputs(in);
  if (d_o) {
    const Tensor taken = has_rows_view(*d_o, 2) ? *d_o : torch::stable::contiguous(*d_o);
    pending->kept.push_back(taken);
    args.d_o = rows_view("do", taken, 2);
  }
  if (dfinal_state) pending->kept.push_back(*dfinal_state);

  Gradients out;
  if (packed) {
    packed_gradients(in, problem, out);
  } else {
    out.dq = empty_like_shape(in.q);
    out.dk = empty_like_shape(in.k);
    out.dv = empty_like_shape(in.v);
  }
  out.dg = empty_like_shape(in.g);
  out.dbeta = empty_like_shape(in.beta);
  const auto like = [&](const MaybeTensor& operand) {
    if (operand) return empty_like_shape(*operand);
    return functional ? nothing(problem) : shared_nothing(problem);
  };
  out.dA_log = like(in.A_log);
  out.ddt_bias = like(in.dt_bias);
  out.dinitial_state = like(in.initial_state);
  if (in.initial_state && session.partition().world_size() > 1) {
    torch::stable::zero_(out.dinitial_state);
  }
  args.dq = rows_view("dq", out.dq, 2);
  args.dk = rows_view("dk", out.dk, 2);
  args.dv = rows_view("dv", out.dv, 2);
  args.dg = rows_view("dg", out.dg, 1);
  args.dbeta = rows_view("dbeta", out.dbeta, 1);
  args.dA_log = present_view("dA_log", out.dA_log);
  args.ddt_bias = present_view("ddt_bias", out.ddt_bias);
  if (in.initial_state) {
    args.dinitial_state = state_view("dinitial_state", out.dinitial_state, v_first);
  }
  for (const Tensor* t : {&out.dq, &out.dk, &out.dv, &out.dg, &out.dbeta, &out.dA_log,
                          &out.ddt_bias, &out.dinitial_state}) {
    pending->kept.push_back(*t);
  }

  const int64_t bytes = saved ? prepared.bytes.backward : prepared.bytes.recompute;
  const Tensor block = workspace_for(workspace, bytes, problem.device);
  pending->blocks = {block};
  gdn::Memory kept;
  if (saved) {
    pending->blocks.push_back(usable_saved(*saved, problem.device));
    kept = memory_of(pending->blocks.back());
  }
  pending->call = value_of(gdn::Call::backward(prepared.context, args, memory_of(block),
                                               saved ? &kept : nullptr, stream));
  out.pending = pending;
  return out;
}

Registry<Pending>& pendings() {
  static auto* registry = new Registry<Pending>;
  return *registry;
}

std::shared_ptr<Pending> pending_at(int64_t handle) {
  auto pending = pendings().get(handle);
  if (!pending) raise(ErrorCode::kInternal, "call: expected one that is under way");
  return pending;
}

void finish(Pending& pending) {
  const auto guard = guard_for(pending.prepared->context.problem().device);
  check(pending.call->advance(pending.message));
  if (pending.message.kind != gdn::Message::Kind::kNone) {
    raise(ErrorCode::kInvalidArgument,
          "ctx: documents cross ranks, so the call needs the context's group");
  }
  note_path(*pending.prepared);
}

}  // namespace gdn_torch
