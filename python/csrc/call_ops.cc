// Ops that compute. `chunk` and `chunk_backward` are functional and need no session (torch.compile
// traces them); `forward` and `backward` take every option; the `_begin` forms pause at every
// collective, which Python does between `call_advance`s.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "calls.h"

namespace gdn_torch {
namespace {

using ForwardResult = std::tuple<Tensor, Tensor, Tensor>;
using ForwardBegun = std::tuple<Tensor, Tensor, Tensor, int64_t>;
using BackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using BackwardBegun =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int64_t>;

#define GDN_INPUTS                                                                        \
  const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &g, const Tensor &beta, \
      const MaybeTensor &A_log, const MaybeTensor &dt_bias, const MaybeTensor &initial_state
#define GDN_MADE_INPUTS \
  Inputs { q, k, v, g, beta, A_log, dt_bias, initial_state, scale, flags }

ForwardResult forward(int64_t session, const MaybeTensor& cu_seqlens, GDN_INPUTS,
                      std::optional<double> scale, int64_t flags, const MaybeTensor& workspace,
                      const MaybeTensor& again, bool save, bool want_final) {
  const Inputs in = GDN_MADE_INPUTS;
  const auto s = session_for(session, cu_seqlens, in);
  Forward out = start_forward(*s, in, workspace, again, save, want_final, false);
  finish(*out.pending);
  return {out.o, out.final_state, out.saved};
}

ForwardBegun forward_begin(int64_t session, GDN_INPUTS, std::optional<double> scale, int64_t flags,
                           const MaybeTensor& workspace, const MaybeTensor& again, bool save,
                           bool want_final) {
  const Inputs in = GDN_MADE_INPUTS;
  const auto s = session_for(session, std::nullopt, in);
  Forward out = start_forward(*s, in, workspace, again, save, want_final, false);
  return {out.o, out.final_state, out.saved, pendings().add(out.pending)};
}

BackwardResult tensors_of(const Gradients& d) {
  return {d.dq, d.dk, d.dv, d.dg, d.dbeta, d.dA_log, d.ddt_bias, d.dinitial_state};
}

BackwardResult backward(int64_t session, const MaybeTensor& cu_seqlens, GDN_INPUTS,
                        const MaybeTensor& d_o, const MaybeTensor& dfinal_state,
                        const MaybeTensor& saved, std::optional<double> scale, int64_t flags,
                        const MaybeTensor& workspace, bool packed) {
  const Inputs in = GDN_MADE_INPUTS;
  const auto s = session_for(session, cu_seqlens, in);
  const Gradients out = start_backward(*s, in, d_o, dfinal_state, saved, workspace, packed, false);
  finish(*out.pending);
  return tensors_of(out);
}

BackwardBegun backward_begin(int64_t session, GDN_INPUTS, const MaybeTensor& d_o,
                             const MaybeTensor& dfinal_state, const MaybeTensor& saved,
                             std::optional<double> scale, int64_t flags,
                             const MaybeTensor& workspace, bool packed) {
  const Inputs in = GDN_MADE_INPUTS;
  const auto s = session_for(session, std::nullopt, in);
  const Gradients out = start_backward(*s, in, d_o, dfinal_state, saved, workspace, packed, false);
  return std::tuple_cat(tensors_of(out), std::make_tuple(pendings().add(out.pending)));
}

std::tuple<Tensor, Tensor> chunk(GDN_INPUTS, const MaybeTensor& cu_seqlens,
                                 std::optional<double> scale, int64_t flags, bool want_final) {
  const Inputs in = GDN_MADE_INPUTS;
  const auto s = session_for(0, cu_seqlens, in);
  Forward out = start_forward(*s, in, std::nullopt, std::nullopt, false, want_final, true);
  finish(*out.pending);
  return {out.o, out.final_state};
}

BackwardResult chunk_backward(GDN_INPUTS, const MaybeTensor& cu_seqlens, const MaybeTensor& d_o,
                              const MaybeTensor& dfinal_state, std::optional<double> scale,
                              int64_t flags) {
  const Inputs in = GDN_MADE_INPUTS;
  const auto s = session_for(0, cu_seqlens, in);
  const Gradients out =
      start_backward(*s, in, d_o, dfinal_state, std::nullopt, std::nullopt, false, true);
  finish(*out.pending);
  return tensors_of(out);
}

// The part of the call's memory that a message lies in.
Tensor region(const Pending& pending, const void* data, int64_t bytes) {
  for (const Tensor& block : pending.blocks) {
    const auto* base = static_cast<const std::byte*>(block.data_ptr());
    const auto* at = static_cast<const std::byte*>(data);
    if (at >= base && at + bytes <= base + block.numel()) {
      return torch::stable::narrow(const_cast<Tensor&>(block), 0, at - base, bytes);
    }
  }
  if (bytes == 0) return aligned_bytes(0, pending.prepared->context.problem().device);
  raise(gdn::ErrorCode::kInternal, "message: outside of the call's memory");
}

int64_t sum_of(const std::vector<int64_t>& values) {
  int64_t sum = 0;
  for (int64_t v : values) sum += v;
  return sum;
}

// (kind, send bytes per rank, receive bytes per rank), what to send, where to receive. Kind 0:
// done, and the handle is gone; 1: all-to-all; 2: all-gather.
std::tuple<Tensor, Tensor, Tensor> call_advance(int64_t handle) {
  const auto pending = pending_at(handle);
  const auto guard = guard_for(pending->prepared->context.problem().device);
  const gdn::Status status = pending->call->advance(pending->message);
  const gdn::Message& message = pending->message;
  if (!status || message.kind == gdn::Message::Kind::kNone) pendings().take(handle);
  check(status);
  std::vector<int64_t> info = {static_cast<int64_t>(message.kind)};
  info.insert(info.end(), message.send_bytes.begin(), message.send_bytes.end());
  info.insert(info.end(), message.receive_bytes.begin(), message.receive_bytes.end());
  const Tensor table = int64_tensor(info, {static_cast<int64_t>(info.size())});
  if (message.kind == gdn::Message::Kind::kNone) {
    note_path(*pending->prepared);
    const Tensor none = aligned_bytes(0, {});
    return {table, none, none};
  }
  const bool gather = message.kind == gdn::Message::Kind::kAllGather;
  const auto rank = static_cast<size_t>(pending->prepared->context.rank());
  const int64_t send = gather ? message.receive_bytes[rank] : sum_of(message.send_bytes);
  return {table, region(*pending, message.send, send),
          region(*pending, message.receive, sum_of(message.receive_bytes))};
}

void call_free(int64_t handle) { pendings().take(handle); }

// (forward, backward, recomputing backward workspace, saved set, sent forward, sent backward,
//  digest, 1 if the forward exchanges) for the shapes of a call.
Tensor query(int64_t session, int64_t tokens, int64_t heads_qk, int64_t heads_v, int64_t dim_k,
             int64_t dim_v, const Tensor& like, std::optional<double> scale, int64_t flags) {
  const auto s = session_at(session, std::nullopt, 1, tokens);
  gdn::Problem p;
  p.tokens = tokens;
  p.heads_qk = heads_qk;
  p.heads_v = heads_v;
  p.dim_k = dim_k;
  p.dim_v = dim_v;
  p.operand = dtype_of("dtype", like);
  p.device = device_of(like);
  p.options.scale = scale;
  p.options.qk_l2norm = flags & kL2Norm;
  p.options.gate_in_kernel = flags & kGateInKernel;
  p.options.beta_sigmoid = flags & kBetaSigmoid;
  p.options.allow_neg_eigval = flags & kNegEigval;
  const auto prepared = s->prepare(p, flags);
  const Bytes& b = prepared->bytes;
  const gdn::Context& c = prepared->context;
  return int64_tensor(
      {b.forward, b.backward, b.recompute, b.saved, c.comm_bytes(false), c.comm_bytes(true),
       static_cast<int64_t>(c.digest()), c.plan().exchange != gdn::ExchangeKind::kNone},
      {8});
}

std::string path() { return last_path(); }

// Lines "name<tab>description<tab>why it does not take bf16 rows of 128 on the device, or nothing".
std::string backend_list(const Tensor& like) {
  gdn::Problem p;
  p.tokens = 64;
  p.heads_qk = p.heads_v = 1;
  p.dim_k = p.dim_v = 128;
  p.operand = gdn::DType::kBFloat16;
  p.device = device_of(like);
  std::string lines;
  for (const gdn::Backend* backend : gdn::backends()) {
    lines += std::string(backend->name()) + "\t" + backend->description() + "\t" +
             backend->why_not(p).value_or("") + "\n";
  }
  return lines;
}

std::string library_version() { return gdn::version(); }

}  // namespace

#define GDN_SCHEMA_INPUTS                                                \
  "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, " \
  "Tensor? dt_bias, Tensor? initial_state"
#define GDN_SCHEMA_GRADIENTS "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"

STABLE_TORCH_LIBRARY(gdn_kcp, m) {
  m.def("forward(int session, Tensor? cu_seqlens, " GDN_SCHEMA_INPUTS
        ", float? scale, int flags, Tensor? workspace, Tensor? again, bool save, "
        "bool want_final) -> (Tensor, Tensor, Tensor)");
  m.def("forward_begin(int session, " GDN_SCHEMA_INPUTS
        ", float? scale, int flags, Tensor? workspace, Tensor? again, bool save, "
        "bool want_final) -> (Tensor, Tensor, Tensor, int)");
  m.def("backward(int session, Tensor? cu_seqlens, " GDN_SCHEMA_INPUTS
        ", Tensor? d_o, Tensor? dfinal_state, Tensor? saved, float? scale, int flags, "
        "Tensor? workspace, bool packed) -> (" GDN_SCHEMA_GRADIENTS ")");
  m.def("backward_begin(int session, " GDN_SCHEMA_INPUTS
        ", Tensor? d_o, Tensor? dfinal_state, Tensor? saved, float? scale, int flags, "
        "Tensor? workspace, bool packed) -> (" GDN_SCHEMA_GRADIENTS ", int)");
  m.def("chunk(" GDN_SCHEMA_INPUTS
        ", Tensor? cu_seqlens, float? scale, int flags, bool want_final) -> (Tensor, Tensor)");
  m.def("chunk_backward(" GDN_SCHEMA_INPUTS
        ", Tensor? cu_seqlens, Tensor? d_o, Tensor? dfinal_state, float? scale, int flags) -> "
        "(" GDN_SCHEMA_GRADIENTS ")");
  m.def("call_advance(int call) -> (Tensor, Tensor, Tensor)");
  m.def("call_free(int call) -> ()");
  m.def(
      "query(int session, int tokens, int heads_qk, int heads_v, int dim_k, int dim_v, "
      "Tensor like, float? scale, int flags) -> Tensor");
  m.def("last_path() -> str");
  m.def("backend_list(Tensor like) -> str");
  m.def("library_version() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(gdn_kcp, CompositeExplicitAutograd, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("forward_begin", TORCH_BOX(&forward_begin));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("backward_begin", TORCH_BOX(&backward_begin));
  m.impl("chunk", TORCH_BOX(&chunk));
  m.impl("chunk_backward", TORCH_BOX(&chunk_backward));
  m.impl("call_advance", TORCH_BOX(&call_advance));
  m.impl("call_free", TORCH_BOX(&call_free));
  m.impl("query", TORCH_BOX(&query));
  m.impl("last_path", TORCH_BOX(&path));
  m.impl("backend_list", TORCH_BOX(&backend_list));
  m.impl("library_version", TORCH_BOX(&library_version));
}

}  // namespace gdn_torch
