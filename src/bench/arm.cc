#include "bench/arm.h"

#include <fmt/format.h>

namespace gdn::bench {
namespace {

constexpr std::pair<Operation, const char*> kNames[] = {
    {Operation::kForward, "fwd"},
    {Operation::kBackward, "bwd"},
    {Operation::kForwardBackward, "fwd+bwd"},
    {Operation::kCheckpoint, "ckpt"},
    {Operation::kPrepare, "prepare"},
    {Operation::kSummarize, "summarize"},
    {Operation::kFold, "fold"},
    {Operation::kRun, "run"},
    {Operation::kSummarizeBackward, "summarize_backward"},
    {Operation::kFoldBackward, "fold_backward"},
    {Operation::kRunBackward, "run_backward"},
};

// Products of one chunk in units of u, by which dims they grow with (K, V and K V; each 1 at 128).
struct Products {
  double k, v, kv;
};
// K K^T, Q K^T | T Y, P Vd | K S, Q S, K^T Vd
constexpr Products kForward{4, 4, 12};
// Q K^T, K K^T, dP K, dP^T Q, N K | P^T dO, T^T dVd, dO Vd^T, dY Vd^T | six state products
constexpr Products kBackward{10, 8, 24};

double flop(const Products& products, int64_t dim_k, int64_t dim_v) {
  constexpr double u = 2.0 * kChunk * kChunk * kChunk;
  const double k = static_cast<double>(dim_k) / 128, v = static_cast<double>(dim_v) / 128;
  return u * (products.k * k + products.v * v + products.kv * k * v);
}

}  // namespace

const char* to_string(Operation operation) {
  for (const auto& [one, name] : kNames) {
    if (one == operation) return name;
  }
  return "?";
}

Result<Operation> parse_operation(const std::string& name) {
  std::string known;
  for (const auto& [operation, text] : kNames) {
    if (name == text) return operation;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", text);
  }
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("operation: expected one of {}, got '{}'", known, name));
}

bool is_stage(Operation operation) { return operation >= Operation::kPrepare; }

bool needs_backward(Operation operation) {
  return (!is_stage(operation) && operation != Operation::kForward) ||
         operation >= Operation::kSummarizeBackward;
}

double products_flop(Operation operation, int64_t chunk_heads, int64_t dim_k, int64_t dim_v) {
  const double forward = flop(kForward, dim_k, dim_v), backward = flop(kBackward, dim_k, dim_v);
  const auto count = static_cast<double>(chunk_heads);
  switch (operation) {
    case Operation::kForward:
      return count * forward;
    case Operation::kBackward:
      return count * backward;
    case Operation::kForwardBackward:
      return count * (forward + backward);
    case Operation::kCheckpoint:
      return count * (2 * forward + backward);
    default:
      return 0;
  }
}

Status Arm::call(Operation operation) {
  const bool keep = keep_saved_ && case_.training;
  switch (operation) {
    case Operation::kForward:
      return forward(keep);
    case Operation::kBackward:
      return backward();
    case Operation::kCheckpoint:
      GDN_RETURN_IF_ERROR(forward(false));
      [[fallthrough]];
    case Operation::kForwardBackward:
      GDN_RETURN_IF_ERROR(forward(keep));
      return backward();
    default:
      return stage(operation);
  }
}

Result<std::unique_ptr<Arm>> make_arm(Machine& machine, const Case& what,
                                      const ArmOptions& options) {
  return options.library.empty() ? make_own_arm(machine, what, options)
                                 : make_library_arm(machine, what, options);
}

}  // namespace gdn::bench
