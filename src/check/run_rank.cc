#include "check/run_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/memory.h"
#include "base/thread_pool.h"

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
  fill_bytes(to.view.data, 0xff, to.buffer.bytes());
  parallel_for(std::ssize(index), [&](int64_t i, int) {
    std::memcpy(to.as<std::byte>() + i * row, from.as<std::byte>() + index[i] * row,
                static_cast<size_t>(row));
  });
  return to;
}

void put_rows(const HostTensor& from, std::span<const int64_t> index, HostTensor& to) {
  const int64_t row = to.view.stride[0] * size_of(to.view.dtype);
  parallel_for(std::ssize(index), [&](int64_t i, int) {
    std::memcpy(to.as<std::byte>() + index[i] * row, from.as<std::byte>() + i * row,
                static_cast<size_t>(row));
  });
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
  fill_bytes(tensor.view.data, 0xff, tensor.buffer.bytes());
  return tensor;
}

// Rows that no rank holds read as the contract says: 0.
void zero_rows_from(int64_t first, HostTensor& to) {
  if (!to.present()) return;
  const int64_t row = to.view.stride[0] * size_of(to.view.dtype);
  fill_bytes(to.as<std::byte>() + first * row, 0, (to.view.shape[0] - first) * row);
}

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

// The view of `tensor` at the rank's place, or the first failure in `status`.
class Placing {
 public:
  explicit Placing(Place& place) : place_(place) {}
  TensorView in(const HostTensor& tensor) { return keep(place_.in(tensor)); }
  TensorView out(const HostTensor& tensor) { return keep(place_.out(tensor)); }
  Memory block(int64_t bytes) { return keep(place_.block(bytes)); }
  const Status& status() const { return status_; }

 private:
  template <typename T>
  T keep(Result<T> result) {
    if (result) return std::move(*result);
    if (status_) status_ = result.status();
    return {};
  }
  Place& place_;
  Status status_;
};

// Global rows of `tensor` that `rank` holds: tokens, or documents that end (final_state) or start
// (dinitial_state) there; documents without tokens are rank 0's. None for partial sums.
std::vector<int64_t> rows_of(const ResultTensor& tensor, const Batch& batch,
                             const Partition& partition, int rank) {
  std::vector<int64_t> rows;
  if (tensor.rows == ResultTensor::Rows::kTokens) {
    rows = partition.token_indices(rank);
    for (int64_t t = partition.num_tokens();
         partition.world_size() == 1 && t < batch.problem.tokens; ++t) {
      rows.push_back(t);  // slack rows belong to the only rank
    }
  } else if (tensor.rows == ResultTensor::Rows::kDocuments) {
    const bool last = tensor.member == &BatchResult::final_state;
    for (int64_t doc = 0; doc < batch.num_documents(); ++doc) {
      const auto holders = doc < partition.num_documents() ? partition.holders(doc)
                                                           : decltype(partition.holders(doc)){};
      const int owner = holders.empty() ? 0 : (last ? holders.back() : holders.front()).rank;
      if (owner == rank) rows.push_back(doc);
    }
  }
  return rows;
}

bool is_states(const ResultTensor& tensor) { return tensor.rows == ResultTensor::Rows::kDocuments; }

// The first rows of `tensor`, as many as `part` has.
void append(const HostTensor& tensor, const TensorView& part, std::vector<std::byte>& bytes) {
  const auto* data = tensor.as<const std::byte>();
  bytes.insert(bytes.end(), data, data + part.numel() * size_of(part.dtype));
}

// Tensors of `result` like one rank's part of them, in kResultTensors' order: f(tensor, rows,
// part).
template <typename F>
void each_part(const BatchResult& result, const Batch& batch, const Partition& partition, int rank,
               const F& f) {
  for (const ResultTensor& tensor : kResultTensors) {
    const HostTensor& whole = result.*tensor.member;
    if (!whole.present()) continue;
    const auto rows = rows_of(tensor, batch, partition, rank);
    TensorView part = whole.view;
    if (tensor.rows != ResultTensor::Rows::kNone) part.shape[0] = std::ssize(rows);
    f(tensor, rows, part);
  }
}

