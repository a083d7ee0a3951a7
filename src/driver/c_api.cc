// gdn_c.h over the C++ interface: converts views, catches what must not cross a C boundary.
#include <fmt/format.h>

#include "base/guarded.h"
#include "gdn/gdn.h"
#include "gdn/gdn_c.h"

struct gdn_partition {
  gdn::Partition value;
};
struct gdn_communicator {
  std::unique_ptr<gdn::Communicator> value;
};
struct gdn_context {
  gdn::Context value;
};

namespace {

using gdn::ErrorCode;
using gdn::Status;

thread_local std::string last_error;

gdn_status report(const Status& status) {
  last_error = status.message();
  return static_cast<gdn_status>(status.code());
}

Status invalid(std::string message) { return {ErrorCode::kInvalidArgument, std::move(message)}; }

// A C function's result: the status of `body`, reported.
template <typename Body>
gdn_status guarded(Body body) {
  return report(gdn::guarded(body));
}

Status convert(DLDataType from, const char* name, gdn::DType& to) {
  if (from.lanes == 1) {
    if (from.code == kDLBfloat && from.bits == 16) return to = gdn::DType::kBFloat16, Status::ok();
    if (from.code == kDLFloat && from.bits == 32) return to = gdn::DType::kFloat32, Status::ok();
    if (from.code == kDLFloat && from.bits == 64) return to = gdn::DType::kFloat64, Status::ok();
    if (from.code == kDLInt && from.bits == 32) return to = gdn::DType::kInt32, Status::ok();
    if (from.code == kDLInt && from.bits == 64) return to = gdn::DType::kInt64, Status::ok();
  }
  return invalid(
      fmt::format("{}: expected bfloat16, float32, float64, int32 or int64, got DLPack "
                  "code {}, {} bits, {} lanes",
                  name, int(from.code), int(from.bits), int(from.lanes)));
}

Status convert(DLDevice from, const char* name, gdn::Device& to) {
  if (from.device_type == kDLCPU) return to = {gdn::Device::Kind::kCpu, 0}, Status::ok();
  if (from.device_type == kDLCUDA) {
    return to = {gdn::Device::Kind::kCuda, from.device_id}, Status::ok();
  }
  return invalid(fmt::format("{}: expected a CPU or CUDA tensor, got DLPack device {}", name,
                             int(from.device_type)));
}

Status convert(const DLTensor* from, const char* name, gdn::TensorView& to) {
  to = {};
  if (from == nullptr) return Status::ok();
  if (from->ndim < 1 || from->ndim > gdn::TensorView::kMaxRank) {
    return invalid(fmt::format("{}: expected 1 to {} dimensions, got {}", name,
                               gdn::TensorView::kMaxRank, from->ndim));
  }
  GDN_RETURN_IF_ERROR(convert(from->dtype, name, to.dtype));
  GDN_RETURN_IF_ERROR(convert(from->device, name, to.device));
  to.rank = from->ndim;
  to.data = static_cast<std::byte*>(from->data) + from->byte_offset;
  if (from->data == nullptr) to.data = nullptr;
  int64_t step = 1;
  for (int i = from->ndim - 1; i >= 0; --i) {
    to.shape[i] = from->shape[i];
    to.stride[i] = from->strides ? from->strides[i] : step;
    step *= from->shape[i];
  }
  return Status::ok();
}

Status convert(const gdn_operands* from, gdn::Operands& to) {
  if (from == nullptr) return invalid("in: expected operands, got NULL");
  GDN_RETURN_IF_ERROR(convert(from->q, "q", to.q));
  GDN_RETURN_IF_ERROR(convert(from->k, "k", to.k));
  GDN_RETURN_IF_ERROR(convert(from->v, "v", to.v));
  GDN_RETURN_IF_ERROR(convert(from->g, "g", to.g));
  GDN_RETURN_IF_ERROR(convert(from->beta, "beta", to.beta));
  GDN_RETURN_IF_ERROR(convert(from->A_log, "A_log", to.A_log));
  return convert(from->dt_bias, "dt_bias", to.dt_bias);
}

Status convert(const gdn_gradients* from, gdn::BackwardArgs& to) {
  if (from == nullptr) return invalid("out: expected gradients, got NULL");
  GDN_RETURN_IF_ERROR(convert(from->dq, "dq", to.dq));
  GDN_RETURN_IF_ERROR(convert(from->dk, "dk", to.dk));
  GDN_RETURN_IF_ERROR(convert(from->dv, "dv", to.dv));
  GDN_RETURN_IF_ERROR(convert(from->dg, "dg", to.dg));
  GDN_RETURN_IF_ERROR(convert(from->dbeta, "dbeta", to.dbeta));
  GDN_RETURN_IF_ERROR(convert(from->dA_log, "dA_log", to.dA_log));
  GDN_RETURN_IF_ERROR(convert(from->ddt_bias, "ddt_bias", to.ddt_bias));
  return convert(from->dinitial_state, "dinitial_state", to.dinitial_state);
}

Status need(const void* pointer, const char* name) {
  return pointer ? Status::ok() : invalid(fmt::format("{}: expected a pointer, got NULL", name));
}

Status need_rank(const gdn_partition* partition, int rank) {
  GDN_RETURN_IF_ERROR(need(partition, "partition"));
  if (rank >= 0 && rank < partition->value.world_size()) return Status::ok();
  return invalid(
      fmt::format("rank: expected 0 to {}, got {}", partition->value.world_size() - 1, rank));
}

}  // namespace

