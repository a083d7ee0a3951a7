// Gradients: every key head with its group of value heads is one item. A segment is walked forward
// once for checkpoints, then block by block from its end: states of the block again, then its
// tokens in reverse. dq and dk sum over the group in head order, A_log and dt_bias over segments in
// order.
#include <algorithm>
#include <cmath>

#include "backend/reference/stages.h"
#include "base/element.h"
#include "base/thread_pool.h"

namespace gdn::reference {
namespace {

// Tokens per block. checkpoints + block states = group len / b + b matrices, least at
// b = sqrt(group len). No result depends on it.
int64_t block_length(const Problem& problem, const Plan& plan) {
  const int64_t longest = std::max<int64_t>(1, plan.capacity.longest);
  const double ideal = std::sqrt(static_cast<double>(problem.group() * longest));
  return std::min(longest, static_cast<int64_t>(std::ceil(ideal)));
}

int64_t max_blocks(const Plan& plan, int64_t block) {
  const int64_t longest = std::max<int64_t>(1, plan.capacity.longest);
  return (longest + block - 1) / block;
}

// One key head of one segment after another.
class GroupWalk {
 public:
  GroupWalk(const StageArgs& args, const BackwardArgs& call, const void* entry, int64_t key_head,
            Scratch scratch)
      : args_(args),
        problem_(args.problem),
        call_(call),
        entry_(entry),
        key_head_(key_head),
        group_(problem_.group()),
        dims_(dims_of(problem_)),
        block_(block_length(problem_, args.plan)),
        blocks_(max_blocks(args.plan, block_)) {
    checkpoints_ = scratch.take(group_ * blocks_ * dims_.state());
    dstates_ = scratch.take(group_ * dims_.state());
    dA_log_ = scratch.take(group_);
    ddt_bias_ = scratch.take(group_);
    states_ = scratch.take((block_ + 1) * dims_.state());
    residuals_ = scratch.take(block_ * dims_.v);
    q_ = scratch.take(block_ * dims_.k);
    k_ = scratch.take(block_ * dims_.k);
    dq_ = scratch.take(block_ * dims_.k);
    dk_ = scratch.take(block_ * dims_.k);
    q_norm_ = scratch.take(block_);
    k_norm_ = scratch.take(block_);
    v_ = scratch.take(dims_.v);
    dv_ = scratch.take(dims_.v);
    d_o_ = scratch.take(dims_.v);
    work_ = scratch.take(2 * dims_.v);
    std::fill_n(dA_log_, group_, 0.0);
    std::fill_n(ddt_bias_, group_, 0.0);
  }

  static int64_t scratch_elements(const Problem& problem, const Plan& plan) {
    const int64_t block = block_length(problem, plan);
    const int64_t state = problem.dim_k * problem.dim_v;
    return problem.group() * ((max_blocks(plan, block) + 1) * state + 2) + (block + 1) * state +
           block * (problem.dim_v + 4 * problem.dim_k + 2) + 5 * problem.dim_v;
  }

  void segment(const Segment& segment) {
    segment_ = &segment;
    const int64_t blocks = (segment.length + block_ - 1) / block_;
    for (int64_t member = 0; member < group_; ++member) {
      write_checkpoints(member, blocks);
      load_exit_gradient(member);
    }
    for (int64_t block = blocks - 1; block >= 0; --block) walk_block(block);
    if (!segment.starts_document()) return;
    for (int64_t member = 0; member < group_; ++member) {
      store_state(call_.dinitial_state, segment.doc, head(member), dstate(member));
    }
  }

  void store_parameter_gradients() const {
    for (int64_t member = 0; member < group_; ++member) {
      const int64_t h = head(member);
      if (call_.dA_log.present()) {
        store_element(call_.dA_log, h * call_.dA_log.stride[0], dA_log_[member]);
      }
      if (call_.ddt_bias.present()) {
        store_element(call_.ddt_bias, h * call_.ddt_bias.stride[0], ddt_bias_[member]);
      }
    }
  }

 private:
  int64_t head(int64_t member) const { return key_head_ * group_ + member; }
  double* dstate(int64_t member) const { return dstates_ + member * dims_.state(); }
  double* checkpoint(int64_t member, int64_t block) const {
    return checkpoints_ + (member * blocks_ + block) * dims_.state();
  }

