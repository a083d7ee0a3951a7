#include "memory.h"

#include <fmt/format.h>
#include <unistd.h>

namespace gdn::cli {
namespace {

// In doubles, since neither the bytes nor the tokens may fit an integer.
struct Footprint {
  Problem problem;  // its tokens are not looked at
  double tokens = 0, documents = 0;
  bool initial_state = false, dfinal_state = false, d_o = false;

  double qk() const {
    return 2 * tokens * count(problem.heads_qk) * count(problem.dim_k) * element();
  }
  double v() const { return tokens * count(problem.heads_v) * count(problem.dim_v) * element(); }
  double gates() const { return 2 * tokens * count(problem.heads_v) * wide(); }
  double state() const {  // one for each document
    return documents * count(problem.heads_v) * count(problem.dim_k) * count(problem.dim_v) *
           wide();
  }
  double operands() const {
    return qk() + v() * (d_o ? 2 : 1) + gates() + state() * (initial_state + dfinal_state);
  }
  double results() const {
    const bool backward = d_o || dfinal_state;
    return v() + state() + (backward ? qk() + v() + gates() + state() * initial_state : 0);
  }

  Status check(const char* what, double needed) const {
    const double have = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) *
                        static_cast<double>(::sysconf(_SC_PAGESIZE));
    if (needed <= have) return Status::ok();
    return {ErrorCode::kInvalidArgument,
            fmt::format("{} of {:.0f} tokens in {:.0f} document{} at H={}, HV={}, K={}, V={} need "
                        "{:.1f} GiB, this machine has {:.1f}",
                        what, tokens, documents, documents == 1 ? "" : "s", problem.heads_qk,
                        problem.heads_v, problem.dim_k, problem.dim_v, needed / (1 << 30),
                        have / (1 << 30))};
  }

 private:
  static double count(int64_t n) { return static_cast<double>(n); }
  double element() const { return static_cast<double>(size_of(problem.operand)); }
  double wide() const { return static_cast<double>(size_of(problem.state())); }
};

}  // namespace

Status check_memory(const BatchSpec& spec, bool results, double other) {
  Footprint f{.problem = {.heads_qk = spec.heads_qk,
                          .heads_v = spec.heads_v,
                          .dim_k = spec.dim_k,
                          .dim_v = spec.dim_v,
                          .operand = spec.operand,
                          .device = {},
                          .options = {}},
              .tokens = static_cast<double>(spec.slack),
              .documents = static_cast<double>(spec.documents.size()),
              .initial_state = spec.initial_state,
              .dfinal_state = spec.dfinal_state,
              .d_o = spec.backward};
  for (int64_t length : spec.documents) f.tokens += static_cast<double>(length);
  return f.check(results ? "operands and results" : "operands",
                 f.operands() + (results ? f.results() : 0) + other);
}

Status check_memory(const Batch& batch) {
  return check_memory(batch, batch.problem.tokens, batch.num_documents());
}

Status check_memory(const Batch& like, int64_t tokens, int64_t documents) {
  const Footprint f{.problem = like.problem,
                    .tokens = static_cast<double>(tokens),
                    .documents = static_cast<double>(documents),
                    .initial_state = like.initial_state.present(),
                    .dfinal_state = like.dfinal_state.present(),
                    .d_o = like.d_o.present()};
  return f.check("operands and results", f.operands() + f.results());
}

}  // namespace gdn::cli