extern "C" {

const char* gdn_version(void) { return gdn::version(); }
const char* gdn_last_error(void) { return last_error.c_str(); }

gdn_status gdn_partition_create(const int64_t* cu_seqlens, int64_t documents, int world_size,
                                const char* layout, gdn_partition** out) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need(cu_seqlens, "cu_seqlens"));
    GDN_RETURN_IF_ERROR(need(layout, "layout"));
    GDN_RETURN_IF_ERROR(need(out, "out"));
    if (documents < 0) return invalid(fmt::format("documents: expected >= 0, got {}", documents));
    auto parsed = gdn::parse_layout(layout);
    if (!parsed) return parsed.status();
    auto made =
        gdn::Partition::make({cu_seqlens, static_cast<size_t>(documents) + 1}, world_size, *parsed);
    if (!made) return made.status();
    *out = new gdn_partition{*made};
    return Status::ok();
  });
}

gdn_status gdn_partition_create_explicit(const int64_t* cu_seqlens, int64_t documents,
                                         int world_size, const gdn_fragment* fragments,
                                         const int64_t* fragment_counts, gdn_partition** out) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need(cu_seqlens, "cu_seqlens"));
    GDN_RETURN_IF_ERROR(need(fragment_counts, "fragment_counts"));
    GDN_RETURN_IF_ERROR(need(out, "out"));
    if (documents < 0) return invalid(fmt::format("documents: expected >= 0, got {}", documents));
    if (world_size < 1)
      return invalid(fmt::format("world_size: expected >= 1, got {}", world_size));
    std::vector<std::vector<gdn::Fragment>> table(static_cast<size_t>(world_size));
    int64_t at = 0;
    for (int r = 0; r < world_size; ++r) {
      for (int64_t i = 0; i < fragment_counts[r]; ++i, ++at) {
        GDN_RETURN_IF_ERROR(need(fragments, "fragments"));
        table[r].push_back({fragments[at].doc, fragments[at].offset, fragments[at].length});
      }
    }
    auto made = gdn::Partition::make_explicit({cu_seqlens, static_cast<size_t>(documents) + 1},
                                              std::move(table));
    if (!made) return made.status();
    *out = new gdn_partition{*made};
    return Status::ok();
  });
}

void gdn_partition_destroy(gdn_partition* partition) { delete partition; }

int64_t gdn_partition_fragments(const gdn_partition* partition, int rank) {
  const Status status = need_rank(partition, rank);
  if (!status) return report(status), -1;
  return static_cast<int64_t>(partition->value.fragments(rank).size());
}

gdn_status gdn_partition_get_fragments(const gdn_partition* partition, int rank,
                                       gdn_fragment* out) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need_rank(partition, rank));
    GDN_RETURN_IF_ERROR(need(out, "out"));
    for (const gdn::Fragment& f : partition->value.fragments(rank)) {
      *out++ = {f.doc, f.offset, f.length};
    }
    return Status::ok();
  });
}

int64_t gdn_partition_local_tokens(const gdn_partition* partition, int rank) {
  const Status status = need_rank(partition, rank);
  if (!status) return report(status), -1;
  return partition->value.local_tokens(rank);
}

gdn_status gdn_partition_token_indices(const gdn_partition* partition, int rank, int64_t* out) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need_rank(partition, rank));
    GDN_RETURN_IF_ERROR(need(out, "out"));
    for (int64_t row : partition->value.token_indices(rank)) *out++ = row;
    return Status::ok();
  });
}

gdn_status gdn_communicator_create_single(gdn_communicator** out) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need(out, "out"));
    *out = new gdn_communicator{gdn::make_single_communicator()};
    return Status::ok();
  });
}

gdn_status gdn_communicator_create_threads(int world_size, int64_t timeout_ms,
                                           gdn_communicator** out) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need(out, "out"));
    if (world_size < 1)
      return invalid(fmt::format("world_size: expected >= 1, got {}", world_size));
    if (timeout_ms < 1)
      return invalid(fmt::format("timeout_ms: expected >= 1, got {}", timeout_ms));
    auto ranks = gdn::make_thread_communicators(world_size, std::chrono::milliseconds(timeout_ms));
    for (auto& rank : ranks) *out++ = new gdn_communicator{std::move(rank)};
    return Status::ok();
  });
}

