// Host side of the kernels in fold.cuh and rows.cuh.
#pragma once

#include "backend/cuda/common/launch.h"
#include "gdn/backend.h"

namespace gdn::cuda {

// `program` must be one of the plan's own (their device copies are in args.resident).
Status fold(const StageArgs& args, const FoldProgram& program);

// Zeros the slack rows of a [T, heads, dim] tensor with unit innermost stride, or of a [T, heads]
// one: those past the packing's.
Status zero_slack(const StageArgs& args, const TensorView& view);

// The packing's rows of `to` <- `from`, both [T, heads, dim] bf16 of any strides; `from` absent: 0.
Status copy_rows(const StageArgs& args, const TensorView& from, const TensorView& to);

// to <- from (0 where absent) for plan.empty_documents.
Status copy_empty_documents(const StageArgs& args, const TensorView& from, const TensorView& to);

// dA_log, ddt_bias [HV] from `sums`, float2 [chunks][HV]; absent views are not wanted.
Status sum_over_chunks(const StageArgs& args, const void* sums, const TensorView& dA_log,
                       const TensorView& ddt_bias);

}  // namespace gdn::cuda
