#include "backend/cuda/sm90/sm90.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "backend/cuda/common/call_options.h"
#include "backend/cuda/common/fold.h"
#include "backend/cuda/common/launch.h"
#include "backend/cuda/common/upload.h"
#include "backend/cuda/common/views.h"
#include "backend/cuda/portable/portable.h"
#include "backend/cuda/sm90/chains.h"
#include "backend/cuda/sm90/layout.h"
#include "backend/cuda/sm90/prepare.h"
#include "backend/cuda/sm90/tensor_map.h"
#include "backend/cuda/sm90/walk.h"

namespace gdn {
namespace {

using namespace sm90;  // NOLINT: the whole file is about it
using cuda::at;

constexpr int kCapability = 90;
constexpr int kSharedBytes = 227 * 1024;  // what a walk's block uses, nearly

constexpr int64_t kPackChunks = 448;  // 28,672 tokens

// Elements between tokens, also where there is but one.
int64_t token_stride(const TensorView& view) {
  return view.shape[0] > 1 ? view.stride[0] : view.shape[1] * view.shape[2];
}

Status map_rows(const TensorView& view, int halves, CUtensorMap* map) {
  return make_tensor_map(view.data, view.shape[0], view.shape[1], token_stride(view), halves, map);
}

// The least factor from 7 on that permutes the blocks: neighbours in work are then a seventh of the
// grid apart.
int block_stride(int64_t blocks) {
  int stride = 7;
  while (std::gcd<int64_t>(stride, blocks) != 1) ++stride;
  return stride;
}

// What all walks are given.
Status walk_params(const StageArgs& args, const TensorView& v, const TensorView& initial_state,
                   WalkParams* p) {
  const Problem& problem = args.problem;
  const PreparedLayout prepared = PreparedLayout::of(problem, args.plan);
  const Grid grid = Grid::of(args.plan);
  GDN_RETURN_IF_ERROR(map_rows(args.in.q, 2, &p->q));
  GDN_RETURN_IF_ERROR(map_rows(args.in.k, 2, &p->k));
  GDN_RETURN_IF_ERROR(map_rows(v, 2, &p->v));
  p->tiles = at<__nv_bfloat16>(args.prepared, prepared.tiles);
  p->gates = at<float>(args.prepared, prepared.gates);
  p->norms = at<float>(args.prepared, prepared.norms);
  p->flags = at<int>(args.scratch, HandOvers::of(args.plan).flags);
  p->hand_over = static_cast<float*>(args.scratch);
  p->initial_state = cuda::state_view(initial_state);
  p->map_slots = args.plan.capacity.map_slots;
  p->log2_bound = cuda::warm_up_bound();
  p->heads_k = static_cast<int>(problem.heads_qk);
  p->heads_v = static_cast<int>(problem.heads_v);
  p->group = static_cast<int>(grid.group);
  p->block_stride = block_stride(grid.blocks());
  return Status::ok();
}

// Zeros for the flags and counters of the walks of a pass to come.
Status clear_flags(const StageArgs& args) {
  const HandOvers layout = HandOvers::of(args.plan);
  return cuda::zero(at<int>(args.scratch, layout.flags), layout.zeros_bytes, args.stream);
}

// Which pieces a walk takes.
void set_pieces(const StageArgs& args, int64_t pieces, int64_t begin, WalkParams* p) {
  p->pieces = at<WalkPiece>(args.resident, pieces);
  p->piece_begin = at<int32_t>(args.resident, begin);
}

int blocks_of(const StageArgs& args) { return static_cast<int>(Grid::of(args.plan).blocks()); }

float* table(const StageArgs& args, Table which) {
  return static_cast<float*>(args.tables[static_cast<int>(which)]);
}

// Rows that the copy engine moves.
bool rows_aligned(const TensorView& view) {
  return cuda::pieces_aligned(view) && (view.shape[1] == 1 || view.stride[1] == kDim);
}

Status check_rows(const char* name, const TensorView& view) {
  if (rows_aligned(view)) return Status::ok();
  return {ErrorCode::kUnsupported,
          fmt::format("{}: expected a 16-byte aligned base, a token stride that is a multiple of 8 "
                      "elements and head stride {}, got address {} and strides [{}, {}, {}]",
                      name, kDim, view.data, view.stride[0], view.stride[1], view.stride[2])};
}

// d_o as rows that the copy engine moves: itself, or a copy in the rows of d_v, which the reverse
// walk writes chunk by chunk after d_o's have been read.
Status aligned_d_o(const StageArgs& args, const BackwardArgs& call, TensorView* d_o) {
  GDN_RETURN_IF_ERROR(check_rows("dv", call.dv));
  if (call.d_o.present() && rows_aligned(call.d_o)) {
    *d_o = call.d_o;
    return Status::ok();
  }
  *d_o = call.dv;
  return cuda::copy_rows(args, call.d_o, call.dv);
}

class CudaSm90Backend final : public Backend {
 public:
  const char* name() const override { return "cuda-sm90a"; }
  std::string description() const override {
    const cuda::DeviceFacts& facts = cuda::device_facts(cuda::current_device());
    if (facts.compute_capability == 0) return "Hopper GPUs: wgmma and the copy engine (none here)";
    return fmt::format("Hopper GPUs: wgmma and the copy engine; here {}, sm_{}, {} multiprocessors",
                       facts.name, facts.compute_capability, facts.multiprocessors);
  }
  Device::Kind device_kind() const override { return Device::Kind::kCuda; }

