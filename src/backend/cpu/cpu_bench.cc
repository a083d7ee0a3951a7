// Times of the CPU backend's stages over one packed batch. The rate counts the operator's products
// (docs/math.md): per chunk and value head 20 u forward, 42 u backward, u = 64 x 64 x 64
// multiply-adds at K = V = 128, whatever the kernels recompute or skip.
//   cpu_bench --benchmark_filter=fp32
#include <benchmark/benchmark.h>

#include <cstring>

#include "backend/cpu/cpu.h"
#include "base/memory.h"
#include "check/batch.h"

namespace gdn {
namespace {

// Multiply-adds of one chunk and value head: state products of C K V, pair products of C C K or
// C C V; forward 3 + 4 of them, backward 6 + 9 (K = V = 128: 20 u and 42 u).
double forward_flops(const Problem& p, double chunks) {
  const double c = kChunk, k = double(p.dim_k), v = double(p.dim_v);
  return 2 * chunks * double(p.heads_v) * (3 * c * k * v + 2 * c * c * (k + v));
}
double backward_flops(const Problem& p, double chunks) {
  const double c = kChunk, k = double(p.dim_k), v = double(p.dim_v);
  return 2 * chunks * double(p.heads_v) * (6 * c * k * v + c * c * (5 * k + 4 * v));
}

struct Setup {
  Batch batch;
  Plan plan;
  AlignedBuffer prepared, scratch;
  HostTensor o, dq, dk, dv, dg, dbeta;
  BackwardArgs grads;

  Setup(DType operand, int64_t tokens, int64_t heads_qk, int64_t heads_v, int64_t dim) {
    BatchSpec spec;
    spec.documents = {tokens};
    spec.heads_qk = heads_qk;
    spec.heads_v = heads_v;
    spec.dim_k = spec.dim_v = dim;
    spec.operand = operand;
    spec.options.qk_l2norm = true;
    batch = make_batch(spec).value();
    const Partition partition = Partition::make(batch.cu_seqlens, 1, Layout::kContiguous).value();
    const PlanOptions options{
        .heads_v = heads_v, .dim_k = dim, .dim_v = dim, .workers = cpu_backend().workers()};
    plan = Plan::make(partition, 0, options).value();
    const Problem& p = batch.problem;
    prepared = AlignedBuffer(cpu_backend().prepared_bytes(p, plan));
    scratch = AlignedBuffer(std::max(cpu_backend().forward_scratch_bytes(p, plan),
                                     cpu_backend().backward_scratch_bytes(p, plan)));
    o = HostTensor(operand, {tokens, heads_v, dim});
    dq = HostTensor(operand, {tokens, heads_qk, dim});
    dk = HostTensor(operand, {tokens, heads_qk, dim});
    dv = HostTensor(operand, {tokens, heads_v, dim});
    dg = HostTensor(batch.g.view.dtype, {tokens, heads_v});
    dbeta = HostTensor(batch.beta.view.dtype, {tokens, heads_v});
    grads.in = batch.operands();
    grads.d_o = batch.d_o.view;
    grads.dq = dq.view;
    grads.dk = dk.view;
    grads.dv = dv.view;
    grads.dg = dg.view;
    grads.dbeta = dbeta.view;
  }

  StageArgs args() {
    StageArgs a{batch.problem, plan, grads.in};
    a.prepared = prepared.data();
    a.scratch = scratch.data();
    return a;
  }
};

enum class What { kPrepare, kRun, kRunBackward, kAll };

void stages(benchmark::State& state, DType operand, What what) {
  Setup setup(operand, state.range(0), state.range(1), state.range(2), state.range(3));
  const StageArgs args = setup.args();
  const Backend& backend = cpu_backend();
  const auto run = [&](What step) {
    Status status;
    if (step == What::kPrepare) status = backend.prepare(args);
    if (step == What::kRun) status = backend.run(args, {}, setup.o.view, {});
    if (step == What::kRunBackward) status = backend.run_backward(args, setup.grads, nullptr);
    if (!status) state.SkipWithError(status.message().c_str());
  };
  run(What::kPrepare);
  for (auto _ : state) {
    if (what != What::kAll) {
      run(what);
    } else {  // a forward, then a backward that prepares again
      for (What step : {What::kPrepare, What::kRun, What::kPrepare, What::kRunBackward}) run(step);
    }
  }
  const double chunks = double(setup.plan.counts.chunks);
  double flops = 0;
  if (what == What::kRun || what == What::kAll) flops += forward_flops(setup.batch.problem, chunks);
  if (what == What::kRunBackward || what == What::kAll) {
    flops += backward_flops(setup.batch.problem, chunks);
  }
  state.counters["FLOP/s"] =
      benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
  const double tokens = double(state.range(0));
  state.counters["prepared_B/token"] = double(setup.prepared.bytes()) / tokens;
  state.counters["scratch_MiB"] = double(setup.scratch.bytes()) / double(1 << 20);
}

// tokens, key heads, value heads, head dim
#define GDN_CPU_BENCH(name, operand, what)       \
  BENCHMARK_CAPTURE(stages, name, operand, what) \
      ->Args({4096, 16, 48, 128})                \
      ->Args({256, 16, 48, 128})                 \
      ->Args({4096, 16, 48, 64})                 \
      ->Unit(benchmark::kMillisecond)            \
      ->UseRealTime()
GDN_CPU_BENCH(fp32_prepare, DType::kFloat32, What::kPrepare);
GDN_CPU_BENCH(fp32_run, DType::kFloat32, What::kRun);
GDN_CPU_BENCH(fp32_run_backward, DType::kFloat32, What::kRunBackward);
GDN_CPU_BENCH(fp32_all, DType::kFloat32, What::kAll);
GDN_CPU_BENCH(bf16_all, DType::kBFloat16, What::kAll);
GDN_CPU_BENCH(fp64_all, DType::kFloat64, What::kAll);

}  // namespace
}  // namespace gdn

BENCHMARK_MAIN();
