// cuda-portable (or GDN_TEST_BACKEND) against the fp64 recurrence, bitwise repeatability, and
// independence of a document's neighbours. Built twice: for a GPU (skipped without one), and on the
// SIMT emulator, with fewer cases.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "../compare_results.h"
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

// GDN_ALL_CASES=1: the wide sweep on the emulator too.
std::vector<GpuCase> cases() {
  return emulated() && std::getenv("GDN_ALL_CASES") == nullptr ? small_cases() : all_cases();
}

// GDN_TEST_BACKEND: another backend of CUDA devices, tried on those cases that it takes.
std::string backend_under_test() {
  const char* name = std::getenv("GDN_TEST_BACKEND");
  return name != nullptr ? name : "cuda-portable";
}

// The case with head dims that the backend takes.
GpuCase fitted(GpuCase c) {
  if (backend_under_test() == "cuda-sm90a") c.spec.dim_k = c.spec.dim_v = 128;
  return c;
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
  expect_results_close(got, want, batch.cu_seqlens, DType::kBFloat16);
}

INSTANTIATE_TEST_SUITE_P(Portable, Against64, testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

#ifdef GDN_SIMT
// Devices with less shared memory take shallower pipelines and narrower tiles; results may differ
// in nothing but the order of sums over V.
class SharedMemory : public testing::TestWithParam<int> {};

TEST_P(SharedMemory, Recurrence) {
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
  const GpuCase c = small_cases()[2];
  const Batch batch = batch_of(c);
  const BatchResult first = on_device(batch, c.run);
  for (uint64_t seed = 2; seed < 6; ++seed) {
    simt::machine().seed = seed;
    expect_bitwise_equal(on_device(batch, c.run), first);
  }
  simt::machine().seed = 1;
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

TEST(Portable, FirstTokenHasNoGateGradient) {
  GDN_NEEDS_DEVICE();
  GpuCase c = fitted(small_cases()[0]);
  c.spec.gates = "slow";
  const Batch batch = batch_of(c);
  const BatchResult got = on_device(batch, c.run);
  for (int64_t h = 0; h < c.spec.heads_v; ++h) EXPECT_EQ(got.dg.as<float>()[h], 0.0f);
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