  std::optional<std::string> why_not(const Problem& problem) const override {
    if (auto why_not = cuda_portable_backend().why_not(problem)) return why_not;
    if (problem.dim_k != kDim) {
      return fmt::format("head dims: expected K = V = 128, got {}", problem.dim_k);
    }
    const cuda::DeviceFacts& facts = cuda::device_facts(problem.device.index);
    if (facts.compute_capability != kCapability || facts.shared_bytes < kSharedBytes) {
      return fmt::format("{}, sm_{}: needs sm_90 with {} bytes of shared memory a block",
                         facts.name, facts.compute_capability, kSharedBytes);
    }
    return std::nullopt;
  }
  std::optional<std::string> why_not_operands(const Operands& in) const override {
    return cuda_portable_backend().why_not_operands(in);
  }

  int64_t workers() const override { return cuda_portable_backend().workers(); }
  int64_t segments_per_worker() const override { return 1; }
  int64_t segment_chunks(int64_t heads_v) const override {
    return segment_chunks_of_heads(heads_v, workers(), kPackChunks);
  }

  int64_t prepared_bytes(const Problem& problem, const Plan& plan) const override {
    return PreparedLayout::of(problem, plan).bytes;
  }
  int64_t forward_scratch_bytes(const Problem&, const Plan& plan) const override {
    return HandOvers::of(plan).bytes;
  }
  int64_t backward_scratch_bytes(const Problem& problem, const Plan& plan) const override {
    return BackwardScratch::of(problem, plan).bytes;
  }
  int64_t resident_bytes(const Plan& plan) const override { return ResidentTables::of(plan).bytes; }

  Status upload(const Plan& plan, void* resident, Stream stream) const override {
    const ResidentTables tables = ResidentTables::of(plan);
    const Grid grid = Grid::of(plan);
    const int64_t heads_k = plan.options.heads_v / grid.group;
    const auto walks = [&](Direction direction) {
      return make_schedule(run_chains(plan, direction), heads_k, grid.lane_groups);
    };
    const auto summaries = [&](Direction direction) {
      return make_schedule(summary_chains(plan, direction), heads_k, grid.lane_groups, Cuts::kNone);
    };
    const Schedule run = walks(Direction::kForward), reverse = walks(Direction::kReverse);
    const Schedule summary = summaries(Direction::kForward);
    const Schedule reverse_summary = summaries(Direction::kReverse);
    std::vector<unsigned char> image = cuda::resident_image(plan);
    image.resize(static_cast<size_t>(tables.bytes));
    const auto put = [&](int64_t offset, const auto& rows) {
      if (!rows.empty()) {
        std::memcpy(image.data() + offset, rows.data(), rows.size() * sizeof(rows[0]));
      }
    };
    put(tables.run, run.pieces);
    put(tables.run_begin, run.piece_begin);
    put(tables.summary, summary.pieces);
    put(tables.summary_begin, summary.piece_begin);
    put(tables.reverse, reverse.pieces);
    put(tables.reverse_begin, reverse.piece_begin);
    put(tables.reverse_summary, reverse_summary.pieces);
    put(tables.reverse_summary_begin, reverse_summary.piece_begin);
    return cuda::upload_image(image, resident, stream);
  }

