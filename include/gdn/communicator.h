// How ranks talk: the few collectives that context parallelism needs. Implementations: single
// (W = 1), in-process threads, NCCL, MPI (gdn/mpi.h); the caller may bring its own.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gdn/status.h"
#include "gdn/tensor.h"

namespace gdn {

// Every rank calls the same collectives in the same order, also with nothing to send. Pointers are
// on the device the communicator serves; work is ordered after what is on `stream`, and complete
// for later work on it. A rank that fails or stays away gives the others kPeerFailed, not a hang.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual const char* name() const = 0;  // "single", "threads", ...
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // send: blocks for ranks 0..W-1 one after another, send_bytes[p] each; recv likewise.
  virtual Status all_to_all(const void* send, std::span<const int64_t> send_bytes, void* recv,
                            std::span<const int64_t> recv_bytes, Stream stream) = 0;

  // send: bytes[rank()] bytes; recv: the blocks of ranks 0..W-1 one after another.
  virtual Status all_gather(const void* send, void* recv, std::span<const int64_t> bytes,
                            Stream stream) = 0;

  // Host-side: every rank learns whether any rank's `local` is an error; the lowest failing rank's
  // error comes back on all, naming that rank. Called before a call's first collective. May be a
  // no-op that returns `local` where host agreement is impossible without a synchronisation.
  virtual Status agree(const Status& local) = 0;

  // Host-side: kInvalidArgument on every rank, naming the ranks, unless all pass the same digest.
  virtual Status agree_on(uint64_t digest, const std::string& what) = 0;

  // Another rank is known to be gone: what this rank has enqueued need not wait for it any more, and
  // later collectives give kPeerFailed. For communicators whose work would wait without end.
  virtual void abandon() {}

  // Payload bytes this rank handed to other ranks so far (its own block never counts).
  int64_t bytes_sent() const { return bytes_sent_; }

 protected:
  std::atomic<int64_t> bytes_sent_{0};
};

std::unique_ptr<Communicator> make_single_communicator();

// W ranks in one process, one thread each. Element r belongs to rank r's thread. Serves host
// memory. `timeout`: how long a collective waits for the others.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int world_size, std::chrono::milliseconds timeout = std::chrono::minutes(5));

// A rank of the caller's ncclComm_t, which outlives it. Serves memory of that communicator's
// device; work is enqueued on the stream of each call and the host waits for nothing. NCCL itself
// cannot compare counts or errors without a synchronisation: with `host`, a communicator of the
// same ranks that serves host memory (it outlives this one), agree() and agree_on() go through
// that; without, they return what this rank knows. kUnsupported where this process finds no
// libnccl.so.2.
Result<std::unique_ptr<Communicator>> make_nccl_communicator(void* nccl_comm,
                                                             Communicator* host = nullptr);

// Ok, or kUnsupported: why this process has no NCCL.
Status find_nccl();

// An ncclUniqueId: one rank makes it, and hands it to the others by whatever it has.
struct NcclId {
  std::array<std::byte, 128> bytes{};
};
Result<NcclId> make_nccl_id();

// The same over a new ncclComm_t, on the thread's current device; it goes with the communicator.
// Every one of `size` ranks calls this with the same id, and waits in NCCL for the others.
Result<std::unique_ptr<Communicator>> make_nccl_communicator(const NcclId& id, int rank, int size,
                                                             Communicator* host = nullptr);

// The same for the ranks of `host`, through which the id travels; an error on one is an error on
// all.
Result<std::unique_ptr<Communicator>> make_nccl_communicator(Communicator& host);

}  // namespace gdn
