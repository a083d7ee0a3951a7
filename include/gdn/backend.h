// Backends implement the stages of docs/architecture.md and nothing else: the driver decides what
// runs when. Any backend can be forced by name; a refusal says why.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gdn/plan.h"
#include "gdn/problem.h"
#include "gdn/status.h"

namespace gdn {

// Base pointers of the boundary tables of one pass, in the problem's state dtype, indexed by Table.
using TablePointers = std::array<void*, kNumTables>;

// What every stage is given. Memory is the caller's; sizes come from the byte queries below.
struct StageArgs {
  const Problem& problem;
  const Plan& plan;
  const Operands& in;
  // prepared_bytes(): written by prepare, only read by every later stage, of calls at once too.
  void* prepared = nullptr;
  void* scratch = nullptr;   // scratch_bytes(): free for the stage while it runs
  const void* resident = nullptr;  // resident_bytes(): the plan's tables on the device
  TablePointers tables{};
  Stream stream{};
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const = 0;         // "reference", "cpu", "cuda-portable", ...
  virtual std::string description() const = 0;  // one line: what it runs on, and how
  virtual Device::Kind device_kind() const = 0;

  // Why this backend does not take the problem; nothing if it does. Operand strides and alignment
  // are refused by why_not_operands, called before the first launch of each call.
  virtual std::optional<std::string> why_not(const Problem& problem) const = 0;
  virtual std::optional<std::string> why_not_operands(const Operands& in) const = 0;

  // How many SMs or threads want work: PlanOptions::workers; and how it wants documents cut:
  // PlanOptions::segments_per_worker and segment_chunks (of one rank: see segment_chunks_over). Two
  // pieces per worker even out the last round; at 32 chunks the two folds of a cut, 16, are 2.8 %
  // of the summary, 32 * 18, they serve.
  virtual int64_t workers() const = 0;
  virtual int64_t segments_per_worker() const { return 2; }
  virtual int64_t segment_chunks(int64_t heads_v) const { return 32; }

  // Byte queries, pure functions of the problem, the plan's options and its capacity; multiples of
  // 256. With a capacity so are the launches: a graph captured of them serves other packings.
  virtual int64_t prepared_bytes(const Problem& problem, const Plan& plan) const = 0;
  virtual int64_t forward_scratch_bytes(const Problem& problem, const Plan& plan) const = 0;
  virtual int64_t backward_scratch_bytes(const Problem& problem, const Plan& plan) const = 0;
  // Device copy of the plan's tables, uploaded once per context and packing. 0 for host backends.
  // Ordered on the stream, without waiting for it; refused while the stream is being captured,
  // since a graph would bring these tables back at every replay.
  virtual int64_t resident_bytes(const Plan& plan) const = 0;
  virtual Status upload(const Plan& plan, void* resident, Stream stream) const = 0;

  // ---- Stages ---------------------------------------------------------------------------------
  // Everything that depends on k, g and beta alone, per chunk: gates, inverse, norms.
  virtual Status prepare(const StageArgs& args) const = 0;

  // For every segment with an exit slot: kPart[exit_slot] = B; for those with a map slot also
  // kMap[map_slot] = M. A segment that starts its document is walked from initial_state.
  virtual Status summarize(const StageArgs& args, const TensorView& initial_state) const = 0;

  // One fold program over the tables.
  virtual Status fold(const StageArgs& args, const FoldProgram& program) const = 0;

  // o of every segment from its entry state (kBoundary[entry_slot], or initial_state of its
  // document); final_state rows of the documents that end here.
  virtual Status run(const StageArgs& args, const TensorView& initial_state, const TensorView& o,
                     const TensorView& final_state) const = 0;

  // For every segment with an entry slot: kPart[entry_slot] = C. A segment that ends its document
  // is walked from dfinal_state.
  virtual Status summarize_backward(const StageArgs& args, const BackwardArgs& call) const = 0;

  // Gradients of every segment. entry: forward kBoundary (S_in); args.tables[kBoundary]: dS_out.
  virtual Status run_backward(const StageArgs& args, const BackwardArgs& call,
                              const void* entry) const = 0;
};

// All backends compiled in, fastest first.
std::span<const Backend* const> backends();

// The one of that name, or null.
const Backend* find_backend(std::string_view name);

// Those that only a build with CUDA has, where this is none.
struct AbsentBackend {
  const char* name;
  const char* why;
};
std::span<const AbsentBackend> absent_backends();

// Whether `name` is one of backends(); the error says which there are, or how to build it.
Status check_backend_name(const std::string& name);

// `forced`, or what GDN_BACKEND in the environment names for all calls that force none.
std::string wanted_backend(const std::string& forced);

// The wanted backend, or for an empty name the first that takes the problem. The error lists every
// refusal.
Result<const Backend*> pick_backend(const Problem& problem, const std::string& forced = "");

}  // namespace gdn
