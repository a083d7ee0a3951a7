// What must not change a bit of the CPU backend's results: strides, neighbours in the pack,
// threads.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "backend/cpu/cpu.h"
#include "backend/reference/by_hand.h"
#include "base/element.h"
#include "base/thread_pool.h"

namespace gdn {
namespace {

using reference::plan_by_hand;
using reference::plan_uncut;
using reference::run_by_hand;
using reference::Views;

BatchSpec spec_of(std::vector<int64_t> documents, DType operand) {
  BatchSpec spec;
  spec.documents = std::move(documents);
  spec.heads_qk = 2;
  spec.heads_v = 4;
  spec.dim_k = 64;
  spec.dim_v = 32;
  spec.operand = operand;
  spec.gates = "slow";
  spec.initial_state = spec.dfinal_state = true;
  spec.options.qk_l2norm = true;
  return spec;
}

Batch make(const BatchSpec& spec) {
  auto batch = make_batch(spec);
  EXPECT_TRUE(batch.is_ok()) << batch.status().message();
  return std::move(batch).value();
}

BatchResult run(const Batch& batch, const Plan& plan,
                const std::function<void(Views&)>& views = {}) {
  return run_by_hand(batch, plan, nullptr, views, &cpu_backend());
}

// Elements [0, n) of two views of one shape in row-major order.
bool same(const TensorView& a, const TensorView& b) {
  for (int64_t i = 0; i < a.numel(); ++i) {
    int64_t at_a = 0, at_b = 0, rest = i;
    for (int axis = a.rank - 1; axis >= 0; --axis) {
      const int64_t index = rest % a.shape[axis];
      rest /= a.shape[axis];
      at_a += index * a.stride[axis];
      at_b += index * b.stride[axis];
    }
    const double x = load_element(a, at_a), y = load_element(b, at_b);
    if (std::memcmp(&x, &y, sizeof(x)) != 0) return false;
  }
  return true;
}

// Rows [first, first + rows) of axis 0.
TensorView rows_of(TensorView view, int64_t first, int64_t rows) {
  view.data = view.as<std::byte>() + first * view.stride[0] * size_of(view.dtype);
  view.shape[0] = rows;
  return view;
}

void expect_same(const BatchResult& a, const BatchResult& b) {
  for (const auto& [name, member, head_axis, rows] : kResultTensors) {
    EXPECT_TRUE(same((a.*member).view, (b.*member).view)) << name;
  }
}

// Columns of one packed row: three views side by side in `row`, like the given ones.
struct Packed {
  HostTensor row;
  TensorView views[3];

