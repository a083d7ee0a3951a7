#include "ranks_arm.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace gdn {

void stop(const std::string& why) {
  std::fprintf(stderr, "ranks_bench: %s\n", why.c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}
void must(const Status& status) {
  if (!status) stop(status.message());
}
void must(cudaError_t error, const char* what) {
  if (error != cudaSuccess) stop(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

Rows::Rows(const TensorView& period, const std::vector<int64_t>& global, int device, bool fill)
    : view(period) {
  const int64_t row = period.stride[0] * size_of(period.dtype);
  const int64_t rows = std::ssize(global);
  buffer = DeviceBuffer(rows * row);
  if (rows > 0 && buffer.data() == nullptr) stop("out of device memory");
  view.shape[0] = rows;
  view.data = buffer.data();
  view.device = {Device::Kind::kCuda, device};
  if (!fill || rows == 0) return;
  std::vector<char> host(static_cast<size_t>(rows * row));
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(host.data() + i * row, period.as<const char>() + global[i] % period.shape[0] * row,
                static_cast<size_t>(row));
  }
  if (!buffer.upload(host.data())) stop("copying operands to the device");
}

ExchangeClock::ExchangeClock() {
  for (cudaEvent_t& event : begins_) must(cudaEventCreate(&event), "cudaEventCreate");
  for (cudaEvent_t& event : ends_) must(cudaEventCreate(&event), "cudaEventCreate");
}

void ExchangeClock::begin(cudaStream_t stream) {
  if (used_ == kMost) stop("a call of more than four collectives");
  must(cudaEventRecord(begins_[used_], stream), "cudaEventRecord");
}

void ExchangeClock::end(cudaStream_t stream) {
  must(cudaEventRecord(ends_[used_++], stream), "cudaEventRecord");
}

double ExchangeClock::take_ms() {
  double total = 0;
  for (size_t i = 0; i < std::exchange(used_, 0); ++i) {
    float ms = 0;
    must(cudaEventSynchronize(ends_[i]), "a clocked call");
    must(cudaEventElapsedTime(&ms, begins_[i], ends_[i]), "cudaEventElapsedTime");
    total += ms;
  }
  return total;
}

Arm::Arm(const Way& way, const Batch& period, int device, cudaStream_t stream)
    : name(way.name), comm(way.comm), global(way.partition.token_indices(way.comm.rank())) {
  Problem problem = period.problem;
  problem.tokens = std::ssize(global);
  problem.device = {Device::Kind::kCuda, device};
  auto made =
      Context::make(way.partition, comm, problem, {.backend = way.backend, .tile = way.tile});
  must(made.status());
  context.emplace(std::move(*made));
  const auto in = [&](const HostTensor& t) {
    return std::make_unique<Rows>(t.view, global, device, true);
  };
  const auto out = [&](const HostTensor& t) {
    return std::make_unique<Rows>(t.view, global, device, false);
  };
  q = in(period.q), k = in(period.k), v = in(period.v), d_o = in(period.d_o);
  g = in(period.g), beta = in(period.beta);
  o = out(period.v), dq = out(period.q), dk = out(period.k), dv = out(period.v);
  dg = out(period.g), dbeta = out(period.beta);
  resident = DeviceBuffer(context->resident_bytes());
  saved = DeviceBuffer(context->saved_bytes());
  workspace = DeviceBuffer(
      std::max(context->forward_workspace_bytes(), context->backward_workspace_bytes(true)));
  must(context->upload(resident.memory(), {stream}));
  must(cudaStreamSynchronize(stream), "uploading the plan");
  bar = way.bar;
}

BackwardArgs Arm::backward_args() const {
  BackwardArgs args;
  args.in = operands();
  args.d_o = d_o->view;
  args.dq = dq->view, args.dk = dk->view, args.dv = dv->view;
  args.dg = dg->view, args.dbeta = dbeta->view;
  return args;
}

std::string Arm::why_not_claimed() const {
  return right() ? "" : fmt::format("{:.1e} from one rank, bar {:.0e}", worst, bar);
}

void Arm::forward_call(bool keep, cudaStream_t stream) {
  const Memory kept = saved.memory();
  must(forward(*context, forward_args(), workspace.memory(), keep ? &kept : nullptr, {stream}));
}

void Arm::backward_call(cudaStream_t stream) {
  const Memory kept = saved.memory();
  must(backward(*context, backward_args(), workspace.memory(), &kept, {stream}));
}

void Arm::clocked_call(ExchangeClock& clock, cudaStream_t stream) {
  const Memory kept = saved.memory();
  const auto drive = [&](Result<Call> call) {
    must(call.status());
    for (Message m;;) {
      must(call->advance(m));
      if (m.kind == Message::Kind::kNone) return;
      clock.begin(stream);
      must(m.kind == Message::Kind::kAllGather
               ? comm.all_gather(m.send, m.receive, m.receive_bytes, {stream})
               : comm.all_to_all(m.send, m.send_bytes, m.receive, m.receive_bytes, {stream}));
      clock.end(stream);
    }
  };
  drive(Call::forward(*context, forward_args(), workspace.memory(), &kept, {stream}));
  drive(Call::backward(*context, backward_args(), workspace.memory(), &kept, {stream}));
}

std::vector<Output> Arm::outputs() const {
  return {{"o", o.get()},   {"dq", dq.get()}, {"dk", dk.get()},
          {"dv", dv.get()}, {"dg", dg.get()}, {"dbeta", dbeta.get()}};
}

}  // namespace gdn
