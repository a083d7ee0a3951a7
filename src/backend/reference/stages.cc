#include "backend/reference/stages.h"

#include <algorithm>
#include <vector>

#include "base/element.h"

namespace gdn::reference {

void load_matrix(const void* table, DType dtype, int64_t size, int64_t index, double* out) {
  load_row(table, dtype, index * size, 1, size, out);
}

void store_matrix(void* table, DType dtype, int64_t size, int64_t index, const double* in) {
  store_row(table, dtype, index * size, 1, size, in);
}

void load_state(const TensorView& states, int64_t doc, int64_t head, Dims dims, double* out) {
  if (!states.present()) {
    std::fill_n(out, dims.state(), 0.0);
    return;
  }
  const int64_t at = doc * states.stride[0] + head * states.stride[1];
  for (int64_t i = 0; i < dims.k; ++i) {
    load_row(states.data, states.dtype, at + i * states.stride[2], states.stride[3], dims.v,
             out + i * dims.v);
  }
}

void store_state(const TensorView& states, int64_t doc, int64_t head, const double* in) {
  if (!states.present()) return;
  const int64_t at = doc * states.stride[0] + head * states.stride[1];
  const int64_t cols = states.shape[3];
  for (int64_t i = 0; i < states.shape[2]; ++i) {
    store_row(states.data, states.dtype, at + i * states.stride[2], states.stride[3], cols,
              in + i * cols);
  }
}

TokenReader::TokenReader(const StageArgs& args, int64_t value_head, Scratch& scratch)
    : problem_(args.problem),
      in_(args.in),
      value_head_(value_head),
      key_head_(value_head / args.problem.group()),
      q_(scratch.take(args.problem.dim_k)),
      k_(scratch.take(args.problem.dim_k)),
      v_(scratch.take(args.problem.dim_v)) {}

const Token& TokenReader::read(int64_t row) {
  load_key(in_.k, row, key_head_, problem_.options.qk_l2norm, k_);
  load_vector(in_.v, row, value_head_, v_);
  token_ = {.k = k_,
            .v = v_,
            .decay = load_gate(problem_.options, in_, row, value_head_).decay,
            .beta = load_beta(problem_.options, in_, row, value_head_).beta};
  return token_;
}

const double* TokenReader::read_q(int64_t row) {
  load_key(in_.q, row, key_head_, problem_.options.qk_l2norm, q_);
  return q_;
}

void zero_rows(const TensorView& view, int64_t first) {
  if (!view.present()) return;
  const int64_t rows = view.shape[0];
  const int64_t outer = view.rank == 3 ? view.shape[1] : 1;
  const int64_t outer_stride = view.rank == 3 ? view.stride[1] : 0;
  const int64_t n = view.shape[view.rank - 1];
  const std::vector<double> zeros(static_cast<size_t>(n), 0.0);
  for (int64_t row = first; row < rows; ++row) {
    for (int64_t i = 0; i < outer; ++i) {
      store_row(view.data, view.dtype, row * view.stride[0] + i * outer_stride,
                view.stride[view.rank - 1], n, zeros.data());
    }
  }
}

}  // namespace gdn::reference
