// Times a CUDA backend on the named workloads: gpu_bench [--backend NAME] [--norm] [--gates NAME]
// [--calls N] LETTER... Checks accuracy against the fp64 recurrence first, on 2,048 tokens of the
// same heads. Then per shape the median over N calls of forward, backward and both, each with a
// cold L2 (a 256 MiB fill, a synchronise, the call between two events). The rows repeat with a
// period of 2,048 tokens.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "check/accuracy.h"
#include "check/run_batch.h"
#include "device_batch.h"
#include "device_memory.h"

namespace gdn {
namespace {

constexpr int64_t kPeriod = 2048;
constexpr int64_t kFlush = 256 << 20;

struct Flags {
  bool norm = false;
  std::string gates = "model";
  std::string backend = "cuda-portable";
  int calls = 20;
  std::vector<std::string> letters;
};

Flags parse(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--norm") {
      flags.norm = true;
    } else if (word == "--gates" && i + 1 < argc) {
      flags.gates = argv[++i];
    } else if (word == "--backend" && i + 1 < argc) {
      flags.backend = argv[++i];
    } else if (word == "--calls" && i + 1 < argc) {
      flags.calls = std::max(1, std::atoi(argv[++i]));
    } else {
      flags.letters.push_back(word);
    }
  }
  if (flags.letters.empty()) flags.letters = {"M"};
  return flags;
}

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "gpu_bench: %s\n", why.c_str());
  std::exit(1);
}
void must(const Status& status) {
  if (!status) stop(status.message());
}

// A device tensor of `rows` rows that repeats the host tensor's.
struct Repeated {
  DeviceBuffer buffer;
  TensorView view;

  Repeated(const TensorView& host, int64_t rows, bool fill) : view(host) {
    const int64_t row = host.stride[0] * size_of(host.dtype);
    buffer = DeviceBuffer(rows * row);
    if (buffer.data() == nullptr) stop("out of device memory");
    view.shape[0] = rows;
    view.data = buffer.data();
    view.device = {Device::Kind::kCuda, 0};
    for (int64_t at = 0; fill && at < rows; at += host.shape[0]) {
      const int64_t some = std::min(host.shape[0], rows - at);
      static_cast<void>(cudaMemcpy(static_cast<char*>(buffer.data()) + at * row, host.data,
                                   static_cast<size_t>(some * row), cudaMemcpyHostToDevice));
    }
  }
};

