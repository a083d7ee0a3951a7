#include "check/run_batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>

#include "base/guarded.h"

namespace gdn {
namespace {

// Rows `index` of a row-major [T, ...] tensor and NaN up to `rows`, or back into them.
HostTensor take_rows(const HostTensor& from, std::span<const int64_t> index, int64_t rows) {
  if (!from.present()) return {};
  HostTensor to;
  to.view = from.view;
  to.view.shape[0] = rows;
  const int64_t row = from.view.stride[0] * size_of(from.view.dtype);
  to.buffer = AlignedBuffer(row * rows);
  to.view.data = to.buffer.data();
  if (to.buffer.bytes() > 0) {
    std::memset(to.view.data, 0xff, static_cast<size_t>(to.buffer.bytes()));
  }
  for (size_t i = 0; i < index.size(); ++i) {
    std::memcpy(to.as<std::byte>() + int64_t(i) * row, from.as<std::byte>() + index[i] * row,
                static_cast<size_t>(row));
  }
  return to;
}

void put_rows(const HostTensor& from, std::span<const int64_t> index, HostTensor& to) {
  const int64_t row = to.view.stride[0] * size_of(to.view.dtype);
  for (size_t i = 0; i < index.size(); ++i) {
    std::memcpy(to.as<std::byte>() + index[i] * row, from.as<std::byte>() + int64_t(i) * row,
                static_cast<size_t>(row));
  }
}

// A tensor like `view`, every byte 0xff (NaN), so that an element nobody writes shows.
HostTensor poisoned(const TensorView& view) {
  if (!view.present()) return {};
  HostTensor tensor;
  int64_t step = 1;
  tensor.view = view;
  for (int i = view.rank - 1; i >= 0; --i) {
    tensor.view.stride[i] = step;
    step *= view.shape[i];
  }
  tensor.buffer = AlignedBuffer(step * size_of(view.dtype));
  tensor.view.data = tensor.buffer.data();
  if (tensor.buffer.bytes() > 0) {
    std::memset(tensor.view.data, 0xff, static_cast<size_t>(tensor.buffer.bytes()));
  }
  return tensor;
}

struct PoisonedMemory {
  explicit PoisonedMemory(int64_t bytes) : buffer(bytes) {
    if (bytes > 0) std::memset(buffer.data(), 0xff, static_cast<size_t>(bytes));
  }
  Memory memory() const { return {buffer.data(), buffer.bytes()}; }
  AlignedBuffer buffer;
};

// Rows that no rank holds read as the contract says: 0.
void zero_rows_from(int64_t first, HostTensor& to) {
  if (!to.present()) return;
  const int64_t row = to.view.stride[0] * size_of(to.view.dtype);
  std::memset(to.as<std::byte>() + first * row, 0,
              static_cast<size_t>((to.view.shape[0] - first) * row));
}

// One rank's operands, results and what it was told.
struct Rank {
  Batch local;
  BatchResult result;
  std::vector<int64_t> rows;  // global row of each local row
  Status status;
};

Batch local_batch(const Batch& batch, std::span<const int64_t> rows, int64_t tokens) {
  Batch local;
  local.problem = batch.problem;
  local.problem.tokens = tokens;
  local.q = take_rows(batch.q, rows, tokens);
  local.k = take_rows(batch.k, rows, tokens);
  local.v = take_rows(batch.v, rows, tokens);
  local.g = take_rows(batch.g, rows, tokens);
  local.beta = take_rows(batch.beta, rows, tokens);
  local.d_o = take_rows(batch.d_o, rows, tokens);
  return local;
}

bool wants_backward(const Batch& batch) {
  return batch.d_o.present() || batch.dfinal_state.present();
}

Result<Partition> make_partition(const std::vector<int64_t>& cu_seqlens,
                                 const RunOptions& options) {
  if (options.layout == Layout::kExplicit) {
    return Partition::make_explicit(cu_seqlens, options.fragments);
  }
  return Partition::make(cu_seqlens, options.world_size, options.layout);
}

// `shared` holds the state outputs of all ranks: each writes the rows of its own documents.
Status run_rank(const Batch& batch, const RunOptions& options, const Partition& partition,
                Communicator& comm, Rank& rank, BatchResult& shared) {
  const Batch& in = rank.local;
  auto first = options.made_with.empty() ? Result<Partition>(partition)
                                         : make_partition(options.made_with, options);
  if (!first) return first.status();
  auto made = Context::make(*first, comm, in.problem, options.context);
  if (!made) return made.status();
  Context& context = *made;
  const PoisonedMemory resident(context.resident_bytes());
  GDN_RETURN_IF_ERROR(context.upload(resident.memory()));
  if (!options.made_with.empty()) GDN_RETURN_IF_ERROR(context.refill(partition));

  Operands operands = in.operands();
  operands.A_log = batch.A_log.view;
  operands.dt_bias = batch.dt_bias.view;
  BatchResult& out = rank.result;
  out.backend = context.backend().name();
  out.o = poisoned(in.v.view);

  const PoisonedMemory saved(context.saved_bytes());
  {
    const PoisonedMemory workspace(context.forward_workspace_bytes());
    const Memory keep = saved.memory();
    const bool save = options.keep_saved && wants_backward(batch);
    GDN_RETURN_IF_ERROR(
        forward(context, {operands, batch.initial_state.view, out.o.view, shared.final_state.view},
                workspace.memory(), save ? &keep : nullptr));
  }
  if (!wants_backward(batch)) return Status::ok();

  out.dq = poisoned(in.q.view);
  out.dk = poisoned(in.k.view);
  out.dv = poisoned(in.v.view);
  out.dg = poisoned(in.g.view);
  out.dbeta = poisoned(in.beta.view);
  out.dA_log = poisoned(batch.A_log.view);
  out.ddt_bias = poisoned(batch.dt_bias.view);
  BackwardArgs args;
  args.in = operands;
  args.initial_state = batch.initial_state.view;
  args.d_o = in.d_o.view;
  args.dfinal_state = batch.dfinal_state.view;
  args.dq = out.dq.view;
  args.dk = out.dk.view;
  args.dv = out.dv.view;
  args.dg = out.dg.view;
  args.dbeta = out.dbeta.view;
  args.dA_log = out.dA_log.view;
  args.ddt_bias = out.ddt_bias.view;
  args.dinitial_state = shared.dinitial_state.view;
  const PoisonedMemory workspace(context.backward_workspace_bytes(options.keep_saved));
  const Memory kept = saved.memory();
  return backward(context, args, workspace.memory(), options.keep_saved ? &kept : nullptr);
}

// Sums the ranks' partial sums in rank order.
template <typename T>
void add_partial(const HostTensor& from, HostTensor& to, bool first) {
  for (int64_t i = 0; i < to.view.numel(); ++i) {
    to.as<T>()[i] = (first ? T{0} : to.as<T>()[i]) + from.as<T>()[i];
  }
}

void add_partials(const HostTensor& from, HostTensor& to, bool first) {
  if (!to.present()) return;
  if (to.view.dtype == DType::kFloat64) {
    add_partial<double>(from, to, first);
  } else {
    add_partial<float>(from, to, first);
  }
}

std::vector<std::unique_ptr<Communicator>> make_communicators(int world_size) {
  if (world_size > 1) return make_thread_communicators(world_size);
  std::vector<std::unique_ptr<Communicator>> one;
  one.push_back(make_single_communicator());
  return one;
}

}  // namespace

Result<BatchResult> run_batch(const Batch& batch, const RunOptions& options) {
  std::vector<int64_t> cu = batch.cu_seqlens;
  const int64_t max_tokens = options.context.max_tokens;
  while (max_tokens > 0 && cu.size() > 1 && cu[cu.size() - 2] == cu.back()) cu.pop_back();
  auto made = make_partition(cu, options);
  if (!made) return made.status();
  const Partition& partition = *made;
  const int world_size = partition.world_size();

  BatchResult result;
  const TensorView state = TensorView::contiguous(
      nullptr, batch.problem.state(),
      {batch.num_documents(), batch.problem.heads_v, batch.problem.dim_k, batch.problem.dim_v});
  result.final_state = poisoned(state);
  const bool backward = wants_backward(batch);
  if (backward && batch.initial_state.present()) result.dinitial_state = poisoned(state);

  std::vector<Rank> ranks(world_size);
  for (int r = 0; r < world_size; ++r) {
    ranks[r].rows = partition.token_indices(r);
    if (world_size == 1) {  // slack rows belong to the only rank
      for (int64_t t = partition.num_tokens(); t < batch.problem.tokens; ++t) {
        ranks[r].rows.push_back(t);
      }
    }
    const int64_t rows = std::ssize(ranks[r].rows);
    ranks[r].local = local_batch(batch, ranks[r].rows, std::max(rows, max_tokens));
  }
  auto communicators = make_communicators(world_size);
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < world_size; ++r) {
      try {
        threads.emplace_back([&, r] {
          ranks[r].status = guarded([&] {
            return run_rank(batch, options, partition, *communicators[r], ranks[r], result);
          });
          // A rank that failed leaves, so that none of the others waits for it.
          if (!ranks[r].status) communicators[r].reset();
        });
      } catch (const std::system_error& error) {
        for (int p = r; p < world_size; ++p) communicators[p].reset();
        ranks[r].status = {ErrorCode::kInternal,
                           fmt::format("{} threads wanted, one for each rank, {} started: {}",
                                       world_size, r, error.what())};
        break;
      }
    }
  }
  // The first cause rather than what the others saw of it.
  for (const Rank& rank : ranks) {
    if (rank.status.code() != ErrorCode::kPeerFailed) GDN_RETURN_IF_ERROR(rank.status);
  }
  for (const Rank& rank : ranks) GDN_RETURN_IF_ERROR(rank.status);

  result.backend = ranks[0].result.backend;
  result.o = poisoned(batch.v.view);
  if (backward) {
    result.dq = poisoned(batch.q.view);
    result.dk = poisoned(batch.k.view);
    result.dv = poisoned(batch.v.view);
    result.dg = poisoned(batch.g.view);
    result.dbeta = poisoned(batch.beta.view);
    result.dA_log = poisoned(batch.A_log.view);
    result.ddt_bias = poisoned(batch.dt_bias.view);
  }
  for (int r = 0; r < world_size; ++r) {
    const BatchResult& part = ranks[r].result;
    put_rows(part.o, ranks[r].rows, result.o);
    if (!backward) continue;
    put_rows(part.dq, ranks[r].rows, result.dq);
    put_rows(part.dk, ranks[r].rows, result.dk);
    put_rows(part.dv, ranks[r].rows, result.dv);
    put_rows(part.dg, ranks[r].rows, result.dg);
    put_rows(part.dbeta, ranks[r].rows, result.dbeta);
    add_partials(part.dA_log, result.dA_log, r == 0);
    add_partials(part.ddt_bias, result.ddt_bias, r == 0);
  }
  if (world_size > 1) {
    for (HostTensor* tensor :
         {&result.o, &result.dq, &result.dk, &result.dv, &result.dg, &result.dbeta}) {
      zero_rows_from(partition.num_tokens(), *tensor);
    }
  }
  return result;
}

}  // namespace gdn
