// Gated DeltaNet for training on packed documents, over ranks. The header most users read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gdn/backend.h"
#include "gdn/communicator.h"
#include "gdn/partition.h"
#include "gdn/plan.h"
#include "gdn/problem.h"
#include "gdn/status.h"
#include "gdn/tensor.h"

namespace gdn {

const char* version();

// Caller-owned memory on the problem's device, 256-byte aligned.
struct Memory {
  void* data = nullptr;
  int64_t bytes = 0;
};

struct ContextOptions {
  std::string backend;  // the same on every rank; empty: the first that takes the problem
  int64_t tile = 0;     // see PlanOptions::tile
  ExchangePolicy exchange = ExchangePolicy::kAuto;
  // The capacity for other packings, the same on every rank: local rows and fragments of any rank;
  // documents, with and without tokens, are world_size * max_fragments at most. 0: this packing
  // alone. See Context::refill.
  int64_t max_tokens = 0;
  int64_t max_fragments = 0;
  // A saved set also keeps what the stage `prepare` made (Backend::prepared_bytes), and a backward
  // or forward_again with it skips that stage; the results are the same bits. Of this rank alone.
  bool keep_prepared = false;
};

// One rank's view of a partition, for one shape of heads: what every layer of a step reuses.
class Context {
 public:
  // `communicator` outlives the context; its size must be the partition's world size and its rank
  // is the rank of this context. `problem`: the shapes and options of the calls to come.
  static Result<Context> make(const Partition& partition, Communicator& communicator,
                              const Problem& problem, const ContextOptions& options = {});

  // Without a communicator, for callers with collectives of their own: use ForwardCall and
  // BackwardCall below. digest() is what all ranks must have in common.
  static Result<Context> make(const Partition& partition, int rank, const Problem& problem,
                              const ContextOptions& options = {});

  const Partition& partition() const { return partition_; }
  Communicator* communicator() const { return communicator_; }  // null: the caller's own
  uint64_t digest() const;
  const Problem& problem() const { return problem_; }
  const Plan& plan() const { return *plan_; }
  const Backend& backend() const { return *backend_; }
  bool keeps_prepared() const { return options_.keep_prepared; }
  // Before the first call: ContextOptions::keep_prepared anew, where it depends on saved_bytes().
  void keep_prepared(bool keep) { options_.keep_prepared = keep; }
  int rank() const { return plan_->rank; }

  // Device tables: the caller uploads them once before the first call (0 bytes on hosts).
  int64_t resident_bytes() const;
  Status upload(Memory resident, Stream stream = {});
  const void* resident() const { return resident_; }

  // Another packing in the same context, made with a capacity: same layout and number of ranks. The
  // new tables take the place of the old ones on the device, ordered on `stream`; byte counts,
  // launches and addresses stay, so that a CUDA graph captured before serves the new packing.
  // Operands have max_tokens rows or more, of which those past the packing's are slack, and states
  // have documents() rows: those past the packing's are documents without tokens. A collective
  // where the context has a communicator. After an error the context is as it was. Not while a call
  // of this context is under way, nor from within a stream capture.
  Status refill(const Partition& partition, Stream stream = {});
  int64_t documents() const { return plan_->num_documents; }  // N of the states

  int64_t forward_workspace_bytes() const;
  int64_t backward_workspace_bytes(bool have_saved) const;
  int64_t saved_bytes() const;  // what a forward keeps for its backwards, which only read it
  int64_t comm_bytes(bool backward_pass) const;  // what this rank hands to others per pass

 private:
  struct Made;
  static Result<Made> make_local(const Partition& partition, int rank, const Problem& problem,
                                 const ContextOptions& options);
  Context(const Partition& partition, Communicator* communicator, const Problem& problem,
          const ContextOptions& options, const Made& made);

  Status replace(const Partition& partition, Stream stream);

  Partition partition_;
  Communicator* communicator_;
  Problem problem_;
  ContextOptions options_;
  const Backend* backend_;
  std::shared_ptr<const Plan> plan_;
  void* resident_ = nullptr;
};

// o and final_state. `saved`, where given (saved_bytes()), keeps what backward() needs; without it
// the backward recomputes the forward's summaries (and exchanges them again).
Status forward(const Context& context, const ForwardArgs& args, Memory workspace,
               const Memory* saved = nullptr, Stream stream = {});

Status backward(const Context& context, const BackwardArgs& args, Memory workspace,
                const Memory* saved = nullptr, Stream stream = {});

// The checks both calls begin with: shapes, dtypes, device, strides, sizes. Touches no device.
Status validate(const Context& context, const ForwardArgs& args);
Status validate(const Context& context, const BackwardArgs& args);

// ---- The same calls, paused at every collective -----------------------------------------------

// What a paused call wants done before it goes on: on all ranks the same kind in the same order.
// Byte counts are per peer; the blocks lie one after another in rank order.
struct Message {
  enum class Kind : uint8_t { kNone, kAllToAll, kAllGather };
  Kind kind = Kind::kNone;
  const void* send = nullptr;  // all-gather: receive_bytes[rank] bytes
  void* receive = nullptr;
  std::vector<int64_t> send_bytes;
  std::vector<int64_t> receive_bytes;
};

// One forward or backward in progress. The context, and all memory it was given, outlive it.
class Call {
 public:
  static Result<Call> forward(const Context& context, const ForwardArgs& args, Memory workspace,
                              const Memory* saved = nullptr, Stream stream = {});
  // The same outputs from a saved set that an earlier forward of the same inputs kept: no message.
  static Result<Call> forward_again(const Context& context, const ForwardArgs& args,
                                    Memory workspace, Memory saved, Stream stream = {});
  static Result<Call> backward(const Context& context, const BackwardArgs& args, Memory workspace,
                               const Memory* saved = nullptr, Stream stream = {});
  Call(Call&&) noexcept;
  Call& operator=(Call&&) noexcept;
  ~Call();

  // Runs (on a device: enqueues) up to the next collective. message.kind == kNone: all is done.
  Status advance(Message& message);

  // Runs to the end: `message`, which advance() asked for last (none: from where it stands), and
  // all that follow, over `comm` on the call's stream.
  Status complete(Communicator& comm, Stream stream, Message message = {});

 private:
  struct State;
  explicit Call(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace gdn
