// Batches through files: nothing is lost, and what does not fit is refused by name.
#include "io/batch_file.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <map>

#include "base/element.h"
#include "io/safetensors.h"
#include "io/temporary_folder.h"

namespace gdn {
namespace {

class BatchFileTest : public TemporaryFolder {
 protected:
  std::string path() const { return TemporaryFolder::path("x"); }

  // A file of zeros with the usual tensors, some of them replaced (by rank 0: left out).
  struct Shaped {
    std::string name;
    std::vector<int64_t> shape;
    DType dtype = DType::kFloat32;
  };
  void write(const std::vector<Shaped>& changes, std::vector<int64_t> cu = {0, 4, 10},
             const std::map<std::string, std::string>& metadata = {}) {
    std::vector<Shaped> all{{"q", {10, 2, 8}},
                            {"k", {10, 2, 8}},
                            {"v", {10, 4, 16}},
                            {"g", {10, 4}},
                            {"beta", {10, 4}}};
    for (const Shaped& change : changes) {
      std::erase_if(all, [&](const Shaped& s) { return s.name == change.name; });
      all.push_back(change);
    }
    std::vector<NamedTensor> named;
    static std::vector<int64_t> zeros(1 << 16);
    for (const Shaped& s : all) {
      if (s.shape.empty()) continue;
      TensorView view{zeros.data(), s.dtype, {}, static_cast<int>(s.shape.size()), {}, {}};
      int64_t step = 1;
      for (size_t i = s.shape.size(); i-- > 0;) {
        view.shape[i] = s.shape[i];
        view.stride[i] = step;
        step *= s.shape[i];
      }
      named.push_back({s.name, view});
    }
    if (!cu.empty()) {
      named.push_back({"cu_seqlens", TensorView::contiguous(cu.data(), DType::kInt64,
                                                            {static_cast<int64_t>(cu.size())})});
    }
    ASSERT_TRUE(write_safetensors(path(), named, metadata));
  }
  std::string refusal(const LoadOptions& options = {}) const {
    const auto loaded = load_batch(path(), options);
    return loaded ? "" : loaded.status().message();
  }
};

void expect_same(const HostTensor& a, const HostTensor& b, const char* name) {
  ASSERT_EQ(a.present(), b.present()) << name;
  EXPECT_EQ(a.view.dtype, b.view.dtype) << name;
  EXPECT_EQ(a.view.shape, b.view.shape) << name;
  ASSERT_EQ(a.buffer.bytes(), b.buffer.bytes()) << name;
  if (a.buffer.bytes() > 0) {
    EXPECT_EQ(0, std::memcmp(a.view.data, b.view.data, a.buffer.bytes())) << name;
  }
}

TEST_F(BatchFileTest, RoundTrip) {
  BatchSpec spec;
  spec.documents = {5, 0, 70};
  spec.dim_k = 16;
  spec.dim_v = 8;
  spec.operand = DType::kBFloat16;
  spec.options.qk_l2norm = spec.options.gate_in_kernel = spec.options.beta_sigmoid = true;
  spec.options.allow_neg_eigval = true;
  spec.initial_state = spec.dfinal_state = true;
  spec.slack = 3;
  const auto made = make_batch(spec);
  ASSERT_TRUE(made) << made.status().message();
  ASSERT_TRUE(save_batch(path(), *made));
  const auto loaded = load_batch(path());
  ASSERT_TRUE(loaded) << loaded.status().message();
  EXPECT_TRUE(loaded->ignored.empty());
  const Batch& batch = loaded->batch;
  EXPECT_EQ(batch.problem, made->problem) << "options travel in the metadata";
  EXPECT_EQ(batch.cu_seqlens, made->cu_seqlens);
  expect_same(batch.q, made->q, "q");
  expect_same(batch.k, made->k, "k");
  expect_same(batch.v, made->v, "v");
  expect_same(batch.g, made->g, "g");
  expect_same(batch.beta, made->beta, "beta");
  expect_same(batch.A_log, made->A_log, "A_log");
  expect_same(batch.dt_bias, made->dt_bias, "dt_bias");
  expect_same(batch.initial_state, made->initial_state, "initial_state");
  expect_same(batch.d_o, made->d_o, "do");
  expect_same(batch.dfinal_state, made->dfinal_state, "dfinal_state");

  const auto off = load_batch(path(), {.scale = 0.5, .qk_l2norm = false, .backward = false});
  ASSERT_TRUE(off);
  EXPECT_FALSE(off->batch.problem.options.qk_l2norm) << "what the caller says wins";
  EXPECT_TRUE(off->batch.problem.options.allow_neg_eigval);
  EXPECT_EQ(off->batch.problem.scale(), 0.5);
  EXPECT_FALSE(off->batch.d_o.present());
  EXPECT_EQ(off->ignored, (std::vector<std::string>{"dfinal_state", "do"}));

  const auto plain = load_batch(path(), {.beta_sigmoid = false});
  ASSERT_TRUE(plain);
  EXPECT_FALSE(plain->batch.problem.options.allow_neg_eigval) << "the factor of that sigmoid";
}

TEST_F(BatchFileTest, ConvertsOperandsAndWhatFollowsThem) {
  BatchSpec spec;
  spec.documents = {9};
  spec.initial_state = true;
  const auto made = make_batch(spec);
  ASSERT_TRUE(made);
  ASSERT_TRUE(save_batch(path(), *made));
  const auto wide = load_batch(path(), {.operand = DType::kFloat64});
  ASSERT_TRUE(wide);
  for (const HostTensor* t : {&wide->batch.q, &wide->batch.d_o, &wide->batch.g, &wide->batch.beta,
                              &wide->batch.initial_state}) {
    EXPECT_EQ(t->view.dtype, DType::kFloat64);
  }
  const auto narrow = load_batch(path(), {.operand = DType::kBFloat16});
  ASSERT_TRUE(narrow);
  EXPECT_EQ(narrow->batch.q.view.dtype, DType::kBFloat16);
  EXPECT_EQ(narrow->batch.g.view.dtype, DType::kFloat32);
  EXPECT_EQ(narrow->batch.initial_state.view.dtype, DType::kFloat32);
  for (int64_t i = 0; i < made->q.view.numel(); ++i) {
    EXPECT_EQ(load_element(narrow->batch.q.view, i),
              double{float{BFloat16(static_cast<float>(load_element(made->q.view, i)))}});
    EXPECT_EQ(load_element(wide->batch.q.view, i), load_element(made->q.view, i));
  }
}

TEST_F(BatchFileTest, TakesBatchDimensions) {
  write({{"q", {1, 10, 2, 8}}, {"g", {1, 10, 4}}});
  auto loaded = load_batch(path());
  ASSERT_TRUE(loaded) << loaded.status().message();
  EXPECT_EQ(loaded->batch.problem.tokens, 10);
  EXPECT_EQ(loaded->batch.q.view.rank, 3);
  EXPECT_EQ(loaded->batch.g.view.rank, 2);

  write({{"q", {5, 2, 2, 8}},
         {"k", {5, 2, 2, 8}},
         {"v", {5, 2, 4, 16}},
         {"g", {5, 2, 4}},
         {"beta", {5, 2, 4}}},
        {});
  loaded = load_batch(path());
  ASSERT_TRUE(loaded) << loaded.status().message();
  EXPECT_EQ(loaded->batch.cu_seqlens, (std::vector<int64_t>{0, 2, 4, 6, 8, 10}));

  write({}, {});
  loaded = load_batch(path());
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->batch.cu_seqlens, (std::vector<int64_t>{0, 10})) << "one document";
}

TEST_F(BatchFileTest, AnOptionSpelledOtherwiseIsNotOff) {
  for (const char* value : {"maybe", "TRUE", "", "1"}) {
    write({}, {0, 4, 10}, {{"gate_in_kernel", value}});
    EXPECT_NE(refusal().find(
                  fmt::format("metadata gate_in_kernel: expected true or false, got '{}'", value)),
              std::string::npos)
        << refusal();
  }
  write({}, {0, 4, 10}, {{"qk_l2norm", "false"}, {"made_by", "somebody"}});
  EXPECT_EQ(refusal(), "");
}

TEST_F(BatchFileTest, RefusalsNameTheTensor) {
  struct Case {
    std::vector<Shaped> changes;
    std::vector<int64_t> cu;
    std::string why;
  };
  const std::vector<int64_t> good{0, 4, 10};
  const Case cases[] = {
      {{{"q", {}}}, good, "tensor 'q': not in the file"},
      {{{"q", {10, 16}}}, good, "tensor 'q': expected [T, H, K], got [10, 16]"},
      {{{"k", {10, 4, 8}}}, good, "tensor 'k': expected [T=10, H=2, K=8], got [10, 4, 8]"},
      {{{"v", {10, 3, 16}}},
       good,
       "tensor 'v': expected HV to be a multiple of H=2 (of q and k), got HV=3"},
      {{{"v", {10, 4, 0}}}, good, "tensor 'v': expected heads and dims of at least 1"},
      {{{"g", {9, 4}}}, good, "tensor 'g': expected [T=10, HV=4], got [9, 4]"},
      {{{"beta", {10, 4}, DType::kInt32}},
       good,
       "tensor 'beta': expected BF16, F32 or F64, got I32"},
      {{{"k", {10, 2, 8}, DType::kBFloat16}}, good, "tensor 'k': expected F32 like q, got BF16"},
      {{{"do", {10, 2, 16}}}, good, "tensor 'do': expected [T=10, HV=4, V=16], got [10, 2, 16]"},
      {{{"initial_state", {3, 4, 8, 16}}},
       good,
       "tensor 'initial_state': expected [N=2, HV=4, K=8, V=16]"},
      {{{"q", {2, 10, 2, 8}}}, good, "tensor 'k': expected [T=20, H=2, K=8], got [10, 2, 8]"},
      {{{"q", {2, 5, 2, 8}}},
       good,
       "tensor 'q': expected no batch dimension beside cu_seqlens, got 2"},
      {{}, {0, 4, 11}, "tensor 'cu_seqlens': ends at token 11, the other tensors have T=10"},
      {{}, {1, 4, 10}, "tensor 'cu_seqlens': [0]: expected 0, got 1"},
      {{}, {0, 4, 3}, "tensor 'cu_seqlens': [2]: expected at least 4, got 3"},
      {{{"q", {3, 0, 2, 8}},
        {"k", {3, 0, 2, 8}},
        {"v", {3, 0, 4, 16}},
        {"g", {3, 0, 4}},
        {"beta", {3, 0, 4}}},
       {},
       "tensor 'q': expected tokens in 3 documents without cu_seqlens, got none"},
      {{{"cu_seqlens", {2}}}, {}, "tensor 'cu_seqlens': expected [N+1] I32 or I64, got [2] F32"},
      {{{"cu_seqlens", {0}, DType::kInt32}}, {}, "tensor 'cu_seqlens': expected [N+1]"},
  };
  for (const Case& c : cases) {
    write(c.changes, c.cu);
    const std::string why = refusal();
    EXPECT_NE(why.find(c.why), std::string::npos) << "expected: " << c.why << "\ngot: " << why;
    EXPECT_EQ(why.rfind(path(), 0), 0u) << "names the file: " << why;
  }
  write({{"k", {10, 2, 8}, DType::kBFloat16}});
  LoadOptions command;
  command.how_to_convert = "convert with --dtype";
  EXPECT_NE(refusal(command).find("like q, got BF16 (or convert with --dtype)"), std::string::npos);
  write({});
  {  // a dtype that this library has no tensors of
    std::fstream file(path(), std::ios::binary | std::ios::in | std::ios::out);
    std::string header(4096, ' ');
    file.read(header.data(), std::ssize(header));
    file.clear();
    const size_t at = header.find("\"F32\"", header.find("\"q\""));
    file.seekp(static_cast<std::streamoff>(at)).write("\"U32\"", 5);
  }
  EXPECT_NE(refusal().find("tensor 'q': expected BF16, F32 or F64, got U32"), std::string::npos);
  write({});
  EXPECT_NE(refusal({.gate_in_kernel = true}).find("tensor 'A_log': not in the file"),
            std::string::npos);
}

}  // namespace
}  // namespace gdn
