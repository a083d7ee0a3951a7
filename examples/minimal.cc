// The smallest use of the C++ library: two packed documents, forward and backward on one rank.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "gdn/gdn.h"

namespace {

// Stops with the library's message where something is not ok.
void must(const gdn::Status& status) {
  if (status) return;
  std::fprintf(stderr, "error: %s\n", status.message().c_str());
  std::exit(1);
}

std::vector<float> wave(int64_t n, float step, float scale, float offset) {
  std::vector<float> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) x[i] = offset + scale * std::sin(step * static_cast<float>(i));
  return x;
}

// 256-byte aligned memory for workspaces.
struct Block {
  explicit Block(int64_t bytes)
      : memory{bytes > 0 ? std::aligned_alloc(256, static_cast<size_t>(bytes)) : nullptr, bytes} {}
  ~Block() { std::free(memory.data); }
  gdn::Memory memory;
};

}  // namespace

int main() {
  using gdn::DType;
  using gdn::TensorView;

  const int64_t T = 300, H = 2, HV = 4, D = 64;  // tokens, key heads, value heads, head dim
  const std::vector<int64_t> cu_seqlens = {0, 100, 300};  // two documents

  std::vector<float> q = wave(T * H * D, 0.7f, 1, 0), k = wave(T * H * D, 1.3f, 1, 0);
  std::vector<float> v = wave(T * HV * D, 0.9f, 1, 0);
  std::vector<float> g = wave(T * HV, 0.1f, 0.05f, -0.06f);  // log-decay, <= 0
  std::vector<float> beta = wave(T * HV, 0.3f, 0.4f, 0.5f);  // in [0, 1]
  std::vector<float> o(v.size()), dq(q.size()), dk(k.size()), dv(v.size()), dg(g.size()),
      dbeta(beta.size());

  const auto rows = [&](std::vector<float>& x, int64_t heads) {
    return TensorView::contiguous(x.data(), DType::kFloat32, {T, heads, D});
  };
  const auto scalars = [&](std::vector<float>& x) {
    return TensorView::contiguous(x.data(), DType::kFloat32, {T, HV});
  };

  gdn::Problem problem;
  problem.tokens = T;
  problem.heads_qk = H;
  problem.heads_v = HV;
  problem.dim_k = problem.dim_v = D;
  problem.operand = DType::kFloat32;
  problem.options.qk_l2norm = true;

  auto partition = gdn::Partition::make(cu_seqlens, /*world_size=*/1, gdn::Layout::kContiguous);
  must(partition.status());
  auto communicator = gdn::make_single_communicator();
  auto context = gdn::Context::make(*partition, *communicator, problem);
  must(context.status());

  const gdn::Operands in = {rows(q, H), rows(k, H), rows(v, HV), scalars(g), scalars(beta), {}, {}};
  Block saved(context->saved_bytes());
  Block forward_workspace(context->forward_workspace_bytes());
  gdn::ForwardArgs forward_args;
  forward_args.in = in;
  forward_args.o = rows(o, HV);
  must(gdn::forward(*context, forward_args, forward_workspace.memory, &saved.memory));

  std::vector<float> d_o = o;  // the gradient of sum(o^2) / 2
  Block backward_workspace(context->backward_workspace_bytes(/*have_saved=*/true));
  gdn::BackwardArgs backward_args;
  backward_args.in = in;
  backward_args.d_o = rows(d_o, HV);
  backward_args.dq = rows(dq, H);
  backward_args.dk = rows(dk, H);
  backward_args.dv = rows(dv, HV);
  backward_args.dg = scalars(dg);
  backward_args.dbeta = scalars(dbeta);
  must(gdn::backward(*context, backward_args, backward_workspace.memory, &saved.memory));

  const auto norm = [](const std::vector<float>& x) {
    double sum = 0;
    for (float value : x) sum += double{value} * value;
    return std::sqrt(sum);
  };
  std::printf("gdn %s, backend %s\n", gdn::version(), context->backend().name());
  std::printf("|o| %.4f  |dq| %.4f  |dk| %.4f  |dv| %.4f  |dg| %.4f  |dbeta| %.4f\n", norm(o),
              norm(dq), norm(dk), norm(dv), norm(dg), norm(dbeta));
  return std::isfinite(norm(o) + norm(dq) + norm(dk) + norm(dv) + norm(dg) + norm(dbeta)) ? 0 : 1;
}
