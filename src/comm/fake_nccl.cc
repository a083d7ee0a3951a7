// A stand-in of libnccl.so.2 for tests without a GPU: the functions of comm/nccl_api.h on host
// memory, for ranks that are threads of one process or processes of one host. A block is a file in
// a folder that the unique id names, and that the last rank to go removes. As on a device, sends
// and receives of a group are matched per pair in order, and both ends must name the same count.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "comm/nccl_api.h"

namespace {

using gdn::nccl::Code;
using gdn::nccl::UniqueId;
namespace fs = std::filesystem;

struct Rank {
  std::string folder;
  int rank, size;
  std::vector<int64_t> sent, received;  // [size] blocks so far: the next one's number
  int use = -1;                         // the folder, locked as in use until the process ends
};
struct Pending {
  Rank* comm;
  char* to;
  size_t bytes;
  int peer;
};

thread_local int depth = 0;
thread_local std::vector<Pending> pending;  // receives of the open group

constexpr Code kInvalidUsage = 5;
constexpr auto kTimeout = std::chrono::minutes(2);

// The ranks of this process. Communicators may stay until it ends.
std::mutex ranks_mutex;
std::set<Rank*>& ranks() {
  static auto* all = new std::set<Rank*>;
  return *all;
}

void leave(Rank& rank) {
  if (rank.use < 0) return;
  std::error_code ignored;
  // Nobody else's lock, also of a process that was killed: the last one.
  if (::flock(rank.use, LOCK_EX | LOCK_NB) == 0) fs::remove_all(rank.folder, ignored);
  ::close(rank.use);
  rank.use = -1;
}

struct AtExit {
  ~AtExit() {
    std::lock_guard lock(ranks_mutex);
    for (Rank* rank : ranks()) leave(*rank);
  }
} at_exit;

fs::path block_file(const Rank& rank, int from, int to, int64_t number) {
  return fs::path(rank.folder) /
         (std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number));
}

Code receive(const Pending& p) {
  const fs::path file = block_file(*p.comm, p.peer, p.comm->rank, p.comm->received[p.peer]++);
  const auto deadline = std::chrono::steady_clock::now() + kTimeout;
  std::error_code none;
  while (!fs::exists(file, none)) {
    if (std::chrono::steady_clock::now() > deadline) return gdn::nccl::kSystemError;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  Code code = kInvalidUsage;
  if (fs::file_size(file, none) == p.bytes) {
    std::ifstream stream(file, std::ios::binary);
    const bool read = static_cast<bool>(stream.read(p.to, static_cast<std::streamsize>(p.bytes)));
    code = read ? gdn::nccl::kSuccess : gdn::nccl::kSystemError;
  }
  fs::remove(file, none);
  return code;
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
  std::memset(id, 0, sizeof(*id));
  std::random_device random;
  const std::string name = "fake_nccl_" + std::to_string(random()) + "_" + std::to_string(random());
  const std::string folder = (fs::temp_directory_path() / name).string();
  if (folder.size() >= sizeof(id->bytes)) return gdn::nccl::kSystemError;
  std::memcpy(id->bytes, folder.data(), folder.size());  // made by the first rank that comes
  return gdn::nccl::kSuccess;
}
Code ncclCommInitRank(void** comm, int size, UniqueId id, int rank) {
  const std::vector<int64_t> none(static_cast<size_t>(size), 0);
  std::error_code failed;
  fs::create_directories(id.bytes, failed);
  const int use = ::open(id.bytes, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (use < 0 || ::flock(use, LOCK_SH) != 0) return gdn::nccl::kSystemError;
  Rank* me = new Rank{id.bytes, rank, size, none, none, use};
  std::lock_guard lock(ranks_mutex);
  ranks().insert(me);
  *comm = me;
  return 0;
}
Code ncclCommDestroy(void* comm) {
  Rank* me = static_cast<Rank*>(comm);
  std::lock_guard lock(ranks_mutex);
  ranks().erase(me);
  leave(*me);
  delete me;
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
  const fs::path file = block_file(*me, me->rank, peer, me->sent[peer]++);
  const fs::path part = file.string() + ".part";
  std::ofstream stream(part, std::ios::binary);
  stream.write(static_cast<const char*>(data), static_cast<std::streamsize>(count));
  stream.close();
  std::error_code failed;
  fs::rename(part, file, failed);  // whole from its first sight on
  return stream && !failed ? gdn::nccl::kSuccess : gdn::nccl::kSystemError;
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
