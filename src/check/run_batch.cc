#include "check/run_batch.h"

#include <fmt/format.h>

#include <system_error>
#include <thread>

#include "base/guarded.h"
#include "check/run_rank.h"
#include "check/staged_communicator.h"

namespace gdn {
namespace {

std::vector<std::unique_ptr<Communicator>> make_communicators(int world_size) {
  if (world_size > 1) return make_thread_communicators(world_size);
  std::vector<std::unique_ptr<Communicator>> one;
  one.push_back(make_single_communicator());
  return one;
}

// One rank at options.place, over NCCL or host memory if there are more. Its states are its own,
// since it fetches whole tables.
Status run_at_place(const Batch& batch, const RunOptions& options, const Partition& partition,
                    Communicator& host, RankPart& part, BatchResult& states) {
  const auto place = options.place(host.rank());
  GDN_RETURN_IF_ERROR(host.agree(place.status()));
  std::unique_ptr<Communicator> made;
  if (host.size() > 1 && options.through_host) {
    made = make_staged_communicator(host, **place);
  } else if (host.size() > 1) {
    auto nccl = make_nccl_communicator(host);
    if (!nccl) return nccl.status();
    made = std::move(*nccl);
  }
  states = empty_states(batch);
  return run_rank(batch, options, partition, made ? *made : host, **place, part, states);
}

}  // namespace

Status agree_on_calls(Communicator& comm, bool has_backward, bool keep_saved) {
  GDN_RETURN_IF_ERROR(
      comm.agree_on(has_backward, "forward alone or also backward (--forward-only)"));
  return comm.agree_on(has_backward && keep_saved, "backward from a saved set (--recompute)");
}

Result<BatchResult> run_batch(const Batch& batch, const RunOptions& options) {
  const Result<Partition> made = make_partition(batch, options);
  if (!made) return made.status();
  const Partition& partition = *made;
  const int world_size = partition.world_size();
  BatchResult result = empty_result(batch);
  std::vector<RankPart> parts;
  for (int r = 0; r < world_size; ++r) parts.push_back(take_part(batch, options, partition, r));
  std::vector<BatchResult> states(world_size);
  std::vector<Status> statuses(world_size);
  auto communicators = make_communicators(world_size);
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < world_size; ++r) {
      try {
        threads.emplace_back([&, r] {
          statuses[r] = guarded([&] {
            if (options.place) {
              return run_at_place(batch, options, partition, *communicators[r], parts[r],
                                  states[r]);
            }
            const auto place = make_host_place();
            return run_rank(batch, options, partition, *communicators[r], *place, parts[r], result);
          });
          // A rank that failed leaves, so that none of the others waits for it.
          if (!statuses[r]) communicators[r].reset();
        });
      } catch (const std::system_error& error) {
        for (int p = r; p < world_size; ++p) communicators[p].reset();
        statuses[r] = {ErrorCode::kInternal,
                       fmt::format("{} threads wanted, one for each rank, {} started: {}",
                                   world_size, r, error.what())};
        break;
      }
    }
  }
  // The first cause rather than what the others saw of it.
  for (const Status& status : statuses) {
    if (status.code() != ErrorCode::kPeerFailed) GDN_RETURN_IF_ERROR(status);
  }
  for (const Status& status : statuses) GDN_RETURN_IF_ERROR(status);

  result.backend = parts[0].result.backend;
  for (int r = 0; r < world_size; ++r) {
    if (options.place) {
      merge_packed(pack(parts[r], states[r], batch, partition, r), batch, partition, r, result);
    } else {
      merge(parts[r], r, result);
    }
  }
  zero_slack(partition, result);
  return result;
}

Result<BatchResult> run_batch(const Batch& batch, const RunOptions& options, Communicator& comm,
                              Communicator& host, Place& place) {
  const Result<Partition> made = make_partition(batch, options);
  GDN_RETURN_IF_ERROR(host.agree(made.status()));
  const Partition& partition = *made;
  const int rank = host.rank();
  RankPart part;
  BatchResult states;
  const Status ran = guarded([&]() -> Status {
    part = take_part(batch, options, partition, rank);
    states = empty_states(batch);
    return run_rank(batch, options, partition, comm, place, part, states);
  });
  // What failed on this rank, or on all alike, is in its own words already.
  const Status all_ran = host.agree(ran);
  GDN_RETURN_IF_ERROR(ran);
  GDN_RETURN_IF_ERROR(all_ran);

  // Everybody's part to rank 0.
  std::vector<int64_t> send_bytes(host.size(), 0), recv_bytes(host.size(), 0);
  send_bytes[0] = part_bytes(batch, partition, rank);
  std::vector<std::byte> mine, all;
  BatchResult result;
  GDN_RETURN_IF_ERROR(host.agree(guarded([&] {
    mine = pack(part, states, batch, partition, rank);
    if (rank != 0) return Status::ok();
    int64_t total = 0;
    for (int r = 0; r < host.size(); ++r) total += recv_bytes[r] = part_bytes(batch, partition, r);
    all.resize(static_cast<size_t>(total));
    result = empty_result(batch);
    return Status::ok();
  })));
  GDN_RETURN_IF_ERROR(host.all_to_all(mine.data(), send_bytes, all.data(), recv_bytes, {}));
  result.backend = part.result.backend;
  size_t at = 0;
  for (int r = 0; r < host.size() && rank == 0; ++r) {
    const auto bytes = static_cast<size_t>(recv_bytes[r]);
    merge_packed(std::span(all).subspan(at, bytes), batch, partition, r, result);
    at += bytes;
  }
  zero_slack(partition, result);
  return result;
}

}  // namespace gdn
