#include "device_batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "device_memory.h"

namespace gdn {
namespace {

int current_device() {
  int index = 0;
  static_cast<void>(cudaGetDevice(&index));
  return index;
}

Status device_error(const char* what) { return {ErrorCode::kDevice, what}; }

// A tensor's place in an image: strides and the first element, in elements.
struct Place {
  std::array<int64_t, 4> stride{};
  int64_t first = 0;
};

Place dense(const TensorView& view, int64_t first = 0) {
  Place place;
  place.first = first;
  int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    place.stride[i] = step;
    step *= view.shape[i];
  }
  return place;
}

// One device allocation holding one or more tensors of one element size.
class Image {
 public:
  Image(int64_t elements, int64_t element_bytes)
      : element_(element_bytes), bytes_(static_cast<size_t>(elements * element_bytes), 0xff) {}

  template <typename F>
  void each(const TensorView& view, const Place& place, const F& f) const {
    for (int64_t i = 0; i < view.numel(); ++i) {
      int64_t rest = i, at = place.first, from = 0;
      for (int axis = view.rank - 1; axis >= 0; --axis) {
        const int64_t index = rest % view.shape[axis];
        rest /= view.shape[axis];
        at += index * place.stride[axis];
        from += index * view.stride[axis];
      }
      f(at * element_, from * element_);
    }
  }
  void put(const TensorView& host, const Place& place) {
    each(host, place, [&](int64_t at, int64_t from) {
      std::memcpy(bytes_.data() + at, host.as<std::byte>() + from, static_cast<size_t>(element_));
    });
  }
  bool upload() {
    const int64_t bytes = static_cast<int64_t>(bytes_.size());
    if (device_.bytes() != bytes) device_ = DeviceBuffer(bytes);
    return bytes_.empty() || (device_.data() != nullptr && device_.upload(bytes_.data()));
  }
  void download() { bytes_ = device_.download(); }
  void get(const TensorView& host, const Place& place) {
    each(host, place, [&](int64_t at, int64_t to) {
      std::memcpy(host.as<std::byte>() + to, bytes_.data() + at, static_cast<size_t>(element_));
      std::memset(bytes_.data() + at, 0xff, static_cast<size_t>(element_));
    });
  }
  // After every tensor has been taken out: was anything else touched?
  bool rest_untouched() const {
    for (unsigned char byte : bytes_) {
      if (byte != 0xff) return false;
    }
    return true;
  }
  TensorView view(const TensorView& like, const Place& place) const {
    TensorView v = like;
    v.data = device_.data() == nullptr
                 ? nullptr
                 : static_cast<unsigned char*>(device_.data()) + place.first * element_;
    v.device = Device{Device::Kind::kCuda, current_device()};
    v.stride = place.stride;
    return v;
  }

 private:
  int64_t element_;
  std::vector<unsigned char> bytes_;
  DeviceBuffer device_;
};

// A tensor alone in its image.
class DeviceTensor {
 public:
  DeviceTensor() = default;
  // Fails silently into an absent view; the launch then reports it.
  DeviceTensor(const TensorView& host, Place place, int64_t elements, bool fill)
      : host_(host), place_(place) {
    if (!host.present()) return;
    image_ = std::make_unique<Image>(elements, size_of(host.dtype));
    if (fill) image_->put(host, place);
    ok_ = image_->upload();
  }
  static DeviceTensor dense_copy(const TensorView& host, bool fill) {
    return {host, dense(host), host.numel(), fill};
  }
  bool ok() const { return ok_; }
  bool upload() { return !image_ || image_->upload(); }  // as it was made
  TensorView view() const { return image_ ? image_->view(host_, place_) : TensorView{}; }
  bool take(const TensorView& into) {
    if (!image_) return true;
    image_->download();
    image_->get(into, place_);
    return image_->rest_untouched();
  }