// The gradients of operands, each like(view) of its operand: rows are those of `rows`, what is per
// head that of `whole`.
template <typename Like>
void make_gradients(const Batch& rows, const Batch& whole, const Like& like, BatchResult& result) {
  result.dq = like(rows.q.view);
  result.dk = like(rows.k.view);
  result.dv = like(rows.v.view);
  result.dg = like(rows.g.view);
  result.dbeta = like(rows.beta.view);
  result.dA_log = like(whole.A_log.view);
  result.ddt_bias = like(whole.dt_bias.view);
}

// Views of the global results without memory: shapes alone.
BatchResult shapes(const Batch& batch) {
  BatchResult result;
  const auto like = [](const TensorView& view) {
    HostTensor tensor;
    tensor.view = view;
    tensor.view.data = nullptr;
    int64_t step = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      tensor.view.stride[i] = step;
      step *= view.shape[i];
    }
    return tensor;
  };
  result.o = like(batch.v.view);
  const Problem& p = batch.problem;
  result.final_state = like(TensorView::contiguous(
      nullptr, p.state(), {batch.num_documents(), p.heads_v, p.dim_k, p.dim_v}));
  if (!wants_backward(batch)) return result;
  make_gradients(batch, batch, like, result);
  if (batch.initial_state.present()) result.dinitial_state = like(result.final_state.view);
  return result;
}

}  // namespace

Result<Partition> make_partition(const std::vector<int64_t>& cu_seqlens,
                                 const RunOptions& options) {
  if (options.layout == Layout::kExplicit) {
    return Partition::make_explicit(cu_seqlens, options.fragments);
  }
  return Partition::make(cu_seqlens, options.world_size, options.layout);
}

Result<Partition> make_partition(const Batch& batch, const RunOptions& options) {
  std::vector<int64_t> cu = batch.cu_seqlens;
  // Under a capacity rows of states past the packing stand for documents without tokens.
  while (options.context.max_tokens > 0 && cu.size() > 1 && cu[cu.size() - 2] == cu.back()) {
    cu.pop_back();
  }
  return make_partition(cu, options);
}

RankPart take_part(const Batch& batch, const RunOptions& options, const Partition& partition,
                   int rank) {
  RankPart part;
  part.rows = rows_of(kResultTensors[0], batch, partition, rank);
  const int64_t rows = std::ssize(part.rows);
  part.local = local_batch(batch, part.rows, std::max(rows, options.context.max_tokens));
  return part;
}

BatchResult empty_result(const Batch& batch) {
  BatchResult result = shapes(batch);
  for (const ResultTensor& tensor : kResultTensors) {
    result.*tensor.member = poisoned((result.*tensor.member).view);
  }
  return result;
}

BatchResult empty_states(const Batch& batch) {
  BatchResult result = shapes(batch);
  for (const ResultTensor& tensor : kResultTensors) {
    HostTensor& one = result.*tensor.member;
    one = is_states(tensor) ? poisoned(one.view) : HostTensor{};
  }
  return result;
}

