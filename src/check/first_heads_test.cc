// The first heads are the whole's own numbers, and what comes of them is what comes of the whole.
#include "check/first_heads.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/element.h"
#include "check/accuracy.h"
#include "check/run_batch.h"
#include "check/tensor_check.h"

namespace gdn {
namespace {

// Three key heads with two value heads each.
Batch make(bool optional) {
  BatchSpec spec;
  spec.documents = {70, 0, 1, 9};
  spec.heads_qk = 3;
  spec.heads_v = 6;
  spec.dim_k = 8;
  spec.dim_v = 5;
  spec.operand = DType::kBFloat16;
  spec.options.qk_l2norm = true;
  spec.options.gate_in_kernel = optional;
  spec.initial_state = spec.dfinal_state = optional;
  spec.slack = optional ? 2 : 0;
  auto batch = make_batch(spec);
  EXPECT_TRUE(batch.is_ok()) << batch.status().message();
  return std::move(batch).value();
}

BatchResult run(const Batch& batch) {
  RunOptions options;
  options.context.backend = "reference";
  auto result = run_batch(batch, options);
  EXPECT_TRUE(result.is_ok()) << result.status().message();
  return std::move(result).value();
}

// part[row, head, i] == whole[row, head, i] for every head of the part, in any dtype.
void expect_first(const HostTensor& part, const HostTensor& whole, int64_t rows, int64_t heads,
                  int64_t all_heads, int64_t width) {
  ASSERT_EQ(part.view.dtype, whole.view.dtype);
  ASSERT_EQ(part.view.numel(), rows * heads * width);
  ASSERT_EQ(whole.view.numel(), rows * all_heads * width);
  for (int64_t i = 0; i < part.view.numel(); ++i) {
    const int64_t row = i / (heads * width);
    const double got = load_element(part.view, i);
    const double want = load_element(whole.view, i + row * (all_heads - heads) * width);
    ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << i;
  }
}

TEST(FirstHeads, HoldTheNumbersOfTheWhole) {
  const Batch batch = make(true);
  const Batch part = first_heads(batch, 2);
  EXPECT_EQ(part.problem.heads_qk, 2);
  EXPECT_EQ(part.problem.heads_v, 4);
  EXPECT_EQ(part.problem.tokens, 82);
  EXPECT_EQ(part.problem.operand, DType::kBFloat16);
  EXPECT_TRUE(part.problem.options.gate_in_kernel);
  EXPECT_EQ(part.cu_seqlens, batch.cu_seqlens);
  EXPECT_EQ(shape_string(part.q.view), "[82, 2, 8]");
  EXPECT_EQ(shape_string(part.g.view), "[82, 4]");
  EXPECT_EQ(shape_string(part.A_log.view), "[4]");
  EXPECT_EQ(shape_string(part.initial_state.view), "[4, 4, 8, 5]");
  EXPECT_EQ(part.initial_state.view.stride[0], 4 * 8 * 5);
  EXPECT_EQ(part.initial_state.view.stride[1], 8 * 5);
  expect_first(part.q, batch.q, 82, 2, 3, 8);
  expect_first(part.k, batch.k, 82, 2, 3, 8);
  expect_first(part.v, batch.v, 82, 4, 6, 5);
  expect_first(part.d_o, batch.d_o, 82, 4, 6, 5);
  expect_first(part.g, batch.g, 82, 4, 6, 1);
  expect_first(part.beta, batch.beta, 82, 4, 6, 1);
  expect_first(part.A_log, batch.A_log, 1, 4, 6, 1);
  expect_first(part.dt_bias, batch.dt_bias, 1, 4, 6, 1);
  expect_first(part.initial_state, batch.initial_state, 4, 4, 6, 40);
  expect_first(part.dfinal_state, batch.dfinal_state, 4, 4, 6, 40);
}

TEST(FirstHeads, WhatIsAbsentStaysAbsent) {
  const Batch part = first_heads(make(false), 1);
  EXPECT_FALSE(part.A_log.present() || part.dt_bias.present());
  EXPECT_FALSE(part.initial_state.present() || part.dfinal_state.present());
  EXPECT_TRUE(part.d_o.present());
}

TEST(FirstHeads, TheirResultIsThatOfTheWhole) {
  const Batch batch = widen(make(true));
  const BatchResult whole = run(batch);
  for (const int64_t key_heads : {1, 2, 3}) {
    const BatchResult want = first_heads(whole, batch.problem, key_heads);
    const BatchResult got = run(first_heads(batch, key_heads));
    for (const ResultTensor& output : kResultTensors) {
      const HostTensor& a = got.*output.member;
      const HostTensor& b = want.*output.member;
      ASSERT_TRUE(a.present() && b.present()) << output.name;
      EXPECT_EQ(shape_string(a.view), shape_string(b.view)) << output.name;
      EXPECT_EQ(a.view.stride, b.view.stride) << output.name;
      ASSERT_EQ(a.buffer.bytes(), b.buffer.bytes()) << output.name;
      EXPECT_EQ(0, std::memcmp(a.view.data, b.view.data, static_cast<size_t>(a.buffer.bytes())))
          << output.name << " of " << key_heads;
    }
  }
}

// An error in a head is found where the head is among the first, and nowhere else.
TEST(FirstHeads, KeepAnErrorOfTheirsAlone) {
  const Batch batch = make(true);
  const BatchResult reference = run(widen(batch));
  BatchResult result = run(widen(batch));
  result.dv.as<double>()[(3 * 6 + 2) * 5 + 1] += 1;  // token 3, value head 2: key head 1
  result.dq.as<double>()[(4 * 3 + 1) * 8 + 7] += 1;  // token 4, key head 1
  for (const int64_t key_heads : {1, 2}) {
    const auto rows =
        check_results(first_heads(result, batch.problem, key_heads),
                      first_heads(reference, batch.problem, key_heads), batch.cu_seqlens,
                      [](const std::string& tensor) { return bars(DType::kFloat64, tensor); });
    for (const TensorCheck& row : rows) {
      const bool planted = key_heads == 2 && (row.tensor == "dv" || row.tensor == "dq");
      EXPECT_EQ(row.passed, !planted) << row.tensor << " of " << key_heads;
      EXPECT_EQ(row.bitwise, !planted) << row.tensor << " of " << key_heads;
      if (planted) {
        EXPECT_EQ(row.accuracy.worst_head, row.tensor == "dv" ? 2 : 1);
      }
    }
  }
}

}  // namespace
}  // namespace gdn
