#include "timing.h"

#include <chrono>

namespace gdn::cli {
namespace {

// Products of one chunk in units of u, by which dims they grow with (K, V and K V; each 1 at 128).
struct Products {
  double k, v, kv;
};
// K K^T, Q K^T | T Y, P Vd | K S, Q S, K^T Vd
constexpr Products kForward{4, 4, 12};
// Q K^T, K K^T, dP K, dP^T Q, N K | P^T dO, T^T dVd, dO Vd^T, dY Vd^T | six state products
constexpr Products kBackward{10, 8, 24};

double flop(const Products& products, int64_t dim_k, int64_t dim_v) {
  constexpr double u = 2.0 * kChunk * kChunk * kChunk;
  const double k = static_cast<double>(dim_k) / 128, v = static_cast<double>(dim_v) / 128;
  return u * (products.k * k + products.v * v + products.kv * k * v);
}

HostTensor like(const TensorView& view) {
  HostTensor tensor;
  if (!view.present()) return tensor;
  tensor.view = view;
  tensor.buffer = AlignedBuffer(view.numel() * size_of(view.dtype));
  tensor.view.data = tensor.buffer.data();
  return tensor;
}

struct Block {
  explicit Block(int64_t bytes) : buffer(bytes) {}
  Memory memory() const { return {buffer.data(), buffer.bytes()}; }
  AlignedBuffer buffer;
};

}  // namespace

double forward_flop(int64_t dim_k, int64_t dim_v) { return flop(kForward, dim_k, dim_v); }

double training_flop(int64_t dim_k, int64_t dim_v) {
  return flop(kForward, dim_k, dim_v) + flop(kBackward, dim_k, dim_v);
}

Result<Timing> time_batch(const Batch& batch, const ContextOptions& options, int repetitions,
                          bool keep_saved, const std::function<void()>& before) {
  const Result<Partition> partition = Partition::make(batch.cu_seqlens, 1, Layout::kContiguous);
  if (!partition) return partition.status();
  const auto communicator = make_single_communicator();
  Result<Context> made = Context::make(*partition, *communicator, batch.problem, options);
  if (!made) return made.status();
  Context& context = *made;
  const Block resident(context.resident_bytes());
  GDN_RETURN_IF_ERROR(context.upload(resident.memory()));

  const bool training = batch.d_o.present() || batch.dfinal_state.present();
  Timing timing;
  timing.backend = context.backend().name();
  timing.chunk_heads = context.plan().num_chunks * batch.problem.heads_v;
  timing.saved_bytes = context.saved_bytes();
  timing.forward_workspace_bytes = context.forward_workspace_bytes();
  timing.backward_workspace_bytes = context.backward_workspace_bytes(keep_saved);
  const Block saved(training && keep_saved ? timing.saved_bytes : 0);
  const Block forward_space(timing.forward_workspace_bytes);
  const Block backward_space(training ? timing.backward_workspace_bytes : 0);

  const HostTensor o = like(batch.v.view);
  const HostTensor dq = like(batch.q.view), dk = like(batch.k.view), dv = like(batch.v.view);
  const HostTensor dg = like(batch.g.view), dbeta = like(batch.beta.view);
  const HostTensor dA_log = like(batch.A_log.view), ddt_bias = like(batch.dt_bias.view);
  const HostTensor dinitial = like(batch.initial_state.view);
  ForwardArgs forward_args;
  forward_args.in = batch.operands();
  forward_args.initial_state = batch.initial_state.view;
  forward_args.o = o.view;
  BackwardArgs backward_args;
  backward_args.in = batch.operands();
  backward_args.initial_state = batch.initial_state.view;
  backward_args.d_o = batch.d_o.view;
  backward_args.dfinal_state = batch.dfinal_state.view;
  backward_args.dq = dq.view;
  backward_args.dk = dk.view;
  backward_args.dv = dv.view;
  backward_args.dg = dg.view;
  backward_args.dbeta = dbeta.view;
  backward_args.dA_log = dA_log.view;
  backward_args.ddt_bias = ddt_bias.view;
  backward_args.dinitial_state = dinitial.view;

  const auto timed = [&](bool with_backward, double& seconds) -> Status {
    if (before) before();
    const auto start = std::chrono::steady_clock::now();
    Memory kept = saved.memory();
    const bool keep = with_backward && keep_saved;
    GDN_RETURN_IF_ERROR(
        forward(context, forward_args, forward_space.memory(), keep ? &kept : nullptr));
    if (with_backward) {
      GDN_RETURN_IF_ERROR(
          backward(context, backward_args, backward_space.memory(), keep ? &kept : nullptr));
    }
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return Status::ok();
  };
  // The first call of each kind warms caches and page tables and is not kept.
  for (int i = -1; i < repetitions; ++i) {
    double seconds = 0;
    GDN_RETURN_IF_ERROR(timed(false, seconds));
    if (i >= 0) timing.forward_seconds.push_back(seconds);
    if (!training) continue;
    GDN_RETURN_IF_ERROR(timed(true, seconds));
    if (i >= 0) timing.training_seconds.push_back(seconds);
  }
  return timing;
}

}  // namespace gdn::cli