Status run_rank(const Batch& batch, const RunOptions& options, const Partition& partition,
                Communicator& comm, Place& place, RankPart& part, const BatchResult& states) {
  const Batch& in = part.local;
  Problem problem = in.problem;
  problem.device = place.device();
  const auto first = options.made_with.empty() ? Result<Partition>(partition)
                                               : make_partition(options.made_with, options);
  if (!first) return first.status();
  auto made = Context::make(*first, comm, problem, options.context);
  if (!made) return made.status();
  Context& context = *made;
  const Stream stream = place.stream();
  const bool training = wants_backward(batch);
  GDN_RETURN_IF_ERROR(agree_on_calls(comm, training, options.keep_saved));

  Placing at(place);
  const Operands operands = {at.in(in.q),    at.in(in.k),        at.in(in.v),         at.in(in.g),
                             at.in(in.beta), at.in(batch.A_log), at.in(batch.dt_bias)};
  const TensorView initial_state = at.in(batch.initial_state);
  BatchResult& out = part.result;
  out.backend = context.backend().name();
  out.o = poisoned(in.v.view);
  const ForwardArgs forward_args{operands, initial_state, at.out(out.o),
                                 at.out(states.final_state)};
  const Memory resident = at.block(context.resident_bytes());
  const Memory saved = at.block(context.saved_bytes());
  const Memory workspace =
      at.block(std::max(context.forward_workspace_bytes(),
                        training ? context.backward_workspace_bytes(options.keep_saved) : 0));
  BackwardArgs args;
  if (training) {
    make_gradients(in, batch, poisoned, out);
    args.in = operands;
    args.initial_state = initial_state;
    args.d_o = at.in(in.d_o);
    args.dfinal_state = at.in(batch.dfinal_state);
    args.dq = at.out(out.dq);
    args.dk = at.out(out.dk);
    args.dv = at.out(out.dv);
    args.dg = at.out(out.dg);
    args.dbeta = at.out(out.dbeta);
    args.dA_log = at.out(out.dA_log);
    args.ddt_bias = at.out(out.ddt_bias);
    args.dinitial_state = at.out(states.dinitial_state);
  }
  Status ready = at.status();
  if (ready) ready = context.upload(resident, stream);
  GDN_RETURN_IF_ERROR(comm.agree(ready));
  if (!options.made_with.empty()) GDN_RETURN_IF_ERROR(context.refill(partition, stream));

  const Memory* keep = options.keep_saved ? &saved : nullptr;
  const int64_t before = comm.bytes_sent();
  GDN_RETURN_IF_ERROR(forward(context, forward_args, workspace, training ? keep : nullptr, stream));
  if (training) GDN_RETURN_IF_ERROR(backward(context, args, workspace, keep, stream));
  GDN_RETURN_IF_ERROR(place.finish());

  // A backward without a saved set exchanges the forward's summaries again.
  const int passes = training && keep == nullptr ? 2 : 1;
  const int64_t want =
      passes * context.comm_bytes(false) + (training ? context.comm_bytes(true) : 0);
  if (const int64_t moved = comm.bytes_sent() - before; moved != want) {
    return {ErrorCode::kInternal,
            fmt::format("comm_bytes: rank {} handed {} bytes to others, the plan says {}",
                        comm.rank(), moved, want)};
  }
  return Status::ok();
}

void merge(const RankPart& part, int rank, BatchResult& result) {
  for (const ResultTensor& tensor : kResultTensors) {
    HostTensor& whole = result.*tensor.member;
    if (!whole.present() || is_states(tensor)) continue;
    const HostTensor& mine = part.result.*tensor.member;
    if (tensor.rows == ResultTensor::Rows::kTokens) {
      put_rows(mine, part.rows, whole);
    } else {
      add_partials(mine, whole, rank == 0);
    }
  }
}

void zero_slack(const Partition& partition, BatchResult& result) {
  if (partition.world_size() == 1) return;
  for (const ResultTensor& tensor : kResultTensors) {
    if (tensor.rows == ResultTensor::Rows::kTokens) {
      zero_rows_from(partition.num_tokens(), result.*tensor.member);
    }
  }
}

std::vector<std::byte> pack(const RankPart& part, const BatchResult& states, const Batch& batch,
                            const Partition& partition, int rank) {
  std::vector<std::byte> bytes;
  bytes.reserve(static_cast<size_t>(part_bytes(batch, partition, rank)));
  each_part(
      shapes(batch), batch, partition, rank,
      [&](const ResultTensor& tensor, const std::vector<int64_t>& rows, const TensorView& view) {
        if (is_states(tensor)) {
          append(take_rows(states.*tensor.member, rows, std::ssize(rows)), view, bytes);
        } else {
          append(part.result.*tensor.member, view, bytes);
        }
      });
  return bytes;
}

int64_t part_bytes(const Batch& batch, const Partition& partition, int rank) {
  int64_t bytes = 0;
  each_part(shapes(batch), batch, partition, rank,
            [&](const ResultTensor&, const std::vector<int64_t>&, const TensorView& view) {
              bytes += view.numel() * size_of(view.dtype);
            });
  return bytes;
}

void merge_packed(std::span<const std::byte> bytes, const Batch& batch, const Partition& partition,
                  int rank, BatchResult& result) {
  each_part(
      result, batch, partition, rank,
      [&](const ResultTensor& tensor, const std::vector<int64_t>& rows, const TensorView& view) {
        HostTensor mine = poisoned(view);
        const auto size = static_cast<size_t>(mine.buffer.bytes());
        if (size > 0) std::memcpy(mine.view.data, bytes.data(), size);
        bytes = bytes.subspan(size);
        if (tensor.rows == ResultTensor::Rows::kNone) {
          add_partials(mine, result.*tensor.member, rank == 0);
        } else {
          put_rows(mine, rows, result.*tensor.member);
        }
      });
}

}  // namespace gdn