 private:
  TensorView host_;
  Place place_;
  std::unique_ptr<Image> image_;
  bool ok_ = true;
};

// [N, HV, K, V] memory, or [N, HV, V, K].
DeviceTensor place_state(const TensorView& host, bool v_first, bool fill) {
  Place place = dense(host);
  if (v_first && host.present()) {
    place.stride[2] = 1;
    place.stride[3] = host.shape[2];
  }
  return {host, place, host.numel(), fill};
}

DeviceTensor place_d_o(const TensorView& host, const std::string& form) {
  if (!host.present()) return {};
  const int64_t t = host.shape[0], h = host.shape[1], v = host.shape[2];
  if (form == "expanded") return {host, Place{}, 1, true};
  if (form == "transposed") return {host, Place{{1, v * t, t}, 0}, t * h * v, true};
  if (form == "sliced") {  // odd strides, unaligned base
    return {host, Place{{h * (v + 3), v + 3, 1}, 1}, t * h * (v + 3) + 1, true};
  }
  return DeviceTensor::dense_copy(host, true);
}

// q, k, v (or their gradients), and g, beta (or theirs): each its own tensor, or columns of rows.
class Rows {
 public:
  Rows(const std::vector<TensorView>& tensors, bool packed, int64_t padding, bool fill)
      : tensors_(tensors) {
    const int64_t rows = tensors[0].shape[0];
    int64_t columns = 0;
    for (const TensorView& t : tensors) columns += width(t);
    const int64_t row = columns + padding;
    int64_t column = 0;
    for (const TensorView& t : tensors) {
      Place place = dense(t);
      if (packed) {
        place.stride[0] = row;
        place.first = column;
        column += width(t);
      } else {
        images_.push_back(std::make_unique<Image>(t.numel(), size_of(t.dtype)));
      }
      places_.push_back(place);
    }
    if (packed) images_.push_back(std::make_unique<Image>(rows * row, size_of(tensors[0].dtype)));
    for (size_t i = 0; fill && i < tensors.size(); ++i) image(i).put(tensors[i], places_[i]);
    for (auto& one : images_) ok_ = one->upload() && ok_;
  }
  bool ok() const { return ok_; }
  bool upload() {  // as they were made
    bool ok = true;
    for (auto& one : images_) ok = one->upload() && ok;
    return ok;
  }
  TensorView view(size_t i) const {
    return images_[images_.size() == 1 ? 0 : i]->view(tensors_[i], places_[i]);
  }
  bool take(const std::vector<TensorView>& into) {
    for (auto& one : images_) one->download();
    for (size_t i = 0; i < into.size(); ++i) image(i).get(into[i], places_[i]);
    bool untouched = true;
    for (auto& one : images_) untouched = one->rest_untouched() && untouched;
    return untouched;
  }

 private:
  static int64_t width(const TensorView& t) { return t.shape[0] > 0 ? t.numel() / t.shape[0] : 0; }
  Image& image(size_t i) { return *images_[images_.size() == 1 ? 0 : i]; }

  std::vector<TensorView> tensors_;
  std::vector<Place> places_;
  std::vector<std::unique_ptr<Image>> images_;
  bool ok_ = true;
};

HostTensor like(const TensorView& view, int64_t rows) {
  if (!view.present()) return {};
  HostTensor tensor;
  tensor.view = view;
  tensor.view.shape[0] = rows;
  int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    tensor.view.stride[i] = step;
    step *= tensor.view.shape[i];
  }
  tensor.buffer = AlignedBuffer(step * size_of(view.dtype));
  tensor.view.data = tensor.buffer.data();
  if (step > 0) std::memset(tensor.view.data, 0xff, static_cast<size_t>(tensor.buffer.bytes()));
  return tensor;
}

// Rows `rows` of `from`, and NaN up to `count` rows.
HostTensor take_rows(const HostTensor& from, const std::vector<int64_t>& rows, int64_t count) {
  if (!from.present()) return {};
  HostTensor to = like(from.view, count);
  const int64_t bytes = to.view.stride[0] * size_of(to.view.dtype);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(to.as<std::byte>() + static_cast<int64_t>(i) * bytes,
                from.as<std::byte>() + rows[i] * bytes, static_cast<size_t>(bytes));
  }
  return to;
}

void put_rows(const HostTensor& from, const std::vector<int64_t>& rows, HostTensor& to) {
  if (!to.present()) return;
  const int64_t bytes = to.view.stride[0] * size_of(to.view.dtype);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(to.as<std::byte>() + rows[i] * bytes,
                from.as<std::byte>() + static_cast<int64_t>(i) * bytes, static_cast<size_t>(bytes));
  }
}

