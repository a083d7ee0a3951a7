// Text as data: what is a document, and the properties that the operator asks of its operands.
#include "text_batch.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>

#include "base/element.h"
#include "io/temporary_folder.h"

namespace gdn::cli {
namespace {

class TextBatchTest : public TemporaryFolder {
 protected:
  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
    return path(name);
  }
};

using Documents = std::vector<std::string>;

TEST_F(TextBatchTest, FilesAndPartsAreDocuments) {
  const std::string a = file("a", "one\ntwo\n\nthree\n\n\n\nfour"), b = file("b", ""),
                    c = file("c", "\n\nfive\n");
  const auto read = [&](bool split, int64_t most) {
    auto documents = read_documents({a, b, c}, split, most);
    EXPECT_TRUE(documents) << documents.status().message();
    return documents ? *documents : Documents{};
  };
  EXPECT_EQ(read(false, 0), (Documents{"one\ntwo\n\nthree\n\n\n\nfour", "", "\n\nfive\n"}));
  EXPECT_EQ(read(true, 0), (Documents{"one\ntwo", "three", "four", "five\n"}));
  EXPECT_EQ(read(false, 5), (Documents{"one\nt"}));
  EXPECT_EQ(read(true, 11), (Documents{"one\ntwo", "th"}));
  EXPECT_NE(read_documents({"/no/such"}, false, 0).status().message().find("/no/such"),
            std::string::npos);
}

TextSpec spec_of(Documents documents) {
  TextSpec spec;
  spec.documents = std::move(documents);
  spec.model_dim = 32;
  spec.batch.dim_k = 16;
  spec.batch.dim_v = 8;
  spec.batch.operand = DType::kFloat64;
  return spec;
}

TEST_F(TextBatchTest, OperandsAreWhatALayerMakes) {
  const auto made = make_text_batch(spec_of({"hello hello", "", "x"}));
  ASSERT_TRUE(made) << made.status().message();
  EXPECT_EQ(made->cu_seqlens, (std::vector<int64_t>{0, 11, 11, 12}));
  EXPECT_FALSE(made->A_log.present());
  for (int64_t row = 0; row < 12 * 2; ++row) {  // of [T, H] rows of K
    double norm = 0;
    for (int64_t i = 0; i < 16; ++i) {
      const double x = load_element(made->k.view, row * 16 + i);
      norm += x * x;
    }
    EXPECT_NEAR(norm, 1, 1e-3);
  }
  for (int64_t i = 0; i < made->g.view.numel(); ++i) {
    EXPECT_LT(load_element(made->g.view, i), 0);
    EXPECT_GT(load_element(made->beta.view, i), 0);
    EXPECT_LT(load_element(made->beta.view, i), 1);
  }
  // The window is 4 bytes: the last "o"s have equal windows "ello", the "h"s have not.
  const auto same = [&](int64_t a, int64_t b) {
    return std::memcmp(made->v.as<double>() + a * 4 * 8, made->v.as<double>() + b * 4 * 8,
                       sizeof(double) * 4 * 8) == 0;
  };
  EXPECT_TRUE(same(4, 10));
  EXPECT_FALSE(same(0, 6));
}

TEST_F(TextBatchTest, ADocumentDoesNotSeeItsNeighbours) {
  const auto one = make_text_batch(spec_of({"abc", "same text"}));
  const auto two = make_text_batch(spec_of({"xyz", "same text"}));
  ASSERT_TRUE(one);
  ASSERT_TRUE(two);
  for (auto tensor : {&Batch::q, &Batch::k, &Batch::v, &Batch::g, &Batch::beta}) {
    const HostTensor& a = (*one).*tensor;
    const HostTensor& b = (*two).*tensor;
    const int64_t row = a.view.stride[0];
    EXPECT_EQ(0, std::memcmp(a.as<double>() + 3 * row, b.as<double>() + 3 * row,
                             static_cast<size_t>(9 * row) * sizeof(double)));
  }
}

TEST_F(TextBatchTest, ActivationsStayOutsideWhereTheKernelDoesThem) {
  TextSpec outside = spec_of({"some text"}), inside = outside;
  inside.batch.options.gate_in_kernel = inside.batch.options.beta_sigmoid = true;
  const auto done = make_text_batch(outside), raw = make_text_batch(inside);
  ASSERT_TRUE(done);
  ASSERT_TRUE(raw);
  for (int64_t i = 0; i < done->g.view.numel(); ++i) {
    const int64_t h = i % 4;
    const double A = std::exp(load_element(raw->A_log.view, h));
    const double a = load_element(raw->g.view, i) + load_element(raw->dt_bias.view, h);
    EXPECT_NEAR(load_element(done->g.view, i), -A * std::log1p(std::exp(a)), 1e-12);
    EXPECT_NEAR(load_element(done->beta.view, i),
                1 / (1 + std::exp(-load_element(raw->beta.view, i))), 1e-12);
  }
}

}  // namespace
}  // namespace gdn::cli
