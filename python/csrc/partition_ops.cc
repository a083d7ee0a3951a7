// Ops over partitions and sessions: tables in and out as int64 CPU tensors.
#include <torch/csrc/stable/library.h>

#include "session.h"

namespace gdn_torch {
namespace {

std::vector<std::vector<gdn::Fragment>> fragments_from(const Tensor& table, int64_t world_size) {
  const gdn::TensorView view = view_of("fragments", table);
  if (view.rank != 2 || view.shape[1] != 4 || view.dtype != gdn::DType::kInt64 ||
      !table.is_contiguous()) {
    raise(
        gdn::ErrorCode::kInvalidArgument,
        "fragments: expected rows of (rank, doc, offset, length), got " + gdn::shape_string(view));
  }
  std::vector<std::vector<gdn::Fragment>> fragments(static_cast<size_t>(world_size));
  for (int64_t i = 0; i < view.shape[0]; ++i) {
    const int64_t* row = view.as<const int64_t>() + 4 * i;
    if (row[0] < 0 || row[0] >= world_size) {
      raise(gdn::ErrorCode::kInvalidArgument, "fragments: expected lists for " +
                                                  std::to_string(world_size) + " ranks, got rank " +
                                                  std::to_string(row[0]));
    }
    fragments[static_cast<size_t>(row[0])].push_back({row[1], row[2], row[3]});
  }
  return fragments;
}

int64_t partition_create(const Tensor& cu_seqlens, int64_t world_size, std::string layout,
                         const MaybeTensor& cut_points, const MaybeTensor& fragments) {
  const std::vector<int64_t> cu = int64_values("cu_seqlens_global", cu_seqlens);
  constexpr int64_t kMost = int64_t{1} << 30;
  const int ranks = static_cast<int>(std::min(std::max(world_size, int64_t{0}), kMost));
  const auto keep = [](gdn::Result<gdn::Partition> made) {
    return partitions().add(std::make_shared<gdn::Partition>(value_of(std::move(made))));
  };
  if (fragments) {
    if (ranks < 1) raise(gdn::ErrorCode::kInvalidArgument, "world_size: expected at least 1");
    return keep(gdn::Partition::make_explicit(cu, fragments_from(*fragments, ranks)));
  }
  if (cut_points) {
    return keep(gdn::Partition::make_with_cuts(cu, ranks, int64_values("cut_points", *cut_points)));
  }
  return keep(gdn::Partition::make(cu, ranks, value_of(gdn::parse_layout(layout))));
}

void partition_free(int64_t handle) { partitions().take(handle); }

int checked_rank(const gdn::Partition& partition, int64_t rank) {
  if (rank < 0 || rank >= partition.world_size()) {
    raise(gdn::ErrorCode::kInvalidArgument, "rank: expected 0 to " +
                                                std::to_string(partition.world_size() - 1) +
                                                ", got " + std::to_string(rank));
  }
  return static_cast<int>(rank);
}

Tensor partition_fragments(int64_t handle, int64_t rank) {
  const auto partition = partition_at(handle);
  std::vector<int64_t> rows;
  for (const gdn::Fragment& f : partition->fragments(checked_rank(*partition, rank))) {
    rows.insert(rows.end(), {f.doc, f.offset, f.length});
  }
  return int64_tensor(rows, {static_cast<int64_t>(rows.size()) / 3, 3});
}

Tensor partition_local_cu(int64_t handle, int64_t rank) {
  const auto partition = partition_at(handle);
  const auto cu = partition->local_cu_seqlens(checked_rank(*partition, rank));
  return int64_tensor({cu.begin(), cu.end()}, {static_cast<int64_t>(cu.size())});
}

Tensor partition_tokens(int64_t handle, int64_t rank) {
  const auto partition = partition_at(handle);
  const auto rows = partition->token_indices(checked_rank(*partition, rank));
  return int64_tensor(rows, {static_cast<int64_t>(rows.size())});
}

Tensor partition_crossing(int64_t handle, int64_t rank) {
  const auto partition = partition_at(handle);
  std::vector<int64_t> rows;
  for (const gdn::Crossing& c : partition->crossing(checked_rank(*partition, rank))) {
    rows.insert(rows.end(), {c.fragment, c.predecessor_rank, c.predecessor_fragment,
                             c.successor_rank, c.successor_fragment});
  }
  return int64_tensor(rows, {static_cast<int64_t>(rows.size()) / 5, 5});
}

Tensor partition_halo(int64_t handle, int64_t rank, int64_t width) {
  const auto partition = partition_at(handle);
  std::vector<int64_t> rows;
  for (const gdn::HaloRun& h :
       partition->halo(checked_rank(*partition, rank), static_cast<int>(width))) {
    rows.insert(rows.end(), {h.fragment, h.rows_before, h.length, h.owner_rank, h.owner_row});
  }
  return int64_tensor(rows, {static_cast<int64_t>(rows.size()) / 5, 5});
}

int64_t partition_digest(int64_t handle) {
  return static_cast<int64_t>(partition_at(handle)->digest());
}

std::string partition_draw(int64_t handle, int64_t width) {
  return gdn::draw(*partition_at(handle), static_cast<int>(width));
}

int64_t session_create(int64_t partition_handle, int64_t rank, std::string backend,
                       std::string exchange, int64_t tile, int64_t max_tokens,
                       int64_t max_fragments) {
  const auto partition = partition_at(partition_handle);
  gdn::ContextOptions options;
  options.backend = backend;
  options.exchange = value_of(gdn::parse_exchange(exchange));
  options.tile = tile;
  options.max_tokens = max_tokens;
  options.max_fragments = max_fragments;
  const int own = checked_rank(*partition, rank);
  check(gdn::check_capacity(*partition, max_tokens, max_fragments));
  check(check_tile(*partition, own, tile));
  return sessions().add(std::make_shared<Session>(*partition, own, options));
}

void session_refill(int64_t handle, int64_t partition_handle) {
  session_at(handle, std::nullopt, 1, 0)->refill(*partition_at(partition_handle));
}

void session_free(int64_t handle) { sessions().take(handle); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(gdn_kcp, m) {
  m.def(
      "partition_create(Tensor cu_seqlens, int world_size, str layout, Tensor? cut_points, "
      "Tensor? fragments) -> int");
  m.def("partition_free(int partition) -> ()");
  m.def("partition_fragments(int partition, int rank) -> Tensor");
  m.def("partition_local_cu(int partition, int rank) -> Tensor");
  m.def("partition_tokens(int partition, int rank) -> Tensor");
  m.def("partition_crossing(int partition, int rank) -> Tensor");
  m.def("partition_halo(int partition, int rank, int width) -> Tensor");
  m.def("partition_digest(int partition) -> int");
  m.def("partition_draw(int partition, int width) -> str");
  m.def(
      "session_create(int partition, int rank, str backend, str exchange, int tile, "
      "int max_tokens, int max_fragments) -> int");
  m.def("session_refill(int session, int partition) -> ()");
  m.def("session_free(int session) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gdn_kcp, CompositeExplicitAutograd, m) {
  m.impl("partition_create", TORCH_BOX(&partition_create));
  m.impl("partition_free", TORCH_BOX(&partition_free));
  m.impl("partition_fragments", TORCH_BOX(&partition_fragments));
  m.impl("partition_local_cu", TORCH_BOX(&partition_local_cu));
  m.impl("partition_tokens", TORCH_BOX(&partition_tokens));
  m.impl("partition_crossing", TORCH_BOX(&partition_crossing));
  m.impl("partition_halo", TORCH_BOX(&partition_halo));
  m.impl("partition_digest", TORCH_BOX(&partition_digest));
  m.impl("partition_draw", TORCH_BOX(&partition_draw));
  m.impl("session_create", TORCH_BOX(&session_create));
  m.impl("session_refill", TORCH_BOX(&session_refill));
  m.impl("session_free", TORCH_BOX(&session_free));
}

}  // namespace gdn_torch
