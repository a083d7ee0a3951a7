#include "text_batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/element.h"
#include "base/thread_pool.h"
#include "check/random.h"
#include "io/file.h"

namespace gdn::cli {
namespace {

constexpr int64_t kBytes = 256;
constexpr int kWidth = 4;  // of the short convolution, as Gated DeltaNet layers have it

enum Stream : uint64_t {  // of random numbers; beyond those of check/batch.cc
  kEmbedding = 100,
  kWq,
  kWk,
  kWv,
  kWa,
  kWb,
  kConvolution,
  kHeads,
};

double softplus(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// W E [kBytes, channels], W with entries N(0, 1 / model_dim): every token is a byte, so that the
// projection of all tokens is a table of 256 rows.
std::vector<double> project(const TextSpec& spec, Stream stream, int64_t channels) {
  const int64_t width = spec.model_dim;
  std::vector<double> embedding(static_cast<size_t>(kBytes * width));
  RandomStream(spec.batch.seed, kEmbedding).normals(0, kBytes * width, embedding.data());
  const RandomStream random(spec.batch.seed, stream);
  const double scale = 1 / std::sqrt(static_cast<double>(width));
  std::vector<double> table(static_cast<size_t>(kBytes * channels));
  parallel_for(channels, [&](int64_t c, int) {
    std::vector<double> row(static_cast<size_t>(width));
    random.normals(static_cast<uint64_t>(c * width), width, row.data());
    for (int64_t byte = 0; byte < kBytes; ++byte) {
      double sum = 0;
      for (int64_t i = 0; i < width; ++i) sum += row[i] * embedding[byte * width + i];
      table[byte * channels + c] = sum * scale;
    }
  });
  return table;
}

// Where a token is: its document and the place in it.
struct Place {
  const std::string* text = nullptr;
  int64_t at = 0;
};

// q, k or v [T, heads, dim]: silu of the causal convolution of the projected bytes.
class Branch {
 public:
  Branch(const TextSpec& spec, Stream stream, int64_t heads, int64_t dim, bool normalise)
      : heads_(heads),
        dim_(dim),
        normalise_(normalise),
        table_(project(spec, stream, heads * dim)) {
    taps_.resize(static_cast<size_t>(heads * dim * kWidth));
    RandomStream(spec.batch.seed, kConvolution)
        .normals(static_cast<uint64_t>(stream) << 32, heads * dim * kWidth, taps_.data());
    // Variance 1 / kWidth each, so that the sum of kWidth unit-variance inputs has variance 1.
    for (double& tap : taps_) tap /= std::sqrt(double{kWidth});
  }

  // out [heads, dim]
  void row(const Place& place, double* out) const {
    const int64_t channels = heads_ * dim_;
    std::fill(out, out + channels, 0.0);
    for (int64_t tap = 0; tap < std::min<int64_t>(kWidth, place.at + 1); ++tap) {
      const auto byte = static_cast<unsigned char>((*place.text)[place.at - tap]);
      const double* in = table_.data() + byte * channels;
      for (int64_t c = 0; c < channels; ++c) out[c] += taps_[c * kWidth + tap] * in[c];
    }
    for (int64_t c = 0; c < channels; ++c) out[c] *= sigmoid(out[c]);
    for (int64_t h = 0; h < heads_ && normalise_; ++h) {
      double* x = out + h * dim_;
      double sum = 1e-6;
      for (int64_t i = 0; i < dim_; ++i) sum += x[i] * x[i];
      for (int64_t i = 0; i < dim_; ++i) x[i] /= std::sqrt(sum);
    }
  }

 private:
  int64_t heads_, dim_;
  bool normalise_;
  std::vector<double> table_;  // [kBytes, heads, dim]
  std::vector<double> taps_;   // [heads, dim, kWidth]; tap 0 is the token itself
};

}  // namespace

Result<std::vector<std::string>> read_documents(const std::vector<std::string>& paths, bool split,
                                                int64_t max_tokens, int64_t* left_out) {
  std::vector<std::string> documents;
  int64_t left = max_tokens > 0 ? max_tokens : INT64_MAX;
  for (const std::string& path : paths) {
    const Result<InputFile> file = InputFile::open(path);
    if (!file) return file.status();
    if (left_out != nullptr && file->size() > left) ++*left_out;
    if (left == 0) continue;
    std::string text(static_cast<size_t>(std::min(file->size(), left)), '\0');
    GDN_RETURN_IF_ERROR(file->read(0, std::as_writable_bytes(std::span(text))));
    left -= static_cast<int64_t>(text.size());
    if (!split) {
      documents.push_back(std::move(text));
      continue;
    }
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find("\n\n", begin), text.size());
      if (end > begin) documents.push_back(text.substr(begin, end - begin));
      begin = text.find_first_not_of('\n', end);
    }
  }
  return documents;
}

