// One way to run a shape on this process's GPU, as bench/ranks_bench.cc compares and times them:
// one rank over the whole pack, or a rank of a layout. An error ends the process with a line that
// names it: nothing useful can follow, and the other ranks are ended by whoever forked them.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check/accuracy.h"
#include "check/batch.h"
#include "device_memory.h"
#include "gdn/gdn.h"

namespace gdn {

[[noreturn]] void stop(const std::string& why);
void must(const Status& status);
void must(cudaError_t error, const char* what);

// Rows `global` of the periodic pack on the device, or memory of that shape.
struct Rows {
  DeviceBuffer buffer;
  TensorView view;

  Rows(const TensorView& period, const std::vector<int64_t>& global, int device, bool fill);
};

struct Output {
  const char* name;
  const Rows* rows;
};

// Device time of the collectives within a call.
class ExchangeClock {
 public:
  ExchangeClock();
  void begin(cudaStream_t stream);
  void end(cudaStream_t stream);
  double take_ms();  // since the last take; waits for the events

 private:
  static constexpr size_t kMost = 4;  // there and back, forward and backward
  cudaEvent_t begins_[kMost], ends_[kMost];
  size_t used_ = 0;
};

struct Arm {
  // Relative RMS of one rank and of several (docs/accuracy.md).
  inline static const double kMoved = bar_between_ranks(Device::Kind::kCuda, true);

  // What a rank runs, over rows that repeat with the period's.
  struct Way {
    std::string name, backend;  // backend: empty: the first that takes the shape
    const Partition& partition;
    Communicator& comm;  // outlives the arm
    double bar = kMoved;
    int64_t tile = 0;  // see PlanOptions::tile
  };
  Arm(const Way& way, const Batch& period, int device, cudaStream_t stream);

  void forward_call(bool keep, cudaStream_t stream);
  void backward_call(cudaStream_t stream);  // after a forward that keeps
  // Forward and backward with every collective between two events of `clock`.
  void clocked_call(ExchangeClock& clock, cudaStream_t stream);
  std::vector<Output> outputs() const;

  std::string name;
  Communicator& comm;
  std::vector<int64_t> global;  // global row of each local row
  std::optional<Context> context;
  double bar = 0;    // relative RMS against one rank, of every tensor (docs/accuracy.md)
  double worst = 0;  // as compared; infinity where something is not finite
  bool right() const { return worst <= bar; }
  // One that misses a stricter bar but is as near as moved roundings explain is timed, and not
  // claimed; one further off computes something else.
  bool timed() const { return worst <= kMoved; }
  std::string why_not_claimed() const;  // empty: it may be

 private:
  Operands operands() const { return {q->view, k->view, v->view, g->view, beta->view, {}, {}}; }
  ForwardArgs forward_args() const { return {operands(), {}, o->view, {}}; }
  BackwardArgs backward_args() const;

  std::unique_ptr<Rows> q, k, v, d_o, g, beta, o, dq, dk, dv, dg, dbeta;
  DeviceBuffer resident, saved, workspace;
};

}  // namespace gdn