  // The token of a row whose k is given.
  Token token(int64_t row, int64_t h, const double* k) {
    load_vector(args_.in.v, row, h, v_);
    return {.k = k,
            .v = v_,
            .decay = load_gate(problem_.options, args_.in, row, h).decay,
            .beta = load_beta(problem_.options, args_.in, row, h).beta};
  }

  void load_entry_state(int64_t member, double* state) const {
    if (segment_->starts_document()) {
      load_state(call_.initial_state, segment_->doc, head(member), dims_, state);
    } else {
      load_matrix(entry_, problem_.state(), dims_.state(),
                  head(member) * args_.plan.capacity.entry_slots + segment_->entry_slot, state);
    }
  }

  void load_exit_gradient(int64_t member) const {
    if (segment_->ends_document()) {
      load_state(call_.dfinal_state, segment_->doc, head(member), dims_, dstate(member));
    } else {
      load_matrix(args_.tables[static_cast<int>(Table::kBoundary)], problem_.state(), dims_.state(),
                  head(member) * args_.plan.capacity.exit_slots + segment_->exit_slot,
                  dstate(member));
    }
  }

  // States at the start of every block.
  void write_checkpoints(int64_t member, int64_t blocks) {
    load_entry_state(member, checkpoint(member, 0));
    for (int64_t block = 1; block < blocks; ++block) {
      double* state = checkpoint(member, block);
      std::copy_n(checkpoint(member, block - 1), dims_.state(), state);
      for (int64_t t = (block - 1) * block_; t < block * block_; ++t) {
        const int64_t row = segment_->row + t;
        load_key(args_.in.k, row, key_head_, problem_.options.qk_l2norm, k_);
        update_state(dims_, token(row, head(member), k_), state, residuals_);
      }
    }
  }

  void walk_block(int64_t block) {
    const int64_t first = segment_->row + block * block_;
    const int64_t n = std::min(block_, segment_->length - block * block_);
    const bool norm = problem_.options.qk_l2norm;
    for (int64_t t = 0; t < n; ++t) {
      q_norm_[t] = load_key(args_.in.q, first + t, key_head_, norm, q_ + t * dims_.k);
      k_norm_[t] = load_key(args_.in.k, first + t, key_head_, norm, k_ + t * dims_.k);
    }
    std::fill_n(dq_, n * dims_.k, 0.0);
    std::fill_n(dk_, n * dims_.k, 0.0);
    for (int64_t member = 0; member < group_; ++member) {
      recompute_states(member, block, first, n);
      for (int64_t t = n - 1; t >= 0; --t) token_backward(member, first + t, t);
    }
    for (int64_t t = 0; t < n; ++t) {
      double* dq = dq_ + t * dims_.k;
      double* dk = dk_ + t * dims_.k;
      if (norm) {
        norm_backward(q_ + t * dims_.k, q_norm_[t], dims_.k, dq);
        norm_backward(k_ + t * dims_.k, k_norm_[t], dims_.k, dk);
      }
      store_vector(call_.dq, first + t, key_head_, dq);
      store_vector(call_.dk, first + t, key_head_, dk);
    }
  }

  // states_[t]: before token t of the block; residuals_[t]: of its update.
  void recompute_states(int64_t member, int64_t block, int64_t first, int64_t n) {
    std::copy_n(checkpoint(member, block), dims_.state(), states_);
    for (int64_t t = 0; t < n; ++t) {
      double* next = states_ + (t + 1) * dims_.state();
      std::copy_n(next - dims_.state(), dims_.state(), next);
      update_state(dims_, token(first + t, head(member), k_ + t * dims_.k), next,
                   residuals_ + t * dims_.v);
    }
  }

  void token_backward(int64_t member, int64_t row, int64_t t) {
    const int64_t h = head(member);
    const Gate gate = load_gate(problem_.options, args_.in, row, h);
    const Beta beta = load_beta(problem_.options, args_.in, row, h);
    const Token token{.k = k_ + t * dims_.k, .v = nullptr, .decay = gate.decay, .beta = beta.beta};
    if (call_.d_o.present()) load_vector(call_.d_o, row, h, d_o_);
    TokenAdjoint io;
    io.q = q_ + t * dims_.k;
    io.state = states_ + t * dims_.state();
    io.residual = residuals_ + t * dims_.v;
    io.d_o = call_.d_o.present() ? d_o_ : nullptr;
    io.scale = problem_.scale();
    io.dq = dq_ + t * dims_.k;
    io.dk = dk_ + t * dims_.k;
    io.dv = dv_;
    adjoint(dims_, token, io, dstate(member), work_);

    store_vector(call_.dv, row, h, dv_);
    store_gate(call_.dbeta, row, h, io.dbeta * beta.by_operand);
    // A gate of no decay left (exp(g) = 0) has no gradient, whatever its activation's slope is.
    const bool forgets = gate.decay == 0;
    const double doperand = forgets ? 0 : io.dlog_decay * gate.by_operand;
    store_gate(call_.dg, row, h, doperand);
    ddt_bias_[member] += doperand;
    dA_log_[member] += forgets ? 0 : io.dlog_decay * gate.log_decay;
  }

