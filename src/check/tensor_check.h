// A whole result against a reference, tensor by tensor.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "check/accuracy.h"
#include "check/batch.h"

namespace gdn {

struct TensorCheck {
  std::string tensor;
  Accuracy accuracy;
  Bars bars;
  bool passed = false;
  bool bitwise = false;  // the same bytes
};

// Every tensor that either has, in the order of kResultTensors, at the bar that `bar_of` names.
std::vector<TensorCheck> check_results(const BatchResult& result, const BatchResult& reference,
                                       std::span<const int64_t> cu_seqlens,
                                       const std::function<Bars(const std::string&)>& bar_of);

bool all_passed(std::span<const TensorCheck> checks);

}  // namespace gdn
