// Randomised rounds of KCP over the processes of an mpirun: rank_rounds [ROUNDS [SEED [FIRST]]]. A
// round draws W up to the number of processes, one of the workloads A-N with documents a 64th as
// long, a layout (or fragments dealt out at random), gates, options, exchange and tile, and holds
// the results of W processes against W threads of one process (equal bits) and against one rank
// (the bars of docs/accuracy.md; equal bits where cuts are multiples of the tile). Every fourth
// round begins with one rank whose call is wrong: all W must get the same error, and the round goes
// on from there.
#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "check/accuracy.h"
#include "check/cuts.h"
#include "check/run_batch.h"
#include "gdn/mpi.h"

namespace gdn {
namespace {

constexpr int64_t kShrink = 64;
constexpr auto kTimeout = std::chrono::seconds(300);

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  template <size_t N>
  const char* one_of(const char* const (&names)[N]) {
    return names[below(N)];
  }

 private:
  std::mt19937_64 random_;
};

struct Round {
  std::string name;
  BatchSpec spec;
  RunOptions options;
  int wrong_rank = -1;  // whose call is wrong first
};

// Pieces of every document, their ends multiples of `tile` (1: anywhere), to ranks at random.
std::vector<std::vector<Fragment>> deal(const std::vector<int64_t>& documents, int world_size,
                                        int64_t tile, Draw& draw) {
  std::vector<std::vector<Fragment>> ranks(world_size);
  for (int64_t doc = 0; doc < std::ssize(documents); ++doc) {
    for (int64_t at = 0; at < documents[doc];) {
      const int64_t want = tile * (1 + draw.below(600 / tile + 1));
      const int64_t length = std::min(want, documents[doc] - at);
      ranks[draw.below(world_size)].push_back({doc, at, length});
      at += length;
    }
  }
  return ranks;
}

Round draw_round(uint64_t seed, int most_ranks) {
  Draw draw(seed);
  Round round;
  const std::string letter(1, static_cast<char>('A' + draw.below(14)));
  round.spec = *workload(letter, kShrink);
  BatchSpec& spec = round.spec;
  spec.operand = draw.below(3) == 0 ? DType::kFloat32 : DType::kBFloat16;
  spec.gates = draw.one_of({"model", "slow", "fla", "mixed", "inf"});
  spec.options.qk_l2norm = draw.below(2) == 0;
  spec.options.gate_in_kernel = draw.below(4) == 0 && spec.gates == "model";
  spec.options.beta_sigmoid = draw.below(4) == 0;
  spec.initial_state = draw.below(2) == 0;
  spec.dfinal_state = draw.below(2) == 0;
  spec.seed = seed;

  RunOptions& run = round.options;
  run.context.backend = "cpu";
  run.world_size = 1 + static_cast<int>(draw.below(most_ranks));
  run.keep_saved = draw.below(3) > 0;
  constexpr ExchangePolicy kPolicies[] = {ExchangePolicy::kAuto, ExchangePolicy::kAllGather,
                                          ExchangePolicy::kAllToAll};
  run.context.exchange = kPolicies[draw.below(3)];
  run.layout = static_cast<Layout>(draw.below(4));
  if (run.layout == Layout::kExplicit) {
    run.context.tile = kChunk * draw.below(3);
    run.fragments =
        deal(spec.documents, run.world_size, std::max<int64_t>(run.context.tile, 1), draw);
  }
  if (draw.below(4) == 0) round.wrong_rank = static_cast<int>(draw.below(run.world_size));
  round.name = fmt::format(
      "{} W{} {} {} {}{}{}{} exchange {} tile {}{}", letter, run.world_size, to_string(run.layout),
      to_string(spec.operand), spec.gates, spec.options.qk_l2norm ? " norm" : "",
      spec.options.gate_in_kernel ? " gate" : "", spec.initial_state ? " states" : "",
      static_cast<int>(run.context.exchange), run.context.tile, run.keep_saved ? "" : " recompute");
  return round;
}

Status wrong(const std::string& what) { return {ErrorCode::kInternal, what}; }

// One rank's call is wrong: all get the same error, and say so to each other.
Status expect_one_error(const Round& round, const Batch& batch, Communicator& comm) {
  RunOptions options = round.options;
  if (comm.rank() == round.wrong_rank) options.context.backend = "none";
  const auto place = make_host_place();
  const auto refused = run_batch(batch, options, comm, comm, *place);
  if (refused) return wrong("a wrong call was taken");
  const std::string message = refused.status().message();
  uint64_t hash = 0;
  for (const char c : message) hash = hash * 131 + static_cast<unsigned char>(c);
  GDN_RETURN_IF_ERROR(comm.agree_on(hash, "the error: '" + message + "'"));
  if (comm.size() > 1 && message.find(fmt::format("rank {}: ", round.wrong_rank)) != 0) {
    return wrong("the error does not name its rank: " + message);
  }
  return Status::ok();
}

Status expect_same_bits(const BatchResult& got, const BatchResult& want, const char* whose) {
  for (const ResultTensor& tensor : kResultTensors) {
    const HostTensor &a = got.*tensor.member, &b = want.*tensor.member;
    if (a.buffer.bytes() != b.buffer.bytes() ||
        (a.buffer.bytes() > 0 &&
         std::memcmp(a.view.data, b.view.data, static_cast<size_t>(a.buffer.bytes())) != 0)) {
      return wrong(fmt::format("{}: other bits than {}", tensor.name, whose));
    }
  }
  return Status::ok();
}

Status expect_close(const BatchResult& got, const BatchResult& one, const Batch& batch,
                    bool same_grid) {
  std::vector<int64_t> documents(batch.cu_seqlens.size());
  for (size_t i = 0; i < documents.size(); ++i) documents[i] = static_cast<int64_t>(i);
  for (const ResultTensor& tensor : kResultTensors) {
    const HostTensor &a = got.*tensor.member, &b = one.*tensor.member;
    if (!a.present()) continue;
    std::span<const int64_t> parts;
    if (tensor.rows == ResultTensor::Rows::kTokens) parts = batch.cu_seqlens;
    if (tensor.rows == ResultTensor::Rows::kDocuments) parts = documents;
    Bars bar = bars(batch.problem.operand, tensor.name);
    if (batch.problem.operand == DType::kBFloat16) {
      bar.rel_rms = bar_between_ranks(Device::Kind::kCpu, same_grid);
    }
    const Accuracy accuracy = compare(a.view, b.view, tensor.head_axis, parts);
    if (!passes(accuracy, bar)) {
      return wrong(fmt::format("{}: rel-RMS {:.2e}, max {:.2e} against one rank, bar {:.0e}",
                               tensor.name, accuracy.rel_rms, accuracy.max_error, bar.rel_rms));
    }
  }
  return Status::ok();
}

// What the ranks of the round do; rank 0 compares.
Status play(const Round& round, Communicator& comm) {
  const Result<Batch> batch = make_batch(round.spec);
  GDN_RETURN_IF_ERROR(comm.agree(batch.status()));
  if (round.wrong_rank >= 0) GDN_RETURN_IF_ERROR(expect_one_error(round, *batch, comm));
  const auto place = make_host_place();
  const auto got = run_batch(*batch, round.options, comm, comm, *place);
  if (!got) return got.status();
  if (comm.rank() != 0) return Status::ok();
  const auto threads = run_batch(*batch, round.options);
  if (!threads) return threads.status();
  GDN_RETURN_IF_ERROR(expect_same_bits(*got, *threads, "threads of one process"));
  RunOptions single = round.options;
  single.world_size = 1;
  single.layout = Layout::kContiguous;
  single.fragments.clear();
  const auto one = run_batch(*batch, single);
  if (!one) return one.status();
  // Partial sums over ranks round in another order, so those bits may differ.
  if (round.options.context.tile > 0 && !batch->A_log.present()) {
    return expect_same_bits(*got, *one, "one rank in tile mode");
  }
  const auto partition =
      round.options.layout == Layout::kExplicit
          ? Partition::make_explicit(batch->cu_seqlens, round.options.fragments)
          : Partition::make(batch->cu_seqlens, round.options.world_size, round.options.layout);
  return expect_close(*got, *one, *batch, cuts_at_multiples_of(kChunk, *partition));
}

int run(int rounds, uint64_t seed, int first) {
  auto world = make_mpi_communicator(nullptr, kTimeout);
  if (!world) {
    std::fprintf(stderr, "rank_rounds: %s\n", world.status().message().c_str());
    return 1;
  }
  const int rank = (*world)->rank();
  int failed = 0, errors = 0;
  std::vector<int> of_size((*world)->size() + 1, 0);
  for (int i = first; i < first + rounds; ++i) {
    const Round round = draw_round(seed * 1'000'003 + static_cast<uint64_t>(i), (*world)->size());
    const int size = round.options.world_size;
    MPI_Comm some = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank < size ? 0 : MPI_UNDEFINED, rank, &some);
    Status status;
    if (rank < size) {
      auto comm = make_mpi_communicator(&some, kTimeout);
      status = comm ? play(round, **comm) : comm.status();
    }
    status = (*world)->agree(status);
    if (some != MPI_COMM_NULL) MPI_Comm_free(&some);
    ++of_size[size];
    errors += round.wrong_rank >= 0;
    failed += !status;
    if (rank == 0) {
      std::printf("%3d %s: %s\n", i, round.name.c_str(), status ? "ok" : status.message().c_str());
      std::fflush(stdout);
    }
    if (status.code() == ErrorCode::kPeerFailed) return 1;
  }
  if (rank == 0) {
    std::printf("%d of %d rounds right, %d of them began with one rank's wrong call; rounds of",
                rounds - failed, rounds, errors);
    for (size_t size = 1; size < of_size.size(); ++size) {
      std::printf(" %zu: %d", size, of_size[size]);
    }
    std::printf("\n");
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace gdn

int main(int argc, char** argv) {
  if (!gdn::start_mpi()) return 2;
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  const int code = gdn::run(rounds, argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1,
                            argc > 3 ? std::atoi(argv[3]) : 0);
  gdn::finish_mpi(code, /*abandon=*/code != 0);
  return code;
}
