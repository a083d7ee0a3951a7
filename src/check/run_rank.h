// One rank of a run over ranks: its rows of the operands, forward and backward over a communicator,
// and its part of the global results.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "check/place.h"
#include "check/run_batch.h"

namespace gdn {

struct RankPart {
  std::vector<int64_t> rows;  // global row of each local row
  Batch local;                // its operands; states and per-head tensors stay in the whole batch
  BatchResult result;         // its rows; its partial sums; no states
};

Result<Partition> make_partition(const std::vector<int64_t>& cu_seqlens, const RunOptions& options);
Result<Partition> make_partition(const Batch& batch, const RunOptions& options);
RankPart take_part(const Batch& batch, const RunOptions& options, const Partition& partition,
                   int rank);

// Global results with every byte 0xff where ranks will write. Only the tensors that apply.
BatchResult empty_result(const Batch& batch);
BatchResult empty_states(const Batch& batch);  // the states of it alone

// `states`: final_state and dinitial_state of all documents, of which this rank writes its own;
// ranks of one process may share them.
Status run_rank(const Batch& batch, const RunOptions& options, const Partition& partition,
                Communicator& comm, Place& place, RankPart& part, const BatchResult& states);

// Adds a rank's part to the global results, ranks in order 0..W-1 (partial sums are added in that
// order). States are not touched.
void merge(const RankPart& part, int rank, BatchResult& result);
// Rows that no rank holds become 0.
void zero_slack(const Partition& partition, BatchResult& result);

// The same parts as bytes for a rank of another process, states of the rank's documents included.
// part_bytes(): how many, known everywhere.
std::vector<std::byte> pack(const RankPart& part, const BatchResult& states, const Batch& batch,
                            const Partition& partition, int rank);
int64_t part_bytes(const Batch& batch, const Partition& partition, int rank);
void merge_packed(std::span<const std::byte> bytes, const Batch& batch, const Partition& partition,
                  int rank, BatchResult& result);

}  // namespace gdn