bool zero_from(const HostTensor& t, int64_t row) {
  const int64_t bytes = t.view.stride[0] * size_of(t.view.dtype);
  const auto* at = t.as<const unsigned char>();
  return std::all_of(at + row * bytes, at + t.view.shape[0] * bytes,
                     [](unsigned char byte) { return byte == 0; });
}

struct States {
  DeviceTensor initial, dfinal, final_out, dinitial;
};

// One rank: host rows, device operands and outputs, and its context.
struct RankRun {
  std::vector<int64_t> rows;  // of the batch
  int64_t tokens = 0;         // and slack of a capacity
  HostTensor q, k, v, g, beta, d_o;
  BatchResult out;
  std::unique_ptr<Rows> qkv, gates, dqkv, dgates;
  DeviceTensor o, d_o_device, A_log, dt_bias, dA_log, ddt_bias;
  std::unique_ptr<Context> context;
  DeviceBuffer resident, saved, workspace, backward_workspace;

  Operands operands() const {
    return {qkv->view(0),   qkv->view(1), qkv->view(2),  gates->view(0),
            gates->view(1), A_log.view(), dt_bias.view()};
  }
};

// `first`: the packing that the context is made with.
Status set_up(const Batch& batch, const DeviceRun& run, const Partition& partition,
              const Partition& first, int rank, RankRun& r) {
  r.rows = partition.token_indices(rank);
  if (partition.world_size() == 1) {
    for (int64_t t = partition.num_tokens(); t < batch.problem.tokens; ++t) r.rows.push_back(t);
  }
  r.tokens = std::max(static_cast<int64_t>(r.rows.size()), run.context.max_tokens);
  r.q = take_rows(batch.q, r.rows, r.tokens);
  r.k = take_rows(batch.k, r.rows, r.tokens);
  r.v = take_rows(batch.v, r.rows, r.tokens);
  r.g = take_rows(batch.g, r.rows, r.tokens);
  r.beta = take_rows(batch.beta, r.rows, r.tokens);
  r.d_o = take_rows(batch.d_o, r.rows, r.tokens);
  const DeviceForm& form = run.form;
  r.qkv = std::make_unique<Rows>(std::vector{r.q.view, r.k.view, r.v.view}, form.packed,
                                 form.padding, true);
  const bool pack_gates = form.packed && r.g.view.dtype == r.beta.view.dtype;
  r.gates = std::make_unique<Rows>(std::vector{r.g.view, r.beta.view}, pack_gates, 3, true);
  r.d_o_device = place_d_o(r.d_o.view, form.d_o);
  r.A_log = DeviceTensor::dense_copy(batch.A_log.view, true);
  r.dt_bias = DeviceTensor::dense_copy(batch.dt_bias.view, true);
  r.o = DeviceTensor::dense_copy(r.v.view, false);

  Problem problem = batch.problem;
  problem.device = Device{Device::Kind::kCuda, run.device};
  problem.tokens = r.tokens;
  auto context = Context::make(first, rank, problem, run.context);
  if (!context) return context.status();
  r.context = std::make_unique<Context>(std::move(*context));
  r.resident = DeviceBuffer(r.context->resident_bytes());
  r.saved = DeviceBuffer(r.context->saved_bytes());
  GDN_RETURN_IF_ERROR(r.context->upload(r.resident.memory()));
  const bool ok = r.qkv->ok() && r.gates->ok() && r.d_o_device.ok() && r.o.ok() && r.A_log.ok();
  return ok ? Status::ok() : device_error("placing the operands");
}

// Block p of a message's send (to rank p) or receive (from rank p) side.
int64_t offset_of(const std::vector<int64_t>& bytes, int p) {
  int64_t at = 0;
  for (int i = 0; i < p; ++i) at += bytes[static_cast<size_t>(i)];
  return at;
}