  Status prepare(const StageArgs& args) const override {
    if (args.plan.capacity.chunks == 0) return Status::ok();
    const cuda::DeviceGuard guard(args.problem.device.index);
    const PreparedLayout layout = PreparedLayout::of(args.problem, args.plan);
    PrepareParams p{};
    p.q = args.in.q.as<const __nv_bfloat16>();
    p.k = args.in.k.as<const __nv_bfloat16>();
    p.q_stride = token_stride(args.in.q);
    p.k_stride = token_stride(args.in.k);
    p.g = cuda::scalar_view(args.in.g);
    p.beta = cuda::scalar_view(args.in.beta);
    p.activation = cuda::activation_of(args.problem, args.in);
    const cuda::ResidentLayout common = cuda::ResidentLayout::of(args.plan);
    p.chunks = at<cuda::ChunkRow>(args.resident, common.chunks);
    p.num_chunks = &at<cuda::CountRow>(args.resident, common.counts)->chunks;
    p.tiles = at<__nv_bfloat16>(args.prepared, layout.tiles);
    p.gates = at<float>(args.prepared, layout.gates);
    p.norms = at<float>(args.prepared, layout.norms);
    p.max_chunks = args.plan.capacity.chunks;
    p.heads_k = static_cast<int>(args.problem.heads_qk);
    p.heads_v = static_cast<int>(args.problem.heads_v);
    p.scale = static_cast<float>(args.problem.scale());
    p.l2norm = args.problem.options.qk_l2norm;
    return launch_prepare(p, args.stream);
  }

  Status summarize(const StageArgs& args, const TensorView& initial_state) const override {
    if (args.plan.capacity.exit_slots == 0) return Status::ok();
    const cuda::DeviceGuard guard(args.problem.device.index);
    const ResidentTables tables = ResidentTables::of(args.plan);
    WalkParams p{};
    GDN_RETURN_IF_ERROR(walk_params(args, args.in.v, initial_state, &p));
    set_pieces(args, tables.summary, tables.summary_begin, &p);
    p.leave_table = table(args, Table::kPart);
    p.leave_slots = args.plan.capacity.exit_slots;
    p.map_table = table(args, Table::kMap);
    return launch_summary(p, blocks_of(args), args.stream);
  }

  Status fold(const StageArgs& args, const FoldProgram& program) const override {
    const cuda::DeviceGuard guard(args.problem.device.index);
    return cuda::fold(args, program);
  }

  Status run(const StageArgs& args, const TensorView& initial_state, const TensorView& o,
             const TensorView& final_state) const override {
    const cuda::DeviceGuard guard(args.problem.device.index);
    if (args.plan.capacity.chunks > 0) {
      GDN_RETURN_IF_ERROR(check_rows("o", o));
      GDN_RETURN_IF_ERROR(clear_flags(args));
      WalkParams p{};
      GDN_RETURN_IF_ERROR(run_params(args, initial_state, table(args, Table::kBoundary), &p));
      GDN_RETURN_IF_ERROR(map_rows(o, 1, &p.o_map));
      p.o = o.as<__nv_bfloat16>();
      p.o_stride = token_stride(o);
      p.final_state = cuda::state_view(final_state);
      GDN_RETURN_IF_ERROR(launch_walk(p, blocks_of(args), args.stream));
    }
    GDN_RETURN_IF_ERROR(cuda::copy_empty_documents(args, initial_state, final_state));
    return cuda::zero_slack(args, o);
  }

  Status summarize_backward(const StageArgs& args, const BackwardArgs& call) const override {
    if (args.plan.capacity.entry_slots == 0) return Status::ok();
    const cuda::DeviceGuard guard(args.problem.device.index);
    const ResidentTables tables = ResidentTables::of(args.plan);
    TensorView d_o;
    GDN_RETURN_IF_ERROR(aligned_d_o(args, call, &d_o));
    WalkParams p{};
    GDN_RETURN_IF_ERROR(walk_params(args, d_o, call.dfinal_state, &p));
    set_pieces(args, tables.reverse_summary, tables.reverse_summary_begin, &p);
    p.leave_table = table(args, Table::kPart);
    p.leave_slots = args.plan.capacity.entry_slots;
    return launch_reverse_summary(p, blocks_of(args), args.stream);
  }

  Status run_backward(const StageArgs& args, const BackwardArgs& call,
                      const void* entry) const override {
    const cuda::DeviceGuard guard(args.problem.device.index);
    if (args.plan.capacity.chunks > 0) {
      GDN_RETURN_IF_ERROR(clear_flags(args));
      GDN_RETURN_IF_ERROR(walk_reverse(args, call));
      GDN_RETURN_IF_ERROR(walk_gradients(args, call, entry));
    }
    if (args.problem.options.gate_in_kernel) {
      const int64_t sums = BackwardScratch::of(args.problem, args.plan).sums;
      GDN_RETURN_IF_ERROR(
          cuda::sum_over_chunks(args, at<float2>(args.scratch, sums), call.dA_log, call.ddt_bias));
    }
    GDN_RETURN_IF_ERROR(cuda::copy_empty_documents(args, call.dfinal_state, call.dinitial_state));
    for (const TensorView* view : {&call.dq, &call.dk, &call.dv, &call.dg, &call.dbeta}) {
      GDN_RETURN_IF_ERROR(cuda::zero_slack(args, *view));
    }
    return Status::ok();
  }

