#include "job.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <utility>

#include "gdn/backend.h"
#ifdef GDN_WITH_MPI
#include "gdn/mpi.h"
#endif

namespace gdn::cli {
namespace {

Status invalid(std::string message) { return {ErrorCode::kInvalidArgument, std::move(message)}; }

// By OpenMPI's mpirun, another PMIx launcher, or MPICH's and Slurm's PMI.
bool started_by_mpirun() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

// Whether the GPU's kernels take `problem`, there being one: what runs it where no backend is
// named.
bool gpu_takes(Problem problem) {
  problem.device = {Device::Kind::kCuda, 0};
  return cuda_devices() > 0 && pick_backend(problem).status();
}

}  // namespace

void Job::add_to(CLI::App& app) {
  app.option_defaults()->group("Ranks");
  app.add_option(
      "--comm", comm_name_,
      "how ranks talk: threads of this process, on GPUs through host memory, several on one if "
      "need be; mpi, each process of an mpirun one rank; nccl, threads or processes with one GPU "
      "each; auto, mpi under mpirun, else threads "
      "[default: auto]");
  app.add_option("--timeout", timeout_,
                 "seconds that a process waits for the others before it gives up [default: 300]")
      ->check(number(1e-3));
}

Status Job::note(Status status) {
  if (status.code() == ErrorCode::kPeerFailed && failure_) failure_ = status;
  return status;
}

Status Job::agree(const Status& local) { return host_ ? note(host_->agree(local)) : local; }

Status Job::agree_on(const std::string& value, const std::string& what) {
  return host_ ? note(host_->agree_on(std::hash<std::string>{}(value), what)) : Status::ok();
}

#ifdef GDN_WITH_MPI

namespace {

// This process's number on its host, or `rank` where the launcher does not say.
int local_rank(int rank) {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}) {
    if (const char* text = std::getenv(name)) return std::atoi(text);
  }
  return rank;
}

}  // namespace

Job::~Job() {
  nccl_.reset();
  place_.reset();
  host_.reset();
  if (mpi_started_) finish_mpi(kBadUse, /*abandon=*/!failure_);
}

Status Job::join_processes(PartitionOptions& partition) {
  GDN_RETURN_IF_ERROR(start_mpi());
  mpi_started_ = true;
  const auto timeout =
      std::chrono::milliseconds(static_cast<int64_t>(std::min(timeout_, 1e9) * 1e3));
  auto made = make_mpi_communicator(nullptr, timeout);
  if (!made) return note(made.status());
  host_ = std::move(*made);
  if (partition.world_size != 1 && partition.world_size != host_->size()) {
    return agree(invalid(fmt::format("--ranks: expected {}, as mpirun started, got {}",
                                     host_->size(), partition.world_size)));
  }
  partition.world_size = host_->size();
  if (!over_nccl()) return agree(Status::ok());

  const int devices = cuda_devices();
  auto place = make_cuda_place(devices > 0 ? local_rank(host_->rank()) % devices : 0);
  GDN_RETURN_IF_ERROR(agree(place.status()));
  place_ = std::move(*place);
  auto nccl = make_nccl_communicator(*host_);
  if (!nccl) return note(nccl.status());
  nccl_ = std::move(*nccl);
  return Status::ok();
}

#else

Job::~Job() = default;

Status Job::join_processes(PartitionOptions&) {
  return {ErrorCode::kUnsupported,
          "mpirun, --comm mpi: this build has no MPI (GDN_MPI=ON where it is found)"};
}

#endif

Status Job::join(PartitionOptions& partition) {
  const bool mpirun = started_by_mpirun();
  const auto is = [&](const char* name) { return comm_name_ == name; };
  if (!is("auto") && !is("threads") && !is("mpi") && !is("nccl")) {
    return invalid(
        fmt::format("--comm: expected auto, threads, mpi or nccl, got '{}'", comm_name_));
  }
  if (is("threads") && mpirun) {
    return invalid("--comm threads: expected one process, got many under mpirun");
  }
  return mpirun || is("mpi") ? join_processes(partition) : Status::ok();
}

Result<BatchResult> Job::run_here(const Batch& batch, RunOptions options) const {
  const std::string wanted = wanted_backend(options.context.backend);
  if (!wanted.empty()) GDN_RETURN_IF_ERROR(check_backend_name(wanted));
  if (over_nccl()) {
    options.place = make_cuda_place;
  } else if (wanted.empty() ? gpu_takes(batch.problem) : wanted.starts_with("cuda")) {
    // Ranks in turns over the GPUs, several on one if need be.
    options.place = [](int rank) { return make_cuda_place(rank % std::max(1, cuda_devices())); };
    options.through_host = true;
  }
  return run_batch(batch, options);
}

Result<BatchResult> Job::run(const Batch& batch, RunOptions options) {
  if (!many_processes()) return run_here(batch, std::move(options));
  if (options.world_size != host_->size()) {
    return agree(invalid(fmt::format("--fragments: expected {} ranks, as mpirun started, got {}",
                                     host_->size(), options.world_size)));
  }
  if (place_ == nullptr) place_ = make_host_place();
  auto result = run_batch(batch, options, *comm(), *host_, *place_);
  static_cast<void>(note(result.status()));
  return result;
}

}  // namespace gdn::cli
