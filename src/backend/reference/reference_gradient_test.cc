// Every gradient of the reference against central differences of a scalar loss, in fp64, for every
// option. The loss is <o, do> + <final_state, dfinal_state>.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "backend/reference/by_hand.h"

namespace gdn::reference {
namespace {

BatchSpec small() {
  BatchSpec spec;
  spec.documents = {5, 0, 1, 7};
  spec.heads_qk = 2;
  spec.heads_v = 4;
  spec.dim_k = 8;
  spec.dim_v = 6;
  spec.operand = DType::kFloat64;
  spec.initial_state = spec.dfinal_state = true;
  return spec;
}

const std::vector<std::vector<int64_t>> kUncut = {{5}, {}, {1}, {7}};
const std::vector<std::vector<int64_t>> kCut = {{2, 3}, {}, {1}, {3, 1, 2, 1}};

double sum_of_products(const HostTensor& a, const HostTensor& b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n && b.present(); ++i) sum += a.as<double>()[i] * b.as<double>()[i];
  return sum;
}

double loss(const Batch& batch, const Plan& plan) {
  const BatchResult result = run_by_hand(batch, plan, nullptr, {}, nullptr, /*backward=*/false);
  const int64_t rows = batch.cu_seqlens.back();
  return sum_of_products(result.o, batch.d_o, rows * result.o.view.stride[0]) +
         sum_of_products(result.final_state, batch.dfinal_state, result.final_state.view.numel());
}

// Largest |numeric - analytic| over the elements [0, n) of `x`, over the largest |analytic| (at
// least 1). Rounding of a loss of 10 leaves 1e-15 / step, the third derivative step^2 / 6.
double worst(Batch& batch, const Plan& plan, HostTensor& x, const HostTensor& dx, int64_t n,
             double step) {
  double largest = 0, error = 0;
  for (int64_t i = 0; i < n; ++i) {
    double& value = x.as<double>()[i];
    const double kept = value;
    if (std::isinf(kept)) continue;
    value = kept + step;
    const double above = loss(batch, plan);
    value = kept - step;
    const double below = loss(batch, plan);
    value = kept;
    const double analytic = dx.as<double>()[i];
    if (!std::isfinite(analytic)) return INFINITY;
    error = std::max(error, std::abs((above - below) / (2 * step) - analytic));
    largest = std::max(largest, std::abs(analytic));
  }
  return error / std::max(largest, 1.0);
}

void check(const BatchSpec& spec, const std::vector<std::vector<int64_t>>& cuts,
           double step = 1e-5) {
  auto made = make_batch(spec);
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  Batch& batch = *made;
  const Plan plan = plan_by_hand(batch, cuts);
  const BatchResult result = run_by_hand(batch, plan);
  const int64_t rows = batch.cu_seqlens.back();
  struct Case {
    const char* name;
    HostTensor* x;
    const HostTensor* dx;
    int64_t n;
  };
  for (const Case& c :
       std::vector<Case>{{"q", &batch.q, &result.dq, rows * batch.q.view.stride[0]},
                         {"k", &batch.k, &result.dk, rows * batch.k.view.stride[0]},
                         {"v", &batch.v, &result.dv, rows * batch.v.view.stride[0]},
                         {"g", &batch.g, &result.dg, rows * batch.g.view.stride[0]},
                         {"beta", &batch.beta, &result.dbeta, rows * batch.beta.view.stride[0]},
                         {"A_log", &batch.A_log, &result.dA_log, batch.A_log.view.numel()},
                         {"dt_bias", &batch.dt_bias, &result.ddt_bias, batch.dt_bias.view.numel()},
                         {"initial_state", &batch.initial_state, &result.dinitial_state,
                          batch.initial_state.view.numel()}}) {
    if (!c.x->present()) continue;
    EXPECT_LT(worst(batch, plan, *c.x, *c.dx, c.n, step), 1e-7) << c.name;
  }
}

TEST(Gradient, Plain) { check(small(), kUncut); }
TEST(Gradient, DocumentsCutInSegments) { check(small(), kCut); }

TEST(Gradient, WithoutStates) {
  BatchSpec spec = small();
  spec.initial_state = spec.dfinal_state = false;
  check(spec, kCut);
}

TEST(Gradient, OfTheFinalStateAlone) {
  BatchSpec spec = small();
  spec.backward = false;
  check(spec, kCut);
}

TEST(Gradient, ThroughTheNorm) {
  BatchSpec spec = small();
  spec.options.qk_l2norm = true;
  spec.options.scale = 0.7;
  check(spec, kCut);
}

TEST(Gradient, ThroughTheNormOfAllZeroRows) {
  BatchSpec spec = small();
  spec.options.qk_l2norm = true;
  spec.keys = "zero";
  check(spec, kCut, 1e-7);  // at 0 the norm bends within sqrt(1e-6)
}

TEST(Gradient, ThroughTheGateActivation) {
  BatchSpec spec = small();
  spec.options.gate_in_kernel = true;
  check(spec, kCut);
  spec.gates = "fla";
  check(spec, kUncut);
}

TEST(Gradient, ThroughTheBetaActivation) {
  BatchSpec spec = small();
  spec.options.beta_sigmoid = true;
  check(spec, kCut);
  spec.options.allow_neg_eigval = true;
  check(spec, kCut);
}

TEST(Gradient, Everything) {
  BatchSpec spec = small();
  spec.options = {.scale = 0.3,
                  .qk_l2norm = true,
                  .gate_in_kernel = true,
                  .beta_sigmoid = true,
                  .allow_neg_eigval = true};
  check(spec, kCut);
}

TEST(Gradient, OfBetaAtZeroAndTwo) {
  BatchSpec spec = small();
  for (const char* beta : {"zeros", "tiny", "one", "two"}) {
    spec.beta = beta;
    check(spec, kCut);
  }
}

TEST(Gradient, AtForgettingAndUnitGates) {
  BatchSpec spec = small();
  for (const char* gates : {"inf", "zero", "strong", "mixed"}) {
    spec.gates = gates;
    spec.seed = 3;
    check(spec, kCut);
  }
}

TEST(Gradient, HeadGroupsOfOneAndThree) {
  BatchSpec spec = small();
  spec.heads_qk = spec.heads_v = 2;
  check(spec, kCut);
  spec.heads_qk = 1;
  spec.heads_v = 3;
  check(spec, kCut);
}

}  // namespace
}  // namespace gdn::reference