class Clock {
 public:
  Clock() : flush_(kFlush) {
    static_cast<void>(cudaEventCreate(&begin_));
    static_cast<void>(cudaEventCreate(&end_));
  }
  double median_ms(int calls, const std::function<void()>& call) {
    std::vector<float> times;
    for (int i = -3; i < calls; ++i) {
      static_cast<void>(cudaMemset(flush_.data(), i & 1, kFlush));
      static_cast<void>(cudaDeviceSynchronize());
      static_cast<void>(cudaEventRecord(begin_));
      call();
      static_cast<void>(cudaEventRecord(end_));
      if (cudaEventSynchronize(end_) != cudaSuccess) stop(cudaGetErrorString(cudaGetLastError()));
      float ms = 0;
      static_cast<void>(cudaEventElapsedTime(&ms, begin_, end_));
      if (i >= 0) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  cudaEvent_t begin_, end_;
  DeviceBuffer flush_;
};

BatchSpec spec_of(const Flags& flags, const std::string& letter) {
  auto spec = workload(letter);
  must(spec.status());
  spec->gates = flags.gates;
  spec->options.qk_l2norm = flags.norm;
  return *spec;
}

void check_accuracy(const Flags& flags) {
  BatchSpec spec = spec_of(flags, "M");
  spec.documents = {1200, 800, 48};
  auto batch = make_batch(spec);
  must(batch.status());
  RunOptions reference;
  reference.context.backend = "reference";
  auto want = run_batch(widen(*batch), reference);
  must(want.status());
  DeviceRun run;
  run.context.backend = flags.backend;
  auto got = run_on_device(*batch, run);
  must(got.status());
  const std::pair<const char*, const HostTensor BatchResult::*> tensors[] = {
      {"o", &BatchResult::o},   {"dq", &BatchResult::dq}, {"dk", &BatchResult::dk},
      {"dv", &BatchResult::dv}, {"dg", &BatchResult::dg}, {"dbeta", &BatchResult::dbeta}};
  std::printf("rel-RMS against fp64:");
  for (const auto& [name, member] : tensors) {
    const Accuracy a = compare(((*got).*member).view, ((*want).*member).view, 1, batch->cu_seqlens);
    std::printf(" %s %.2e", name, a.rel_rms);
    if (!passes(a, bars(DType::kBFloat16, name))) stop(fmt::format("{} is wrong", name));
  }
  std::printf("\n");
}

void time_shape(const Flags& flags, const std::string& letter, Clock& clock) {
  BatchSpec spec = spec_of(flags, letter);
  std::vector<int64_t> cu = {0};
  for (int64_t length : spec.documents) cu.push_back(cu.back() + length);
  const int64_t tokens = cu.back();
  spec.documents = {std::min(kPeriod, tokens)};
  auto made = make_batch(spec);
  must(made.status());
  Batch& period = *made;

  Repeated q(period.q.view, tokens, true), k(period.k.view, tokens, true);
  Repeated v(period.v.view, tokens, true), d_o(period.d_o.view, tokens, true);
  Repeated g(period.g.view, tokens, true), beta(period.beta.view, tokens, true);
  Repeated o(period.v.view, tokens, false), dv(period.v.view, tokens, false);
  Repeated dq(period.q.view, tokens, false), dk(period.k.view, tokens, false);
  Repeated dg(period.g.view, tokens, false), dbeta(period.beta.view, tokens, false);

  auto partition = Partition::make(cu, 1, Layout::kContiguous);
  must(partition.status());
  Problem problem = period.problem;
  problem.tokens = tokens;
  problem.device = {Device::Kind::kCuda, 0};
  auto communicator = make_single_communicator();
  auto context = Context::make(*partition, *communicator, problem, {.backend = flags.backend});
  must(context.status());
  DeviceBuffer resident(context->resident_bytes()), saved(context->saved_bytes());
  DeviceBuffer workspace(
      std::max(context->forward_workspace_bytes(), context->backward_workspace_bytes(true)));
  must(context->upload(resident.memory()));
  const Operands in = {q.view, k.view, v.view, g.view, beta.view, {}, {}};
  const Memory keep = saved.memory();
  const auto forward_call = [&] {
    must(forward(*context, {in, {}, o.view, {}}, workspace.memory(), &keep));
  };
  BackwardArgs args;
  args.in = in;
  args.d_o = d_o.view;
  args.dq = dq.view;
  args.dk = dk.view;
  args.dv = dv.view;
  args.dg = dg.view;
  args.dbeta = dbeta.view;
  const auto backward_call = [&] { must(backward(*context, args, workspace.memory(), &keep)); };
  const double fwd = clock.median_ms(flags.calls, forward_call);
  const double bwd = clock.median_ms(flags.calls, backward_call);
  const double both = clock.median_ms(flags.calls, [&] {
    forward_call();
    backward_call();
  });
  const double kib = 1.0 / 1024 / static_cast<double>(tokens);
  std::printf(
      "%s %-6s %s fwd %.3f bwd %.3f fwd+bwd %.3f ms; %zu segments; KiB/token: saved %.2f, "
      "workspace %.1f forward, %.1f backward\n",
      letter.c_str(), flags.gates.c_str(), flags.norm ? "norm" : "pre-norm", fwd, bwd, both,
      context->plan().segments.size(), static_cast<double>(context->saved_bytes()) * kib,
      static_cast<double>(context->forward_workspace_bytes()) * kib,
      static_cast<double>(context->backward_workspace_bytes(true)) * kib);
  std::fflush(stdout);
}

int bench(const Flags& flags) {
  if (usable_devices() == 0) stop("no CUDA device");
  std::printf("%s\n", device_summary().c_str());
  check_accuracy(flags);
  Clock clock;
  for (const std::string& letter : flags.letters) time_shape(flags, letter, clock);
  return 0;
}

}  // namespace
}  // namespace gdn

int main(int argc, char** argv) { return gdn::bench(gdn::parse(argc, argv)); }
