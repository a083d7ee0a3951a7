// Building a context: all local checks first, then one agreement, so that a bad argument on one
// rank is an error on all of them.
#include <fmt/format.h>

#include <bit>

#include "base/thread_pool.h"
#include "driver/memory_map.h"
#include "driver/validate.h"

namespace gdn {

struct Context::Made {
  const Backend* backend = nullptr;
  std::shared_ptr<const Plan> plan;
};

namespace {

class Digest {
 public:
  Digest& operator<<(uint64_t value) {  // FNV-1a over the value's bytes
    for (int i = 0; i < 8; ++i) {
      hash_ = (hash_ ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3u;
    }
    return *this;
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

// What all ranks must have in common beside the partition; the local row count may differ.
uint64_t call_digest(const Problem& p, const ContextOptions& options) {
  Digest digest;
  digest << p.heads_qk << p.heads_v << p.dim_k << p.dim_v << uint64_t(p.operand)
         << std::bit_cast<uint64_t>(p.scale()) << p.options.qk_l2norm << p.options.gate_in_kernel
         << p.options.beta_sigmoid << p.options.allow_neg_eigval << options.tile
         << uint64_t(options.exchange) << options.max_tokens << options.max_fragments;
  return digest.value();
}

}  // namespace

Result<Context::Made> Context::make_local(const Partition& partition, int rank,
                                          const Problem& problem, const ContextOptions& options) {
  if (rank < 0 || rank >= partition.world_size()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("rank: expected 0 to {}, got {}", partition.world_size() - 1, rank));
  }
  GDN_RETURN_IF_ERROR(check_num_threads());
  GDN_RETURN_IF_ERROR(validate(problem));
  auto backend = pick_backend(problem, options.backend);
  if (!backend) return backend.status();
  PlanOptions plan_options;
  plan_options.heads_v = problem.heads_v;
  plan_options.dim_k = problem.dim_k;
  plan_options.dim_v = problem.dim_v;
  plan_options.workers = (*backend)->workers();
  plan_options.heads_qk = problem.heads_qk;
  plan_options.segments_per_worker = (*backend)->segments_per_worker();
  plan_options.segment_chunks = (*backend)->segment_chunks(problem.heads_v);
  plan_options.tile = options.tile;
  plan_options.exchange = options.exchange;
  plan_options.max_tokens = options.max_tokens;
  plan_options.max_fragments = options.max_fragments;
  auto plan = Plan::make(partition, rank, plan_options);
  if (!plan) return plan.status();
  GDN_RETURN_IF_ERROR(validate_rows(problem, *plan));
  return Made{*backend, std::make_shared<const Plan>(std::move(*plan))};
}

Context::Context(const Partition& partition, Communicator* communicator, const Problem& problem,
                 const ContextOptions& options, const Made& made)
    : partition_(partition),
      communicator_(communicator),
      problem_(problem),
      options_(options),
      backend_(made.backend),
      plan_(made.plan) {}

Result<Context> Context::make(const Partition& partition, int rank, const Problem& problem,
                              const ContextOptions& options) {
  auto made = make_local(partition, rank, problem, options);
  if (!made) return made.status();
  return Context(partition, nullptr, problem, options, *made);
}

Result<Context> Context::make(const Partition& partition, Communicator& communicator,
                              const Problem& problem, const ContextOptions& options) {
  if (communicator.size() != partition.world_size()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("communicator: expected {} ranks, as in the partition, got {}",
                              partition.world_size(), communicator.size()));
  }
  auto made = make_local(partition, communicator.rank(), problem, options);
  GDN_RETURN_IF_ERROR(communicator.agree(made.status()));
  GDN_RETURN_IF_ERROR(communicator.agree_on(partition.digest(), "partition"));
  GDN_RETURN_IF_ERROR(communicator.agree_on(call_digest(problem, options),
                                            "heads, dims, dtype or options of the call"));
  return Context(partition, &communicator, problem, options, *made);
}

uint64_t Context::digest() const {
  return (Digest() << partition_.digest() << call_digest(problem_, options_)).value();
}

int64_t Context::resident_bytes() const { return backend_->resident_bytes(*plan_); }

Status Context::upload(Memory resident, Stream stream) {
  GDN_RETURN_IF_ERROR(check_memory("resident", resident, resident_bytes()));
  GDN_RETURN_IF_ERROR(backend_->upload(*plan_, resident.data, stream));
  resident_ = resident.data;
  return Status::ok();
}

Status Context::replace(const Partition& partition, Stream stream) {
  GDN_RETURN_IF_ERROR(
      check_refill(partition_, partition, options_.max_tokens, options_.max_fragments));
  auto plan = Plan::make(partition, rank(), plan_->options);
  if (!plan) return plan.status();
  if (resident_ != nullptr) GDN_RETURN_IF_ERROR(backend_->upload(*plan, resident_, stream));
  partition_ = partition;
  plan_ = std::make_shared<const Plan>(std::move(*plan));
  return Status::ok();
}

Status Context::refill(const Partition& partition, Stream stream) {
  if (communicator_ == nullptr) return replace(partition, stream);
  const Context before = *this;
  Status status = communicator_->agree(replace(partition, stream));
  if (status) status = communicator_->agree_on(partition.digest(), "partition");
  if (status || plan_ == before.plan_) return status;
  *this = before;  // another rank refused
  if (resident_ != nullptr) GDN_RETURN_IF_ERROR(backend_->upload(*plan_, resident_, stream));
  return status;
}

int64_t Context::forward_workspace_bytes() const { return forward_map(*this, false).bytes; }

int64_t Context::backward_workspace_bytes(bool have_saved) const {
  return backward_map(*this, have_saved).bytes;
}

int64_t Context::saved_bytes() const { return saved_map(*this).bytes; }

int64_t Context::comm_bytes(bool backward_pass) const {
  return plan_->sent_elements(backward_pass) * size_of(problem_.state());
}

}  // namespace gdn
