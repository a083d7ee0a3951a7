// How far a tensor is from its reference: over the whole tensor, per head and per document, so that
// one wrong head or one wrong one-token document cannot hide in an average.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "gdn/tensor.h"

namespace gdn {

struct Accuracy {
  bool finite = true;            // no NaN or infinity in x
  bool reference_finite = true;  // ... in ref
  double rel_rms = 0;       // ||x - ref|| / ||ref||; 0 where both are 0, infinity where only ref is
  double max_error = 0;     // max |x - ref| / max |ref|
  int64_t worst_head = -1;  // with the largest rel_rms of its own
  double worst_head_rms = 0;
  int64_t worst_document = -1;
  double worst_document_rms = 0;
};

// x and ref: same shape, any dtype, any strides. Axis `head_axis` is the head (-1: none);
// cu_seqlens, where not empty, splits axis 0 in documents, and rows past its last are left out.
Accuracy compare(const TensorView& x, const TensorView& ref, int head_axis,
                 std::span<const int64_t> cu_seqlens);

// The contract's bars for the operand dtype (docs/accuracy.md): bf16 0.005 for o and final_state,
// 0.006 for gradients; fp32 1e-5; fp64 1e-12; max_error 2e-2, 1e-4, 1e-11. Per head and document
// the bar is looser by a stated factor where a part's own norm is small.
struct Bars {
  double rel_rms = 0;
  double max_error = 0;
};
// What the contract asks at most of bf16 operands, whatever the inputs.
inline constexpr Bars kContractBars{.rel_rms = 1e-2, .max_error = 2e-2};
Bars bars(DType operand, const std::string& tensor);
// rel_rms of several ranks from one, bf16 operands and the same backend. `one_chunk_grid`: every
// cut is a multiple of 64 tokens from its document's start. Why a GPU's cannot be 1e-3 there: the
// same page.
double bar_between_ranks(Device::Kind where, bool one_chunk_grid);
bool passes(const Accuracy& accuracy, const Bars& bars);

}  // namespace gdn
