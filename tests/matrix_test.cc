// The CPU backend against the fp64 token recurrence over the kinds of input that users of this
// operator bring: lengths around the chunk, head groupings, gates from none to -inf, awkward keys
// and betas, activations inside, states, slack rows.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "check/run_batch.h"
#include "compare_results.h"

namespace gdn {
namespace {

struct Case {
  std::string name;
  BatchSpec spec;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

void check_case(const BatchSpec& base, DType operand) {
  BatchSpec spec = base;
  spec.operand = operand;
  if (operand == DType::kFloat64 && spec.gate == DType::kFloat32) spec.gate = DType::kFloat64;
  auto made = make_batch(spec);
  ASSERT_TRUE(made) << made.status().message();
  RunOptions reference, cpu;
  reference.context.backend = "reference";
  cpu.context.backend = "cpu";
  auto want = run_batch(widen(*made), reference);
  auto got = run_batch(*made, cpu);
  ASSERT_TRUE(want) << want.status().message();
  ASSERT_TRUE(got) << got.status().message();
  ASSERT_EQ(got->backend, "cpu");
  expect_results_close(*got, *want, made->cu_seqlens, operand);
}

class Matrix : public testing::TestWithParam<Case> {};
TEST_P(Matrix, Float64) { check_case(GetParam().spec, DType::kFloat64); }
TEST_P(Matrix, Float32) { check_case(GetParam().spec, DType::kFloat32); }
TEST_P(Matrix, BFloat16) { check_case(GetParam().spec, DType::kBFloat16); }

BatchSpec spec_of(std::vector<int64_t> documents, int64_t heads_qk, int64_t heads_v, int64_t dim) {
  BatchSpec spec;
  spec.documents = std::move(documents);
  spec.heads_qk = heads_qk;
  spec.heads_v = heads_v;
  spec.dim_k = spec.dim_v = dim;
  return spec;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](std::string name, BatchSpec spec) {
    all.push_back({std::move(name), std::move(spec)});
  };

