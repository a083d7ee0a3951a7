// The comparator finds planted errors, wherever they hide.
#include "check/accuracy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/element.h"
#include "base/host_tensor.h"
#include "check/random.h"

namespace gdn {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
const std::vector<int64_t> kCuSeqlens = {0, 40, 41, 41, 100};  // one of one token, one empty

// x, an error of `noise` (relative) away from a normal ref, both [100, 8, 16].
struct Pair {
  explicit Pair(double noise = 1e-3, DType dtype = DType::kFloat64)
      : x(dtype, {100, 8, 16}), ref(DType::kFloat64, {100, 8, 16}) {
    const RandomStream values(1, 0), errors(1, 1);
    for (int64_t i = 0; i < ref.view.numel(); ++i) {
      store_element(ref.view, i, values.normal(i));
      store_element(x.view, i, values.normal(i) * (1 + noise * errors.normal(i)));
    }
  }
  Accuracy compare() const { return gdn::compare(x.view, ref.view, 1, kCuSeqlens); }
  bool passes() const { return gdn::passes(compare(), bars(DType::kBFloat16, "o")); }
  double& at(int64_t t, int64_t h, int64_t i) { return x.as<double>()[(t * 8 + h) * 16 + i]; }
  double& ref_at(int64_t t, int64_t h, int64_t i) { return ref.as<double>()[(t * 8 + h) * 16 + i]; }

  HostTensor x, ref;
};

TEST(Compare, MeasuresTheNoiseItIsGiven) {
  const Pair pair(1e-3);
  const Accuracy accuracy = pair.compare();
  EXPECT_TRUE(accuracy.finite);
  EXPECT_NEAR(accuracy.rel_rms, 1e-3, 1e-4);
  EXPECT_LT(accuracy.max_error, 5e-3);
  EXPECT_GE(accuracy.worst_head_rms, accuracy.rel_rms);
  EXPECT_GE(accuracy.worst_document_rms, accuracy.rel_rms);
  EXPECT_TRUE(pair.passes());
}

TEST(Compare, FindsPlantedErrors) {
  {
    Pair pair;  // a negative value
    pair.at(50, 3, 7) = -100;
    EXPECT_FALSE(pair.passes());
  }
  for (double bad : {kNaN, kInfinity, -kInfinity}) {
    Pair pair;
    pair.at(99, 7, 15) = bad;
    EXPECT_FALSE(pair.compare().finite);
    EXPECT_EQ(pair.compare().rel_rms, kInfinity);
    EXPECT_EQ(pair.compare().max_error, kInfinity);
    EXPECT_FALSE(pair.passes());
  }
  {
    Pair pair;  // the last element, by no more than the tensor's typical size
    pair.ref_at(99, 7, 15) = 2;
    pair.at(99, 7, 15) = 1;
    EXPECT_LT(pair.compare().rel_rms, 0.02);
    EXPECT_FALSE(pair.passes());
  }
  {
    Pair pair;  // the first element
    pair.at(0, 0, 0) += 1;
    EXPECT_FALSE(pair.passes());
  }
  {
    Pair pair;  // a reference that is not a number is nobody's success
    EXPECT_TRUE(pair.compare().reference_finite);
    pair.ref_at(5, 5, 5) = kNaN;
    EXPECT_FALSE(pair.compare().reference_finite);
    EXPECT_FALSE(pair.passes());
  }
}

TEST(Compare, OneWrongHeadDoesNotHideInTheAverage) {
  Pair pair(1e-4);
  for (int64_t t = 0; t < 100; ++t) {
    for (int64_t i = 0; i < 16; ++i) {
      pair.ref_at(t, 5, i) *= 0.01;  // a small head
      pair.at(t, 5, i) = pair.ref_at(t, 5, i) * 1.5;
    }
  }
  const Accuracy accuracy = pair.compare();
  EXPECT_LT(accuracy.rel_rms, 0.005);
  EXPECT_LT(accuracy.max_error, 0.02);
  EXPECT_EQ(accuracy.worst_head, 5);
  EXPECT_NEAR(accuracy.worst_head_rms, 0.05, 0.01);  // half of 0.01, over the floor of 0.1
  EXPECT_FALSE(pair.passes());
}

TEST(Compare, AWrongOneTokenDocumentDoesNotHideInTheAverage) {
  Pair pair(1e-4);
  for (int64_t h = 0; h < 8; ++h) {
    for (int64_t i = 0; i < 16; ++i) pair.at(40, h, i) = pair.ref_at(40, h, i) * 1.03;
  }
  const Accuracy accuracy = pair.compare();
  EXPECT_LT(accuracy.rel_rms, 0.005);
  EXPECT_EQ(accuracy.worst_document, 1);
  EXPECT_NEAR(accuracy.worst_document_rms, 0.03, 1e-3);
  EXPECT_FALSE(pair.passes());
}

TEST(Compare, APartWithoutNormIsJudgedByTheTensor) {
  Pair pair;
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t h = 0; h < 8; ++h) {
      pair.ref_at(40, h, i) = 0;
      pair.at(40, h, i) = 1e-5;
    }
  }
  EXPECT_NEAR(pair.compare().worst_document_rms, 1e-3, 1e-3);
  EXPECT_TRUE(pair.passes());
}

