#include "bench/case.h"

#include <algorithm>
#include <numeric>

namespace gdn::bench {
namespace {

// Two document boundaries and a tail, inside one set of heads: 18.75, 12.5 and 0.75 chunks.
const std::vector<int64_t> kSample = {1200, 800, 48};

class Placer {
 public:
  Placer(Machine& machine, std::vector<Storage>& storage) : machine_(machine), storage_(storage) {}

  // A row-major tensor like `host` with `rows` rows, zeros.
  Status place(const TensorView& host, int64_t rows, TensorView& view) {
    if (!host.present()) return Status::ok();
    view = host;
    view.device = machine_.device();
    view.shape[0] = rows;
    Result<Storage> made = machine_.allocate(view.numel() * size_of(host.dtype));
    if (!made) return made.status();
    view.data = made->owner.get();
    storage_.push_back(std::move(*made));
    return Status::ok();
  }

  // Its first `filled` rows: the first `period` of `host`, over and over.
  Status fill(const TensorView& host, int64_t period, int64_t filled, const TensorView& view) {
    if (!host.present()) return Status::ok();
    const int64_t row = host.stride[0] * size_of(host.dtype);
    for (int64_t at = 0; at < filled && period > 0; at += period) {
      GDN_RETURN_IF_ERROR(machine_.upload(view.as<std::byte>() + at * row, host.data,
                                          std::min(period, filled - at) * row));
    }
    return Status::ok();
  }
  Status both(const TensorView& host, int64_t period, int64_t filled, int64_t rows,
              TensorView& view) {
    GDN_RETURN_IF_ERROR(place(host, rows, view));
    return fill(host, period, filled, view);
  }

 private:
  Machine& machine_;
  std::vector<Storage>& storage_;
};

}  // namespace

std::vector<int64_t> sample_documents(const std::vector<int64_t>& documents) {
  const int64_t tokens = std::accumulate(documents.begin(), documents.end(), int64_t{0});
  const int64_t enough = std::accumulate(kSample.begin(), kSample.end(), int64_t{0});
  return tokens <= enough ? documents : kSample;
}

Result<Case> Case::make(Machine& machine, const Partition& partition, int rank, const Batch& sample,
                        bool final_state) {
  Case c{partition, rank, sample.problem, {}, {}, false, nullptr, {}};
  const int64_t period = sample.cu_seqlens.back();
  const int64_t filled = partition.local_tokens(rank);
  // Rows past the documents only where one rank holds them all.
  const int64_t slack = partition.world_size() == 1 ? sample.problem.tokens - period : 0;
  const int64_t rows = filled + slack;
  c.problem.tokens = rows;
  c.problem.device = machine.device();
  c.training = sample.d_o.present() || sample.dfinal_state.present();

  Placer placer(machine, c.storage);
  ForwardArgs& f = c.forward;
  for (const auto& [host, view] :
       {std::pair{&sample.q, &f.in.q}, std::pair{&sample.k, &f.in.k}, std::pair{&sample.v, &f.in.v},
        std::pair{&sample.g, &f.in.g}, std::pair{&sample.beta, &f.in.beta},
        std::pair{&sample.d_o, &c.backward.d_o}}) {
    GDN_RETURN_IF_ERROR(placer.both(host->view, period, filled, rows, *view));
  }
  for (const auto& [host, view] :
       {std::pair{&sample.A_log, &f.in.A_log}, std::pair{&sample.dt_bias, &f.in.dt_bias}}) {
    const int64_t heads = sample.problem.heads_v;
    GDN_RETURN_IF_ERROR(placer.both(host->view, heads, heads, heads, *view));
  }
  const int64_t documents = partition.num_documents();
  for (const auto& [host, view] : {std::pair{&sample.initial_state, &f.initial_state},
                                   std::pair{&sample.dfinal_state, &c.backward.dfinal_state}}) {
    GDN_RETURN_IF_ERROR(
        placer.both(host->view, sample.num_documents(), documents, documents, *view));
  }
  GDN_RETURN_IF_ERROR(placer.place(sample.v.view, rows, f.o));
  if (final_state) {
    const Problem& p = sample.problem;
    const TensorView state = TensorView::contiguous(
        nullptr, p.state(), {documents, p.heads_v, p.dim_k, p.dim_v}, machine.device());
    GDN_RETURN_IF_ERROR(placer.place(state, documents, f.final_state));
  }
  if (!c.training) return c;
  BackwardArgs& b = c.backward;
  b.in = f.in;
  b.initial_state = f.initial_state;
  for (const auto& [like, view] :
       {std::pair{&f.in.q, &b.dq}, std::pair{&f.in.k, &b.dk}, std::pair{&f.in.v, &b.dv},
        std::pair{&f.in.g, &b.dg}, std::pair{&f.in.beta, &b.dbeta},
        std::pair{&f.in.A_log, &b.dA_log}, std::pair{&f.in.dt_bias, &b.ddt_bias},
        std::pair{&f.initial_state, &b.dinitial_state}}) {
    GDN_RETURN_IF_ERROR(placer.place(*like, like->shape[0], *view));
  }
  return c;
}

Result<BatchResult> Case::download(Machine& machine) const {
  BatchResult result;
  for (const auto& [view, tensor] :
       {std::pair{&forward.o, &result.o}, std::pair{&forward.final_state, &result.final_state},
        std::pair{&backward.dq, &result.dq}, std::pair{&backward.dk, &result.dk},
        std::pair{&backward.dv, &result.dv}, std::pair{&backward.dg, &result.dg},
        std::pair{&backward.dbeta, &result.dbeta}, std::pair{&backward.dA_log, &result.dA_log},
        std::pair{&backward.ddt_bias, &result.ddt_bias},
        std::pair{&backward.dinitial_state, &result.dinitial_state}}) {
    if (!view->present()) continue;
    const int64_t bytes = view->numel() * size_of(view->dtype);
    tensor->buffer = AlignedBuffer(bytes);
    tensor->view = *view;
    tensor->view.device = {};
    tensor->view.data = tensor->buffer.data();
    GDN_RETURN_IF_ERROR(machine.download(tensor->view.data, view->data, bytes));
  }
  return result;
}

}  // namespace gdn::bench
