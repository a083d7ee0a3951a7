// Times KCP over the GPUs of one host, one process each, over NCCL: ranks_bench [--gpus W]
// [--backend NAME] [--norm] [--gates NAME] [--groups N] [--calls N] LETTER...   (default M I H N)
//
// Per shape: every layout's outputs and gradients against one rank's (each process runs the whole
// pack once and compares every eighth of its own rows), then forward and forward + backward of one
// rank (all GPUs at once, each the whole pack) and of the layouts, in palindromic order, with a
// cold L2 (a 256 MiB fill, a synchronise, all ranks meet, then the call between two events). A time
// is the median over calls of the slowest rank. An arm that fails the comparison gets no time. Rows
// repeat with a period of 2,048 tokens. libnccl.so.2 is found as the loader does, or named by
// GDN_NCCL_LIBRARY.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/element.h"
#include "check/batch.h"
#include "device_memory.h"
#include "fork_ranks.h"

namespace gdn {
namespace {

constexpr int64_t kPeriod = 2048;
constexpr int64_t kFlush = 256 << 20;
constexpr int64_t kSampled = 8;  // one row in so many is compared

struct Flags {
  int gpus = 2;
  bool norm = false;
  std::string gates = "model";
  std::string backend;  // empty: the first that takes the shape
  int groups = 2, calls = 10;
  int64_t shrink = 1;  // documents are so many times shorter
  std::vector<std::string> letters;
};

Flags parse(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool more = i + 1 < argc;
    if (word == "--norm") {
      flags.norm = true;
    } else if (word == "--gates" && more) {
      flags.gates = argv[++i];
    } else if (word == "--backend" && more) {
      flags.backend = argv[++i];
    } else if (word == "--gpus" && more) {
      flags.gpus = std::max(1, std::atoi(argv[++i]));
    } else if (word == "--groups" && more) {
      flags.groups = std::max(1, std::atoi(argv[++i]));
    } else if (word == "--calls" && more) {
      flags.calls = std::max(1, std::atoi(argv[++i]));
    } else if (word == "--shrink" && more) {
      flags.shrink = std::max(1, std::atoi(argv[++i]));
    } else {
      flags.letters.push_back(word);
    }
  }
  if (flags.letters.empty()) flags.letters = {"M", "I", "H", "N"};
  return flags;
}

[[noreturn]] void stop(const std::string& why) {
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

// Rows `global` of the periodic pack on the device, or memory of that shape.
struct Rows {
  DeviceBuffer buffer;
  TensorView view;

  Rows(const TensorView& period, const std::vector<int64_t>& global, int device, bool fill)
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
      std::memcpy(host.data() + i * row,
                  period.as<const char>() + global[i] % period.shape[0] * row,
                  static_cast<size_t>(row));
    }
    if (!buffer.upload(host.data())) stop("copying operands to the device");
  }
};

struct Output {
  const char* name;
  const Rows* rows;
};

// One way to run a shape: one rank over the whole pack, or this process's part of a layout.
struct Arm {
  std::string name;
  std::vector<int64_t> global;  // global row of each local row
  std::unique_ptr<Communicator> own;
  std::optional<Context> context;
  std::unique_ptr<Rows> q, k, v, d_o, g, beta, o, dq, dk, dv, dg, dbeta;
  DeviceBuffer resident, saved, workspace;
  double bar = 0;
  bool right = true;
  std::vector<double> forward_ms, both_ms;

  Arm(std::string label, const Partition& partition, Communicator& comm, const Batch& period,
      const Flags& flags, int device, cudaStream_t stream)
      : name(std::move(label)), global(partition.token_indices(comm.rank())) {
    Problem problem = period.problem;
    problem.tokens = std::ssize(global);
    problem.device = {Device::Kind::kCuda, device};
    auto made = Context::make(partition, comm, problem, {.backend = flags.backend});
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
    // The chunk grid is one rank's where every cut is a multiple of 64 (docs/accuracy.md).
    bar = 1e-3;
    for (int rank = 0; rank < partition.world_size(); ++rank) {
      for (const Fragment& f : partition.fragments(rank)) {
        if (f.offset % kChunk != 0) bar = 5e-3;
      }
    }
  }

