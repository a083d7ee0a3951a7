// What a Python Context holds: one rank's place in a partition, and the core's contexts for the
// shapes of heads that were called so far.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "registry.h"
#include "views.h"

namespace gdn_torch {

struct Bytes {
  int64_t forward = 0;    // workspace of a forward
  int64_t backward = 0;   // of a backward with a saved set
  int64_t recompute = 0;  // of a backward without
  int64_t saved = 0;
};

// One shape of heads. `resident`: the plan's tables on the device.
struct Prepared {
  gdn::Context context;
  Bytes bytes;
  Tensor resident;
};

class Session {
 public:
  Session(gdn::Partition partition, int rank, gdn::ContextOptions options)
      : partition_(std::move(partition)), rank_(rank), options_(std::move(options)) {}

  const gdn::Partition& partition() const { return partition_; }
  int rank() const { return rank_; }

  // Another packing for all its contexts, present and to come; their tables follow on the device's
  // current stream.
  void refill(gdn::Partition partition);

  // The context of a problem, made on its first call. `exchange`: -1, or the policy of this call.
  std::shared_ptr<const Prepared> prepare(const gdn::Problem& problem, int64_t exchange = -1);

 private:
  struct Entry {
    gdn::Problem problem;
    gdn::ExchangePolicy exchange;
    std::shared_ptr<Prepared> prepared;
  };

  gdn::Partition partition_;
  int rank_;
  gdn::ContextOptions options_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

// Bits of the `flags` argument of every op; flags.py has the same table.
enum Flag : int64_t {
  kL2Norm = 1,
  kGateInKernel = 2,
  kBetaSigmoid = 4,
  kNegEigval = 8,
  kStateVFirst = 16,
  kExchangeGiven = 32,  // bits 6 and 7: the ExchangePolicy of this call
};
inline int64_t exchange_of(int64_t flags) {
  return (flags & kExchangeGiven) ? (flags >> 6) & 3 : -1;
}

Registry<gdn::Partition>& partitions();
Registry<Session>& sessions();

std::shared_ptr<gdn::Partition> partition_at(int64_t handle);
// The session of a handle; or, for handle 0, one rank holding cu_seqlens (absent: `batch` documents
// of `length` tokens each), from a small cache compared by content.
std::shared_ptr<Session> session_at(int64_t handle, const MaybeTensor& cu_seqlens, int64_t batch,
                                    int64_t length);

void note_path(std::shared_ptr<const Prepared> prepared);
std::string last_path();

}  // namespace gdn_torch
