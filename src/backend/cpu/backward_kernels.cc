// The backward kernels, compiled once per instruction set; dispatch at run time.
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/backward_kernels.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/denormals.h"
#include "backend/cpu/gradients-inl.h"
#include "backend/cpu/stage_call.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu {
namespace HWY_NAMESPACE {

void summarize_backward_any(const StageCall& call, int64_t item, int worker) {
  return call.args->problem.state() == DType::kFloat64
             ? summarize_backward_item_t<double>(call, item, worker)
             : summarize_backward_item_t<float>(call, item, worker);
}

void run_backward_any(const StageCall& call, int64_t item, int worker) {
  return call.args->problem.state() == DType::kFloat64
             ? run_backward_item_t<double>(call, item, worker)
             : run_backward_item_t<float>(call, item, worker);
}

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(summarize_backward_any);
HWY_EXPORT(run_backward_any);

void summarize_backward_item(const StageCall& call, int64_t item, int worker) {
  const FlushDenormals flush;
  HWY_DYNAMIC_DISPATCH(summarize_backward_any)(call, item, worker);
}

void run_backward_item(const StageCall& call, int64_t item, int worker) {
  const FlushDenormals flush;
  HWY_DYNAMIC_DISPATCH(run_backward_any)(call, item, worker);
}

int64_t backward_worker_bytes(const Problem& problem, const Plan& plan) {
  const Dims dims = Dims::of(problem);
  const BlockPlan blocks = BlockPlan::of(problem, plan);
  Arena arena(nullptr);
  if (problem.state() == DType::kFloat64) {
    BackwardScratch<double>(arena, dims, blocks);
  } else {
    BackwardScratch<float>(arena, dims, blocks);
  }
  return std::max(arena.bytes(), forward_worker_bytes(problem));
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