  Operands operands() const { return {q->view, k->view, v->view, g->view, beta->view, {}, {}}; }
  void forward_call(cudaStream_t stream) {
    const Memory keep = saved.memory();
    must(forward(*context, {operands(), {}, o->view, {}}, workspace.memory(), &keep, {stream}));
  }
  void backward_call(cudaStream_t stream) {
    BackwardArgs args;
    args.in = operands();
    args.d_o = d_o->view;
    args.dq = dq->view, args.dk = dk->view, args.dv = dv->view;
    args.dg = dg->view, args.dbeta = dbeta->view;
    const Memory keep = saved.memory();
    must(backward(*context, args, workspace.memory(), &keep, {stream}));
  }
  std::vector<Output> outputs() const {
    return {{"o", o.get()},   {"dq", dq.get()}, {"dk", dk.get()},
            {"dv", dv.get()}, {"dg", dg.get()}, {"dbeta", dbeta.get()}};
  }
};

class Bench {
 public:
  Bench(const Flags& flags, Communicator& host) : flags_(flags), host_(host) {
    must(cudaSetDevice(host.rank()), "cudaSetDevice");
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    must(cudaEventCreate(&begin_), "cudaEventCreate");
    must(cudaEventCreate(&end_), "cudaEventCreate");
    flush_ = DeviceBuffer(kFlush);
    auto nccl = make_nccl_communicator(host);
    must(nccl.status());
    nccl_ = std::move(*nccl);
    single_ = make_single_communicator();
  }

  bool shape(const std::string& letter) {
    auto spec = workload(letter, flags_.shrink);
    must(spec.status());
    spec->gates = flags_.gates;
    spec->options.qk_l2norm = flags_.norm;
    std::vector<int64_t> cu = {0};
    for (const int64_t length : spec->documents) cu.push_back(cu.back() + length);
    spec->documents = {std::min(kPeriod, cu.back())};
    auto made = make_batch(*spec);
    must(made.status());

    std::vector<std::unique_ptr<Arm>> arms;
    const auto add = [&](const std::string& name, int world_size, Layout layout,
                         Communicator& comm) {
      auto partition = Partition::make(cu, world_size, layout);
      must(partition.status());
      arms.push_back(
          std::make_unique<Arm>(name, *partition, comm, *made, flags_, host_.rank(), stream_));
    };
    add("CP1", 1, Layout::kContiguous, *single_);
    const int w = host_.size();
    add(fmt::format("CP{} C", w), w, Layout::kContiguous, *nccl_);
    add(fmt::format("CP{} Z", w), w, Layout::kZigzag, *nccl_);
    add(fmt::format("CP{} D", w), w, Layout::kZigzagPerDocument, *nccl_);
    check(letter, arms);
    time(arms);
    report(letter, arms);
    return std::all_of(arms.begin(), arms.end(), [](const auto& arm) { return arm->right; });
  }

 private:
  double over_ranks(double mine, const std::function<double(double, double)>& join) {
    std::vector<double> all(host_.size());
    const std::vector<int64_t> bytes(host_.size(), sizeof(double));
    must(host_.all_gather(&mine, all.data(), bytes, {}));
    double result = all[0];
    for (size_t i = 1; i < all.size(); ++i) result = join(result, all[i]);
    return result;
  }
  double sum(double mine) {
    return over_ranks(mine, [](double a, double b) { return a + b; });
  }
  double most(double mine) {
    return over_ranks(mine, [](double a, double b) { return std::max(a, b); });
  }

  void check(const std::string& letter, std::vector<std::unique_ptr<Arm>>& arms) {
    for (const auto& arm : arms) {
      arm->forward_call(stream_);
      arm->backward_call(stream_);
      must(cudaStreamSynchronize(stream_), arm->name.c_str());
    }
    std::vector<std::string> lines(arms.size());
    for (size_t tensor = 0; tensor < arms[0]->outputs().size(); ++tensor) {
      const Output want = arms[0]->outputs()[tensor];
      const std::vector<unsigned char> whole = want.rows->buffer.download();
      for (size_t a = 1; a < arms.size(); ++a) {
        Arm& arm = *arms[a];
        const Rows& rows = *arm.outputs()[tensor].rows;
        const std::vector<unsigned char> mine = rows.buffer.download();
        const int64_t columns = rows.view.stride[0];
        const DType dtype = rows.view.dtype;
        std::vector<double> x(columns), y(columns);
        double error = 0, norm = 0;
        for (int64_t i = 0; i < std::ssize(arm.global); i += kSampled) {
          load_row(mine.data(), dtype, i * columns, 1, columns, x.data());
          load_row(whole.data(), dtype, arm.global[i] * columns, 1, columns, y.data());
          for (int64_t c = 0; c < columns; ++c) {
            error += (x[c] - y[c]) * (x[c] - y[c]);
            norm += y[c] * y[c];
          }
        }
        const double rms = std::sqrt(sum(error) / sum(norm));
        arm.right = arm.right && rms <= arm.bar;  // false for NaN
        lines[a] += fmt::format(" {} {:.2e}", want.name, rms);
      }
    }
    for (size_t a = 1; a < arms.size() && host_.rank() == 0; ++a) {
      std::printf("%s %s against one rank, bar %.0e:%s %s\n", letter.c_str(), arms[a]->name.c_str(),
                  arms[a]->bar, lines[a].c_str(), arms[a]->right ? "pass" : "FAIL");
    }
    std::fflush(stdout);
  }

