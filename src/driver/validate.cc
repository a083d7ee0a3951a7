// The checks every call begins with. Each message names the argument, what was expected, what came.
#include "driver/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace gdn {
namespace {

struct Axis {
  const char* name;
  int64_t size;
};
using Shape = std::vector<Axis>;

std::string text_of(const Shape& shape) {
  std::string text;
  for (const Axis& axis : shape) {
    text += fmt::format("{}{}={}", text.empty() ? "" : ", ", axis.name, axis.size);
  }
  return "[" + text + "]";
}

Status invalid(std::string message) { return {ErrorCode::kInvalidArgument, std::move(message)}; }

class Checker {
 public:
  explicit Checker(const Problem& problem) : problem_(problem) {}

  // `as`: whose dtype is the only one of `dtypes`, for the message.
  Status tensor(const char* name, const TensorView& view, const Shape& shape,
                std::initializer_list<DType> dtypes, const char* as = nullptr) const {
    if (!view.present()) {
      return invalid(
          fmt::format("{}: expected a tensor of shape {}, got none", name, text_of(shape)));
    }
    bool same = view.rank == static_cast<int>(shape.size());
    for (int i = 0; same && i < view.rank; ++i) same = view.shape[i] == shape[i].size;
    if (!same) {
      return invalid(
          fmt::format("{}: expected {}, got {}", name, text_of(shape), shape_string(view)));
    }
    if (std::find(dtypes.begin(), dtypes.end(), view.dtype) == dtypes.end()) {
      std::string names;
      for (DType dtype : dtypes) {
        names += fmt::format("{}{}", names.empty() ? "" : " or ", to_string(dtype));
      }
      if (as != nullptr) names += fmt::format(", as {}", as);
      return invalid(fmt::format("{}: expected {}, got {}", name, names, to_string(view.dtype)));
    }
    if (!(view.device == problem_.device)) {
      return invalid(fmt::format("{}: expected on {}, got {}", name, to_string(problem_.device),
                                 to_string(view.device)));
    }
    if (view.numel() > 0 && view.data == nullptr) {
      return invalid(fmt::format("{}: expected data, got a null pointer", name));
    }
    if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(size_of(view.dtype))) {
      return invalid(fmt::format("{}: expected an address aligned to its {}-byte elements", name,
                                 size_of(view.dtype)));
    }
    return Status::ok();
  }

  Status optional_tensor(const char* name, const TensorView& view, const Shape& shape,
                         std::initializer_list<DType> dtypes, const char* as = nullptr) const {
    return view.present() ? tensor(name, view, shape, dtypes, as) : Status::ok();
  }

  Shape keys() const {
    return {{"T", problem_.tokens}, {"H", problem_.heads_qk}, {"K", problem_.dim_k}};
  }
  Shape values() const {
    return {{"T", problem_.tokens}, {"HV", problem_.heads_v}, {"V", problem_.dim_v}};
  }
  Shape gates() const { return {{"T", problem_.tokens}, {"HV", problem_.heads_v}}; }
  Shape heads() const { return {{"HV", problem_.heads_v}}; }

  // [T, heads, dim] with unit innermost stride and heads side by side.
  Status rows(const char* name, const TensorView& view, const Shape& shape,
              const char* as = "q") const {
    const int64_t heads = shape[1].size, dim = shape[2].size;
    GDN_RETURN_IF_ERROR(tensor(name, view, shape, {problem_.operand}, as));
    if (view.numel() == 0) return Status::ok();
    if ((dim > 1 && view.stride[2] != 1) || (heads > 1 && view.stride[1] != dim)) {
      return invalid(fmt::format(
          "{}: expected unit innermost stride and head stride {}, got strides [{}, {}, {}]", name,
          dim, view.stride[0], view.stride[1], view.stride[2]));
    }
    return Status::ok();
  }

  // As rows, and written: two tokens must not share elements.
  Status written_rows(const char* name, const TensorView& view, const Shape& shape) const {
    GDN_RETURN_IF_ERROR(rows(name, view, shape));
    const int64_t row = shape[1].size * shape[2].size;
    if (problem_.tokens > 1 && view.stride[0] < row) {
      return invalid(fmt::format("{}: expected a token stride of at least {}, got {}", name, row,
                                 view.stride[0]));
    }
    return Status::ok();
  }

  Status inputs(const Operands& in) const {
    const Problem& p = problem_;
    GDN_RETURN_IF_ERROR(rows("q", in.q, keys(), nullptr));
    GDN_RETURN_IF_ERROR(rows("k", in.k, keys()));
    GDN_RETURN_IF_ERROR(rows("v", in.v, values()));
    GDN_RETURN_IF_ERROR(tensor("g", in.g, gates(), kGateTypes));
    GDN_RETURN_IF_ERROR(tensor("beta", in.beta, gates(), kGateTypes));
    if (p.options.gate_in_kernel) {
      GDN_RETURN_IF_ERROR(tensor("A_log", in.A_log, heads(), kSumTypes));
      GDN_RETURN_IF_ERROR(optional_tensor("dt_bias", in.dt_bias, heads(), kSumTypes));
    } else if (in.A_log.present() || in.dt_bias.present()) {
      return invalid("A_log, dt_bias: expected none without gate_in_kernel");
    }
    return Status::ok();
  }

  Status states(const char* name, const TensorView& view, int64_t documents) const {
    return optional_tensor(
        name, view,
        {{"N", documents}, {"HV", problem_.heads_v}, {"K", problem_.dim_k}, {"V", problem_.dim_v}},
        {problem_.state()});
  }