double text_tables_bytes(const TextSpec& spec) {
  const auto wide = [](int64_t heads, int64_t dim) {
    return static_cast<double>(heads) * static_cast<double>(dim);
  };
  const double channels = 2 * wide(spec.batch.heads_qk, spec.batch.dim_k) +
                          wide(spec.batch.heads_v, spec.batch.dim_v + 2);  // a and b beside v
  // the projections, their taps, and one embedding
  return sizeof(double) * (channels * (kBytes + kWidth) + wide(kBytes, spec.model_dim));
}

Result<Batch> make_text_batch(const TextSpec& spec, const std::function<void(int64_t)>& progress) {
  // Everything that does not come from the text (do, states, A_log, dt_bias, slack) as recipes
  // make it; the rest is overwritten.
  BatchSpec recipe = spec.batch;
  recipe.documents.clear();
  for (const std::string& text : spec.documents) {
    recipe.documents.push_back(static_cast<int64_t>(text.size()));
  }
  recipe.gates = "model";
  recipe.options.gate_in_kernel = true;  // for A_log and dt_bias, used below
  if (spec.model_dim < 1) {
    return Status{ErrorCode::kInvalidArgument,
                  fmt::format("model-dim: expected at least 1, got {}", spec.model_dim)};
  }
  Result<Batch> made = make_batch(recipe);
  if (!made) return made.status();
  Batch& batch = *made;
  const Options& options = spec.batch.options;
  batch.problem.options = options;
  const Problem& p = batch.problem;

  const Branch q(spec, kWq, p.heads_qk, p.dim_k, !options.qk_l2norm);
  const Branch k(spec, kWk, p.heads_qk, p.dim_k, !options.qk_l2norm);
  const Branch v(spec, kWv, p.heads_v, p.dim_v, false);
  const std::vector<double> a = project(spec, kWa, p.heads_v);
  const std::vector<double> b = project(spec, kWb, p.heads_v);
  std::vector<Place> places;
  for (const std::string& text : spec.documents) {
    for (size_t at = 0; at < text.size(); ++at) places.push_back({&text, static_cast<int64_t>(at)});
  }

  constexpr int64_t kBlock = 64;  // tokens of one item of work
  const auto tokens = static_cast<int64_t>(places.size());
  parallel_for((tokens + kBlock - 1) / kBlock, [&](int64_t block, int) {
    const int64_t end = std::min(tokens, (block + 1) * kBlock);
    std::vector<double> row(
        static_cast<size_t>(std::max(p.heads_qk * p.dim_k, p.heads_v * p.dim_v)));
    const auto store = [&](const HostTensor& tensor, int64_t t) {
      const int64_t width = tensor.view.stride[0];
      store_row(tensor.view.data, tensor.view.dtype, t * width, 1, width, row.data());
    };
    for (int64_t t = block * kBlock; t < end; ++t) {
      const Place& place = places[t];
      const auto byte = static_cast<unsigned char>((*place.text)[place.at]);
      q.row(place, row.data());
      store(batch.q, t);
      k.row(place, row.data());
      store(batch.k, t);
      v.row(place, row.data());
      store(batch.v, t);
      for (int64_t h = 0; h < p.heads_v; ++h) {
        const double raw = a[byte * p.heads_v + h];
        row[h] = options.gate_in_kernel ? raw
                                        : -std::exp(load_element(batch.A_log.view, h)) *
                                              softplus(raw + load_element(batch.dt_bias.view, h));
      }
      store(batch.g, t);
      for (int64_t h = 0; h < p.heads_v; ++h) {
        const double raw = b[byte * p.heads_v + h];
        row[h] = options.beta_sigmoid ? raw : sigmoid(raw);
      }
      store(batch.beta, t);
    }
    if (progress) progress(end - block * kBlock);
  });
  if (!options.gate_in_kernel) {
    batch.A_log = {};
    batch.dt_bias = {};
  }
  return made;
}

}  // namespace gdn::cli