  // The slowest rank's time of one call.
  double call_ms(const std::function<void()>& call) {
    must(cudaMemsetAsync(flush_.data(), 0, kFlush, stream_), "flushing L2");
    must(cudaStreamSynchronize(stream_), "flushing L2");
    must(host_.agree({}));
    must(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    call();
    must(cudaEventRecord(end_, stream_), "cudaEventRecord");
    must(cudaEventSynchronize(end_), "a timed call");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return most(ms);
  }

  void block(Arm& arm) {
    if (!arm.right) return;  // alike on all ranks
    const auto fwd = [&] { arm.forward_call(stream_); };
    const auto both = [&] {
      arm.forward_call(stream_);
      arm.backward_call(stream_);
    };
    for (int i = -3; i < flags_.calls; ++i) {
      const double ms = call_ms(fwd);
      if (i >= 0) arm.forward_ms.push_back(ms);
    }
    for (int i = -3; i < flags_.calls; ++i) {
      const double ms = call_ms(both);
      if (i >= 0) arm.both_ms.push_back(ms);
    }
  }

  void time(std::vector<std::unique_ptr<Arm>>& arms) {
    for (int group = 0; group < flags_.groups; ++group) {
      for (size_t i = 0; i < arms.size(); ++i) block(*arms[i]);
      for (size_t i = arms.size(); i-- > 0;) block(*arms[i]);
    }
  }

  static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }

  void report(const std::string& letter, const std::vector<std::unique_ptr<Arm>>& arms) {
    const double fwd1 = median(arms[0]->forward_ms), both1 = median(arms[0]->both_ms);
    for (const auto& arm : arms) {
      const double sent = most(static_cast<double>(arm->context->comm_bytes(false)) +
                               static_cast<double>(arm->context->comm_bytes(true)));
      if (host_.rank() != 0) continue;
      if (!arm->right) {
        std::printf("%s %-6s no time: failed the comparison\n", letter.c_str(), arm->name.c_str());
        continue;
      }
      const double fwd = median(arm->forward_ms), both = median(arm->both_ms);
      std::printf("%s %-6s fwd %.3f (%.2fx)  fwd+bwd %.3f (%.2fx) ms; %s, %s, %.1f MB sent\n",
                  letter.c_str(), arm->name.c_str(), fwd, fwd1 / fwd, both, both1 / both,
                  arm->context->backend().name(), to_string(arm->context->plan().exchange),
                  sent * 1e-6);
    }
    std::fflush(stdout);
  }

  const Flags& flags_;
  Communicator& host_;
  std::unique_ptr<Communicator> nccl_, single_;
  cudaStream_t stream_{};
  cudaEvent_t begin_{}, end_{};
  DeviceBuffer flush_;
};

int rank_main(const Flags& flags, Communicator& host) {
  int devices = 0;
  static_cast<void>(cudaGetDeviceCount(&devices));
  if (devices < host.size()) {
    if (host.rank() == 0) {
      std::printf("skipped: %d GPUs wanted, %d found\n", host.size(), devices);
    }
    return 0;
  }
  cudaDeviceProp properties;
  must(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  if (host.rank() == 0) {
    std::printf("%d x %s, %s gates, %s, median of %d calls, slowest rank\n", host.size(),
                properties.name, flags.gates.c_str(), flags.norm ? "norm inside" : "pre-norm",
                2 * flags.groups * flags.calls);
    std::fflush(stdout);
  }
  Bench bench(flags, host);
  bool right = true;
  for (const std::string& letter : flags.letters) right = bench.shape(letter) && right;
  return right ? 0 : 2;
}

}  // namespace
}  // namespace gdn

int main(int argc, char** argv) {
  const gdn::Flags flags = gdn::parse(argc, argv);
  return gdn::fork_ranks(flags.gpus,
                         [&](gdn::Communicator& host) { return gdn::rank_main(flags, host); });
}
