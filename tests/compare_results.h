// Whole results against each other, tensor by tensor, with names that say what is wrong.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check/accuracy.h"
#include "check/batch.h"

namespace gdn {

struct NamedTensor {
  const char* name;
  const HostTensor* tensor;
  int head_axis;
  bool per_token;  // axis 0 counts tokens (else documents, or there is none)
};

inline std::vector<NamedTensor> tensors_of(const BatchResult& r) {
  return {{"o", &r.o, 1, true},
          {"final_state", &r.final_state, 1, false},
          {"dq", &r.dq, 1, true},
          {"dk", &r.dk, 1, true},
          {"dv", &r.dv, 1, true},
          {"dg", &r.dg, 1, true},
          {"dbeta", &r.dbeta, 1, true},
          {"dinitial_state", &r.dinitial_state, 1, false},
          {"dA_log", &r.dA_log, 0, false},
          {"ddt_bias", &r.ddt_bias, 0, false}};
}

// Every tensor of `got` at the bars of `operand` against `want` (same shapes, any dtype).
inline void expect_results_close(const BatchResult& got, const BatchResult& want,
                                 std::span<const int64_t> cu_seqlens, DType operand) {
  const auto got_tensors = tensors_of(got), want_tensors = tensors_of(want);
  for (size_t i = 0; i < got_tensors.size(); ++i) {
    const NamedTensor& t = got_tensors[i];
    ASSERT_EQ(t.tensor->present(), want_tensors[i].tensor->present()) << t.name;
    if (!t.tensor->present()) continue;
    const Accuracy a = compare(t.tensor->view, want_tensors[i].tensor->view, t.head_axis,
                               t.per_token ? cu_seqlens : std::span<const int64_t>{});
    // A gradient stored in bf16 (of a bf16 gate, say) can be no better than its rounding.
    const DType stored = t.tensor->view.dtype;
    EXPECT_TRUE(passes(a, bars(stored == DType::kBFloat16 ? stored : operand, t.name)))
        << t.name << ": rel-RMS " << a.rel_rms << ", max " << a.max_error << ", finite " << a.finite
        << ", worst head " << a.worst_head << " (" << a.worst_head_rms << "), worst document "
        << a.worst_document << " (" << a.worst_document_rms << ")";
  }
}

inline void expect_bitwise_equal(const BatchResult& got, const BatchResult& want) {
  const auto got_tensors = tensors_of(got), want_tensors = tensors_of(want);
  for (size_t i = 0; i < got_tensors.size(); ++i) {
    const HostTensor& a = *got_tensors[i].tensor;
    const HostTensor& b = *want_tensors[i].tensor;
    ASSERT_EQ(a.buffer.bytes(), b.buffer.bytes()) << got_tensors[i].name;
    if (a.buffer.bytes() == 0) continue;
    EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data(), static_cast<size_t>(a.buffer.bytes())),
              0)
        << got_tensors[i].name;
  }
}

}  // namespace gdn