 private:
  // A walk over all segments from their entry states.
  static Status run_params(const StageArgs& args, const TensorView& initial_state,
                           const float* entry, WalkParams* p) {
    const ResidentTables tables = ResidentTables::of(args.plan);
    GDN_RETURN_IF_ERROR(walk_params(args, args.in.v, initial_state, p));
    set_pieces(args, tables.run, tables.run_begin, p);
    p->enter_table = entry;
    p->enter_slots = args.plan.capacity.entry_slots;
    return Status::ok();
  }

  // dS of every chunk, dinitial_state, and d_v but for tokens whose beta is nearly 0.
  static Status walk_reverse(const StageArgs& args, const BackwardArgs& call) {
    const ResidentTables tables = ResidentTables::of(args.plan);
    TensorView d_o;
    GDN_RETURN_IF_ERROR(aligned_d_o(args, call, &d_o));
    WalkParams p{};
    GDN_RETURN_IF_ERROR(walk_params(args, d_o, call.dfinal_state, &p));
    set_pieces(args, tables.reverse, tables.reverse_begin, &p);
    GDN_RETURN_IF_ERROR(map_rows(call.dv, 1, &p.o_map));
    p.o = call.dv.as<__nv_bfloat16>();
    p.o_stride = token_stride(call.dv);
    p.final_state = cuda::state_view(call.dinitial_state);
    p.enter_table = table(args, Table::kBoundary);
    p.enter_slots = args.plan.capacity.exit_slots;
    p.states = at<__nv_bfloat16>(args.scratch, BackwardScratch::of(args.problem, args.plan).states);
    return launch_reverse_states(p, blocks_of(args), args.stream);
  }

  // Then, from the segments' beginnings, the other gradients.
  static Status walk_gradients(const StageArgs& args, const BackwardArgs& call, const void* entry) {
    const Problem& problem = args.problem;
    GDN_RETURN_IF_ERROR(check_rows("dq", call.dq));
    GDN_RETURN_IF_ERROR(check_rows("dk", call.dk));
    const BackwardScratch scratch = BackwardScratch::of(problem, args.plan);
    BackwardParams p{};
    GDN_RETURN_IF_ERROR(
        run_params(args, call.initial_state, static_cast<const float*>(entry), &p.walk));
    p.walk.states = at<__nv_bfloat16>(args.scratch, scratch.states);
    p.d_o = cuda::element_view(call.d_o);
    p.d_o.rows = call.d_o.present() && rows_aligned(call.d_o);
    if (p.d_o.rows) GDN_RETURN_IF_ERROR(map_rows(call.d_o, 2, &p.d_o_map));
    GDN_RETURN_IF_ERROR(map_rows(call.dv, 2, &p.d_v_map));
    p.d_v = cuda::element_view(call.dv);
    p.g = cuda::scalar_view(args.in.g);
    p.activation = cuda::activation_of(problem, args.in);
    GDN_RETURN_IF_ERROR(map_rows(call.dq, 2, &p.rows_map[0]));
    GDN_RETURN_IF_ERROR(map_rows(call.dk, 2, &p.rows_map[1]));
    p.rows[0] = cuda::element_view(call.dq);
    p.rows[1] = cuda::element_view(call.dk);
    p.d_g = cuda::scalar_view(call.dg);
    p.d_beta = cuda::scalar_view(call.dbeta);
    p.sums = problem.options.gate_in_kernel ? at<float2>(args.scratch, scratch.sums) : nullptr;
    p.row_counters = at<int>(args.scratch, HandOvers::of(args.plan).row_counters);
    const double scale = problem.scale();
    p.inverse_scale = scale != 0.0 ? static_cast<float>(1.0 / scale) : 0.0f;
    p.l2norm = problem.options.qk_l2norm;
    return launch_backward(p, blocks_of(args), args.stream);
  }
};

}  // namespace

const Backend& cuda_sm90_backend() {
  static const CudaSm90Backend backend;
  return backend;
}

}  // namespace gdn