Status carry(const std::vector<Message>& messages) {
  if (cudaDeviceSynchronize() != cudaSuccess) return device_error("before a message");
  const int world = static_cast<int>(messages.size());
  for (int to = 0; to < world; ++to) {
    const Message& m = messages[static_cast<size_t>(to)];
    for (int from = 0; from < world; ++from) {
      const Message& s = messages[static_cast<size_t>(from)];
      const bool gather = m.kind == Message::Kind::kAllGather;
      const int64_t bytes = m.receive_bytes[static_cast<size_t>(from)];
      const int64_t send_at = gather ? 0 : offset_of(s.send_bytes, to);
      if (bytes == 0) continue;
      if (cudaMemcpy(static_cast<char*>(m.receive) + offset_of(m.receive_bytes, from),
                     static_cast<const char*>(s.send) + send_at, static_cast<size_t>(bytes),
                     cudaMemcpyDefault) != cudaSuccess) {
        return device_error("carrying a message");
      }
    }
  }
  return Status::ok();
}

Status drive(std::vector<Call>& calls) {
  for (;;) {
    std::vector<Message> messages(calls.size());
    for (size_t r = 0; r < calls.size(); ++r) GDN_RETURN_IF_ERROR(calls[r].advance(messages[r]));
    if (messages[0].kind == Message::Kind::kNone) break;
    GDN_RETURN_IF_ERROR(carry(messages));
  }
  return cudaDeviceSynchronize() == cudaSuccess ? Status::ok() : device_error("at the end");
}

Status add_forward(std::vector<RankRun>& ranks, States& states, bool save, Stream stream,
                   std::vector<Call>& calls) {
  for (RankRun& r : ranks) {
    r.workspace = DeviceBuffer(r.context->forward_workspace_bytes());
    const Memory saved = r.saved.memory();
    auto call = Call::forward(
        *r.context, {r.operands(), states.initial.view(), r.o.view(), states.final_out.view()},
        r.workspace.memory(), save ? &saved : nullptr, stream);
    if (!call) return call.status();
    calls.push_back(std::move(*call));
  }
  return Status::ok();
}

Status add_backward(std::vector<RankRun>& ranks, const DeviceRun& run, States& states,
                    Stream stream, std::vector<Call>& calls) {
  for (RankRun& r : ranks) {
    r.dqkv = std::make_unique<Rows>(std::vector{r.q.view, r.k.view, r.v.view}, run.form.packed,
                                    run.form.padding, false);
    const bool pack_gates = run.form.packed && r.g.view.dtype == r.beta.view.dtype;
    r.dgates = std::make_unique<Rows>(std::vector{r.g.view, r.beta.view}, pack_gates, 3, false);
    r.dA_log = DeviceTensor::dense_copy(r.A_log.view(), false);
    r.ddt_bias = DeviceTensor::dense_copy(r.dt_bias.view(), false);
    BackwardArgs args;
    args.in = r.operands();
    args.initial_state = states.initial.view();
    args.d_o = r.d_o_device.view();
    args.dfinal_state = states.dfinal.view();
    args.dq = r.dqkv->view(0);
    args.dk = r.dqkv->view(1);
    args.dv = r.dqkv->view(2);
    args.dg = r.dgates->view(0);
    args.dbeta = r.dgates->view(1);
    args.dA_log = r.dA_log.view();
    args.ddt_bias = r.ddt_bias.view();
    args.dinitial_state = states.dinitial.view();
    r.backward_workspace = DeviceBuffer(r.context->backward_workspace_bytes(run.keep_saved));
    const Memory saved = r.saved.memory();
    auto call = Call::backward(*r.context, args, r.backward_workspace.memory(),
                               run.keep_saved ? &saved : nullptr, stream);
    if (!call) return call.status();
    calls.push_back(std::move(*call));
  }
  return Status::ok();
}

std::vector<std::vector<unsigned char>> saved_sets(const std::vector<RankRun>& ranks) {
  std::vector<std::vector<unsigned char>> sets;
  for (const RankRun& r : ranks) sets.push_back(r.saved.download());
  return sets;
}

// Every output and all memory of the calls NaN again.
bool poison(RankRun& r, States& states) {
  bool ok = r.saved.fill() && r.workspace.fill() && r.backward_workspace.fill() && r.o.upload() &&
            states.final_out.upload() && states.dinitial.upload();
  if (r.dqkv) {
    ok = ok && r.dqkv->upload() && r.dgates->upload() && r.dA_log.upload() && r.ddt_bias.upload();
  }
  return ok;
}

