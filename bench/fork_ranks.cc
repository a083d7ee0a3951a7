#include "fork_ranks.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <thread>

#include "comm/offer.h"

namespace gdn {
namespace {

constexpr int64_t kSlot = 64 << 10;  // bytes one rank can show the others at once
constexpr auto kTimeout = std::chrono::minutes(2);

struct Shared {
  std::atomic<int> arrived{0};
  std::atomic<int> generation{0};
};

class ForkCommunicator final : public Communicator {
 public:
  ForkCommunicator(Shared& shared, char* slots, int rank, int size)
      : shared_(shared), slots_(slots), rank_(rank), size_(size) {}

  const char* name() const override { return "fork"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status all_to_all(const void*, std::span<const int64_t>, void*, std::span<const int64_t>,
                    Stream) override {
    return {ErrorCode::kUnsupported, "all_to_all: forked ranks only gather"};
  }
  Status all_gather(const void* send, void* recv, std::span<const int64_t> bytes, Stream) override {
    return show(send, bytes[rank_], [&] {
      char* out = static_cast<char*>(recv);
      for (int r = 0; r < size_; ++r) {
        if (bytes[r] > 0) std::memcpy(out, slot(r), static_cast<size_t>(bytes[r]));
        out += bytes[r];
      }
    });
  }
  Status agree(const Status& local) override {
    const std::string text = static_cast<char>(local.code()) + local.message();
    std::vector<Offer> offers(size_, offer_of("agree", size_));
    GDN_RETURN_IF_ERROR(show(text.c_str(), std::min<int64_t>(std::ssize(text) + 1, kSlot), [&] {
      for (int r = 0; r < size_; ++r) {
        const auto code = static_cast<ErrorCode>(slot(r)[0]);
        if (code != ErrorCode::kOk) offers[r].status = {code, slot(r) + 1};
      }
    }));
    return first_error(offers);
  }
  Status agree_on(uint64_t digest, const std::string& what) override {
    std::vector<Offer> offers(size_, offer_of("agree_on", size_));
    GDN_RETURN_IF_ERROR(show(&digest, sizeof(digest), [&] {
      for (int r = 0; r < size_; ++r) std::memcpy(&offers[r].digest, slot(r), sizeof(digest));
    }));
    return same_digest(offers, what);
  }

 private:
  const char* slot(int rank) const { return slots_ + rank * kSlot; }

  // Puts `bytes` in this rank's slot; read() runs once all have, and before any is reused.
  template <typename Read>
  Status show(const void* data, int64_t bytes, const Read& read) {
    if (bytes > kSlot) {
      return {ErrorCode::kUnsupported,
              fmt::format("expected at most {} bytes, got {}", kSlot, bytes)};
    }
    if (bytes > 0) std::memcpy(slots_ + rank_ * kSlot, data, static_cast<size_t>(bytes));
    GDN_RETURN_IF_ERROR(meet());
    read();
    return meet();
  }

  Status meet() {
    const int generation = shared_.generation.load();
    if (shared_.arrived.fetch_add(1) + 1 == size_) {
      shared_.arrived.store(0);
      shared_.generation.store(generation + 1);
      return Status::ok();
    }
    const auto deadline = std::chrono::steady_clock::now() + kTimeout;
    while (shared_.generation.load() == generation) {
      if (std::chrono::steady_clock::now() > deadline) {
        return {ErrorCode::kPeerFailed, "a rank did not arrive within 2 minutes"};
      }
      std::this_thread::yield();
    }
    return Status::ok();
  }

  Shared& shared_;
  char* slots_;
  int rank_, size_;
};

}  // namespace

int fork_ranks(int world_size, const std::function<int(Communicator& host)>& body) {
  const size_t bytes = 4096 + static_cast<size_t>(world_size * kSlot);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  Shared* shared = new (memory) Shared;
  char* slots = static_cast<char*>(memory) + 4096;
  std::vector<pid_t> children;
  for (int rank = 0; rank < world_size; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ForkCommunicator host(*shared, slots, rank, world_size);
      int code = 1;
      try {
        code = body(host);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      std::fflush(nullptr);
      ::_exit(code);
    }
    if (child > 0) children.push_back(child);
  }
  int code = static_cast<int>(children.size()) == world_size ? 0 : 1;
  for (size_t ended = 0; ended < children.size(); ++ended) {
    int status = 0;
    const pid_t child = ::wait(&status);
    if (child < 0) break;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    if (code == 0) {
      if (WIFSIGNALED(status)) {  // nothing else tells of it: out of memory, say
        const auto rank = std::find(children.begin(), children.end(), child) - children.begin();
        std::fprintf(stderr, "rank %d: ended by signal %d\n", static_cast<int>(rank),
                     WTERMSIG(status));
      }
      for (const pid_t other : children) ::kill(other, SIGKILL);
    }
    code = 1;
  }
  ::munmap(memory, bytes);
  return code;
}

}  // namespace gdn
