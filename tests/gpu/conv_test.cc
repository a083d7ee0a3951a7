// The convolution on a GPU against the host's: dtypes, widths, documents shorter than the window
// and without rows, prefixes, strided and misaligned rows, slack rows with NaN; twice, bit by bit.
// Built for the SIMT emulator too.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/element.h"
#include "base/host_tensor.h"
#include "conv/causal_conv.h"
#include "device_batch.h"
#include "device_memory.h"

namespace gdn {
namespace {

struct ConvCase {
  const char* name;
  DType dtype;
  int64_t channels, width;
  bool silu;
  std::vector<int64_t> begin;
  int64_t tokens;
  bool bias = true, prefix = true;
  int64_t row_gap = 0, offset = 0;  // elements: strided rows, and a base that is not aligned
};

std::ostream& operator<<(std::ostream& out, const ConvCase& c) { return out << c.name; }

// Short documents, without rows, over the ends of runs of 32 and 128 rows.
std::vector<int64_t> ragged() { return {0, 1, 3, 3, 5, 31, 33, 64, 64, 127, 129, 260, 397}; }
std::vector<int64_t> one_each(int64_t n) {
  std::vector<int64_t> begin;
  for (int64_t i = 0; i <= n; ++i) begin.push_back(i);
  return begin;
}

std::vector<ConvCase> conv_cases() {
  const DType bf16 = DType::kBFloat16, f32 = DType::kFloat32, f64 = DType::kFloat64;
  return {
      {"bf16_4", bf16, 72, 4, true, ragged(), 400},
      {"bf16_4_wide", bf16, 264, 4, true, {0, 70, 300}, 300, false, false},
      {"bf16_3_none", bf16, 40, 3, false, ragged(), 397},
      {"bf16_2", bf16, 33, 2, true, ragged(), 400},
      {"bf16_1", bf16, 8, 1, true, {0, 50}, 50, true, false},
      {"bf16_8", bf16, 16, 8, true, ragged(), 397},
      {"bf16_6", bf16, 12, 6, false, ragged(), 400},
      {"table_of_480", bf16, 4, 4, true, one_each(479), 479},
      {"table_of_481", bf16, 4, 4, true, one_each(480), 480},
      {"bf16_5_strided", bf16, 24, 5, true, ragged(), 397, true, true, 40},
      {"bf16_4_odd_stride", bf16, 24, 4, true, ragged(), 397, true, true, 3},
      {"bf16_4_misaligned", bf16, 24, 4, true, ragged(), 397, true, true, 40, 1},
      {"fp32_4", f32, 20, 4, true, ragged(), 400},
      {"fp32_3_odd", f32, 7, 3, true, ragged(), 397, false, true},
      {"fp64_4", f64, 6, 4, true, ragged(), 400},
      {"fp64_7_none", f64, 3, 7, false, ragged(), 397},
      {"many_documents", f32, 4, 4, true, one_each(1000), 1003},
      {"no_documents", bf16, 16, 4, true, {0}, 40, true, false},
      {"no_rows", bf16, 16, 4, true, {0, 0, 0}, 0},
      {"long", bf16, 8, 4, true, {0, 2000, 2003, 5000}, 5000, true, false},
  };
}

// Host memory for a tensor, NaN so far, and a view of it with gaps.
struct Rows {
  Rows(DType dtype, std::vector<int64_t> shape, int64_t gap, int64_t offset)
      : memory(dtype, {elements(shape, gap) + offset}, 0xff), view(memory.view) {
    view.rank = static_cast<int>(shape.size());
    int64_t step = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      view.shape[i] = shape[i];
      view.stride[i] = step;
      step *= shape[i] + (i + 1 == shape.size() ? gap : 0);
    }
    view.data = memory.as<unsigned char>() + offset * size_of(dtype);
  }
  static int64_t elements(const std::vector<int64_t>& shape, int64_t gap) {
    int64_t n = 1;
    for (size_t i = 0; i < shape.size(); ++i) n *= shape[i] + (i + 1 == shape.size() ? gap : 0);
    return n;
  }
  HostTensor memory;
  TensorView view;
};

// A fixed sequence of numbers in [-1, 1), rounded to the dtype.
struct Numbers {
  uint64_t state = 1;
  void fill(const TensorView& view) {
    for (int64_t i = 0; i < view.numel(); ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      store_element(view, offset(view, i), static_cast<double>(state >> 11) / (1ull << 52) - 1.0);
    }
  }
  static int64_t offset(const TensorView& view, int64_t i) {
    int64_t at = 0;
    for (int d = view.rank; d-- > 0; i /= view.shape[d]) at += i % view.shape[d] * view.stride[d];
    return at;
  }
};

// The same memory on the device, with the same view of it.
struct OnDevice {
  explicit OnDevice(const Rows& rows)
      : host(rows), memory(rows.memory.view.numel() * size_of(rows.view.dtype)), view(rows.view) {
    EXPECT_TRUE(memory.upload(rows.memory.view.data));
    view.data = static_cast<unsigned char*>(memory.data()) +
                (static_cast<const unsigned char*>(rows.view.data) -
                 static_cast<const unsigned char*>(rows.memory.view.data));
    view.device = {Device::Kind::kCuda, 0};
    if (rows.view.numel() == 0) view.data = nullptr;
  }
  std::vector<double> values() const {
    const std::vector<unsigned char> bytes = memory.download();
    TensorView at = host.view;
    at.data = const_cast<unsigned char*>(bytes.data()) +
              (static_cast<const unsigned char*>(host.view.data) -
               static_cast<const unsigned char*>(host.memory.view.data));
    std::vector<double> out;
    for (int64_t i = 0; i < at.numel(); ++i)
      out.push_back(load_element(at, Numbers::offset(at, i)));
    return out;
  }
  const Rows& host;
  DeviceBuffer memory;
  TensorView view;
};

std::vector<double> values(const Rows& rows) {
  std::vector<double> out;
  for (int64_t i = 0; i < rows.view.numel(); ++i) {
    out.push_back(load_element(rows.view, Numbers::offset(rows.view, i)));
  }
  return out;
}

double bar(DType dtype) {
  return dtype == DType::kFloat64 ? 1e-12 : dtype == DType::kFloat32 ? 2e-6 : 3e-3;
}

void expect_close(const char* name, const OnDevice& got, const Rows& want, double most) {
  double error = 0.0, norm = 0.0;
  const std::vector<double> a = got.values(), b = values(want);
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(std::isfinite(a[i])) << name << " element " << i;
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  EXPECT_LE(std::sqrt(error), most * std::sqrt(norm)) << name;
}

// The operands and results that the case has, of rows on either side.
template <typename Of>
ConvArgs args_of(const ConvCase& c, const Of& x, const Of& weight, const Of& bias,
                 const Of& prefix) {
  ConvArgs args{x.view, weight.view, {}, {}, c.begin, c.silu};
  if (c.bias) args.bias = bias.view;
  if (c.prefix) args.prefix = prefix.view;
  return args;
}
template <typename Of>
ConvGradients gradients_of(const ConvCase& c, const Of& dx, const Of& dweight, const Of& dbias,
                           const Of& dprefix) {
  ConvGradients out{dx.view, dweight.view, {}, {}};
  if (c.bias) out.dbias = dbias.view;
  if (c.prefix) out.dprefix = dprefix.view;
  return out;
}

class ConvOnGpu : public ::testing::TestWithParam<ConvCase> {};

TEST_P(ConvOnGpu, IsTheHosts) {
  if (usable_devices() == 0) GTEST_SKIP() << "no CUDA device";
  const ConvCase& c = GetParam();
  const int64_t fragments = static_cast<int64_t>(c.begin.size()) - 1;
  const auto rows = [&] { return Rows(c.dtype, {c.tokens, c.channels}, c.row_gap, c.offset); };
  Rows x = rows(), dy = rows(), y = rows(), dx = rows();
  const auto prefixes = [&] { return Rows(c.dtype, {fragments, c.width - 1, c.channels}, 0, 0); };
  Rows prefix = prefixes(), dprefix = prefixes();
  Rows weight(DType::kFloat32, {c.channels, c.width}, 2, 0);
  Rows dweight(DType::kFloat32, {c.channels, c.width}, 2, 0);
  Rows bias(DType::kBFloat16, {c.channels}, 0, 0);
  Rows dbias(DType::kFloat64, {c.channels}, 0, 0);
  Numbers numbers;
  for (const Rows* r : {&x, &dy, &prefix, &weight, &bias}) numbers.fill(r->view);
  for (int64_t t = c.begin.back(); t < c.tokens; ++t) {
    for (const Rows* r : {&x, &dy}) {
      store_element(r->view, t * r->view.stride[0], std::numeric_limits<double>::quiet_NaN());
    }
  }

  const ConvArgs host = args_of(c, x, weight, bias, prefix);
  const ConvGradients wanted = gradients_of(c, dx, dweight, dbias, dprefix);
  ASSERT_TRUE(causal_conv(host, y.view));
  ASSERT_TRUE(causal_conv_backward(host, dy.view, wanted));

  std::vector<unsigned char> before;
  for (int repeat = 0; repeat < 2; ++repeat) {
    const OnDevice on_x(x), on_dy(dy), on_prefix(prefix), on_weight(weight), on_bias(bias);
    const Rows untouched = rows();
    const OnDevice on_y(untouched), on_dx(untouched), on_dprefix(dprefix), on_dweight(dweight),
        on_dbias(dbias);
    const ConvArgs args = args_of(c, on_x, on_weight, on_bias, on_prefix);
    const ConvGradients out = gradients_of(c, on_dx, on_dweight, on_dbias, on_dprefix);
    const DeviceBuffer workspace(conv_workspace_bytes(args, true));
    const Status forward = causal_conv(args, on_y.view, workspace.memory());
    ASSERT_TRUE(forward) << forward.message();
    const Status backward = causal_conv_backward(args, on_dy.view, out, workspace.memory());
    ASSERT_TRUE(backward) << backward.message();
    expect_close("y", on_y, y, bar(c.dtype));
    expect_close("dx", on_dx, dx, bar(c.dtype));
    expect_close("dweight", on_dweight, dweight, 2e-6);
    if (c.bias) expect_close("dbias", on_dbias, dbias, 2e-6);
    if (c.prefix) expect_close("dprefix", on_dprefix, dprefix, bar(c.dtype));
    std::vector<unsigned char> now;
    for (const OnDevice* t : {&on_y, &on_dx, &on_dweight, &on_dbias, &on_dprefix}) {
      const std::vector<unsigned char> bytes = t->memory.download();
      now.insert(now.end(), bytes.begin(), bytes.end());
    }
    if (repeat > 0) {
      EXPECT_TRUE(now == before) << "not the same bits";
    }
    before = std::move(now);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ConvOnGpu, ::testing::ValuesIn(conv_cases()),
                         [](const auto& one) { return std::string(one.param.name); });

TEST(ConvOnGpu, RefusesWhatItCannotTake) {
  if (usable_devices() == 0) GTEST_SKIP() << "no CUDA device";
  Rows x(DType::kFloat32, {8, 4}, 0, 0), weight(DType::kFloat32, {4, 4}, 0, 0);
  const OnDevice on_x(x), on_weight(weight), on_y(x);
  const std::vector<int64_t> begin = {0, 8};
  ConvArgs args{on_x.view, weight.view, {}, {}, begin, true};
  Status status = causal_conv(args, on_y.view);
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(status.message().find("weight: expected on cuda:0, as x, got cpu"), std::string::npos)
      << status.message();
  args.weight = on_weight.view;
  status = causal_conv(args, on_y.view);
  EXPECT_EQ(status.code(), ErrorCode::kWorkspaceTooSmall) << status.message();
  const DeviceBuffer workspace(conv_workspace_bytes(args, true) + 256);
  status = causal_conv(args, on_y.view, {static_cast<char*>(workspace.data()) + 8, 512});
  EXPECT_NE(status.message().find("workspace: expected an address aligned"), std::string::npos);
  const ConvGradients out{on_y.view, weight.view, {}, {}};
  status = causal_conv_backward(args, on_x.view, out, workspace.memory());
  EXPECT_NE(status.message().find("dweight: expected on cuda:0, as x, got cpu"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace gdn
