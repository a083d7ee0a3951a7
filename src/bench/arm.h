// What is timed: the operator's calls, or one of its stages, by a backend of this build or by
// another build's C ABI.
#pragma once

#include <memory>
#include <string>

#include "bench/case.h"

namespace gdn::bench {

enum class Operation : uint8_t {
  kForward,
  kBackward,  // after a forward that is not timed
  kForwardBackward,
  kCheckpoint,  // a forward that keeps nothing, then forward and backward
  kPrepare,     // the stages of include/gdn/backend.h, each alone, many folds as one
  kSummarize,
  kFold,
  kRun,
  kSummarizeBackward,
  kFoldBackward,
  kRunBackward,
};
const char* to_string(Operation operation);  // "fwd", "bwd", "fwd+bwd", "ckpt", "prepare", ...
Result<Operation> parse_operation(const std::string& name);
bool is_stage(Operation operation);
bool needs_backward(Operation operation);

// FLOP of the matrix products of `chunk_heads` chunks, as docs/math.md counts them: u = 2 * 64^3 at
// K = V = 128; a forward 20 u, a backward 42 u. 0 for stages.
double products_flop(Operation operation, int64_t chunk_heads, int64_t dim_k, int64_t dim_v);

struct ArmOptions {
  ContextOptions context;
  bool keep_saved = true;  // false: the backward recomputes
  std::string library;     // a build's libgdn_c.so; empty: this build
};

struct ArmFacts {
  std::string backend;
  int64_t segments = -1;  // -1: not told
  int64_t saved_bytes = 0, forward_workspace_bytes = 0, backward_workspace_bytes = 0;
};

class Arm {
 public:
  virtual ~Arm() = default;
  virtual const ArmFacts& facts() const = 0;
  // kUnsupported where the operation is not there to be timed, and why.
  virtual Status offers(Operation operation) const = 0;
  Status call(Operation operation);

 protected:
  Arm(const Case& what, bool keep_saved) : case_(what), keep_saved_(keep_saved) {}

  virtual Status forward(bool keep) = 0;
  virtual Status backward() = 0;
  virtual Status stage(Operation operation) = 0;

  const Case& case_;
  const bool keep_saved_;
};

// The case outlives the arm. Memory of its own: saved set, workspaces, tables.
Result<std::unique_ptr<Arm>> make_arm(Machine& machine, const Case& what,
                                      const ArmOptions& options);

// The two kinds, for make_arm.
Result<std::unique_ptr<Arm>> make_own_arm(Machine& machine, const Case& what,
                                          const ArmOptions& options);
Result<std::unique_ptr<Arm>> make_library_arm(Machine& machine, const Case& what,
                                              const ArmOptions& options);

}  // namespace gdn::bench