// What `calls` enqueue on the stream, as a graph, replayed at every packing but the first.
Status replay(RankRun& r, States& states, std::vector<Call>& calls,
              const std::vector<Partition>& packings, cudaStream_t stream) {
  if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess) {
    return device_error("beginning a capture");
  }
  Message message;
  Status status;
  for (Call& call : calls) {
    if (status) status = call.advance(message);
  }
  // A refill within the capture is refused, and leaves capture and context as they were.
  const Status refused = r.context->refill(packings.back(), {stream});
  cudaGraph_t graph = nullptr;
  if (cudaStreamEndCapture(stream, &graph) != cudaSuccess) return device_error("a capture");
  GDN_RETURN_IF_ERROR(status);
  if (refused.code() != ErrorCode::kInvalidArgument) {
    return device_error("a refill within a capture was not refused");
  }
  cudaGraphExec_t exec = nullptr;
  if (cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) return device_error("a graph");
  for (size_t i = 1; i < packings.size() && status; ++i) {
    status = r.context->refill(packings[i], {stream});
    if (status && (cudaStreamSynchronize(stream) != cudaSuccess || !poison(r, states) ||
                   cudaGraphLaunch(exec, stream) != cudaSuccess ||
                   cudaStreamSynchronize(stream) != cudaSuccess)) {
      status = device_error("a replay");
    }
  }
  static_cast<void>(cudaGraphExecDestroy(exec));
  static_cast<void>(cudaGraphDestroy(graph));
  return status;
}

Status replay_on_stream(RankRun& r, const DeviceRun& run, States& states, bool backward,
                        const std::vector<Partition>& packings) {
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
    return device_error("a stream");
  }
  std::vector<RankRun> one;
  one.push_back(std::move(r));
  std::vector<Call> calls;
  Status status = add_forward(one, states, backward && run.keep_saved, {stream}, calls);
  if (status && backward) status = add_backward(one, run, states, {stream}, calls);
  if (status && cudaDeviceSynchronize() != cudaSuccess) status = device_error("placing operands");
  if (status) status = replay(one[0], states, calls, packings, stream);
  r = std::move(one[0]);
  static_cast<void>(cudaStreamDestroy(stream));
  return status;
}

void add_partial(DeviceTensor& part, HostTensor& sum, bool first) {
  if (!sum.present()) return;
  HostTensor mine = like(sum.view, sum.view.shape[0]);
  part.take(mine.view);
  for (int64_t i = 0; i < sum.view.numel(); ++i) {
    sum.as<float>()[i] = (first ? 0.0f : sum.as<float>()[i]) + mine.as<float>()[i];
  }
}

}  // namespace

