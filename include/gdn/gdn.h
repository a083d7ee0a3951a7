// Gated DeltaNet for training on packed documents, over ranks. The header most users read.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

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
  std::string backend;  // empty: the first that takes the problem
  int64_t tile = 0;     // see PlanOptions::tile
  ExchangePolicy exchange = ExchangePolicy::kAuto;
};

// One rank's view of a partition, for one shape of heads: what every layer of a step reuses.
class Context {
 public:
  // `communicator` outlives the context; its size must be the partition's world size and its rank
  // is the rank of this context. `problem`: the shapes and options of the calls to come.
  static Result<Context> make(const Partition& partition, Communicator& communicator,
                              const Problem& problem, const ContextOptions& options = {});

  const Partition& partition() const { return partition_; }
  Communicator& communicator() const { return *communicator_; }
  const Problem& problem() const { return problem_; }
  const Plan& plan() const { return *plan_; }
  const Backend& backend() const { return *backend_; }
  int rank() const { return plan_->rank; }

  // Device tables: the caller uploads them once before the first call (0 bytes on hosts).
  int64_t resident_bytes() const;
  Status upload(Memory resident, Stream stream = {});
  const void* resident() const { return resident_; }

  int64_t forward_workspace_bytes() const;
  int64_t backward_workspace_bytes(bool have_saved) const;
  int64_t saved_bytes() const;  // what a forward keeps for its backward
  int64_t comm_bytes(bool backward_pass) const;  // what this rank hands to others per pass

 private:
  Context(Partition partition, Communicator& communicator, Problem problem, const Backend& backend,
          std::shared_ptr<const Plan> plan)
      : partition_(std::move(partition)), communicator_(&communicator),
        problem_(std::move(problem)), backend_(&backend), plan_(std::move(plan)) {}

  Partition partition_;
  Communicator* communicator_;
  Problem problem_;
  const Backend* backend_;
  std::shared_ptr<const Plan> plan_;
  const void* resident_ = nullptr;
};

// o and final_state. `saved`, where given (saved_bytes()), keeps what backward() needs; without it
// the backward recomputes the forward's summaries (and exchanges them again).
Status forward(const Context& context, const ForwardArgs& args, Memory workspace,
               Memory* saved = nullptr, Stream stream = {});

Status backward(const Context& context, const BackwardArgs& args, Memory workspace,
                const Memory* saved = nullptr, Stream stream = {});

// The checks both calls begin with: shapes, dtypes, device, strides, sizes. Touches no device.
Status validate(const Context& context, const ForwardArgs& args);
Status validate(const Context& context, const BackwardArgs& args);

}  // namespace gdn
