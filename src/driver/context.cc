// Building a context: all local checks first, then one agreement, so that a bad argument on one
// rank is an error on all of them.
#include <fmt/format.h>

#include <bit>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "base/memory.h"
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
  Digest& operator<<(std::string_view text) {
    for (const char c : text) *this << uint64_t(static_cast<unsigned char>(c));
    return *this;
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

// What all ranks must have in common beside the partition, in parts that an error can name; the
// local row count may differ.
struct CommonPart {
  const char* what;
  uint64_t digest;
};

std::vector<CommonPart> common_parts(const Problem& p, const ContextOptions& options) {
  const auto of = [](std::initializer_list<uint64_t> values) {
    Digest digest;
    for (const uint64_t value : values) digest << value;
    return digest.value();
  };
  const Options& o = p.options;
  return {
      {"heads (H, HV)", of({uint64_t(p.heads_qk), uint64_t(p.heads_v)})},
      {"dims (K, V)", of({uint64_t(p.dim_k), uint64_t(p.dim_v)})},
      {"dtype of q, k, v", of({uint64_t(p.operand)})},
      {"scale", of({std::bit_cast<uint64_t>(p.scale())})},
      {"options (norm, gate, sigmoid, negative eigenvalues)",
       of({o.qk_l2norm, o.gate_in_kernel, o.beta_sigmoid, o.allow_neg_eigval})},
      // As asked for: where none is named, ranks on unlike devices may take unlike backends.
      {"backend", (Digest() << options.backend).value()},
      {"tile", of({uint64_t(options.tile)})},
      {"exchange policy", of({uint64_t(options.exchange)})},
      {"capacity", of({uint64_t(options.max_tokens), uint64_t(options.max_fragments)})},
  };
}

uint64_t common_digest(const Partition& partition, const std::vector<CommonPart>& parts) {
  Digest digest;
  digest << partition.digest();
  for (const CommonPart& part : parts) digest << part.digest;
  return digest.value();
}

// One collective where all agree; where not, all ranks know, and find the part that differs.
Status agree_on_common(const Partition& partition, const std::vector<CommonPart>& parts,
                       Communicator& communicator) {
  const Status same =
      communicator.agree_on(common_digest(partition, parts), "partition or options of the call");
  if (same || same.code() != ErrorCode::kInvalidArgument) return same;
  GDN_RETURN_IF_ERROR(communicator.agree_on(partition.digest(), "partition"));
  for (const CommonPart& part : parts) {
    GDN_RETURN_IF_ERROR(communicator.agree_on(part.digest, part.what));
  }
  return same;
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
  plan_options.segment_chunks =
      segment_chunks_over(partition.world_size(), (*backend)->segment_chunks(problem.heads_v));
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
      plan_(made.plan) {
  options_.backend = wanted_backend(options.backend);  // for the digest
}

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
  Context context(partition, &communicator, problem, options, *made);
  GDN_RETURN_IF_ERROR(
      agree_on_common(partition, common_parts(problem, context.options_), communicator));
  return context;
}

uint64_t Context::digest() const {
  return common_digest(partition_, common_parts(problem_, options_));
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
