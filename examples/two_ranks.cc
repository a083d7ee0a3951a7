// Context parallelism in one process: two ranks (threads) share a document of 1,000 tokens, zigzag,
// and exchange one state map each; the outputs are those of one rank.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "gdn/gdn.h"

namespace {

constexpr int64_t kTokens = 1000, kHeads = 2, kDim = 64;

struct Rows {  // operands and output of some tokens, all heads
  std::vector<float> q, k, v, g, beta, o;
};

// Any deterministic numbers: element i of the token with global index `token`.
float value(int64_t token, int64_t i, float step) {
  return std::sin(step * static_cast<float>(token) + 0.37f * static_cast<float>(i));
}

Rows make_rows(const std::vector<int64_t>& tokens) {
  Rows rows;
  for (int64_t t : tokens) {
    for (int64_t i = 0; i < kHeads * kDim; ++i) {
      rows.q.push_back(value(t, i, 0.11f));
      rows.k.push_back(value(t, i, 0.23f));
      rows.v.push_back(value(t, i, 0.31f));
    }
    for (int64_t h = 0; h < kHeads; ++h) {
      rows.g.push_back(-0.02f * (1.01f + value(t, h, 0.5f)));
      rows.beta.push_back(0.5f + 0.4f * value(t, h, 0.7f));
    }
  }
  rows.o.resize(rows.v.size());
  return rows;
}

gdn::Status run_rank(const gdn::Partition& partition, gdn::Communicator& communicator, Rows& rows,
                     const char** backend) {
  using gdn::TensorView;
  const int64_t tokens = partition.local_tokens(communicator.rank());
  gdn::Problem problem;
  problem.tokens = tokens;
  problem.heads_qk = problem.heads_v = kHeads;
  problem.dim_k = problem.dim_v = kDim;
  problem.options.qk_l2norm = true;
  auto context = gdn::Context::make(partition, communicator, problem);
  if (!context) return context.status();
  *backend = context->backend().name();

  const auto wide = [&](std::vector<float>& x) {
    return TensorView::contiguous(x.data(), gdn::DType::kFloat32, {tokens, kHeads, kDim});
  };
  const auto narrow = [&](std::vector<float>& x) {
    return TensorView::contiguous(x.data(), gdn::DType::kFloat32, {tokens, kHeads});
  };
  gdn::ForwardArgs args;
  args.in = {wide(rows.q), wide(rows.k), wide(rows.v), narrow(rows.g), narrow(rows.beta), {}, {}};
  args.o = wide(rows.o);
  const int64_t bytes = context->forward_workspace_bytes();
  void* workspace = std::aligned_alloc(256, static_cast<size_t>(bytes));
  const gdn::Status status = gdn::forward(*context, args, {workspace, bytes});
  std::free(workspace);
  return status;
}

// o of the whole document over `world_size` ranks.
std::vector<float> run(int world_size) {
  const std::vector<int64_t> cu_seqlens = {0, kTokens};
  auto partition = gdn::Partition::make(cu_seqlens, world_size, gdn::Layout::kZigzagPerDocument);
  if (!partition) std::exit(1);
  auto communicators = gdn::make_thread_communicators(world_size);
  std::vector<float> o(kTokens * kHeads * kDim);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto tokens = partition->token_indices(rank);
      Rows rows = make_rows(tokens);
      const char* backend = "";
      const gdn::Status status = run_rank(*partition, *communicators[rank], rows, &backend);
      if (!status) {
        std::fprintf(stderr, "rank %d: %s\n", rank, status.message().c_str());
        std::exit(1);
      }
      for (size_t i = 0; i < tokens.size(); ++i) {
        std::copy_n(rows.o.begin() + i * kHeads * kDim, kHeads * kDim,
                    o.begin() + tokens[i] * kHeads * kDim);
      }
      std::printf("%d ranks, rank %d: %zu tokens on %s, %lld bytes handed to others\n", world_size,
                  rank, tokens.size(), backend,
                  static_cast<long long>(communicators[rank]->bytes_sent()));
    });
  }
  threads.clear();
  return o;
}

}  // namespace

int main() {
  const auto one = run(1), two = run(2);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < one.size(); ++i) {
    difference += std::pow(double{two[i]} - one[i], 2);
    norm += std::pow(double{one[i]}, 2);
  }
  const double rel_rms = std::sqrt(difference / norm);
  std::printf("two ranks against one: rel-RMS %.1e\n", rel_rms);
  return rel_rms < 1e-5 ? 0 : 1;
}
