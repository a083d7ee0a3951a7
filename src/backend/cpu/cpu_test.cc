// The CPU backend against the fp64 recurrence: shapes, dtypes, gates, keys, segments, views,
// threads.
#include "backend/cpu/cpu.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "backend/reference/by_hand.h"
#include "base/element.h"
#include "check/accuracy.h"

namespace gdn {
namespace {

using reference::plan_by_hand;
using reference::plan_uncut;
using reference::run_by_hand;
using reference::Views;
using Cuts = std::vector<std::vector<int64_t>>;

Batch make(const BatchSpec& spec) {
  auto batch = make_batch(spec);
  EXPECT_TRUE(batch.is_ok()) << batch.status().message();
  return std::move(batch).value();
}

void expect_accurate(const Batch& batch, const BatchResult& got, const BatchResult& want) {
  for (const auto& [name, member, head_axis, rows] : kResultTensors) {
    const HostTensor& x = got.*member;
    if (!x.present() || x.view.numel() == 0) continue;
    const bool packed = x.view.rank == 2 || x.view.rank == 3;
    const Accuracy a =
        compare(x.view, (want.*member).view, x.view.rank >= 2 ? 1 : -1,
                packed ? std::span<const int64_t>(batch.cu_seqlens) : std::span<const int64_t>());
    const Bars bar = bars(batch.problem.operand, name);
    EXPECT_TRUE(passes(a, bar)) << fmt::format(
        "{}: finite {}, rel_rms {:.2e}, max {:.2e}, head {} {:.2e}, document {} {:.2e}", name,
        a.finite, a.rel_rms, a.max_error, a.worst_head, a.worst_head_rms, a.worst_document,
        a.worst_document_rms);
  }
}

void check(const BatchSpec& spec, const Cuts& cuts = {}) {
  const Batch batch = make(spec);
  const Batch wide = widen(batch);
  const BatchResult want = run_by_hand(wide, plan_uncut(wide));
  const Plan plan = cuts.empty() ? plan_uncut(batch) : plan_by_hand(batch, cuts);
  expect_accurate(batch, run_by_hand(batch, plan, nullptr, {}, &cpu_backend()), want);
}

constexpr DType kOperands[] = {DType::kFloat64, DType::kFloat32, DType::kBFloat16};

BatchSpec spec_of(std::vector<int64_t> documents, DType operand) {
  BatchSpec spec;
  spec.documents = std::move(documents);
  spec.operand = operand;
  spec.heads_qk = 1;
  spec.heads_v = 2;
  spec.dim_k = spec.dim_v = 64;
  spec.initial_state = spec.dfinal_state = true;
  return spec;
}

TEST(Cpu, EveryLengthAndDtype) {
  for (DType operand : kOperands) {
    for (int64_t length : {0, 1, 63, 64, 65, 127, 128, 129, 300}) {
      SCOPED_TRACE(fmt::format("{} T {}", to_string(operand), length));
      check(spec_of({length}, operand));
    }
  }
}

TEST(Cpu, EveryHeadGrouping) {
  for (const auto& [h, hv] : {std::pair{2, 4}, {3, 3}, {2, 8}, {1, 3}}) {
    for (int64_t dim : {64, 128}) {
      SCOPED_TRACE(fmt::format("H {} HV {} D {}", h, hv, dim));
      BatchSpec spec = spec_of({70, 0, 1, 65}, DType::kFloat32);
      spec.heads_qk = h;
      spec.heads_v = hv;
      spec.dim_k = spec.dim_v = dim;
      check(spec);
    }
  }
}

TEST(Cpu, OtherHeadDims) {
  for (const auto& [k, v] : {std::pair{16, 48}, {32, 16}, {80, 128}, {256, 256}}) {
    SCOPED_TRACE(fmt::format("K {} V {}", k, v));
    for (DType operand : {DType::kFloat64, DType::kFloat32}) {
      BatchSpec spec = spec_of({90}, operand);
      spec.dim_k = k;
      spec.dim_v = v;
      check(spec, {{64, 26}});
    }
  }
}

TEST(Cpu, EveryGateAndKey) {
  for (DType operand : kOperands) {
    for (const char* gates : {"model", "slow", "fla", "zero", "strong", "mixed", "spike", "inf"}) {
      for (const char* keys : {"normal", "correlated", "duplicated", "zero"}) {
        for (bool norm : {false, true}) {
          SCOPED_TRACE(fmt::format("{} {} {} norm {}", to_string(operand), gates, keys, norm));
          BatchSpec spec = spec_of({150}, operand);
          spec.gates = gates;
          spec.keys = keys;
          spec.options.qk_l2norm = norm;
          check(spec);
        }
      }
    }
  }
}

TEST(Cpu, EveryBetaAndActivation) {
  for (DType operand : {DType::kFloat64, DType::kFloat32}) {
    for (const char* beta : {"sigmoid", "one", "two", "tiny", "zeros"}) {
      SCOPED_TRACE(fmt::format("{} {}", to_string(operand), beta));
      BatchSpec spec = spec_of({100}, operand);
      spec.beta = beta;
      check(spec);
    }
    for (int bits = 0; bits < 8; ++bits) {
      if ((bits & 6) == 4) continue;  // the factor 2 goes with the sigmoid
      SCOPED_TRACE(fmt::format("{} options {}", to_string(operand), bits));
      BatchSpec spec = spec_of({70, 3}, operand);
      spec.options.gate_in_kernel = bits & 1;
      spec.options.beta_sigmoid = bits & 2;
      spec.options.allow_neg_eigval = bits & 4;
      spec.options.scale = 0.3;
      check(spec, {{64, 6}, {3}});
    }
  }
}

TEST(Cpu, DocumentsInSegments) {
  for (DType operand : kOperands) {
    for (const char* gates : {"slow", "model", "inf"}) {
      SCOPED_TRACE(fmt::format("{} {}", to_string(operand), gates));
      BatchSpec spec = spec_of({1, 200, 0, 330}, operand);
      spec.gates = gates;
      spec.heads_v = 3;
      spec.dim_k = 128;
      spec.slack = 5;
      check(spec, {{1}, {64, 128, 8}, {}, {64, 1, 128, 64, 73}});
      spec.initial_state = spec.dfinal_state = false;
      check(spec, {{1}, {64, 128, 8}, {}, {64, 1, 128, 64, 73}});
    }
  }
}

TEST(Cpu, BFloat16GatesAndNoGradientOfO) {
  BatchSpec spec = spec_of({100}, DType::kBFloat16);
  spec.gate = DType::kBFloat16;
  check(spec);
  spec.backward = false;
  check(spec);
}

}  // namespace
}  // namespace gdn