Result<BatchResult> run_on_device(const Batch& batch, const DeviceRun& run) {
  if (cudaSetDevice(run.device) != cudaSuccess) return device_error("choosing the device");
  std::vector<int64_t> cu = batch.cu_seqlens;
  while (run.context.max_tokens > 0 && cu.size() > 1 && cu[cu.size() - 2] == cu.back()) {
    cu.pop_back();
  }
  auto partition = run.layout == Layout::kExplicit
                       ? Partition::make_explicit(cu, run.fragments)
                       : Partition::make(cu, run.world_size, run.layout);
  if (!partition) return partition.status();
  std::vector<Partition> packings;
  for (const auto& packing : run.replays) {
    auto other = Partition::make(packing, run.world_size, run.layout);
    if (!other) return other.status();
    packings.push_back(*other);
  }
  packings.push_back(*partition);
  const bool backward = batch.d_o.present() || batch.dfinal_state.present();
  const Problem& p = batch.problem;

  BatchResult result;
  const bool v_first = run.form.state_v_first;
  result.final_state =
      HostTensor(DType::kFloat32, {batch.num_documents(), p.heads_v, p.dim_k, p.dim_v}, 0xff);
  States states;
  states.initial = place_state(batch.initial_state.view, v_first, true);
  states.dfinal = place_state(batch.dfinal_state.view, v_first, true);
  states.final_out = place_state(result.final_state.view, v_first, false);
  if (backward && batch.initial_state.present()) {
    result.dinitial_state = like(batch.initial_state.view, batch.num_documents());
    states.dinitial = place_state(result.dinitial_state.view, v_first, false);
  }
  std::vector<RankRun> ranks(static_cast<size_t>(partition->world_size()));
  for (size_t r = 0; r < ranks.size(); ++r) {
    GDN_RETURN_IF_ERROR(set_up(batch, run, *partition, packings[0], static_cast<int>(r), ranks[r]));
  }
  result.backend = ranks[0].context->backend().name();
  if (!run.replays.empty() && ranks.size() == 1) {
    GDN_RETURN_IF_ERROR(replay_on_stream(ranks[0], run, states, backward, packings));
  } else {
    for (RankRun& r : ranks) {
      if (!run.replays.empty()) GDN_RETURN_IF_ERROR(r.context->refill(*partition));
    }
    std::vector<Call> forward;
    GDN_RETURN_IF_ERROR(add_forward(ranks, states, backward && run.keep_saved, {}, forward));
    GDN_RETURN_IF_ERROR(drive(forward));
    const auto saved = saved_sets(ranks);
    for (int i = 0; backward && i < run.backwards; ++i) {
      std::vector<Call> gradients;
      if (i > 0 && !states.dinitial.upload()) return device_error("placing a gradient");
      GDN_RETURN_IF_ERROR(add_backward(ranks, run, states, {}, gradients));
      GDN_RETURN_IF_ERROR(drive(gradients));
    }
    if (saved_sets(ranks) != saved) return device_error("a backward wrote to its saved set");
  }

  result.o = like(batch.v.view, p.tokens);
  if (backward) {
    result.dq = like(batch.q.view, p.tokens);
    result.dk = like(batch.k.view, p.tokens);
    result.dv = like(batch.v.view, p.tokens);
    result.dg = like(batch.g.view, p.tokens);
    result.dbeta = like(batch.beta.view, p.tokens);
    if (batch.A_log.present()) result.dA_log = like(batch.A_log.view, p.heads_v);
    if (batch.dt_bias.present()) result.ddt_bias = like(batch.dt_bias.view, p.heads_v);
  }
  bool untouched = states.final_out.take(result.final_state.view);
  if (result.dinitial_state.present()) {
    untouched = states.dinitial.take(result.dinitial_state.view) && untouched;
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    RankRun& r = ranks[i];
    const int64_t rows = r.tokens;
    r.out.o = like(r.v.view, rows);
    untouched = r.o.take(r.out.o.view) && untouched;
    put_rows(r.out.o, r.rows, result.o);
    if (!backward) continue;
    r.out.dq = like(r.q.view, rows);
    r.out.dk = like(r.k.view, rows);
    r.out.dv = like(r.v.view, rows);
    r.out.dg = like(r.g.view, rows);
    r.out.dbeta = like(r.beta.view, rows);
    untouched = r.dqkv->take({r.out.dq.view, r.out.dk.view, r.out.dv.view}) && untouched;
    untouched = r.dgates->take({r.out.dg.view, r.out.dbeta.view}) && untouched;
    put_rows(r.out.dq, r.rows, result.dq);
    put_rows(r.out.dk, r.rows, result.dk);
    put_rows(r.out.dv, r.rows, result.dv);
    put_rows(r.out.dg, r.rows, result.dg);
    put_rows(r.out.dbeta, r.rows, result.dbeta);
    for (const HostTensor* t :
         {&r.out.o, &r.out.dq, &r.out.dk, &r.out.dv, &r.out.dg, &r.out.dbeta}) {
      if (!zero_from(*t, static_cast<int64_t>(r.rows.size()))) {
        return device_error("slack rows of a gradient or of o are not 0");
      }
    }
    add_partial(r.dA_log, result.dA_log, i == 0);
    add_partial(r.ddt_bias, result.ddt_bias, i == 0);
  }
  if (!untouched) return device_error("something between the rows of an output was written");
  return result;
}

int usable_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::string device_summary() {
  cudaDeviceProp properties;
  if (usable_devices() == 0 || cudaGetDeviceProperties(&properties, 0) != cudaSuccess) {
    return "no CUDA device";
  }
  return fmt::format("{}, sm_{}{}, {} multiprocessors", properties.name, properties.major,
                     properties.minor, properties.multiProcessorCount);
}

}  // namespace gdn