void gdn_communicator_destroy(gdn_communicator* communicator) { delete communicator; }

gdn_status gdn_context_create(const gdn_partition* partition, gdn_communicator* communicator,
                              const gdn_problem* problem, const char* backend, int64_t tile,
                              gdn_context** out) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need(partition, "partition"));
    GDN_RETURN_IF_ERROR(need(communicator, "communicator"));
    GDN_RETURN_IF_ERROR(need(problem, "problem"));
    GDN_RETURN_IF_ERROR(need(out, "out"));
    gdn::Problem p;
    p.tokens = problem->tokens;
    p.heads_qk = problem->heads_qk;
    p.heads_v = problem->heads_v;
    p.dim_k = problem->dim_k;
    p.dim_v = problem->dim_v;
    GDN_RETURN_IF_ERROR(convert(problem->operand, "problem.operand", p.operand));
    GDN_RETURN_IF_ERROR(convert(problem->device, "problem.device", p.device));
    if (problem->scale != 0) p.options.scale = problem->scale;
    p.options.qk_l2norm = problem->qk_l2norm != 0;
    p.options.gate_in_kernel = problem->gate_in_kernel != 0;
    p.options.beta_sigmoid = problem->beta_sigmoid != 0;
    p.options.allow_neg_eigval = problem->allow_neg_eigval != 0;
    gdn::ContextOptions options;
    if (backend) options.backend = backend;
    options.tile = tile;
    options.max_tokens = problem->max_tokens;
    options.max_fragments = problem->max_fragments;
    options.keep_prepared = problem->keep_prepared != 0;
    auto made = gdn::Context::make(partition->value, *communicator->value, p, options);
    if (!made) return made.status();
    *out = new gdn_context{std::move(*made)};
    return Status::ok();
  });
}

void gdn_context_destroy(gdn_context* context) { delete context; }

const char* gdn_context_backend(const gdn_context* context) {
  return context->value.backend().name();
}

int64_t gdn_context_resident_bytes(const gdn_context* context) {
  return context->value.resident_bytes();
}

gdn_status gdn_context_upload(gdn_context* context, void* resident, int64_t bytes, void* stream) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need(context, "context"));
    return context->value.upload({resident, bytes}, {stream});
  });
}

gdn_status gdn_context_refill(gdn_context* context, const gdn_partition* partition, void* stream) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need(context, "context"));
    GDN_RETURN_IF_ERROR(need(partition, "partition"));
    return context->value.refill(partition->value, {stream});
  });
}

int64_t gdn_context_documents(const gdn_context* context) { return context->value.documents(); }

int64_t gdn_context_forward_workspace_bytes(const gdn_context* context) {
  return context->value.forward_workspace_bytes();
}

int64_t gdn_context_backward_workspace_bytes(const gdn_context* context, int have_saved) {
  return context->value.backward_workspace_bytes(have_saved != 0);
}

int64_t gdn_context_saved_bytes(const gdn_context* context) { return context->value.saved_bytes(); }

gdn_status gdn_forward(const gdn_context* context, const gdn_operands* in,
                       const DLTensor* initial_state, DLTensor* o, DLTensor* final_state,
                       void* workspace, int64_t workspace_bytes, void* saved, int64_t saved_bytes,
                       void* stream) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need(context, "context"));
    gdn::ForwardArgs args;
    Status local = convert(in, args.in);
    if (local) local = convert(initial_state, "initial_state", args.initial_state);
    if (local) local = convert(o, "o", args.o);
    if (local) local = convert(final_state, "final_state", args.final_state);
    GDN_RETURN_IF_ERROR(context->value.communicator()->agree(local));
    const gdn::Memory keep{saved, saved_bytes};
    return gdn::forward(context->value, args, {workspace, workspace_bytes}, saved ? &keep : nullptr,
                        {stream});
  });
}

gdn_status gdn_backward(const gdn_context* context, const gdn_operands* in,
                        const DLTensor* initial_state, const DLTensor* d_o,
                        const DLTensor* dfinal_state, const gdn_gradients* out, void* workspace,
                        int64_t workspace_bytes, const void* saved, int64_t saved_bytes,
                        void* stream) {
  return guarded([&]() -> Status {
    GDN_RETURN_IF_ERROR(need(context, "context"));
    gdn::BackwardArgs args;
    Status local = convert(in, args.in);
    if (local) local = convert(initial_state, "initial_state", args.initial_state);
    if (local) local = convert(d_o, "do", args.d_o);
    if (local) local = convert(dfinal_state, "dfinal_state", args.dfinal_state);
    if (local) local = convert(out, args);
    GDN_RETURN_IF_ERROR(context->value.communicator()->agree(local));
    const gdn::Memory kept{const_cast<void*>(saved), saved_bytes};
    return gdn::backward(context->value, args, {workspace, workspace_bytes},
                         saved ? &kept : nullptr, {stream});
  });
}

}  // extern "C"
