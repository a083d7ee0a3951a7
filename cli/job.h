// How the ranks of a subcommand run: threads of this process, or, under mpirun, every process one
// of them; and which of the processes speaks.
#pragma once

#include <memory>
#include <string>

#include "check/run_batch.h"
#include "options.h"

namespace gdn::cli {

class Job {
 public:
  Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job();  // leaves the job; ends the others where they may wait for a rank that failed

  void add_to(CLI::App& app);  // --comm, --timeout

  // Joins the processes that mpirun started, if any; first of all a command does. The number of
  // ranks is then theirs: world_size follows it, or is refused.
  Status join(PartitionOptions& partition);

  bool many_processes() const { return host_ != nullptr; }
  // Rank 0's process, or the only one: it prints results and writes files.
  bool speaks() const { return host_ == nullptr || host_->rank() == 0; }
  // An error that all ranks share is said once; that a peer is gone, by everybody.
  bool speaks_of(const Status& status) const {
    return speaks() || status.code() == ErrorCode::kPeerFailed;
  }

  // The same error on every rank where any has one.
  Status agree(const Status& local);
  // An error on every rank, with the name `what`, where the processes' values differ.
  Status agree_on(const std::string& value, const std::string& what);
  // Rank 0's process gets the results, the others the backend's name.
  Result<BatchResult> run(const Batch& batch, RunOptions options);
  // As ranks of this process alone, beside what the job's other processes do.
  Result<BatchResult> run_here(const Batch& batch, RunOptions options) const;

  bool over_nccl() const { return comm_name_ == "nccl"; }
  // Of the processes; null without any. comm() is what tensors travel over, host() for the rest.
  Communicator* comm() const { return nccl_ ? nccl_.get() : host_.get(); }
  Communicator* host() const { return host_.get(); }

 private:
  Status join_processes(PartitionOptions& partition);
  Status note(Status status);  // remembers that a peer failed

  std::string comm_name_ = "auto";
  double timeout_ = 300;
  bool mpi_started_ = false;
  Status failure_;
  std::unique_ptr<Communicator> host_, nccl_;
  std::unique_ptr<Place> place_;
};

}  // namespace gdn::cli