 private:
  static constexpr std::initializer_list<DType> kGateTypes = {DType::kFloat32, DType::kBFloat16,
                                                              DType::kFloat64};
  static constexpr std::initializer_list<DType> kSumTypes = {DType::kFloat32, DType::kFloat64};

  const Problem& problem_;
};

Status refused_operands(const Context& context, const Operands& in) {
  if (const auto why_not = context.backend().why_not_operands(in)) {
    return {ErrorCode::kUnsupported, fmt::format("{}: {}", context.backend().name(), *why_not)};
  }
  return Status::ok();
}

}  // namespace

Status validate(const Problem& problem) {
  const Problem& p = problem;
  const auto positive = [](const char* name, int64_t value) {
    return value > 0 ? Status::ok()
                     : invalid(fmt::format("{}: expected at least 1, got {}", name, value));
  };
  if (p.tokens < 0) return invalid(fmt::format("tokens: expected at least 0, got {}", p.tokens));
  GDN_RETURN_IF_ERROR(positive("q: heads", p.heads_qk));
  GDN_RETURN_IF_ERROR(positive("v: heads", p.heads_v));
  GDN_RETURN_IF_ERROR(positive("q: head dim", p.dim_k));
  GDN_RETURN_IF_ERROR(positive("v: head dim", p.dim_v));
  if (p.heads_v % p.heads_qk != 0) {
    return invalid(fmt::format("v: expected HV to be a multiple of H={} (of q and k), got HV={}",
                               p.heads_qk, p.heads_v));
  }
  if (p.operand != DType::kBFloat16 && p.operand != DType::kFloat32 &&
      p.operand != DType::kFloat64) {
    return invalid(fmt::format("q, k, v: expected bfloat16, float32 or float64, got {}",
                               to_string(p.operand)));
  }
  if (p.options.allow_neg_eigval && !p.options.beta_sigmoid) {
    return invalid(
        "allow_neg_eigval: expected only with beta_sigmoid, whose 2 sigmoid(b) it asks for, got it "
        "off; a beta that is given may be up to 2 without it");
  }
  if (!std::isfinite(p.scale())) {
    return invalid(fmt::format("scale: expected a finite number, got {}", p.scale()));
  }
  return Status::ok();
}

Status validate_rows(const Problem& problem, const Plan& plan) {
  if (plan.options.has_capacity()) {
    if (problem.tokens >= plan.options.max_tokens) return Status::ok();
    return invalid(fmt::format("q, k, v: expected at least max_tokens = {} rows, got {}",
                               plan.options.max_tokens, problem.tokens));
  }
  const int64_t held = plan.local_tokens;
  // One rank may have slack rows past its last document; several must agree with the partition.
  const bool fits = plan.world_size == 1 ? problem.tokens >= held : problem.tokens == held;
  if (fits) return Status::ok();
  return invalid(fmt::format("q, k, v: expected {}{} rows, as the partition gives rank {}, got {}",
                             plan.world_size == 1 ? "at least " : "", held, plan.rank,
                             problem.tokens));
}

Status validate(const Context& context, const ForwardArgs& args) {
  const Problem& p = context.problem();
  const Checker check(p);
  const int64_t documents = context.documents();
  GDN_RETURN_IF_ERROR(check.inputs(args.in));
  GDN_RETURN_IF_ERROR(check.states("initial_state", args.initial_state, documents));
  GDN_RETURN_IF_ERROR(check.written_rows("o", args.o, check.values()));
  GDN_RETURN_IF_ERROR(check.states("final_state", args.final_state, documents));
  return refused_operands(context, args.in);
}

Status validate(const Context& context, const BackwardArgs& args) {
  const Problem& p = context.problem();
  const Checker check(p);
  const int64_t documents = context.documents();
  GDN_RETURN_IF_ERROR(check.inputs(args.in));
  GDN_RETURN_IF_ERROR(check.states("initial_state", args.initial_state, documents));
  GDN_RETURN_IF_ERROR(check.optional_tensor("do", args.d_o, check.values(), {p.operand}, "q"));
  GDN_RETURN_IF_ERROR(check.states("dfinal_state", args.dfinal_state, documents));
  GDN_RETURN_IF_ERROR(check.written_rows("dq", args.dq, check.keys()));
  GDN_RETURN_IF_ERROR(check.written_rows("dk", args.dk, check.keys()));
  GDN_RETURN_IF_ERROR(check.written_rows("dv", args.dv, check.values()));
  GDN_RETURN_IF_ERROR(check.tensor("dg", args.dg, check.gates(), {args.in.g.dtype}, "g"));
  GDN_RETURN_IF_ERROR(
      check.tensor("dbeta", args.dbeta, check.gates(), {args.in.beta.dtype}, "beta"));
  if (p.options.gate_in_kernel) {
    GDN_RETURN_IF_ERROR(
        check.tensor("dA_log", args.dA_log, check.heads(), {args.in.A_log.dtype}, "A_log"));
    if (args.in.dt_bias.present()) {
      GDN_RETURN_IF_ERROR(check.tensor("ddt_bias", args.ddt_bias, check.heads(),
                                       {args.in.dt_bias.dtype}, "dt_bias"));
    }
  }
  GDN_RETURN_IF_ERROR(check.states("dinitial_state", args.dinitial_state, documents));
  return refused_operands(context, args.in);
}

}  // namespace gdn
