// Times KCP over the GPUs of one host, one process each, over NCCL: ranks_bench [--gpus W]
// [--backend NAME] [--norm] [--gates NAME] [--groups N] [--warm-up N] [--calls N] [--shrink N]
// [--bar X] LETTER... (default M I H N; --shrink: documents are so many times shorter; --bar:
// layouts may be no further from one rank than X in place of 5e-3)
//
// Per shape: every layout's outputs and gradients against one rank's (each process runs the whole
// pack once and compares every eighth of its own rows), then forward, forward + backward and the
// checkpointed step (a forward that keeps nothing, then both) of one rank (all GPUs at once, each
// the whole pack) and of the layouts, in palindromic order, with a cold L2 (a 256 MiB fill, a
// synchronise, all ranks meet, then the call between two events). A time is the median over calls
// of the slowest rank. Beside it: what docs/scaling.md predicts. The collectives are also timed
// alone, within calls that are not counted: on the rank that waits most, and on the one that waits
// least, whose bytes over that time are the bandwidth. An arm that misses its bar is a failure of
// the run (exit status 1): its times are shown as not claimed, and none are taken beyond 5e-3. In
// tiles of 1,024 tokens the layouts whose cuts are multiples of that must give one rank's bits.
// Rows repeat with a period of 2,048 tokens. libnccl.so.2 is found as the loader does, or named by
// GDN_NCCL_LIBRARY.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/element.h"
#include "check/batch.h"
#include "check/cuts.h"
#include "fork_ranks.h"
#include "model/step_model.h"
#include "ranks_arm.h"

namespace gdn {
namespace {

constexpr int64_t kPeriod = 2048;
constexpr int64_t kFlush = 256 << 20;
constexpr int64_t kSampled = 8;  // one row in so many is compared
constexpr int64_t kTile = 1024;

struct Flags {
  int gpus = 2;
  bool norm = false;
  std::string gates = "model";
  std::string backend;  // empty: the first that takes the shape
  int groups = 2, warm_up = 3, calls = 10;
  int64_t shrink = 1;
  double bar = Arm::kMoved;
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
    } else if (word == "--warm-up" && more) {
      flags.warm_up = std::max(0, std::atoi(argv[++i]));
    } else if (word == "--calls" && more) {
      flags.calls = std::max(1, std::atoi(argv[++i]));
    } else if (word == "--shrink" && more) {
      flags.shrink = std::max(1, std::atoi(argv[++i]));
    } else if (word == "--bar" && more) {
      flags.bar = std::atof(argv[++i]);
    } else {
      flags.letters.push_back(word);
    }
  }
  if (flags.letters.empty()) flags.letters = {"M", "I", "H", "N"};
  return flags;
}

constexpr const char* kOperations[] = {"fwd", "fwd+bwd", "ckpt"};
constexpr size_t kNumOperations = std::size(kOperations);

// An arm and what was measured of it, in ms.
struct Timed {
  std::unique_ptr<Arm> arm;
  std::vector<double> calls[kNumOperations];
  double predicted[kNumOperations] = {};  // 0: no rates of this backend
  std::vector<double> exchange_most, exchange_least;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  Bench(const Flags& flags, Communicator& host) : flags_(flags), host_(host) {
    must(cudaSetDevice(host.rank()), "cudaSetDevice");
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    must(cudaEventCreate(&begin_), "cudaEventCreate");
    must(cudaEventCreate(&end_), "cudaEventCreate");
    clock_ = std::make_unique<ExchangeClock>();
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
    const model::Shape shape{spec->documents, spec->heads_qk, spec->heads_v};
    std::vector<int64_t> cu = {0};
    for (const int64_t length : spec->documents) cu.push_back(cu.back() + length);
    spec->documents = {std::min(kPeriod, cu.back())};
    auto made = make_batch(*spec);
    must(made.status());

    std::vector<Timed> arms;
    const auto add = [&](const std::string& name, int world_size, Layout layout,
                         Communicator& comm) {
      auto partition = Partition::make(cu, world_size, layout);
      must(partition.status());
      Timed timed;
      timed.arm =
          std::make_unique<Arm>(Arm::Way{name, flags_.backend, *partition, comm, flags_.bar}, *made,
                                host_.rank(), stream_);
      predict(shape, world_size, layout, timed);
      arms.push_back(std::move(timed));
    };
    add("CP1", 1, Layout::kContiguous, *single_);
    const int w = host_.size();
    add(fmt::format("CP{} C", w), w, Layout::kContiguous, *nccl_);
    add(fmt::format("CP{} Z", w), w, Layout::kZigzag, *nccl_);
    add(fmt::format("CP{} D", w), w, Layout::kZigzagPerDocument, *nccl_);
    check(letter, arms);
    time(arms);
    report(letter, arms);
    const bool right =
        std::all_of(arms.begin(), arms.end(), [](const Timed& t) { return t.arm->right(); });
    arms.clear();
    return same_bits_in_tiles(letter, cu, *made) && right;
  }

