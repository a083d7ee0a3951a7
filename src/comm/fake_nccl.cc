// A stand-in of libnccl.so.2 for tests without a GPU: the functions of comm/nccl_api.h for ranks
// that are threads of one process, on host memory. As on a device, sends and receives of a group
// are matched per pair in order, and both ends must name the same count.
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/nccl_api.h"

namespace {

using gdn::nccl::Code;
using gdn::nccl::UniqueId;

struct Hub {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> mail;  // (from, to)
};
struct Rank {
  std::shared_ptr<Hub> hub;
  int rank, size;
};
struct Pending {
  Rank* comm;
  char* to;
  size_t bytes;
  int peer;
};

std::mutex hubs_mutex;
std::map<int, std::weak_ptr<Hub>> hubs;
int next_id = 0;
thread_local int depth = 0;
thread_local std::vector<Pending> pending;  // receives of the open group

constexpr Code kInvalidUsage = 5;

Code receive(const Pending& p) {
  std::unique_lock lock(p.comm->hub->mutex);
  auto& queue = p.comm->hub->mail[{p.peer, p.comm->rank}];
  p.comm->hub->changed.wait(lock, [&] { return !queue.empty(); });
  const std::vector<char> block = std::move(queue.front());
  queue.pop_front();
  if (block.size() != p.bytes) return kInvalidUsage;
  std::memcpy(p.to, block.data(), p.bytes);
  return 0;
}

}  // namespace

extern "C" {

Code ncclGetVersion(int* version) {
  *version = 0;
  return 0;
}
const char* ncclGetErrorString(Code code) {
  static thread_local char text[32];
  std::snprintf(text, sizeof(text), "fake error %d", code);
  return text;
}
Code ncclGetUniqueId(UniqueId* id) {
  std::lock_guard lock(hubs_mutex);
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->bytes, &++next_id, sizeof(next_id));
  return 0;
}
Code ncclCommInitRank(void** comm, int ranks, UniqueId id, int rank) {
  int key = 0;
  std::memcpy(&key, id.bytes, sizeof(key));
  std::lock_guard lock(hubs_mutex);
  std::shared_ptr<Hub> hub = hubs[key].lock();
  if (hub == nullptr) hubs[key] = hub = std::make_shared<Hub>();
  *comm = new Rank{hub, rank, ranks};
  return 0;
}
Code ncclCommDestroy(void* comm) {
  delete static_cast<Rank*>(comm);
  return 0;
}
Code ncclCommAbort(void* comm) { return ncclCommDestroy(comm); }
Code ncclCommGetAsyncError(void*, Code* code) {
  const char* text = std::getenv("FAKE_NCCL_ASYNC_ERROR");
  *code = text != nullptr ? std::atoi(text) : 0;
  return 0;
}
Code ncclCommCount(void* comm, int* count) {
  *count = static_cast<Rank*>(comm)->size;
  return 0;
}
Code ncclCommUserRank(void* comm, int* rank) {
  *rank = static_cast<Rank*>(comm)->rank;
  return 0;
}
Code ncclGroupStart() {
  ++depth;
  return 0;
}
Code ncclGroupEnd() {
  Code code = 0;
  if (--depth == 0) {
    for (const Pending& p : pending) code = code != 0 ? code : receive(p);
    pending.clear();
  }
  return code;
}
Code ncclSend(const void* data, size_t count, int type, int peer, void* comm, void*) {
  Rank* me = static_cast<Rank*>(comm);
  if (type != gdn::nccl::kInt8 || peer < 0 || peer >= me->size) return kInvalidUsage;
  const char* bytes = static_cast<const char*>(data);
  std::lock_guard lock(me->hub->mutex);
  me->hub->mail[{me->rank, peer}].emplace_back(bytes, bytes + count);
  me->hub->changed.notify_all();
  return 0;
}
Code ncclRecv(void* data, size_t count, int type, int peer, void* comm, void*) {
  Rank* me = static_cast<Rank*>(comm);
  if (type != gdn::nccl::kInt8 || peer < 0 || peer >= me->size) return kInvalidUsage;
  pending.push_back({me, static_cast<char*>(data), count, peer});
  if (depth > 0) return 0;
  const Code code = receive(pending.back());
  pending.clear();
  return code;
}
Code ncclAllGather(const void* send, void* recv, size_t count, int type, void* comm, void* stream) {
  Rank* me = static_cast<Rank*>(comm);
  ncclGroupStart();
  Code code = 0;
  for (int p = 0; p < me->size && code == 0; ++p) {
    code = ncclSend(send, count, type, p, comm, stream);
    if (code == 0) {
      code = ncclRecv(static_cast<char*>(recv) + static_cast<size_t>(p) * count, count, type, p,
                      comm, stream);
    }
  }
  const Code end = ncclGroupEnd();
  return code != 0 ? code : end;
}

}  // extern "C"