  Packed(const Batch& batch, int fill) {
    const HostTensor* parts[] = {&batch.q, &batch.k, &batch.v};
    int64_t width = 0;
    for (const HostTensor* x : parts) width += x->view.stride[0];
    row = HostTensor(batch.q.view.dtype, {batch.problem.tokens, width}, fill);
    int64_t at = 0;
    for (int i = 0; i < 3; ++i) {
      views[i] = parts[i]->view;
      views[i].data = row.as<std::byte>() + at * size_of(row.view.dtype);
      views[i].stride[0] = width;
      at += parts[i]->view.stride[0];
    }
  }
};

TensorView flipped(const HostTensor& tensor) {
  TensorView view = tensor.view;
  std::swap(view.shape[2], view.shape[3]);
  std::swap(view.stride[2], view.stride[3]);
  return view;
}

TEST(CpuBitwise, Views) {
  for (DType operand : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    SCOPED_TRACE(to_string(operand));
    const Batch batch = make(spec_of({70, 0, 90}, operand));
    Batch expanded = make(spec_of({70, 0, 90}, operand));
    for (int64_t i = 0; i < expanded.d_o.view.numel(); ++i) {
      store_element(expanded.d_o.view, i, 0.25);
    }
    const Plan plan = plan_by_hand(batch, {{64, 6}, {}, {90}});
    const BatchResult want = run(expanded, plan);

    Packed in(batch, 0), out(batch, 0xff);
    const HostTensor* parts[] = {&batch.q, &batch.k, &batch.v};
    for (int i = 0; i < 3; ++i) {
      for (int64_t t = 0; t < batch.problem.tokens; ++t) {
        for (int64_t j = 0; j < parts[i]->view.stride[0]; ++j) {
          store_element(in.views[i], t * in.views[i].stride[0] + j,
                        load_element(parts[i]->view, t * parts[i]->view.stride[0] + j));
        }
      }
    }
    HostTensor quarter(operand, {1});
    store_element(quarter.view, 0, 0.25);
    const DType state = batch.problem.state();
    HostTensor initial(state, {3, 4, 32, 64}), final_state(state, {3, 4, 32, 64}, 0xff),
        dinitial(state, {3, 4, 32, 64}, 0xff);
    for (int64_t i = 0; i < 3 * 4; ++i) {
      for (int64_t k = 0; k < 64; ++k) {
        for (int64_t v = 0; v < 32; ++v) {
          store_element(initial.view, (i * 32 + v) * 64 + k,
                        load_element(batch.initial_state.view, (i * 64 + k) * 32 + v));
        }
      }
    }
    const BatchResult got = run(batch, plan, [&](Views& views) {
      for (Operands* x : {&views.forward.in, &views.backward.in}) {
        x->q = in.views[0];
        x->k = in.views[1];
        x->v = in.views[2];
      }
      views.forward.initial_state = views.backward.initial_state = flipped(initial);
      views.forward.final_state = flipped(final_state);
      views.backward.dinitial_state = flipped(dinitial);
      views.backward.d_o.data = quarter.view.data;
      views.backward.d_o.stride = {};
      views.backward.dq = out.views[0];
      views.backward.dk = out.views[1];
      views.backward.dv = out.views[2];
    });
    EXPECT_TRUE(same(got.o.view, want.o.view));
    EXPECT_TRUE(same(out.views[0], want.dq.view));
    EXPECT_TRUE(same(out.views[1], want.dk.view));
    EXPECT_TRUE(same(out.views[2], want.dv.view));
    EXPECT_TRUE(same(got.dg.view, want.dg.view));
    EXPECT_TRUE(same(got.dbeta.view, want.dbeta.view));
    EXPECT_TRUE(same(flipped(final_state), want.final_state.view));
    EXPECT_TRUE(same(flipped(dinitial), want.dinitial_state.view));
  }
}

// A document alone, where each value head is an item, and among others, where key heads are.
TEST(CpuBitwise, Neighbours) {
  for (DType operand : {DType::kFloat64, DType::kFloat32}) {
    SCOPED_TRACE(to_string(operand));
    std::vector<int64_t> lengths(static_cast<size_t>(4 * num_threads() + 2), 33);
    lengths[3] = 140;
    const Batch many = make(spec_of(lengths, operand));
    Batch one = make(spec_of({140}, operand));
    for (const auto& [to, from] : {std::pair{&one.q, &many.q},
                                   {&one.k, &many.k},
                                   {&one.v, &many.v},
                                   {&one.g, &many.g},
                                   {&one.beta, &many.beta},
                                   {&one.d_o, &many.d_o}}) {
      to->view = rows_of(from->view, 99, 140);
    }
    one.initial_state.view = rows_of(many.initial_state.view, 3, 1);
    one.dfinal_state.view = rows_of(many.dfinal_state.view, 3, 1);
    const BatchResult all = run(many, plan_uncut(many)), alone = run(one, plan_uncut(one));
    for (const auto& [name, member, head_axis, rows] : kResultTensors) {
      const TensorView& x = (alone.*member).view;
      if (!x.present()) continue;
      const bool state = x.rank == 4;
      EXPECT_TRUE(same(x, rows_of((all.*member).view, state ? 3 : 99, state ? 1 : 140))) << name;
    }
  }
}

TEST(CpuBitwise, SlackRowsAreNotReadAndBecomeZero) {
  for (DType operand : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    BatchSpec spec = spec_of({50, 0, 21}, operand);
    const Batch tight = make(spec);
    spec.slack = 7;
    const Batch slack = make(spec);
    const BatchResult a = run(tight, plan_uncut(tight)), b = run(slack, plan_uncut(slack));
    for (const auto& [name, member, head_axis, rows] : kResultTensors) {
      const TensorView& x = (b.*member).view;
      if (!x.present()) continue;
      EXPECT_TRUE(same((a.*member).view, x.rank == 4 ? x : rows_of(x, 0, 71))) << name;
      for (int64_t i = 71 * x.stride[0]; x.rank != 4 && i < x.numel(); ++i) {
        ASSERT_EQ(load_element(x, i), 0) << name;
      }
    }
  }
}

// States that are absent count as 0, and the products that only they need are left out.
TEST(CpuBitwise, AbsentStatesAreZeros) {
  BatchSpec spec = spec_of({300, 5, 64, 129}, DType::kFloat32);
  Batch zeros = make(spec);
  spec.initial_state = spec.dfinal_state = false;
  const Batch absent = make(spec);
  for (HostTensor* x : {&zeros.initial_state, &zeros.dfinal_state}) {
    std::memset(x->view.data, 0, static_cast<size_t>(x->buffer.bytes()));
  }
  for (const auto& [to, from] : {std::pair{&zeros.q, &absent.q},
                                 {&zeros.k, &absent.k},
                                 {&zeros.v, &absent.v},
                                 {&zeros.g, &absent.g},
                                 {&zeros.beta, &absent.beta},
                                 {&zeros.d_o, &absent.d_o}}) {
    to->view = from->view;
  }
  const Plan plan = plan_by_hand(zeros, {{64, 128, 108}, {5}, {64}, {129}});
  const BatchResult want = run(zeros, plan);
  expect_same(run(absent, plan), want);
  BatchResult got = run(absent, plan, [](Views& views) {
    views.forward.final_state = views.backward.dinitial_state = {};
  });
  got.final_state.view = want.final_state.view;
  got.dinitial_state.view = want.dinitial_state.view;
  expect_same(got, want);
}

// A loop inside a loop runs on its caller alone: one thread.
TEST(CpuBitwise, ThreadsAndRepeats) {
  BatchSpec spec = spec_of({300, 5, 129}, DType::kFloat32);
  spec.options.gate_in_kernel = true;
  const Batch batch = make(spec);
  const Plan plan = plan_by_hand(batch, {{64, 128, 108}, {5}, {129}});
  const BatchResult threads = run(batch, plan);
  expect_same(run(batch, plan), threads);
  BatchResult single;
  parallel_for(2, [&](int64_t item, int) {
    if (item == 0) single = run(batch, plan);
  });
  expect_same(single, threads);
}

// More chunks than a block of the backward keeps (at K = V = 256 in fp64: 7 with groups of 4).
TEST(CpuBitwise, CheckpointedBlocks) {
  BatchSpec spec = spec_of({64 * 17 + 3}, DType::kFloat64);
  spec.heads_qk = 1;
  spec.dim_k = spec.dim_v = 256;
  const Batch batch = make(spec);
  BatchSpec narrow = spec;
  narrow.heads_qk = 4;
  Batch repeated = make(narrow);
  for (int64_t t = 0; t < batch.problem.tokens; ++t) {
    for (int64_t i = 0; i < 4 * 256; ++i) {
      for (const auto& [to, from] : {std::pair{&repeated.q, &batch.q}, {&repeated.k, &batch.k}}) {
        to->as<double>()[t * 1024 + i] = from->as<double>()[t * 256 + i % 256];
      }
    }
  }
  for (const auto& [to, from] : {std::pair{&repeated.v, &batch.v},
                                 {&repeated.g, &batch.g},
                                 {&repeated.beta, &batch.beta},
                                 {&repeated.d_o, &batch.d_o},
                                 {&repeated.initial_state, &batch.initial_state},
                                 {&repeated.dfinal_state, &batch.dfinal_state}}) {
    to->view = from->view;
  }
  const BatchResult a = run(batch, plan_uncut(batch)), b = run(repeated, plan_uncut(repeated));
  for (const auto& [name, member, head_axis, rows] : kResultTensors) {
    if (name[1] == 'q' || name[1] == 'k')
      continue;  // sums over the group in one, apart in the other
    EXPECT_TRUE(same((a.*member).view, (b.*member).view)) << name;
  }
}

}  // namespace
}  // namespace gdn
