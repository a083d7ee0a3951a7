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

// Every tensor of `got` at the bars of `operand` against `want` (same shapes, any dtype); inputs
// that are not ordinary at the contract's own (docs/accuracy.md).
inline void expect_results_close(const BatchResult& got, const BatchResult& want,
                                 std::span<const int64_t> cu_seqlens, DType operand,
                                 bool ordinary = true) {
  for (const ResultTensor& t : kResultTensors) {
    const HostTensor &x = got.*t.member, &ref = want.*t.member;
    ASSERT_EQ(x.present(), ref.present()) << t.name;
    if (!x.present()) continue;
    const bool tokens = t.rows == ResultTensor::Rows::kTokens;
    const Accuracy a =
        compare(x.view, ref.view, t.head_axis, tokens ? cu_seqlens : std::span<const int64_t>{});
    // A gradient stored in bf16 (of a bf16 gate, say) can be no better than its rounding.
    const DType stored = x.view.dtype;
    const Bars wanted =
        ordinary ? bars(stored == DType::kBFloat16 ? stored : operand, t.name) : kContractBars;
    EXPECT_TRUE(passes(a, wanted))
        << t.name << ": rel-RMS " << a.rel_rms << ", max " << a.max_error << ", finite " << a.finite
        << ", worst head " << a.worst_head << " (" << a.worst_head_rms << "), worst document "
        << a.worst_document << " (" << a.worst_document_rms << ")";
  }
}

inline void expect_bitwise_equal(const BatchResult& got, const BatchResult& want) {
  for (const ResultTensor& t : kResultTensors) {
    const HostTensor &a = got.*t.member, &b = want.*t.member;
    ASSERT_EQ(a.buffer.bytes(), b.buffer.bytes()) << t.name;
    if (a.buffer.bytes() == 0) continue;
    EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data(), static_cast<size_t>(a.buffer.bytes())),
              0)
        << t.name;
  }
}

}  // namespace gdn
