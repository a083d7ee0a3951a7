// cuda-portable (or GDN_TEST_BACKEND) against the fp64 recurrence, bitwise repeatability, and
// independence of a document's neighbours. Built twice: for a GPU (skipped without one), and on the
// SIMT emulator, with fewer cases.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "../compare_results.h"
#include "base/element.h"
#include "cases.h"
#include "check/run_batch.h"
#ifdef GDN_SIMT
#include "simt/engine.h"
#endif

namespace gdn {
namespace {

bool emulated() {
#ifdef GDN_SIMT
  return true;
#else
  return false;
#endif
}

// GDN_TEST_BACKEND: another backend of CUDA devices, tried on those cases that it takes.
std::string backend_under_test() {
  const char* name = std::getenv("GDN_TEST_BACKEND");
  return name != nullptr ? name : "cuda-portable";
}

// The case with head dims that the backend takes.
GpuCase fitted(GpuCase c) {
  if (backend_under_test() == "cuda-sm90a" && c.spec.dim_k != 128) {
    c.spec.dim_k = c.spec.dim_v = 128;
    c.name += "_at_128";
  }
  return c;
}

// GDN_ALL_CASES=1: the wide sweep on the emulator too.
std::vector<GpuCase> cases() {
  if (!emulated() || std::getenv("GDN_ALL_CASES") != nullptr) return all_cases();
  std::vector<GpuCase> cases = small_cases();
  for (GpuCase& c : cases) c = fitted(std::move(c));
  return cases;
}

#define GDN_NEEDS_DEVICE() \
  if (usable_devices() == 0) GTEST_SKIP() << "no CUDA device"

// One element everywhere, as the expanded form of d_o wants.
void flatten(HostTensor& t) {
  for (int64_t i = 0; i < t.view.numel(); ++i) t.as<uint16_t>()[i] = 0x3e80;  // 0.25
}

Batch batch_of(const GpuCase& c) {
  auto made = make_batch(c.spec);
  EXPECT_TRUE(made.is_ok()) << made.status().message();
  Batch batch = std::move(*made);
  if (c.run.form.d_o == "expanded") flatten(batch.d_o);
  return batch;
}

BatchResult reference_of(const Batch& batch) {
  RunOptions options;
  options.context.backend = "reference";
  auto result = run_batch(widen(batch), options);
  EXPECT_TRUE(result.is_ok()) << result.status().message();
  return std::move(*result);
}

BatchResult on_device(const Batch& batch, DeviceRun run) {
  run.context.backend = backend_under_test();
  auto result = run_on_device(batch, run);
  EXPECT_TRUE(result.is_ok()) << result.status().message();
  if (!result) return {};
  EXPECT_EQ(result->backend, backend_under_test());
  return std::move(*result);
}

void print_errors(const std::string& name, const BatchResult& got, const BatchResult& want,
                  const Batch& batch) {
  std::string line = fmt::format("{:32}", name);
  for (const ResultTensor& t : kResultTensors) {
    const HostTensor &a = got.*t.member, &b = want.*t.member;
    if (!a.present() || !b.present()) continue;
    const bool tokens = t.rows == ResultTensor::Rows::kTokens;
    const Accuracy x =
        compare(a.view, b.view, t.head_axis,
                tokens ? std::span<const int64_t>(batch.cu_seqlens) : std::span<const int64_t>{});
    line += fmt::format(" {} {:.1e}{}", t.name, x.rel_rms, x.finite ? "" : "!");
  }
  std::printf("%s\n", line.c_str());
}

class Against64 : public testing::TestWithParam<GpuCase> {};

TEST_P(Against64, Recurrence) {
  GDN_NEEDS_DEVICE();
  const GpuCase& c = GetParam();
  if (fitted(c).spec.dim_k != c.spec.dim_k) GTEST_SKIP() << "another head dim";
  const Batch batch = batch_of(c);
  const BatchResult want = reference_of(batch);
  const BatchResult got = on_device(batch, c.run);
  print_errors(c.name, got, want, batch);
  expect_results_close(got, want, batch.cu_seqlens, DType::kBFloat16, c.ordinary);
}

INSTANTIATE_TEST_SUITE_P(Portable, Against64, testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

#ifdef GDN_SIMT
// Devices with less shared memory take shallower pipelines and narrower tiles; results may differ
// in nothing but the order of sums over V.
class SharedMemory : public testing::TestWithParam<int> {};

TEST_P(SharedMemory, Recurrence) {
  if (backend_under_test() != "cuda-portable") GTEST_SKIP() << "one kind of device";
  for (GpuCase c : small_cases()) {
    if (c.name != "segments_128" && c.name != "everything_64") continue;
    c.run.device = GetParam();
    const Batch batch = batch_of(c);
    expect_results_close(on_device(batch, c.run), reference_of(batch), batch.cu_seqlens,
                         DType::kBFloat16);
  }
}

INSTANTIATE_TEST_SUITE_P(Portable, SharedMemory, testing::Range(0, simt::kDevices));

TEST(Portable, OrderOfWarpsDoesNotMatter) {
  const GpuCase c = fitted(small_cases()[2]);
  const Batch batch = batch_of(c);
  const BatchResult first = on_device(batch, c.run);
  const simt::SeedScope scope;
  for (uint64_t seed = 2; seed < 6; ++seed) {
    simt::machine().seed = seed;
    expect_bitwise_equal(on_device(batch, c.run), first);
  }
}
#endif

TEST(Portable, RepeatsBitwise) {
  GDN_NEEDS_DEVICE();
  GpuCase c = fitted(small_cases()[3]);
  const int repeats = emulated() ? 1 : 100;
  if (!emulated()) {
    c.spec.documents = {700, 65, 300};
    c.spec.heads_qk = 2;
    c.spec.heads_v = 6;
    c.spec.dim_k = c.spec.dim_v = 128;
  }
  const Batch batch = batch_of(c);
  const BatchResult first = on_device(batch, c.run);
  for (int i = 0; i < repeats; ++i) expect_bitwise_equal(on_device(batch, c.run), first);
}

TEST(Portable, KeptPreparedGivesTheSameBits) {
  GDN_NEEDS_DEVICE();
  for (GpuCase c : small_cases()) {
    if (c.name != "everything_64" && c.name != "segments_64" && c.name != "ranks_64") continue;
    SCOPED_TRACE(c.name);
    c = fitted(std::move(c));
    const Batch batch = batch_of(c);
    const BatchResult exact = on_device(batch, c.run);
    c.run.context.keep_prepared = true;
    c.run.backwards = 2;
    expect_bitwise_equal(on_device(batch, c.run), exact);
  }
}

// The rows of document `doc`.
std::vector<unsigned char> rows_of(const HostTensor& t, const std::vector<int64_t>& cu, int doc) {
  const int64_t row = t.view.stride[0] * size_of(t.view.dtype);
  const auto* bytes = t.as<unsigned char>();
  return {bytes + cu[doc] * row, bytes + cu[doc + 1] * row};
}

TEST(Portable, NeighboursDoNotMatter) {
  GDN_NEEDS_DEVICE();
  GpuCase c = fitted(small_cases()[0]);
  c.spec.documents = {70, 100, 30};
  c.spec.gates = "slow";
  if (!emulated()) c.run.context.tile = 64;
  const Batch batch = batch_of(c);
  const BatchResult first = on_device(batch, c.run);
  Batch changed = batch_of(c);
  for (HostTensor* t : {&changed.q, &changed.k, &changed.v, &changed.d_o}) {
    const int64_t row = t->view.stride[0];
    for (int64_t i = 0; i < 70 * row; ++i) t->as<uint16_t>()[i] ^= 0x8000;
    for (int64_t i = 170 * row; i < 200 * row; ++i) t->as<uint16_t>()[i] = 0x3c00;
  }
  const BatchResult second = on_device(changed, c.run);
  for (const ResultTensor& t : kResultTensors) {
    const HostTensor &a = first.*t.member, &b = second.*t.member;
    if (t.rows != ResultTensor::Rows::kTokens || !a.present()) continue;
    EXPECT_EQ(rows_of(a, batch.cu_seqlens, 1), rows_of(b, batch.cu_seqlens, 1)) << t.name;
  }
}

// Packings of one capacity: tokens and documents. The emulator takes the lengths / 16.
struct Packings {
  int64_t tokens = 8192, documents = 7;
  std::vector<std::vector<int64_t>> lengths = {
      {3000, 2200, 1500, 942, 500},          // where the graph is captured
      {8192},                                // one long document
      {640, 1, 0, 2048, 0, 1023, 4480},      // more documents, two without tokens, full
      {0, 0, 333},                           // mostly slack
      {},                                    // nothing at all
      {1024, 1024, 1024, 1024, 1024, 1024},  // whole chunks
  };

  explicit Packings(int64_t shrink) {
    tokens /= shrink;
    for (auto& list : lengths) {
      for (int64_t& n : list) n = (n + shrink - 1) / shrink;
      int64_t sum = 0;
      for (int64_t& n : list) n = std::min(n, tokens - sum), sum += n;
    }
  }
  std::vector<int64_t> cu_seqlens(size_t i) const {
    std::vector<int64_t> cu{0};
    for (int64_t n : lengths[i]) cu.push_back(cu.back() + n);
    return cu;
  }
  // The batch of packing i: rows and states of the whole capacity, slack rows NaN.
  void put(size_t i, BatchSpec& spec) const {
    spec.documents = lengths[i];
    spec.documents.resize(static_cast<size_t>(documents), 0);
    spec.slack = tokens - cu_seqlens(i).back();
  }
};

class Replay : public testing::TestWithParam<GpuCase> {};

TEST_P(Replay, OneGraphServesOtherPackings) {
  GDN_NEEDS_DEVICE();
  const Packings packings(emulated() ? 16 : 1);
  for (size_t i = 1; i < packings.lengths.size(); ++i) {
    SCOPED_TRACE(i);
    GpuCase c = fitted(GetParam());
    packings.put(i, c.spec);
    const Batch batch = batch_of(c);
    const BatchResult exact = on_device(batch, c.run);
    c.run.context.max_tokens = packings.tokens;
    c.run.context.max_fragments = packings.documents;
    const BatchResult eager = on_device(batch, c.run);
    expect_bitwise_equal(eager, exact);
    // Captured at the first, after the others: nothing of them is left.
    c.run.replays = {packings.cu_seqlens(0)};
    for (size_t other = 1; other < packings.lengths.size(); ++other) {
      if (other != i) c.run.replays.push_back(packings.cu_seqlens(other));
    }
    expect_bitwise_equal(on_device(batch, c.run), eager);
  }
}

INSTANTIATE_TEST_SUITE_P(Portable, Replay, testing::ValuesIn(replay_cases()),
                         [](const auto& one) { return one.param.name; });

TEST(Portable, RanksServeOtherPackings) {
  GDN_NEEDS_DEVICE();
  for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument}) {
    for (const auto policy : {ExchangePolicy::kAllGather, ExchangePolicy::kAllToAll}) {
      SCOPED_TRACE(to_string(layout));
      GpuCase c = fitted(replay_cases()[1]);
      c.run.context.tile = 0;
      c.run.context.exchange = policy;
      c.run.layout = layout;
      c.run.world_size = 3;
      constexpr int64_t kFragments = 4;
      c.spec.documents = {200, 0, 90};
      c.spec.documents.resize(3 * kFragments, 0);
      const Batch batch = batch_of(c);
      const BatchResult exact = on_device(batch, c.run);
      c.run.context.max_tokens = 150;
      c.run.context.max_fragments = kFragments;
      c.run.replays = {{0, 40, 400}};
      expect_bitwise_equal(on_device(batch, c.run), exact);
    }
  }
}

TEST(Portable, RefillRefusesWhatDoesNotFit) {
  GDN_NEEDS_DEVICE();
  GpuCase c = fitted(small_cases()[0]);
  c.run.context.max_tokens = 100;
  c.run.context.max_fragments = 1;
  c.run.replays = {{0, 50}, {0, 40, 60}};
  const auto more = run_on_device(batch_of(c), c.run);
  ASSERT_FALSE(more.is_ok());
  EXPECT_EQ(more.status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(more.status().message(),
            "max_fragments: expected at least 2, the fragments of rank 0, got 1");
}

TEST(Portable, FirstTokenHasNoGateGradient) {
  GDN_NEEDS_DEVICE();
  GpuCase c = fitted(small_cases()[0]);
  c.spec.gates = "slow";
  const Batch batch = batch_of(c);
  const BatchResult got = on_device(batch, c.run);
  for (int64_t h = 0; h < c.spec.heads_v; ++h) EXPECT_EQ(got.dg.as<float>()[h], 0.0f);
}

// A NaN in a gate, or a gate above any number, is seen from its token on, in its document and head.
TEST(Portable, NotANumberShows) {
  GDN_NEEDS_DEVICE();
  GpuCase c = fitted(small_cases()[0]);
  c.spec.documents = {100, 70};
  const BatchResult clean = on_device(batch_of(c), c.run);
  for (float bad : {std::nanf(""), HUGE_VALF}) {
    Batch batch = batch_of(c);
    const int64_t heads = c.spec.heads_v, dim = c.spec.dim_v, row = heads * dim;
    batch.g.as<float>()[30 * heads] = bad;
    const BatchResult got = on_device(batch, c.run);
    for (int64_t t : {30, 63, 64, 99}) {
      const double o = load_element(got.o.view, t * row);
      EXPECT_FALSE(std::isfinite(o)) << t << ' ' << o;
    }
    const size_t bytes = static_cast<size_t>(70 * row) * sizeof(uint16_t);
    EXPECT_EQ(
        std::memcmp(got.o.as<uint16_t>() + 100 * row, clean.o.as<uint16_t>() + 100 * row, bytes),
        0);
    for (int64_t i = dim; i < row && heads > 1; ++i) {  // the other heads
      EXPECT_EQ(got.o.as<uint16_t>()[99 * row + i], clean.o.as<uint16_t>()[99 * row + i]);
    }
  }
}

TEST(Portable, RefusesWithReasons) {
  GDN_NEEDS_DEVICE();
  GpuCase c = small_cases()[0];
  c.spec.operand = DType::kFloat32;
  const auto fp32 = run_on_device(batch_of(c), c.run);
  ASSERT_FALSE(fp32.is_ok());
  EXPECT_NE(fp32.status().message().find("bfloat16"), std::string::npos);
  GpuCase odd = small_cases()[0];
  odd.run.form = {true, false, "rows", 4};
  const auto rows = run_on_device(batch_of(odd), odd.run);
  ASSERT_FALSE(rows.is_ok());
  EXPECT_EQ(rows.status().code(), ErrorCode::kUnsupported);
  EXPECT_NE(rows.status().message().find("multiple of 8"), std::string::npos);
}

}  // namespace
}  // namespace gdn

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  std::printf("device: %s\n", gdn::device_summary().c_str());
  return RUN_ALL_TESTS();
}
