// What a Python Context holds: one rank's place in a partition, and the core's contexts for the
// shapes of heads that were called so far.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "registry.h"
#include "stream_uses.h"
#include "views.h"

namespace gdn_torch {

struct Bytes {
  int64_t forward = 0;    // workspace of a forward
  int64_t backward = 0;   // of a backward with a saved set
  int64_t recompute = 0;  // of a backward without
  int64_t saved = 0;
};

// One shape of heads.
struct Prepared {
  Prepared(gdn::Context made, const Bytes& counted, Tensor tables, gdn::Device device)
      : context(std::move(made)), bytes(counted), resident(std::move(tables)), uses(device) {}

  gdn::Context context;
  Bytes bytes;
  Tensor resident;          // the plan's tables on the device
  mutable StreamUses uses;  // of the tables; freed before them
};

// A call that reads the tables on a stream, while it lives.
class TablesRead {
 public:
  TablesRead(std::shared_ptr<const Prepared> prepared, gdn::Stream stream)
      : prepared_(std::move(prepared)), stream_(stream) {
    prepared_->uses.before_read(stream_);
  }
  ~TablesRead();
  TablesRead(const TablesRead&) = delete;
  TablesRead& operator=(const TablesRead&) = delete;

 private:
  std::shared_ptr<const Prepared> prepared_;
  gdn::Stream stream_;
};

class Session {
 public:
  // `cached`: of calls without a Context; it goes when others came.
  Session(gdn::Partition partition, int rank, gdn::ContextOptions options, bool cached = false)
      : partition_(std::move(partition)),
        rank_(rank),
        options_(std::move(options)),
        cached_(cached) {}

  const gdn::Partition& partition() const { return partition_; }
  int rank() const { return rank_; }
  bool is_cached() const { return cached_; }
  bool has_capacity() const { return options_.max_tokens > 0; }
  int64_t local_tokens() const { return partition_.local_tokens(rank_); }

  // Another packing for all its contexts, present and to come; their tables follow on the device's
  // current stream.
  void refill(gdn::Partition partition);

  // The context of a problem and of those `flags` that are ContextOptions, made on its first call.
  std::shared_ptr<const Prepared> prepare(const gdn::Problem& problem, int64_t flags);

 private:
  struct Entry {
    gdn::Problem problem;
    gdn::ExchangePolicy exchange;
    int64_t keep;  // the flags of what a saved set keeps
    std::shared_ptr<Prepared> prepared;
  };

  gdn::Partition partition_;
  int rank_;
  gdn::ContextOptions options_;
  bool cached_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

// Bits of the `flags` argument of every op; _library.py has the same table.
enum Flag : int64_t {
  kL2Norm = 1,
  kGateInKernel = 2,
  kBetaSigmoid = 4,
  kNegEigval = 8,
  kStateVFirst = 16,
  kExchangeGiven = 32,  // bits 6 and 7: the ExchangePolicy of this call
  kKeepPrepared = 256,
  kKeepWhereLight = 512,  // prepared data too, where a saved set stays under kLightBytes
};
// A token and value head: what the operator's other implementations keep, a row of a chunk's inverse
// in bf16 and a sum of gates.
inline constexpr int64_t kLightBytes = 64 * 2 + 4;
inline int64_t exchange_of(int64_t flags) {
  return (flags & kExchangeGiven) ? (flags >> 6) & 3 : -1;
}

Registry<gdn::Partition>& partitions();
Registry<Session>& sessions();

std::shared_ptr<gdn::Partition> partition_at(int64_t handle);
// Whether the partition's cuts are multiples of ContextOptions::tile, found before the first call.
gdn::Status check_tile(const gdn::Partition& partition, int rank, int64_t tile);
// The session of a handle; or, for handle 0, one rank holding cu_seqlens (absent: `batch` documents
// of `length` tokens each), from a small cache compared by content.
std::shared_ptr<Session> session_at(int64_t handle, const MaybeTensor& cu_seqlens, int64_t batch,
                                    int64_t length);

// A CUDA graph that a call without a Context is captured in reads the call's tables at every
// replay: they are kept for good.
void keep_if_captured(const std::shared_ptr<const Prepared>& prepared, gdn::Stream stream);

void note_path(const Prepared& prepared);
std::string last_path();

}  // namespace gdn_torch
