#include "session.h"

#include <list>
#include <set>
#include <type_traits>

namespace gdn_torch {
namespace {

// Packings in turn without a Context: enough for the micro-batches of one step.
constexpr size_t kCachedPackings = 64;

class PackingCache {
 public:
  std::shared_ptr<Session> get(const std::vector<int64_t>& cu_seqlens) {
    std::lock_guard lock(mutex_);
    for (auto it = sessions_.begin(); it != sessions_.end(); ++it) {
      const auto known = (*it)->partition().cu_seqlens();
      if (std::equal(known.begin(), known.end(), cu_seqlens.begin(), cu_seqlens.end())) {
        sessions_.splice(sessions_.begin(), sessions_, it);
        return sessions_.front();
      }
    }
    auto partition = value_of(gdn::Partition::make(cu_seqlens, 1, gdn::Layout::kContiguous));
    sessions_.push_front(
        std::make_shared<Session>(std::move(partition), 0, gdn::ContextOptions{}, true));
    if (sessions_.size() > kCachedPackings) sessions_.pop_back();
    return sessions_.front();
  }

 private:
  std::mutex mutex_;
  std::list<std::shared_ptr<Session>> sessions_;
};

// What ran last. It holds no tensor: at exit torch and the CUDA runtime may be gone before it.
struct Path {
  const gdn::Backend* backend = nullptr;
  gdn::Problem problem;
};
static_assert(std::is_trivially_destructible_v<Path>);
std::mutex path_mutex;
Path path;

}  // namespace

std::shared_ptr<const Prepared> Session::prepare(const gdn::Problem& problem, int64_t flags) {
  gdn::ContextOptions options = options_;
  const int64_t keep = flags & (kKeepPrepared | kKeepWhereLight);
  options.keep_prepared = keep != 0;
  const int64_t exchange = exchange_of(flags);
  if (exchange >= 0) options.exchange = static_cast<gdn::ExchangePolicy>(exchange);
  std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.exchange == options.exchange && entry.keep == keep && entry.problem == problem) {
      return entry.prepared;
    }
  }
  const auto guard = guard_for(problem.device);
  auto context = value_of(gdn::Context::make(partition_, rank_, problem, options));
  if (keep == kKeepWhereLight) {
    const int64_t most = kLightBytes * problem.tokens * problem.heads_v;
    context.keep_prepared(context.saved_bytes() <= most);
  }
  Bytes bytes;
  bytes.forward = context.forward_workspace_bytes();
  bytes.backward = context.backward_workspace_bytes(true);
  bytes.recompute = context.backward_workspace_bytes(false);
  bytes.saved = context.saved_bytes();
  const int64_t resident = context.resident_bytes();
  auto prepared = std::make_shared<Prepared>(
      std::move(context), bytes, aligned_bytes(resident, problem.device), problem.device);
  if (resident > 0) {
    const gdn::Stream stream = current_stream(problem.device);
    check(prepared->context.upload(memory_of(prepared->resident), stream));
    prepared->uses.after_write(stream);
  }
  entries_.push_back({problem, options.exchange, keep, prepared});
  return entries_.back().prepared;
}

void Session::refill(gdn::Partition partition) {
  std::lock_guard lock(mutex_);
  check(gdn::check_refill(partition_, partition, options_.max_tokens, options_.max_fragments));
  check(check_tile(partition, rank_, options_.tile));
  const auto fill = [](const Entry& entry, const gdn::Partition& with) {
    const gdn::Device device = entry.problem.device;
    const auto guard = guard_for(device);
    const gdn::Stream stream = current_stream(device);
    entry.prepared->uses.before_write(stream);
    gdn::Status status = entry.prepared->context.refill(with, stream);
    if (status && entry.prepared->resident.numel() > 0) entry.prepared->uses.after_write(stream);
    return status;
  };
  for (size_t i = 0; i < entries_.size(); ++i) {
    const gdn::Status status = fill(entries_[i], partition);
    // All or none.
    for (size_t done = 0; !status && done < i; ++done) check(fill(entries_[done], partition_));
    check(status);
  }
  partition_ = std::move(partition);
}

Registry<gdn::Partition>& partitions() {
  static auto* registry = new Registry<gdn::Partition>;  // outlives Python's finalizers
  return *registry;
}

Registry<Session>& sessions() {
  static auto* registry = new Registry<Session>;
  return *registry;
}

std::shared_ptr<gdn::Partition> partition_at(int64_t handle) {
  auto partition = partitions().get(handle);
  if (!partition) raise(gdn::ErrorCode::kInvalidArgument, "partition: expected one that is alive");
  return partition;
}

gdn::Status check_tile(const gdn::Partition& partition, int rank, int64_t tile) {
  if (tile == 0) return gdn::Status::ok();
  gdn::PlanOptions options;
  options.tile = tile;
  return gdn::Plan::make(partition, rank, options).status();
}

std::shared_ptr<Session> session_at(int64_t handle, const MaybeTensor& cu_seqlens, int64_t batch,
                                    int64_t length) {
  if (handle != 0) {
    auto session = sessions().get(handle);
    if (!session) raise(gdn::ErrorCode::kInvalidArgument, "ctx: expected one that is alive");
    return session;
  }
  static auto* cache = new PackingCache;
  if (cu_seqlens) return cache->get(int64_values("cu_seqlens", *cu_seqlens));
  std::vector<int64_t> equal(static_cast<size_t>(batch) + 1);
  for (size_t i = 0; i < equal.size(); ++i) equal[i] = static_cast<int64_t>(i) * length;
  return cache->get(equal);
}

TablesRead::~TablesRead() {
  try {
    prepared_->uses.after_read(stream_);
  } catch (const std::exception&) {  // the device has failed: every later call says so
  }
}

void keep_if_captured(const std::shared_ptr<const Prepared>& prepared, gdn::Stream stream) {
  if (prepared->resident.numel() == 0 || !is_capturing(stream)) return;
  static std::mutex mutex;
  static auto* kept = new std::set<std::shared_ptr<const Prepared>>;
  std::lock_guard lock(mutex);
  kept->insert(prepared);
}

void note_path(const Prepared& prepared) {
  std::lock_guard lock(path_mutex);
  path = {&prepared.context.backend(), prepared.context.problem()};
}

std::string last_path() {
  Path last;
  {
    std::lock_guard lock(path_mutex);
    last = path;
  }
  if (last.backend == nullptr) return "";
  std::string text = std::string(last.backend->name()) + "\n" + last.backend->description();
  for (const gdn::Backend* backend : gdn::backends()) {
    if (backend == last.backend) break;  // the list is in order of speed
    const auto why_not = backend->why_not(last.problem);
    text += std::string("\n") + backend->name() + ": " + why_not.value_or("another was forced");
  }
  return text;
}

}  // namespace gdn_torch
