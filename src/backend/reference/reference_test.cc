// The reference against the recurrence written out, its affine maps, and what must hold exactly:
// forgotten states, neighbours, slack rows, views, rounding.
#include "backend/reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "backend/reference/by_hand.h"
#include "base/element.h"
#include "check/accuracy.h"

namespace gdn::reference {
namespace {

BatchSpec small() {
  BatchSpec spec;
  spec.documents = {40, 0, 1, 75};
  spec.heads_qk = 2;
  spec.heads_v = 6;
  spec.dim_k = 12;
  spec.dim_v = 7;
  spec.operand = DType::kFloat64;
  spec.initial_state = spec.dfinal_state = true;
  return spec;
}

Batch make(const BatchSpec& spec) {
  auto batch = make_batch(spec);
  EXPECT_TRUE(batch.is_ok()) << batch.status().message();
  return std::move(batch).value();
}

// Pairs of the results of two runs, by name.
template <typename F>
void for_each_result(const BatchResult& a, const BatchResult& b, const F& f) {
  for (const ResultTensor& t : kResultTensors) f(t.name, a.*t.member, b.*t.member);
}

// rows [first, last) of axis 0
bool same_rows(const HostTensor& a, const HostTensor& b, int64_t first, int64_t last) {
  const int64_t row = a.view.stride[0] * size_of(a.view.dtype);
  return std::memcmp(a.as<char>() + first * row, b.as<char>() + first * row,
                     static_cast<size_t>((last - first) * row)) == 0;
}

void expect_close(const BatchResult& a, const BatchResult& b, double tolerance) {
  for_each_result(a, b, [&](const char* name, const HostTensor& x, const HostTensor& ref) {
    const Accuracy accuracy = compare(x.view, ref.view, x.view.rank >= 2 ? 1 : -1, {});
    EXPECT_TRUE(accuracy.finite) << name;
    EXPECT_LE(accuracy.rel_rms, tolerance) << name;
    EXPECT_LE(accuracy.worst_head_rms, tolerance) << name;
  });
}

TEST(Reference, IsTheRecurrence) {
  BatchSpec spec = small();
  const Batch batch = make(spec);
  const BatchResult result = run_by_hand(batch, plan_uncut(batch));
  const int64_t K = spec.dim_k, V = spec.dim_v;
  for (int64_t doc : {0, 1, 2, 3}) {
    for (int64_t h = 0; h < 6; ++h) {
      const double* s0 = batch.initial_state.as<double>() + (doc * 6 + h) * K * V;
      std::vector<double> S(s0, s0 + K * V);
      for (int64_t t = batch.cu_seqlens[doc]; t < batch.cu_seqlens[doc + 1]; ++t) {
        const double* k = batch.k.as<double>() + (t * 2 + h / 3) * K;
        const double* q = batch.q.as<double>() + (t * 2 + h / 3) * K;
        const double* v = batch.v.as<double>() + (t * 6 + h) * V;
        const double alpha = std::exp(batch.g.as<double>()[t * 6 + h]);
        const double beta = batch.beta.as<double>()[t * 6 + h];
        for (int64_t j = 0; j < V; ++j) {
          double seen = 0, o = 0;
          for (int64_t i = 0; i < K; ++i) seen += alpha * S[i * V + j] * k[i];
          for (int64_t i = 0; i < K; ++i) {
            S[i * V + j] = alpha * S[i * V + j] + beta * k[i] * (v[j] - seen);
            o += S[i * V + j] * q[i] / std::sqrt(double(K));
          }
          ASSERT_NEAR(result.o.as<double>()[(t * 6 + h) * V + j], o, 1e-13);
        }
      }
      for (int64_t i = 0; i < K * V; ++i) {
        ASSERT_NEAR(result.final_state.as<double>()[(doc * 6 + h) * K * V + i], S[i], 1e-13);
      }
    }
  }
}

TEST(Reference, SegmentsByHandEqualTheUncutDocument) {
  for (const char* gates : {"model", "slow", "zero", "inf"}) {
    BatchSpec spec = small();
    spec.gates = gates;
    spec.options.qk_l2norm = true;
    spec.options.gate_in_kernel = true;
    spec.options.beta_sigmoid = true;
    const Batch batch = make(spec);
    const BatchResult whole = run_by_hand(batch, plan_uncut(batch));
    const Plan cut = plan_by_hand(batch, {{1, 38, 1}, {}, {1}, {30, 20, 24, 1}});
    EXPECT_EQ(cut.counts.map_slots, 3);
    expect_close(run_by_hand(batch, cut), whole, 1e-13);
  }
}

// The states between segments are the final states of the document's beginnings, and the gradients
// there those of the initial states of its endings.
TEST(Reference, AffineMapsCarryStatesAndGradients) {
  BatchSpec spec = small();
  spec.documents = {50};
  const Batch batch = make(spec);
  Boundaries cut;
  run_by_hand(batch, plan_by_hand(batch, {{20, 17, 13}}), &cut);
  const int64_t size = spec.dim_k * spec.dim_v;
  for (int64_t slot : {0, 1}) {
    const int64_t at = slot == 0 ? 20 : 37;
    Batch beginning = make(spec);
    beginning.cu_seqlens = {0, at};
    const BatchResult first = run_by_hand(beginning, plan_uncut(beginning));
    Batch ending = make(spec);
    ending.cu_seqlens = {0, 50 - at};
    ending.problem.tokens = 50 - at;
    for (HostTensor* x : {&ending.q, &ending.k, &ending.v, &ending.g, &ending.beta, &ending.d_o}) {
      x->view.data = x->as<double>() + at * x->view.stride[0];
      x->view.shape[0] = 50 - at;
    }
    const Plan plan = plan_uncut(ending);
    const BatchResult last = run_by_hand(ending, plan, nullptr, [&](Views& views) {
      views.forward.initial_state = views.backward.initial_state = first.final_state.view;
    });
    for (int64_t h = 0; h < 6; ++h) {
      for (int64_t i = 0; i < size; ++i) {
        EXPECT_NEAR(cut.entry_states.as<double>()[(h * 2 + slot) * size + i],
                    first.final_state.as<double>()[h * size + i], 1e-13);
        EXPECT_NEAR(cut.exit_gradients.as<double>()[(h * 2 + slot) * size + i],
                    last.dinitial_state.as<double>()[h * size + i], 1e-13);
      }
    }
  }
}

TEST(Reference, AFirstTokensGateHasExactlyNoGradientWithoutAnInitialState) {
  BatchSpec spec = small();
  spec.initial_state = false;
  const Batch batch = make(spec);
  const BatchResult result = run_by_hand(batch, plan_uncut(batch));
  for (int64_t t : {0, 40, 41}) {
    for (int64_t h = 0; h < 6; ++h) EXPECT_EQ(result.dg.as<double>()[t * 6 + h], 0);
  }
  EXPECT_NE(result.dg.as<double>()[1 * 6], 0);
  spec.initial_state = true;
  const Batch with = make(spec);
  EXPECT_NE(run_by_hand(with, plan_uncut(with)).dg.as<double>()[0], 0);
}

TEST(Reference, AForgettingGateBeginsAFreshDocument) {
  BatchSpec spec = small();
  spec.documents = {30};
  spec.initial_state = false;
  spec.dfinal_state = false;
  spec.gates = "slow";
  Batch one = make(spec);
  for (int64_t h = 0; h < 6; ++h) one.g.as<double>()[11 * 6 + h] = -INFINITY;
  const BatchResult forgotten = run_by_hand(one, plan_uncut(one));
  Batch two = make(spec);
  two.cu_seqlens = {0, 11, 30};
  const BatchResult fresh = run_by_hand(two, plan_uncut(two));
  for (const auto& [a, b] :
       {std::pair(&forgotten.o, &fresh.o), std::pair(&forgotten.dq, &fresh.dq),
        std::pair(&forgotten.dk, &fresh.dk), std::pair(&forgotten.dv, &fresh.dv),
        std::pair(&forgotten.dg, &fresh.dg), std::pair(&forgotten.dbeta, &fresh.dbeta)}) {
    for (int64_t i = 0; i < a->view.numel(); ++i) {
      ASSERT_EQ(a->as<double>()[i], b->as<double>()[i]);  // -0 and 0 are equal
    }
  }
  // Cut at the gate, and with the gate inside an interior segment.
  expect_close(run_by_hand(one, plan_by_hand(one, {{11, 19}})), forgotten, 1e-13);
  expect_close(run_by_hand(one, plan_by_hand(one, {{5, 10, 15}})), forgotten, 1e-13);
}

TEST(Reference, NeighboursDoNotLeak) {
  BatchSpec spec = small();
  spec.gates = "zero";
  spec.documents = {33, 20, 40};
  const Batch batch = make(spec);
  Batch changed = make(spec);
  for (HostTensor* x : {&changed.q, &changed.k, &changed.v, &changed.beta, &changed.d_o}) {
    for (int64_t t = 33; t < 53; ++t) {
      for (int64_t i = 0; i < x->view.stride[0]; ++i) {
        x->as<double>()[t * x->view.stride[0] + i] *= 0.5;
      }
    }
  }
  const std::vector<std::vector<int64_t>> cuts = {{20, 13}, {20}, {10, 10, 20}};
  const BatchResult a = run_by_hand(batch, plan_by_hand(batch, cuts));
  const BatchResult b = run_by_hand(changed, plan_by_hand(changed, cuts));
  for_each_result(a, b, [&](const char* name, const HostTensor& x, const HostTensor& y) {
    if (!x.present()) return;
    const bool states = x.view.rank == 4;
    EXPECT_TRUE(same_rows(x, y, 0, states ? 1 : 33)) << name;
    EXPECT_FALSE(same_rows(x, y, states ? 1 : 33, states ? 2 : 53)) << name;
    EXPECT_TRUE(same_rows(x, y, states ? 2 : 53, states ? 3 : 93)) << name;
  });
}

TEST(Reference, SlackRowsAndEmptyDocuments) {
  for (DType operand : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    BatchSpec spec = small();
    spec.operand = operand;
    spec.gate = DType::kBFloat16;
    spec.slack = 3;
    const Batch batch = make(spec);
    const BatchResult result = run_by_hand(batch, plan_uncut(batch));
    for (const HostTensor* x :
         {&result.o, &result.dq, &result.dk, &result.dv, &result.dg, &result.dbeta}) {
      for (int64_t i = 0; i < 119 * x->view.stride[0]; ++i) {
        const double value = load_element(x->view, i);
        ASSERT_TRUE(std::isfinite(value));
        ASSERT_TRUE(value == 0 || i < 116 * x->view.stride[0]);
      }
    }
    EXPECT_TRUE(same_rows(result.final_state, batch.initial_state, 1, 2));
    EXPECT_TRUE(same_rows(result.dinitial_state, batch.dfinal_state, 1, 2));
  }
}

TEST(Reference, NothingAtAll) {
  BatchSpec spec = small();
  spec.documents = {};
  const Batch none = make(spec);
  run_by_hand(none, plan_uncut(none));
  spec.documents = {0, 0};
  spec.options.gate_in_kernel = true;
  const Batch empty = make(spec);
  const BatchResult result = run_by_hand(empty, plan_uncut(empty));
  EXPECT_TRUE(same_rows(result.final_state, empty.initial_state, 0, 2));
  for (int64_t h = 0; h < 6; ++h) EXPECT_EQ(result.dA_log.as<double>()[h], 0);
}

// Narrow operands are exact in fp64: the results are those of the widened batch, rounded once.
TEST(Reference, NarrowOperandsRoundOnce) {
  for (DType operand : {DType::kFloat32, DType::kBFloat16}) {
    BatchSpec spec = small();
    spec.operand = operand;
    spec.options.qk_l2norm = true;
    const Batch batch = make(spec), wide = widen(batch);
    const BatchResult narrow = run_by_hand(batch, plan_uncut(batch));
    const BatchResult full = run_by_hand(wide, plan_uncut(wide));
    for_each_result(narrow, full, [&](const char* name, const HostTensor& x, const HostTensor& y) {
      if (!x.present()) return;
      HostTensor rounded(x.view.dtype, {x.view.numel()});
      store_row(rounded.view.data, x.view.dtype, 0, 1, x.view.numel(), y.as<double>());
      for (int64_t i = 0; i < x.view.numel(); ++i) {
        ASSERT_EQ(load_element(x.view, i), load_element(rounded.view, i)) << name;
      }
    });
  }
}

TEST(Reference, RepeatedKeyHeadsGiveTheSameAndTheirGradientsSum) {
  BatchSpec spec = small();
  const Batch grouped = make(spec);
  spec.heads_qk = 6;
  Batch repeated = make(spec);
  for (int64_t i = 0; i < repeated.q.view.numel(); ++i) {
    const int64_t t = i / (6 * 12), h = i / 12 % 6;
    const int64_t from = (t * 2 + h / 3) * 12 + i % 12;
    repeated.q.as<double>()[i] = grouped.q.as<double>()[from];
    repeated.k.as<double>()[i] = grouped.k.as<double>()[from];
  }
  const BatchResult a = run_by_hand(grouped, plan_uncut(grouped));
  const BatchResult b = run_by_hand(repeated, plan_uncut(repeated));
  EXPECT_TRUE(same_rows(a.o, b.o, 0, 116) && same_rows(a.dv, b.dv, 0, 116) &&
              same_rows(a.dg, b.dg, 0, 116));
  for (int64_t i = 0; i < a.dk.view.numel(); ++i) {
    const int64_t t = i / 24, h = i / 12 % 2, at = (t * 6 + h * 3) * 12 + i % 12;
    const double* dk = b.dk.as<double>() + at;
    const double* dq = b.dq.as<double>() + at;
    ASSERT_NEAR(a.dk.as<double>()[i], dk[0] + dk[12] + dk[24], 1e-12);
    ASSERT_NEAR(a.dq.as<double>()[i], dq[0] + dq[12] + dq[24], 1e-12);
  }
}

TEST(Reference, ViewsAreBitwiseAsContiguous) {
  BatchSpec spec = small();
  const Batch batch = make(spec);
  Batch plain = make(spec);
  for (int64_t i = 0; i < plain.d_o.view.numel(); ++i) plain.d_o.as<double>()[i] = 0.25;
  const BatchResult expected = run_by_hand(plain, plan_uncut(plain));

  // q, k, v and their gradients are columns of one row; do is one expanded number; states and their
  // gradients are [N, HV, V, K] in memory.
  const int64_t widths[3] = {24, 24, 42}, width = 90;
  HostTensor row(DType::kFloat64, {116, width}), drow(DType::kFloat64, {116, width}, 0xff);
  HostTensor one(DType::kFloat64, {1});
  one.as<double>()[0] = 0.25;
  HostTensor flipped(DType::kFloat64, {4, 6, 7, 12}), out_states(DType::kFloat64, {4, 6, 7, 12}),
      dstates(DType::kFloat64, {4, 6, 7, 12});
  const auto flip = [](const HostTensor& tensor) {
    TensorView view = tensor.view;
    std::swap(view.shape[2], view.shape[3]);
    std::swap(view.stride[2], view.stride[3]);
    return view;
  };
  for (int64_t i = 0; i < batch.initial_state.view.numel(); ++i) {
    const int64_t matrix = i / 84, k = i % 84 / 7, v = i % 7;
    flipped.as<double>()[matrix * 84 + v * 12 + k] = batch.initial_state.as<double>()[i];
  }
  const auto columns = [&](const HostTensor& tensor, int which, const TensorView& like) {
    TensorView view = like;
    int64_t at = 0;
    for (int i = 0; i < which; ++i) at += widths[i];
    view.data = tensor.as<double>() + at;
    view.stride[0] = width;
    return view;
  };
  const HostTensor* sources[3] = {&batch.q, &batch.k, &batch.v};
  for (int which = 0; which < 3; ++which) {
    const TensorView to = columns(row, which, sources[which]->view);
    for (int64_t t = 0; t < 116; ++t) {
      std::memcpy(to.as<double>() + t * width, sources[which]->as<double>() + t * widths[which],
                  static_cast<size_t>(widths[which]) * sizeof(double));
    }
  }
  const BatchResult got = run_by_hand(batch, plan_uncut(batch), nullptr, [&](Views& views) {
    views.forward.in.q = columns(row, 0, batch.q.view);
    views.forward.in.k = columns(row, 1, batch.k.view);
    views.forward.in.v = columns(row, 2, batch.v.view);
    views.forward.initial_state = flip(flipped);
    views.forward.final_state = flip(out_states);
    views.backward.in = views.forward.in;
    views.backward.initial_state = flip(flipped);
    views.backward.dinitial_state = flip(dstates);
    views.backward.d_o.data = one.view.data;
    views.backward.d_o.stride = {0, 0, 0, 0};
    views.backward.dq = columns(drow, 0, batch.q.view);
    views.backward.dk = columns(drow, 1, batch.k.view);
    views.backward.dv = columns(drow, 2, batch.v.view);
  });
  EXPECT_TRUE(same_rows(got.o, expected.o, 0, 116) && same_rows(got.dg, expected.dg, 0, 116) &&
              same_rows(got.dbeta, expected.dbeta, 0, 116));
  const HostTensor* gradients[3] = {&expected.dq, &expected.dk, &expected.dv};
  for (int which = 0; which < 3; ++which) {
    const TensorView from = columns(drow, which, gradients[which]->view);
    for (int64_t t = 0; t < 116; ++t) {
      EXPECT_EQ(std::memcmp(from.as<double>() + t * width,
                            gradients[which]->as<double>() + t * widths[which],
                            static_cast<size_t>(widths[which]) * sizeof(double)),
                0);
    }
  }
  EXPECT_EQ(compare(flip(out_states), expected.final_state.view, 1, {}).rel_rms, 0);
  EXPECT_EQ(compare(flip(dstates), expected.dinitial_state.view, 1, {}).rel_rms, 0);
}

TEST(Reference, RepeatsBitwise) {
  BatchSpec spec = small();
  spec.options.gate_in_kernel = true;
  const Batch batch = make(spec);
  const Plan plan = plan_by_hand(batch, {{40}, {}, {1}, {30, 45}});
  const BatchResult a = run_by_hand(batch, plan), b = run_by_hand(batch, plan);
  for_each_result(a, b, [&](const char* name, const HostTensor& x, const HostTensor& y) {
    EXPECT_TRUE(same_rows(x, y, 0, x.view.shape[0])) << name;
  });
}

TEST(Reference, RefusesOtherDevices) {
  Problem problem;
  EXPECT_FALSE(reference_backend().why_not(problem).has_value());
  problem.device = {Device::Kind::kCuda, 1};
  EXPECT_EQ(*reference_backend().why_not(problem), "device: expected cpu, got cuda:1");
}

}  // namespace
}  // namespace gdn::reference