  // Lengths around one and two chunks, at the heads of the large models.
  for (int64_t T : {0, 1, 63, 64, 65, 127, 128, 129}) {
    BatchSpec spec = spec_of({T}, 16, 48, 64);
    spec.initial_state = spec.dfinal_state = true;
    add(fmt::format("edge_{}", T), spec);
  }
  // Lengths, groupings and dims of FLA's own matrix.
  struct Fla {
    int64_t T, H, HV, D;
    const char* gates;
    bool norm;
  };
  for (const Fla& f : std::vector<Fla>{{75, 2, 4, 64, "fla", false},
                                       {256, 2, 8, 64, "zero", true},
                                       {500, 3, 3, 128, "model", false},
                                       {512, 4, 4, 64, "slow", true},
                                       {1000, 4, 8, 128, "fla", true},
                                       {1024, 8, 8, 64, "zero", false},
                                       {1500, 2, 4, 128, "slow", false},
                                       {2048, 2, 4, 64, "model", true}}) {
    BatchSpec spec = spec_of({f.T}, f.H, f.HV, f.D);
    spec.gates = f.gates;
    spec.options.qk_l2norm = f.norm;
    spec.initial_state = spec.dfinal_state = true;
    add(fmt::format("fla_{}_{}_{}_{}_{}", f.T, f.H, f.HV, f.D, f.gates), spec);
  }
  for (const auto& documents : std::vector<std::vector<int64_t>>{
           {15}, {256, 244, 500}, {15, 85, 200, 900, 800}, {47, 81}, {0, 3, 0, 0, 64, 1, 0}}) {
    BatchSpec spec = spec_of(documents, 2, 4, 64);
    spec.gates = "fla";
    spec.initial_state = spec.dfinal_state = true;
    add(fmt::format("packed_{}", documents.size()), spec);
  }
  {
    BatchSpec spec = spec_of({211, 774}, 2, 4, 128);
    spec.slack = 15;
    add("slack_rows_hold_nan", spec);
  }
  // Gates.
  for (const char* gates : {"model", "slow", "fla", "zero", "strong", "mixed", "spike", "inf"}) {
    for (bool state : {false, true}) {
      BatchSpec spec = spec_of({131, 70}, 2, 4, 64);
      spec.gates = gates;
      spec.initial_state = spec.dfinal_state = state;
      add(fmt::format("gates_{}{}", gates, state ? "_state" : ""), spec);
    }
  }
  {
    BatchSpec spec = spec_of({4500}, 1, 2, 64);  // a state that lives for thousands of tokens
    spec.gates = "zero";
    spec.initial_state = true;
    add("long_memory", spec);
  }
  // Keys and betas.
  for (const char* keys : {"correlated", "duplicated", "zero"}) {
    for (bool norm : {false, true}) {
      BatchSpec spec = spec_of({190}, 2, 4, 64);
      spec.keys = keys;
      spec.options.qk_l2norm = norm;
      add(fmt::format("keys_{}{}", keys, norm ? "_norm" : ""), spec);
    }
  }
  for (const char* beta : {"one", "two", "tiny", "zeros"}) {
    BatchSpec spec = spec_of({190}, 2, 4, 64);
    spec.beta = beta;
    add(fmt::format("beta_{}", beta), spec);
  }
  // Activations inside.
  for (int bits = 0; bits < 8; ++bits) {
    BatchSpec spec = spec_of({63, 129}, 2, 6, 64);
    spec.options.qk_l2norm = bits & 1;
    spec.options.gate_in_kernel = bits & 2;
    spec.options.beta_sigmoid = bits & 4;
    spec.options.allow_neg_eigval = bits & 4;
    spec.initial_state = true;
    add(fmt::format("activations_{}", bits), spec);
  }
  {
    BatchSpec spec = spec_of({200}, 2, 4, 64);
    spec.gate = DType::kBFloat16;
    spec.options.scale = 0.3;
    add("bf16_gates_and_scale", spec);
  }
  {
    BatchSpec spec = spec_of({200}, 2, 4, 64);
    spec.dim_v = 128;
    add("dims_64_128", spec);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Matrix, testing::ValuesIn(cases()),
                         [](const auto& param_info) { return param_info.param.name; });

// What one NaN or infinity in an operand of token 30 and head 1 gives: not finite there, and
// nothing else in the other document.
TEST(NotFinite, ShowsInItsOwnDocument) {
  BatchSpec spec = spec_of({100, 70}, 2, 4, 16);
  spec.initial_state = spec.dfinal_state = true;
  for (const char* backend : {"reference", "cpu"}) {
    RunOptions options;
    options.context.backend = backend;
    const auto run = [&](const Batch& batch) {
      auto result = run_batch(batch, options);
      EXPECT_TRUE(result) << result.status().message();
      return std::move(*result);
    };
    const BatchResult clean = run(*make_batch(spec));
    for (HostTensor Batch::* operand : {&Batch::q, &Batch::k, &Batch::v, &Batch::g, &Batch::beta}) {
      for (float bad : {std::nanf(""), HUGE_VALF}) {
        Batch batch = *make_batch(spec);
        HostTensor& tensor = batch.*operand;
        const int64_t head = operand == &Batch::q || operand == &Batch::k ? 0 : 1;
        tensor.as<float>()[30 * tensor.view.stride[0] + head * tensor.view.stride[1]] = bad;
        const BatchResult got = run(batch);
        const float* o = got.o.as<float>() + (30 * 4 + 1) * 16;
        EXPECT_FALSE(std::all_of(o, o + 16, [](float x) { return std::isfinite(x); })) << backend;
        const bool forgets_nothing = operand != &Batch::q && operand != &Batch::v;
        const float* last = got.o.as<float>() + (99 * 4 + 1) * 16;
        if (forgets_nothing) {
          EXPECT_FALSE(std::isfinite(*last)) << backend;
        }
        for (const ResultTensor& t : kResultTensors) {
          if (t.rows != ResultTensor::Rows::kTokens) continue;
          const HostTensor &x = got.*t.member, &want = clean.*t.member;
          const int64_t first = 100 * x.view.stride[0];
          EXPECT_EQ(std::memcmp(x.as<float>() + first, want.as<float>() + first,
                                70 * static_cast<size_t>(x.view.stride[0]) * sizeof(float)),
                    0)
              << backend << ' ' << t.name;
        }
      }
    }
  }
}

// 2,050 documents x 32 heads: more items than a 16-bit grid holds. Against two halves, bitwise.
TEST(ManyDocuments, EqualTheirHalves) {
  BatchSpec spec = spec_of(std::vector<int64_t>(2050, 16), 32, 32, 16);
  const Batch whole = *make_batch(spec);
  RunOptions cpu;
  cpu.context.backend = "cpu";
  auto all = run_batch(whole, cpu);
  ASSERT_TRUE(all) << all.status().message();
  for (int half = 0; half < 2; ++half) {
    const int64_t first = half * 1025 * 16, tokens = 1025 * 16;
    Batch part;
    part.problem = whole.problem;
    part.problem.tokens = tokens;
    for (int64_t doc = 0; doc <= 1025; ++doc) part.cu_seqlens.push_back(doc * 16);
    const auto cut = [&](const HostTensor& from) {
      HostTensor to;
      to.view = from.view;
      to.view.shape[0] = tokens;
      to.view.data = from.as<float>() + first * from.view.stride[0];
      return to;
    };
    part.q = cut(whole.q);
    part.k = cut(whole.k);
    part.v = cut(whole.v);
    part.g = cut(whole.g);
    part.beta = cut(whole.beta);
    part.d_o = cut(whole.d_o);
    auto got = run_batch(part, cpu);
    ASSERT_TRUE(got) << got.status().message();
    for (const ResultTensor& t : kResultTensors) {
      if (t.rows != ResultTensor::Rows::kTokens) continue;
      const HostTensor &x = (*got).*t.member, &want = (*all).*t.member;
      EXPECT_EQ(std::memcmp(x.as<float>(), want.as<float>() + first * want.view.stride[0],
                            static_cast<size_t>(x.buffer.bytes())),
                0)
          << t.name;
    }
  }
}

}  // namespace
}  // namespace gdn
