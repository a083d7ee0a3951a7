// The stages of the reference backend as functions, and what they share: states in tables and
// views, scratch per worker, one value head's tokens.
#pragma once

#include <cstdint>

#include "backend/reference/operands.h"
#include "backend/reference/recurrence.h"
#include "gdn/backend.h"

namespace gdn::reference {

Status summarize(const StageArgs& args, const TensorView& initial_state);
Status run(const StageArgs& args, const TensorView& initial_state, const TensorView& o,
           const TensorView& final_state);
Status fold(const StageArgs& args, const FoldProgram& program);
Status summarize_backward(const StageArgs& args, const BackwardArgs& call);
Status run_backward(const StageArgs& args, const BackwardArgs& call, const void* entry);

int64_t forward_scratch_elements(const Problem& problem);  // doubles per worker, fold included
int64_t backward_scratch_elements(const Problem& problem, const Plan& plan);

// Hands out the doubles of one worker's part of the scratch.
class Scratch {
 public:
  // `elements`: of one worker.
  Scratch(const StageArgs& args, int64_t elements, int worker)
      : next_(static_cast<double*>(args.scratch) + elements * worker) {}

  double* take(int64_t n) {
    double* at = next_;
    next_ += n;
    return at;
  }

 private:
  double* next_;
};

// Matrix `index` (head * slots + slot) of a head-major table of matrices of `size` elements.
void load_matrix(const void* table, DType dtype, int64_t size, int64_t index, double* out);
void store_matrix(void* table, DType dtype, int64_t size, int64_t index, const double* in);

// State (doc, head) of a [N, HV, K, V] view of any strides. An absent view loads 0, stores nothing.
void load_state(const TensorView& states, int64_t doc, int64_t head, Dims dims, double* out);
void store_state(const TensorView& states, int64_t doc, int64_t head, const double* in);

// The tokens of one value head, one at a time.
class TokenReader {
 public:
  TokenReader(const StageArgs& args, int64_t value_head, Scratch& scratch);

  // k, v, decay, beta of a row; valid until the next read.
  const Token& read(int64_t row);
  const double* read_q(int64_t row);

 private:
  const Problem& problem_;
  const Operands& in_;
  int64_t value_head_, key_head_;
  double *q_, *k_, *v_;
  Token token_;
};

inline Dims dims_of(const Problem& problem) { return {problem.dim_k, problem.dim_v}; }

// Rows [first, T) of a [T, ...] output become 0.
void zero_rows(const TensorView& view, int64_t first);

}  // namespace gdn::reference
