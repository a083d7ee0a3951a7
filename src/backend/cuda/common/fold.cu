#include <algorithm>

#include "backend/cuda/common/fold.cuh"
#include "backend/cuda/common/fold.h"
#include "backend/cuda/common/rows.cuh"
#include "backend/cuda/common/views.h"

namespace gdn::cuda {
namespace {

// Kernels over elements go round: some blocks for every multiprocessor, whatever there is to do.
constexpr int64_t kMostRowBlocks = 2048;

int64_t blocks_for(int64_t items) {
  return std::min((items + kRowThreads - 1) / kRowThreads, kMostRowBlocks);
}

const CountRow* counts_of(const StageArgs& args) {
  return at<CountRow>(args.resident, ResidentLayout::of(args.plan).counts);
}

template <int kRows>
Status launch_fold(const FoldParams& params, int64_t chains, Stream stream) {
  LaunchShape shape;
  shape.blocks = chains * params.heads * (params.cols / kFoldColumns);
  shape.threads = kFoldThreads;
  shape.shared_bytes = FoldShared<kRows>::kBytes;
  return launch("fold", fold_kernel<kRows>, shape, stream, params);
}

}  // namespace

Status fold(const StageArgs& args, const FoldProgram& program) {
  const int64_t heads = program.head_end - program.head_begin;
  if (program.max_chains == 0 || heads <= 0) return Status::ok();
  const int index = program_index(args.plan, program);
  if (index < 0) return {ErrorCode::kInternal, "fold: the program is not one of the plan's"};
  const ResidentLayout layout = ResidentLayout::of(args.plan);
  FoldParams params{};
  params.steps = at<FoldRow>(args.resident, layout.program_steps[index]);
  params.chains = at<int64_t>(args.resident, layout.program_chains[index]);
  params.num_chains = &counts_of(args)->chains[index];
  for (int i = 0; i < kNumTables; ++i) params.tables[i] = static_cast<float*>(args.tables[i]);
  params.heads = static_cast<int>(heads);
  params.cols = static_cast<int>(program.cols);
  params.transpose = program.transpose;
  return program.rows == 128 ? launch_fold<128>(params, program.max_chains, args.stream)
                             : launch_fold<64>(params, program.max_chains, args.stream);
}

Status zero_slack(const StageArgs& args, const TensorView& view) {
  if (!view.present()) return Status::ok();
  const int64_t rows = view.shape[0];
  // Without a capacity the packing is known here; with one it may be another by then.
  if (!args.plan.options.has_capacity() && args.plan.local_tokens >= rows) return Status::ok();
  const int64_t element = size_of(view.dtype);
  // A row is one run where its heads lie side by side, else a run for each head.
  const int64_t dim = view.rank == 3 ? view.shape[2] : 1;
  const bool dense = view.shape[1] == 1 || view.stride[1] == dim;
  ZeroRowsParams params{};
  params.data = view.as<unsigned char>();
  params.first = &counts_of(args)->tokens;
  params.rows = rows;
  params.row_bytes = view.stride[0] * element;
  params.runs = dense ? 1 : view.shape[1];
  params.run_bytes = view.stride[1] * element;
  params.bytes = element * dim * (dense ? view.shape[1] : 1);
  params.unit = element;
  const auto whole = [&](int64_t bytes) { return bytes % 16 == 0; };
  if (whole(reinterpret_cast<intptr_t>(view.data)) && whole(params.bytes) &&
      (rows == 1 || whole(params.row_bytes)) && (dense || whole(params.run_bytes))) {
    params.unit = 16;
  }
  const int64_t units = rows * params.runs * (params.bytes / params.unit);
  return launch("zero_rows", zero_rows_kernel, {blocks_for(units), kRowThreads, 0}, args.stream,
                params);
}

Status copy_rows(const StageArgs& args, const TensorView& from, const TensorView& to) {
  const int64_t rows = to.shape[0];
  if (rows == 0) return Status::ok();
  CopyRowsParams params{};
  params.from = element_view(from);
  params.to = element_view(to);
  params.rows = &counts_of(args)->tokens;
  params.heads = static_cast<int>(to.shape[1]);
  params.pieces = static_cast<int>(to.shape[2] / 8);
  return launch("copy_rows", copy_rows_kernel,
                {blocks_for(rows * params.heads * params.pieces), kRowThreads, 0}, args.stream,
                params);
}

Status copy_empty_documents(const StageArgs& args, const TensorView& from, const TensorView& to) {
  const int64_t most = args.plan.capacity.empty_documents;
  if (most == 0 || !to.present()) return Status::ok();
  CopyStatesParams params{};
  params.documents = at<int64_t>(args.resident, ResidentLayout::of(args.plan).empty);
  params.from = state_view(from);
  params.to = state_view(to);
  params.count = &counts_of(args)->empty;
  params.heads = static_cast<int>(args.problem.heads_v);
  params.dim_k = static_cast<int>(args.problem.dim_k);
  params.dim_v = static_cast<int>(args.problem.dim_v);
  const int64_t elements = most * to.shape[1] * to.shape[2] * to.shape[3];
  return launch("copy_states", copy_states_kernel, {blocks_for(elements), kRowThreads, 0},
                args.stream, params);
}

Status sum_over_chunks(const StageArgs& args, const void* sums, const TensorView& dA_log,
                       const TensorView& ddt_bias) {
  if (!dA_log.present() && !ddt_bias.present()) return Status::ok();
  SumParams params{};
  params.sums = static_cast<const float2*>(sums);
  params.chunks = &counts_of(args)->chunks;
  params.heads = static_cast<int>(args.problem.heads_v);
  params.dA_log = scalar_view(dA_log);
  params.ddt_bias = scalar_view(ddt_bias);
  return launch("sum_over_chunks", sum_kernel,
                {params.heads, kRowThreads, kRowThreads * static_cast<int>(sizeof(double2))},
                args.stream, params);
}

}  // namespace gdn::cuda