// [100, 8]: a number for each token and head, as dg and dbeta have.
TEST(Compare, APartOfFewNumbersIsJudgedByThoseOfTheTensor) {
  HostTensor x(DType::kFloat64, {100, 8}), ref(DType::kFloat64, {100, 8});
  const RandomStream values(1, 0);
  for (int64_t i = 0; i < 800; ++i) ref.as<double>()[i] = x.as<double>()[i] = values.normal(i);
  const auto worst = [&] { return compare(x.view, ref.view, 1, kCuSeqlens).worst_document_rms; };
  for (int64_t h = 0; h < 8; ++h) x.as<double>()[320 + h] = ref.as<double>()[320 + h] = 0.01;
  x.as<double>()[323] += 0.01;  // of a typical 1, though the document's own are 0.01
  EXPECT_NEAR(worst(), 0.01 / std::sqrt(8.0), 1e-3);
  x.as<double>()[323] = -1;
  EXPECT_NEAR(worst(), 1 / std::sqrt(8.0), 0.03);
  for (int64_t h = 0; h < 8; ++h) x.as<double>()[320 + h] = ref.as<double>()[320 + h] = h + 1;
  x.as<double>()[320] = 1.5;
  EXPECT_NEAR(worst(), 0.5 / std::sqrt(204.0), 1e-3);  // its own norm, where that is larger
}

TEST(Compare, RowsPastTheLastDocumentAreLeftOut) {
  Pair pair;
  for (int64_t i = 0; i < 16; ++i) pair.at(99, 0, i) = kNaN;
  const std::vector<int64_t> shorter = {0, 40, 99};
  EXPECT_TRUE(passes(compare(pair.x.view, pair.ref.view, 1, shorter), bars(DType::kBFloat16, "o")));
}

TEST(Compare, TakesAnyStridesAndDtypes) {
  const Pair pair(0, DType::kBFloat16);
  const Accuracy rounding = pair.compare();
  EXPECT_GT(rounding.rel_rms, 1e-3);  // about 1.6e-3 (docs/accuracy.md)
  EXPECT_LT(rounding.rel_rms, 2e-3);

  // Both transposed: axes [head, token, dim].
  TensorView x = pair.x.view, ref = pair.ref.view;
  std::swap(x.shape[0], x.shape[1]);
  std::swap(x.stride[0], x.stride[1]);
  std::swap(ref.shape[0], ref.shape[1]);
  std::swap(ref.stride[0], ref.stride[1]);
  const Accuracy transposed = compare(x, ref, 0, {});
  EXPECT_NEAR(transposed.rel_rms, rounding.rel_rms, 1e-12);
  EXPECT_NEAR(transposed.worst_head_rms, rounding.worst_head_rms, 1e-12);
  EXPECT_EQ(transposed.worst_head, rounding.worst_head);
  EXPECT_EQ(transposed.worst_document, -1);
}

TEST(Compare, ZerosShapesAndAbsence) {
  const HostTensor zero(DType::kFloat32, {4, 2}), other(DType::kFloat32, {4, 3});
  HostTensor one(DType::kFloat32, {4, 2});
  one.as<float>()[3] = 1;
  EXPECT_EQ(compare(zero.view, zero.view, 1, {}).rel_rms, 0);
  EXPECT_EQ(compare(one.view, zero.view, 1, {}).rel_rms, kInfinity);
  EXPECT_EQ(compare(one.view, zero.view, 1, {}).max_error, kInfinity);
  EXPECT_EQ(compare(zero.view, one.view, 1, {}).rel_rms, 1);
  EXPECT_EQ(compare(zero.view, other.view, 1, {}).rel_rms, kInfinity);
  EXPECT_EQ(compare({}, zero.view, -1, {}).rel_rms, kInfinity);
  EXPECT_EQ(compare({}, {}, -1, {}).rel_rms, 0);
}

TEST(Bars, FollowTheOperand) {
  EXPECT_EQ(bars(DType::kBFloat16, "o").rel_rms, 0.005);
  EXPECT_EQ(bars(DType::kBFloat16, "final_state").rel_rms, 0.005);
  EXPECT_EQ(bars(DType::kBFloat16, "dg").rel_rms, 0.006);
  EXPECT_EQ(bars(DType::kFloat32, "dq").max_error, 1e-4);
  EXPECT_EQ(bars(DType::kFloat64, "dq").rel_rms, 1e-12);
}

}  // namespace
}  // namespace gdn
