// The forward kernels, compiled once per instruction set; dispatch at run time.
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/forward_kernels.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/denormals.h"
#include "backend/cpu/forward-inl.h"
#include "backend/cpu/prepare-inl.h"
#include "backend/cpu/stage_call.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu {
namespace HWY_NAMESPACE {

const char* name_of_target() { return hwy::TargetName(HWY_TARGET); }

bool wide(const StageCall& call) { return call.args->problem.state() == DType::kFloat64; }

void prepare_any(const StageCall& call, int64_t item, int worker) {
  return wide(call) ? prepare_item_t<double>(call, item, worker)
                    : prepare_item_t<float>(call, item, worker);
}

void summarize_any(const StageCall& call, int64_t item, int worker) {
  return wide(call) ? summarize_item_t<double>(call, item, worker)
                    : summarize_item_t<float>(call, item, worker);
}

void fold_any(const StageCall& call, int64_t item, int worker) {
  return wide(call) ? fold_item_t<double>(call, item, worker)
                    : fold_item_t<float>(call, item, worker);
}

void run_any(const StageCall& call, int64_t item, int worker) {
  return wide(call) ? run_item_t<double>(call, item, worker)
                    : run_item_t<float>(call, item, worker);
}

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(name_of_target);
HWY_EXPORT(prepare_any);
HWY_EXPORT(summarize_any);
HWY_EXPORT(fold_any);
HWY_EXPORT(run_any);

const char* target_name() { return HWY_DYNAMIC_DISPATCH(name_of_target)(); }

void prepare_item(const StageCall& call, int64_t item, int worker) {
  const FlushDenormals flush;
  HWY_DYNAMIC_DISPATCH(prepare_any)(call, item, worker);
}

void summarize_item(const StageCall& call, int64_t item, int worker) {
  const FlushDenormals flush;
  HWY_DYNAMIC_DISPATCH(summarize_any)(call, item, worker);
}

void fold_item(const StageCall& call, int64_t item, int worker) {
  const FlushDenormals flush;
  HWY_DYNAMIC_DISPATCH(fold_any)(call, item, worker);
}

void run_item(const StageCall& call, int64_t item, int worker) {
  const FlushDenormals flush;
  HWY_DYNAMIC_DISPATCH(run_any)(call, item, worker);
}

namespace {

template <typename T>
int64_t forward_bytes(const Dims& dims) {
  Arena prepare(nullptr), forward(nullptr), fold(nullptr);
  PrepareScratch<T>(prepare, dims);
  ForwardScratch<T>(forward, dims);
  FoldScratch<T>(fold, dims);
  return std::max({prepare.bytes(), forward.bytes(), fold.bytes()});
}

}  // namespace

int64_t forward_worker_bytes(const Problem& problem) {
  const Dims dims = Dims::of(problem);
  return problem.state() == DType::kFloat64 ? forward_bytes<double>(dims)
                                            : forward_bytes<float>(dims);
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