  void print_table() const {
    if (host_.rank() == 0) std::printf("\n%s", table_.c_str());
  }

 private:
  using Join = std::function<double(double, double)>;
  double over_ranks(double mine, const Join& join) {
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
  double least(double mine) {
    return over_ranks(mine, [](double a, double b) { return std::min(a, b); });
  }

  static void predict(const model::Shape& shape, int world_size, Layout layout, Timed& timed) {
    const auto rates = model::find_rates(timed.arm->context->backend().name());
    if (!rates) return;
    const auto step = model::kcp_step(shape, world_size, layout, *rates, model::Network{});
    must(step.status());
    const double forward = step->forward.total_ms();
    timed.predicted[0] = forward;
    timed.predicted[1] = step->total_ms();
    timed.predicted[2] = forward + step->total_ms();
  }

  void check(const std::string& letter, std::vector<Timed>& arms) {
    for (const Timed& timed : arms) {
      timed.arm->forward_call(true, stream_);
      timed.arm->backward_call(stream_);
      must(cudaStreamSynchronize(stream_), timed.arm->name.c_str());
    }
    std::vector<std::string> lines(arms.size());
    for (size_t tensor = 0; tensor < arms[0].arm->outputs().size(); ++tensor) {
      const Output want = arms[0].arm->outputs()[tensor];
      const std::vector<unsigned char> whole = want.rows->buffer.download();
      for (size_t a = 1; a < arms.size(); ++a) {
        Arm& arm = *arms[a].arm;
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
        arm.worst =
            std::isfinite(rms) ? std::max(arm.worst, rms) : std::numeric_limits<double>::infinity();
        lines[a] += fmt::format(" {} {:.2e}", want.name, rms);
      }
    }
    for (size_t a = 1; a < arms.size() && host_.rank() == 0; ++a) {
      const Arm& arm = *arms[a].arm;
      std::printf("%s %s against one rank, bar %.0e:%s %s\n", letter.c_str(), arm.name.c_str(),
                  arm.bar, lines[a].c_str(), arm.right() ? "pass" : "FAIL");
    }
    std::fflush(stdout);
  }

  // In tiles every segment is the same one over any number of ranks, and so are all roundings.
  bool same_bits_in_tiles(const std::string& letter, const std::vector<int64_t>& cu,
                          const Batch& period) {
    const auto run = [&](const Partition& partition, Communicator& comm) {
      auto arm = std::make_unique<Arm>(
          Arm::Way{"tiles", flags_.backend, partition, comm, flags_.bar, kTile}, period,
          host_.rank(), stream_);
      arm->forward_call(true, stream_);
      arm->backward_call(stream_);
      must(cudaStreamSynchronize(stream_), "a run in tiles");
      return arm;
    };
    std::vector<std::vector<unsigned char>> one;  // the outputs of one rank
    bool right = true;
    for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument}) {
      auto partition = Partition::make(cu, host_.size(), layout);
      must(partition.status());
      if (!cuts_at_multiples_of(kTile, *partition)) continue;
      if (one.empty()) {
        auto whole = Partition::make(cu, 1, Layout::kContiguous);
        must(whole.status());
        const std::unique_ptr<Arm> arm = run(*whole, *single_);
        for (const Output& output : arm->outputs()) one.push_back(output.rows->buffer.download());
      }
      const double differ = sum(rows_that_differ(*run(*partition, *nccl_), one));
      if (host_.rank() == 0) {
        std::printf("%s CP%d %s in tiles of %d: %s\n", letter.c_str(), host_.size(),
                    to_string(layout), static_cast<int>(kTile),
                    differ == 0 ? "the bits of one rank"
                                : fmt::format("FAIL, {} rows differ", differ).c_str());
        std::fflush(stdout);
      }
      right = right && differ == 0;
    }
    return right;
  }

  // Of the sampled rows of all outputs; `one`: the same outputs of the whole pack.
  static double rows_that_differ(const Arm& arm,
                                 const std::vector<std::vector<unsigned char>>& one) {
    double count = 0;
    const std::vector<Output> outputs = arm.outputs();
    for (size_t tensor = 0; tensor < outputs.size(); ++tensor) {
      const Rows& rows = *outputs[tensor].rows;
      const std::vector<unsigned char> mine = rows.buffer.download();
      const int64_t bytes = rows.view.stride[0] * size_of(rows.view.dtype);
      for (int64_t i = 0; i < std::ssize(arm.global); i += kSampled) {
        count += std::memcmp(mine.data() + i * bytes, one[tensor].data() + arm.global[i] * bytes,
                             static_cast<size_t>(bytes)) != 0;
      }
    }
    return count;
  }

  // A cold L2, then all ranks at once.
  void ready() {
    must(cudaMemsetAsync(flush_.data(), 0, kFlush, stream_), "flushing L2");
    must(cudaStreamSynchronize(stream_), "flushing L2");
    must(host_.agree({}));
  }

  // The slowest rank's time of one call.
  double call_ms(const std::function<void()>& call) {
    ready();
    must(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    call();
    must(cudaEventRecord(end_, stream_), "cudaEventRecord");
    must(cudaEventSynchronize(end_), "a timed call");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return most(ms);
  }

  void block(Timed& timed) {
    Arm& arm = *timed.arm;
    if (!arm.timed()) return;  // alike on all ranks
    for (size_t op = 0; op < kNumOperations; ++op) {
      const auto call = [&] {
        if (op == 2) arm.forward_call(false, stream_);
        arm.forward_call(true, stream_);
        if (op > 0) arm.backward_call(stream_);
      };
      for (int i = -flags_.warm_up; i < flags_.calls; ++i) {
        const double ms = call_ms(call);
        if (i >= 0) timed.calls[op].push_back(ms);
      }
    }
    for (int i = 0; i < flags_.calls; ++i) {
      ready();
      arm.clocked_call(*clock_, stream_);
      const double ms = clock_->take_ms();
      timed.exchange_most.push_back(most(ms));
      timed.exchange_least.push_back(least(ms));
    }
  }

  void time(std::vector<Timed>& arms) {
    for (int group = 0; group < flags_.groups; ++group) {
      for (size_t i = 0; i < arms.size(); ++i) block(arms[i]);
      for (size_t i = arms.size(); i-- > 0;) block(arms[i]);
    }
  }

  // A row per arm: printed now, and again with all others at the end.
  void report(const std::string& letter, const std::vector<Timed>& arms) {
    for (const Timed& timed : arms) {
      const Context& context = *timed.arm->context;
      const auto sent = static_cast<int64_t>(
          most(static_cast<double>(context.comm_bytes(false) + context.comm_bytes(true))));
      if (host_.rank() != 0) continue;
      std::string row = fmt::format("{} {:<6}", letter, timed.arm->name);
      if (!timed.arm->timed()) {
        row += " no time: failed the comparison";
      } else {
        for (size_t op = 0; op < kNumOperations; ++op) {
          const double ms = median(timed.calls[op]), one = median(arms[0].calls[op]);
          row += fmt::format(" | {} {:.3f} {:.2f}x", kOperations[op], ms, one / ms);
          if (timed.predicted[op] > 0) row += fmt::format(" ({:.3f})", timed.predicted[op]);
        }
        row +=
            fmt::format(" | {}, {}", context.backend().name(), to_string(context.plan().exchange));
        if (sent > 0) {
          const double waits = median(timed.exchange_most), moves = median(timed.exchange_least);
          row += fmt::format(" {:.3f}..{:.3f} ms, {:.1f} MB, {:.0f} GB/s", moves, waits,
                             static_cast<double>(sent) * 1e-6,
                             static_cast<double>(sent) / moves * 1e-6);
        }
        if (!timed.arm->right()) row += " | not claimed: " + timed.arm->why_not_claimed();
      }
      table_ += row + "\n";
      std::printf("%s\n", row.c_str());
    }
    std::fflush(stdout);
  }

  const Flags& flags_;
  Communicator& host_;
  std::unique_ptr<Communicator> nccl_, single_;
  cudaStream_t stream_{};
  cudaEvent_t begin_{}, end_{};
  std::unique_ptr<ExchangeClock> clock_;
  DeviceBuffer flush_;
  std::string table_;
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
    std::printf(
        "%d x %s, %s gates, %s, median of %d calls, slowest rank; ms, times as fast as CP1, "
        "(predicted); the exchange in forward + backward\n",
        host.size(), properties.name, flags.gates.c_str(), flags.norm ? "norm inside" : "pre-norm",
        2 * flags.groups * flags.calls);
    std::fflush(stdout);
  }
  Bench bench(flags, host);
  bool right = true;
  for (const std::string& letter : flags.letters) right = bench.shape(letter) && right;
  bench.print_table();
  return right ? 0 : 1;
}

}  // namespace
}  // namespace gdn

int main(int argc, char** argv) {
  const gdn::Flags flags = gdn::parse(argc, argv);
  return gdn::fork_ranks(flags.gpus,
                         [&](gdn::Communicator& host) { return gdn::rank_main(flags, host); });
}