  static void store_gate(const TensorView& view, int64_t row, int64_t h, double value) {
    store_element(view, row * view.stride[0] + h * view.stride[1], value);
  }

  const StageArgs& args_;
  const Problem& problem_;
  const BackwardArgs& call_;
  const void* entry_;
  const int64_t key_head_, group_;
  const Dims dims_;
  const int64_t block_, blocks_;
  const Segment* segment_ = nullptr;
  double *checkpoints_, *dstates_, *dA_log_, *ddt_bias_;
  double *states_, *residuals_;
  double *q_, *k_, *dq_, *dk_, *q_norm_, *k_norm_;  // of one block
  double *v_, *dv_, *d_o_, *work_;                  // of one token
};

// C of a segment: the gradient of its entry state for a zero gradient of its exit state, or for
// dfinal_state where it ends its document.
void walk_part_backward(const StageArgs& args, const BackwardArgs& call, const Segment& segment,
                        int64_t head, Scratch scratch) {
  const Dims dims = dims_of(args.problem);
  TokenReader reader(args, head, scratch);
  double* dstate = scratch.take(dims.state());
  double* work = scratch.take(dims.v);
  double* d_o = scratch.take(dims.v);
  load_state(segment.ends_document() ? call.dfinal_state : TensorView{}, segment.doc, head, dims,
             dstate);
  for (int64_t row = segment.row + segment.length - 1; row >= segment.row; --row) {
    if (call.d_o.present()) {
      load_vector(call.d_o, row, head, d_o);
      add_output_gradient(dims, reader.read_q(row), args.problem.scale(), d_o, dstate);
    }
    pull_back(dims, reader.read(row), dstate, work);
  }
  store_matrix(args.tables[static_cast<int>(Table::kPart)], args.problem.state(), dims.state(),
               head * args.plan.capacity.entry_slots + segment.entry_slot, dstate);
}

}  // namespace

int64_t backward_scratch_elements(const Problem& problem, const Plan& plan) {
  return std::max(forward_scratch_elements(problem), GroupWalk::scratch_elements(problem, plan));
}

Status summarize_backward(const StageArgs& args, const BackwardArgs& call) {
  const int64_t elements = forward_scratch_elements(args.problem);
  const int64_t heads = args.problem.heads_v;
  const auto& segments = args.plan.segments;
  parallel_for(static_cast<int64_t>(segments.size()) * heads, [&](int64_t item, int worker) {
    const Segment& segment = segments[static_cast<size_t>(item / heads)];
    if (segment.entry_slot < 0) return;
    walk_part_backward(args, call, segment, item % heads, Scratch(args, elements, worker));
  });
  return Status::ok();
}

Status run_backward(const StageArgs& args, const BackwardArgs& call, const void* entry) {
  const int64_t elements = backward_scratch_elements(args.problem, args.plan);
  parallel_for(args.problem.heads_qk, [&](int64_t key_head, int worker) {
    GroupWalk walk(args, call, entry, key_head, Scratch(args, elements, worker));
    for (const Segment& segment : args.plan.segments) walk.segment(segment);
    walk.store_parameter_gradients();
  });
  const Dims dims = dims_of(args.problem);
  double* dstate = Scratch(args, elements, 0).take(dims.state());
  for (int64_t doc : args.plan.empty_documents) {
    for (int64_t head = 0; head < args.problem.heads_v; ++head) {
      load_state(call.dfinal_state, doc, head, dims, dstate);
      store_state(call.dinitial_state, doc, head, dstate);
    }
  }
  for (const TensorView* view : {&call.dq, &call.dk, &call.dv, &call.dg, &call.dbeta}) {
    zero_rows(*view, args.plan.local_tokens);
  }
  return Status::ok();
}

}  // namespace gdn::reference
