// Recipes make what they say; a tensor depends on its recipe and seed alone.
#include "check/batch.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/element.h"
#include "check/random.h"

namespace gdn {
namespace {

Batch make(const BatchSpec& spec) {
  auto batch = make_batch(spec);
  EXPECT_TRUE(batch.is_ok()) << batch.status().message();
  return std::move(batch).value();
}

double at(const HostTensor& tensor, int64_t i) { return load_element(tensor.view, i); }

BatchSpec small() {
  BatchSpec spec;
  spec.documents = {70, 0, 1, 200};
  spec.dim_k = 16;
  spec.dim_v = 8;
  spec.operand = DType::kFloat64;
  return spec;
}

bool same_bytes(const HostTensor& a, const HostTensor& b) {
  return a.buffer.bytes() == b.buffer.bytes() &&
         std::memcmp(a.buffer.data(), b.buffer.data(), static_cast<size_t>(a.buffer.bytes())) == 0;
}

TEST(Random, IsNormalAndIndependentOfTheOrder) {
  const RandomStream random(7, 3);
  constexpr int64_t n = 20000;
  std::vector<double> x(n);
  random.normals(0, n, x.data());
  double mean = 0, square = 0, fourth = 0;
  for (double value : x) {
    mean += value / n;
    square += value * value / n;
    fourth += value * value * value * value / n;
  }
  EXPECT_NEAR(mean, 0, 0.03);  // four standard errors
  EXPECT_NEAR(square, 1, 0.04);
  EXPECT_NEAR(fourth, 3, 0.3);
  std::vector<double> part(5);
  random.normals(1001, 5, part.data());
  for (int i = 0; i < 5; ++i) EXPECT_EQ(part[i], x[1001 + i]);
  EXPECT_NE(RandomStream(7, 4).bits(0), random.bits(0));
  EXPECT_NE(RandomStream(8, 3).bits(0), random.bits(0));
}

TEST(Batch, ShapesSlackAndRepeatability) {
  BatchSpec spec = small();
  spec.operand = DType::kBFloat16;
  spec.slack = 3;
  spec.initial_state = spec.dfinal_state = true;
  spec.options.gate_in_kernel = true;
  const Batch batch = make(spec), again = make(spec);
  EXPECT_EQ(batch.cu_seqlens, (std::vector<int64_t>{0, 70, 70, 71, 271}));
  EXPECT_EQ(batch.problem.tokens, 274);
  EXPECT_EQ(shape_string(batch.q.view), "[274, 2, 16]");
  EXPECT_EQ(shape_string(batch.v.view), "[274, 4, 8]");
  EXPECT_EQ(shape_string(batch.initial_state.view), "[4, 4, 16, 8]");
  EXPECT_EQ(batch.q.view.dtype, DType::kBFloat16);
  EXPECT_EQ(batch.initial_state.view.dtype, DType::kFloat32);
  EXPECT_EQ(batch.A_log.view.numel(), 4);
  for (const HostTensor* tensor :
       {&batch.q, &batch.k, &batch.v, &batch.g, &batch.beta, &batch.d_o}) {
    const int64_t width = tensor->view.stride[0];
    EXPECT_TRUE(std::isfinite(at(*tensor, 271 * width - 1)));
    EXPECT_TRUE(std::isnan(at(*tensor, 271 * width)));
    EXPECT_TRUE(std::isnan(at(*tensor, 274 * width - 1)));
  }
  EXPECT_TRUE(same_bytes(batch.q, again.q) && same_bytes(batch.g, again.g) &&
              same_bytes(batch.d_o, again.d_o) &&
              same_bytes(batch.initial_state, again.initial_state));
  spec.seed = 1;
  EXPECT_FALSE(same_bytes(batch.q, make(spec).q));
}

TEST(Batch, KeysAreNormalisedUnlessTheKernelDoesIt) {
  BatchSpec spec = small();
  for (const char* keys : {"normal", "correlated", "duplicated", "uniform"}) {
    spec.keys = keys;
    const Batch batch = make(spec);
    for (int64_t row = 0; row < 2 * 271; ++row) {
      double sum = 0;
      for (int64_t i = 0; i < 16; ++i) sum += std::pow(at(batch.k, row * 16 + i), 2);
      ASSERT_NEAR(sum, 1, 1e-12) << keys;
    }
  }
  spec.keys = "normal";
  spec.options.qk_l2norm = true;
  const Batch raw = make(spec);
  double sum = 0;
  for (int64_t i = 0; i < raw.q.view.numel(); ++i) sum += std::pow(at(raw.q, i), 2);
  EXPECT_NEAR(sum / static_cast<double>(raw.q.view.numel()), 1, 0.1);
}

TEST(Batch, KeyRecipes) {
  BatchSpec spec = small();
  spec.dim_k = 256;
  spec.keys = "correlated";
  const Batch correlated = make(spec);
  double mean = 0;
  for (int64_t t = 1; t < 271; ++t) {
    double dot = 0;
    for (int64_t i = 0; i < 256; ++i) {
      dot += at(correlated.k, i) * at(correlated.k, t * 512 + i);
    }
    mean += dot / 270;
  }
  EXPECT_NEAR(mean, 0.95, 0.02);

  spec.keys = "duplicated";
  const Batch duplicated = make(spec);
  int equal = 0;
  for (int64_t t = 1; t < 271; ++t) equal += at(duplicated.k, t * 512) == at(duplicated.k, 0);
  EXPECT_GT(equal, 30);
  EXPECT_LT(equal, 120);

  spec.keys = "zero";
  const Batch zero = make(spec);
  EXPECT_EQ(at(zero.k, 3 * 512 + 5), 0);
  EXPECT_EQ(at(zero.q, 2 * 512 + 5), 0);
  EXPECT_NE(at(zero.k, 4 * 512 + 5), 0);
}

TEST(Batch, GateRecipesAlsoThroughTheKernelsActivation) {
  for (const char* gates : {"model", "slow", "fla", "zero", "strong", "mixed", "spike", "inf"}) {
    BatchSpec spec = small();
    spec.gates = gates;
    const Batch batch = make(spec);
    spec.options.gate_in_kernel = true;
    const Batch raw = make(spec);
    double lowest = 0, sum = 0;
    int infinite = 0;
    for (int64_t i = 0; i < batch.g.view.numel(); ++i) {
      const double g = at(batch.g, i);
      const double x = at(raw.g, i) + at(raw.dt_bias, i % 4);
      const double activated =
          -std::exp(at(raw.A_log, i % 4)) * (x > 30 ? x : std::log1p(std::exp(x)));
      if (std::isinf(g)) {
        ++infinite;
        EXPECT_EQ(activated, g);
        continue;
      }
      ASSERT_LE(g, 0) << gates;
      ASSERT_NEAR(activated, g, 1e-9 * std::max(1.0, -g)) << gates;
      lowest = std::min(lowest, g);
      sum += g;
    }
    const double mean = sum / static_cast<double>(batch.g.view.numel());
    const std::string name = gates;
    if (name == "model") {
      EXPECT_TRUE(mean < -0.02 && mean > -2) << mean;
    }
    if (name == "slow") {
      EXPECT_NEAR(mean, -0.011, 0.003);
    }
    if (name == "fla") {
      EXPECT_NEAR(mean, -0.05, 0.01);
    }
    if (name == "zero") {
      EXPECT_EQ(lowest, 0);
    }
    if (name == "strong") {
      EXPECT_TRUE(lowest < -60 && lowest > -70);
    }
    if (name == "mixed") {
      EXPECT_EQ(lowest, -88);
    }
    if (name == "spike") {
      EXPECT_EQ(at(batch.g, (71 + 64 + 29) * 4), -1e4);
    }
    EXPECT_EQ(infinite > 0, name == "inf");
  }
}

TEST(Batch, BetaRecipes) {
  BatchSpec spec = small();
  spec.beta = "zeros";
  const Batch zeros = make(spec);
  int zero = 0;
  for (int64_t i = 0; i < zeros.beta.view.numel(); ++i) zero += at(zeros.beta, i) == 0;
  EXPECT_NEAR(zero / static_cast<double>(zeros.beta.view.numel()), 0.25, 0.06);
  spec.beta = "tiny";
  EXPECT_EQ(at(make(spec).beta, 5), 1e-10);
  spec.beta = "two";
  EXPECT_EQ(at(make(spec).beta, 5), 2);
  spec.options.beta_sigmoid = true;
  EXPECT_FALSE(make_batch(spec).is_ok());
  spec.options.allow_neg_eigval = true;
  EXPECT_EQ(2 / (1 + std::exp(-at(make(spec).beta, 5))), 2);
  spec.beta = "one";
  EXPECT_EQ(at(make(spec).beta, 5), 0);
}

TEST(Batch, DtypesAndWiden) {
  BatchSpec spec = small();
  spec.gate = DType::kBFloat16;
  EXPECT_EQ(make(spec).g.view.dtype, DType::kBFloat16);
  spec.gate = DType::kFloat32;
  EXPECT_EQ(make(spec).g.view.dtype, DType::kFloat64);
  spec.operand = DType::kBFloat16;
  spec.slack = 1;
  const Batch batch = make(spec), wide = widen(batch);
  EXPECT_EQ(wide.problem.operand, DType::kFloat64);
  EXPECT_EQ(wide.q.view.dtype, DType::kFloat64);
  for (int64_t i = 0; i < 271 * 32; ++i) ASSERT_EQ(at(wide.q, i), at(batch.q, i));
  EXPECT_TRUE(std::isnan(at(wide.q, 271 * 32)));
  EXPECT_FALSE(wide.initial_state.present());
}

TEST(Batch, RefusesWhatItDoesNotKnow) {
  BatchSpec spec = small();
  spec.gates = "fast";
  EXPECT_NE(make_batch(spec).status().message().find("got 'fast'"), std::string::npos);
  spec = small();
  spec.heads_v = 5;
  EXPECT_FALSE(make_batch(spec).is_ok());
  spec = small();
  spec.documents[1] = -1;
  EXPECT_NE(make_batch(spec).status().message().find("documents[1]"), std::string::npos);
}

TEST(Workload, Letters) {
  const auto m = workload("M");
  ASSERT_TRUE(m.is_ok());
  EXPECT_EQ(m->documents, (std::vector<int64_t>{12000, 9000, 6000, 3768, 2000}));
  EXPECT_EQ(m->heads_v, 48);
  EXPECT_EQ(m->operand, DType::kBFloat16);
  EXPECT_EQ(workload("N", 1000)->documents, (std::vector<int64_t>{2, 3, 3}));
  EXPECT_EQ(workload("N")->heads_qk, 2);
  EXPECT_FALSE(workload("O").is_ok());
  EXPECT_FALSE(workload("AB").is_ok());
  EXPECT_FALSE(workload("A", 0).is_ok());
}

}  // namespace
}  // namespace gdn
