// The convolution against its formula in double, and its gradient against finite differences: all
// widths, documents shorter than the window, prefixes, slack rows with NaN.
#include "conv/causal_conv.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/host_tensor.h"

namespace gdn {
namespace {

struct Case {
  int64_t channels, width;
  bool silu;
  std::vector<int64_t> begin;
  int64_t tokens;
};

// A fixed sequence of numbers in [-1, 1).
struct Numbers {
  uint64_t state = 1;
  double next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state >> 11) / (1ull << 52) - 1.0;
  }
  void fill(const TensorView& view) {
    for (int64_t i = 0; i < view.numel(); ++i) view.as<double>()[i] = next();
  }
};

struct Problem {
  explicit Problem(const Case& c)
      : x(DType::kFloat64, {c.tokens, c.channels}, 0xff),
        weight(DType::kFloat64, {c.channels, c.width}),
        bias(DType::kFloat64, {c.channels}),
        prefix(DType::kFloat64,
               {static_cast<int64_t>(c.begin.size()) - 1, c.width - 1, c.channels}) {
    Numbers numbers;
    for (int64_t i = 0; i < c.begin.back() * c.channels; ++i) x.as<double>()[i] = numbers.next();
    numbers.fill(weight.view);
    numbers.fill(bias.view);
    numbers.fill(prefix.view);
    args = {x.view, weight.view, bias.view, prefix.view, c.begin, c.silu};
  }
  HostTensor x, weight, bias, prefix;
  ConvArgs args;
};

std::vector<double> formula(const Case& c, const Problem& p) {
  std::vector<double> y(static_cast<size_t>(c.tokens * c.channels), 0.0);
  for (size_t f = 0; f + 1 < c.begin.size(); ++f) {
    for (int64_t t = c.begin[f]; t < c.begin[f + 1]; ++t) {
      for (int64_t ch = 0; ch < c.channels; ++ch) {
        double z = p.bias.as<double>()[ch];
        for (int64_t j = 0; j < c.width; ++j) {
          const int64_t s = t - (c.width - 1) + j;
          const int64_t before = s - c.begin[f] + c.width - 1;  // row of the prefix
          z += p.weight.as<double>()[ch * c.width + j] *
               (s >= c.begin[f]
                    ? p.x.as<double>()[s * c.channels + ch]
                    : p.prefix.as<double>()[(static_cast<int64_t>(f) * (c.width - 1) + before) *
                                                c.channels +
                                            ch]);
        }
        y[static_cast<size_t>(t * c.channels + ch)] = c.silu ? z / (1 + std::exp(-z)) : z;
      }
    }
  }
  return y;
}

class CausalConv : public ::testing::TestWithParam<Case> {};

TEST_P(CausalConv, IsItsFormula) {
  const Case& c = GetParam();
  const Problem p(c);
  HostTensor y(DType::kFloat64, {c.tokens, c.channels}, 0xff);
  ASSERT_TRUE(causal_conv(p.args, y.view).is_ok());
  const std::vector<double> expected = formula(c, p);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(y.as<double>()[i], expected[i], 1e-12);
}

TEST_P(CausalConv, GradientIsTheDifferenceQuotient) {
  const Case& c = GetParam();
  Problem p(c);
  HostTensor dy(DType::kFloat64, {c.tokens, c.channels}, 0xff);
  Numbers numbers{7};
  for (int64_t i = 0; i < c.begin.back() * c.channels; ++i) dy.as<double>()[i] = numbers.next();
  HostTensor dx(DType::kFloat64, {c.tokens, c.channels}, 0xff);
  HostTensor dweight(DType::kFloat64, {c.channels, c.width}, 0xff);
  HostTensor dbias(DType::kFloat64, {c.channels}, 0xff);
  HostTensor dprefix(DType::kFloat64,
                     {static_cast<int64_t>(c.begin.size()) - 1, c.width - 1, c.channels}, 0xff);
  ASSERT_TRUE(
      causal_conv_backward(p.args, dy.view, {dx.view, dweight.view, dbias.view, dprefix.view})
          .is_ok());
  const auto loss = [&] {
    const std::vector<double> y = formula(c, p);
    double sum = 0;
    for (int64_t i = 0; i < c.begin.back() * c.channels; ++i) sum += y[i] * dy.as<double>()[i];
    return sum;
  };
  const auto compare = [&](const char* name, HostTensor& at, const HostTensor& gradient,
                           int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      double& value = at.as<double>()[i];
      const double kept = value, step = 1e-5;
      value = kept + step;
      const double up = loss();
      value = kept - step;
      const double down = loss();
      value = kept;
      EXPECT_NEAR(gradient.as<double>()[i], (up - down) / (2 * step), 1e-7) << name << " " << i;
    }
  };
  compare("dx", p.x, dx, c.begin.back() * c.channels);
  compare("dweight", p.weight, dweight, c.channels * c.width);
  compare("dbias", p.bias, dbias, c.channels);
  compare("dprefix", p.prefix, dprefix, p.prefix.view.numel());
  for (int64_t i = c.begin.back() * c.channels; i < dx.view.numel(); ++i) {
    EXPECT_EQ(dx.as<double>()[i], 0.0);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CausalConv,
                         ::testing::Values(Case{3, 4, true, {0, 7}, 7},
                                           Case{70, 4, true, {0, 2, 2, 5}, 6},
                                           Case{2, 3, false, {0, 1, 9}, 9},
                                           Case{5, 2, true, {0, 4}, 4}, Case{5, 1, true, {0, 4}, 4},
                                           Case{1, 4, false, {0, 1}, 3}));

