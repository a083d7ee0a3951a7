#include "backend/cuda/common/fold.cuh"
#include "backend/cuda/common/fold.h"
#include "backend/cuda/common/rows.cuh"
#include "backend/cuda/common/views.h"

namespace gdn::cuda {
namespace {

int64_t blocks_for(int64_t items) { return (items + kRowThreads - 1) / kRowThreads; }

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
  if (program.chains() == 0 || heads <= 0) return Status::ok();
  const int index = program_index(args.plan, program);
  if (index < 0) return {ErrorCode::kInternal, "fold: the program is not one of the plan's"};
  const ResidentLayout layout = ResidentLayout::of(args.plan);
  FoldParams params{};
  params.steps = at<FoldRow>(args.resident, layout.program_steps[index]);
  params.chains = at<int64_t>(args.resident, layout.program_chains[index]);
  for (int i = 0; i < kNumTables; ++i) params.tables[i] = static_cast<float*>(args.tables[i]);
  params.heads = static_cast<int>(heads);
  params.cols = static_cast<int>(program.cols);
  params.transpose = program.transpose;
  return program.rows == 128 ? launch_fold<128>(params, program.chains(), args.stream)
                             : launch_fold<64>(params, program.chains(), args.stream);
}

Status zero_rows(const TensorView& view, int64_t first, Stream stream) {
  if (!view.present() || first >= view.shape[0]) return Status::ok();
  const int64_t element = size_of(view.dtype);
  // Heads lie side by side in a row; a [T, heads] tensor of any head stride goes head by head.
  const bool by_head = view.rank == 2 && stride_of(view, 1) > 1;
  const int64_t runs = by_head ? view.shape[1] : 1;
  ZeroRowsParams params{};
  params.rows = view.shape[0] - first;
  params.row_bytes = view.stride[0] * element;
  params.bytes = element * (by_head ? 1 : view.shape[1] * (view.rank == 3 ? view.shape[2] : 1));
  params.element_bytes = element;
  for (int64_t i = 0; i < runs; ++i) {
    params.data =
        view.as<unsigned char>() + (first * view.stride[0] + i * stride_of(view, 1)) * element;
    const LaunchShape shape{blocks_for(params.rows * params.bytes / element), kRowThreads, 0};
    GDN_RETURN_IF_ERROR(launch("zero_rows", zero_rows_kernel, shape, stream, params));
  }
  return Status::ok();
}

Status copy_rows(const TensorView& from, const TensorView& to, int64_t rows, Stream stream) {
  if (rows == 0) return Status::ok();
  CopyRowsParams params{};
  params.from = element_view(from);
  params.to = element_view(to);
  params.rows = rows;
  params.heads = static_cast<int>(to.shape[1]);
  params.pieces = static_cast<int>(to.shape[2] / 8);
  return launch("copy_rows", copy_rows_kernel,
                {blocks_for(rows * params.heads * params.pieces), kRowThreads, 0}, stream, params);
}

Status copy_empty_documents(const StageArgs& args, const TensorView& from, const TensorView& to) {
  const int64_t count = static_cast<int64_t>(args.plan.empty_documents.size());
  if (count == 0 || !to.present()) return Status::ok();
  CopyStatesParams params{};
  params.documents = at<int64_t>(args.resident, ResidentLayout::of(args.plan).empty);
  params.from = state_view(from);
  params.to = state_view(to);
  params.count = count;
  params.heads = static_cast<int>(args.problem.heads_v);
  params.dim_k = static_cast<int>(args.problem.dim_k);
  params.dim_v = static_cast<int>(args.problem.dim_v);
  const int64_t elements = count * to.shape[1] * to.shape[2] * to.shape[3];
  return launch("copy_states", copy_states_kernel, {blocks_for(elements), kRowThreads, 0},
                args.stream, params);
}

Status sum_over_chunks(const StageArgs& args, const void* sums, const TensorView& dA_log,
                       const TensorView& ddt_bias) {
  if (!dA_log.present() && !ddt_bias.present()) return Status::ok();
  SumParams params{};
  params.sums = static_cast<const float2*>(sums);
  params.chunks = args.plan.num_chunks;
  params.heads = static_cast<int>(args.problem.heads_v);
  params.dA_log = scalar_view(dA_log);
  params.ddt_bias = scalar_view(ddt_bias);
  return launch("sum_over_chunks", sum_kernel,
                {params.heads, kRowThreads, kRowThreads * static_cast<int>(sizeof(double2))},
                args.stream, params);
}

}  // namespace gdn::cuda