TEST(CausalConvFloat, SigmoidIsWithinTwoUlp) {
  Problem p({1, 1, true, {0, 1}, 1});
  HostTensor x(DType::kFloat32, {1000, 1}), y(DType::kFloat32, {1000, 1});
  HostTensor weight(DType::kFloat32, {1, 1});
  weight.as<float>()[0] = 1;
  for (int i = 0; i < 1000; ++i) x.as<float>()[i] = static_cast<float>(i - 500) * 0.05f;
  const std::vector<int64_t> begin = {0, 1000};
  ASSERT_TRUE(causal_conv({x.view, weight.view, {}, {}, begin, true}, y.view).is_ok());
  for (int i = 0; i < 1000; ++i) {
    const double z = x.as<float>()[i], exact = z / (1 + std::exp(-z));
    EXPECT_NEAR(y.as<float>()[i], exact, 4e-7 * std::abs(exact)) << z;
  }
}

TEST(CausalConvErrors, NameTheArgument) {
  HostTensor x(DType::kFloat32, {4, 2}), weight(DType::kFloat32, {3, 4});
  const std::vector<int64_t> begin = {0, 5};
  Status status = causal_conv({x.view, weight.view, {}, {}, begin, true}, x.view);
  EXPECT_EQ(status.message(), "weight: expected [2, W] with W of 1 to 8, got [3, 4]");
  HostTensor right(DType::kFloat32, {2, 4});
  status = causal_conv({x.view, right.view, {}, {}, begin, true}, x.view);
  EXPECT_NE(status.message().find("cu_seqlens: expected"), std::string::npos);
  status = causal_conv({x.view, right.view, {}, {}, {}, true}, x.view);
  EXPECT_EQ(status.message(), "cu_seqlens: expected [N + 1] offsets, got none");

  const std::vector<int64_t> whole = {0, 4};
  const ConvArgs args{x.view, right.view, {}, {}, whole, true};
  ConvArgs other = args;
  HostTensor numbers(DType::kInt64, {2});
  other.bias = numbers.view;
  status = causal_conv(other, x.view);
  EXPECT_EQ(status.message(), "bias: expected [2] of bfloat16, float32 or float64, got int64 [2]");
  other = args;
  HostTensor rows(DType::kFloat32, {2, 3, 2}), wide(DType::kFloat64, {1, 3, 2});
  for (const HostTensor* prefix : {&rows, &wide}) {
    other.prefix = prefix->view;
    status = causal_conv(other, x.view);
    EXPECT_NE(status.message().find("prefix: expected float32 [1, 3, 2], got"), std::string::npos)
        << status.message();
  }
  const TensorView& y = x.view;
  EXPECT_NE(causal_conv_backward(args, y, {y, weight.view, {}, {}})
                .message()
                .find("dweight: expected [2, 4] of"),
            std::string::npos);
  EXPECT_NE(causal_conv_backward(args, y, {y, right.view, numbers.view, {}})
                .message()
                .find("dbias: expected [2] of"),
            std::string::npos);
  EXPECT_NE(causal_conv_backward(args, y, {y, right.view, {}, rows.view})
                .message()
                .find("dprefix: expected float32 [1, 3, 2]"),
            std::string::npos);
}

}  // namespace
}  // namespace gdn
