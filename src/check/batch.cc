// Every tensor is filled in fp64 from its own random stream, row by row, and rounded once.
#include "check/batch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "base/element.h"
#include "base/thread_pool.h"
#include "check/random.h"

namespace gdn {
namespace {

enum Source : uint64_t {
  kQ,
  kK,
  kV,
  kGate,
  kGateHead,
  kBeta,
  kInitialState,
  kDo,
  kDFinalState,
  kCommonKey,
  kBetaZero
};

constexpr std::array kGates = {"model", "slow", "fla", "zero", "strong", "mixed", "spike", "inf"};
constexpr std::array kKeys = {"normal",  "correlated", "duplicated", "zero",
                              "uniform", "small",      "large"};
constexpr std::array kBetas = {"sigmoid", "one", "two", "tiny", "zeros"};

Status invalid(std::string message) { return {ErrorCode::kInvalidArgument, std::move(message)}; }

template <size_t N>
Status known(const char* what, const std::string& name, const std::array<const char*, N>& names) {
  if (std::find(names.begin(), names.end(), name) != names.end()) return Status::ok();
  return invalid(
      fmt::format("{}: expected one of {}, got '{}'", what, fmt::join(names, ", "), name));
}

Status check(const BatchSpec& spec) {
  for (size_t i = 0; i < spec.documents.size(); ++i) {
    if (spec.documents[i] < 0) {
      return invalid(fmt::format("documents[{}]: expected a length of at least 0, got {}", i,
                                 spec.documents[i]));
    }
  }
  if (spec.heads_qk < 1 || spec.heads_v < 1 || spec.heads_v % spec.heads_qk != 0) {
    return invalid(fmt::format("heads: expected HV to be a positive multiple of H, got {} and {}",
                               spec.heads_v, spec.heads_qk));
  }
  if (spec.dim_k < 1 || spec.dim_v < 1 || spec.slack < 0) {
    return invalid(fmt::format("dims, slack: expected at least 1, 1, 0, got {}, {}, {}", spec.dim_k,
                               spec.dim_v, spec.slack));
  }
  if (!is_floating(spec.operand) || !is_floating(spec.gate)) {
    return invalid(fmt::format("dtypes: expected floating ones, got {} and {}",
                               to_string(spec.operand), to_string(spec.gate)));
  }
  GDN_RETURN_IF_ERROR(known("gates", spec.gates, kGates));
  GDN_RETURN_IF_ERROR(known("keys", spec.keys, kKeys));
  GDN_RETURN_IF_ERROR(known("beta", spec.beta, kBetas));
  if (spec.beta == "two" && spec.options.beta_sigmoid && !spec.options.allow_neg_eigval) {
    return invalid("beta: 'two' expected allow_neg_eigval beside beta_sigmoid, got it off");
  }
  return Status::ok();
}

// Fills rows [0, rows) of a row-major tensor; the rest keeps its bytes. make(row, values) gives the
// row's elements, all trailing axes flattened.
using RowMaker = std::function<void(int64_t row, std::vector<double>& values)>;

void fill(HostTensor& tensor, int64_t rows, const RowMaker& make) {
  const TensorView& view = tensor.view;
  const int64_t width = view.stride[0];
  parallel_for(rows, [&](int64_t row, int) {
    std::vector<double> values(static_cast<size_t>(width));
    make(row, values);
    store_row(view.data, view.dtype, row * width, 1, width, values.data());
  });
}

RowMaker normals(const BatchSpec& spec, Source stream) {
  const RandomStream random(spec.seed, stream);
  return [random](int64_t row, std::vector<double>& values) {
    const auto n = static_cast<int64_t>(values.size());
    random.normals(static_cast<uint64_t>(row * n), n, values.data());
  };
}

void normalise(double* x, int64_t n) {
  const double norm = std::sqrt(std::inner_product(x, x + n, x, 0.0));
  for (int64_t i = 0; i < n && norm > 0; ++i) x[i] /= norm;
}

// Rows of q or k, [H, K] each.
RowMaker keys(const BatchSpec& spec, Source stream) {
  const RandomStream random(spec.seed, stream);
  const RandomStream common(spec.seed, kCommonKey);
  return [=](int64_t row, std::vector<double>& values) {
    const auto n = static_cast<int64_t>(values.size());
    // duplicated: four keys per head, one of which each token draws
    const uint64_t source = spec.keys == "duplicated" && stream == kK
                                ? random.bits(~static_cast<uint64_t>(row)) % 4
                                : static_cast<uint64_t>(row);
    const uint64_t first = source * static_cast<uint64_t>(n);
    random.normals(first, n, values.data());
    if (spec.keys == "correlated" && stream == kK) {
      // k = sqrt(c) common + sqrt(1 - c) own has correlation c between any two tokens.
      for (int64_t i = 0; i < n; ++i) {
        values[i] = std::sqrt(0.95) * common.normal(i) + std::sqrt(0.05) * values[i];
      }
    }
    for (int64_t i = 0; i < n && spec.keys == "uniform"; ++i) values[i] = random.uniform(first + i);
    // zero: every fifth q and every seventh k
    const bool zero = spec.keys == "zero" && (stream == kQ ? row % 5 == 2 : row % 7 == 3);
    const double size = spec.keys == "small" ? 1e-3 : spec.keys == "large" ? 1e3 : 1.0;
    for (int64_t head = 0; head < spec.heads_qk; ++head) {
      double* x = values.data() + head * spec.dim_k;
      if (!spec.options.qk_l2norm) normalise(x, spec.dim_k);
      for (int64_t i = 0; i < spec.dim_k; ++i) x[i] = zero ? 0.0 : size * x[i];
    }
  };
}

double softplus(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The raw a whose softplus is y >= 0. softplus(-1e4) is 0 in fp64.
double inverse_softplus(double y) {
  if (y == 0) return -1e4;
  return y > 30 ? y : std::log(std::expm1(y));
}

// Mamba's and Qwen's starting values: A uniform in [1, 16), dt log-uniform in [1e-3, 1e-1],
// softplus(bias) = dt. Other recipes need neither.
struct GateHead {
  double A = 1;
  double bias = 0;
};

std::vector<GateHead> gate_heads(const BatchSpec& spec) {
  const RandomStream random(spec.seed, kGateHead);
  std::vector<GateHead> heads(static_cast<size_t>(spec.heads_v));
  for (size_t h = 0; h < heads.size() && spec.gates == "model"; ++h) {
    const double dt = std::exp(std::log(1e-3) + random.uniform(2 * h + 1) * std::log(100.0));
    heads[h] = {.A = 1 + 15 * random.uniform(2 * h), .bias = inverse_softplus(dt)};
  }
  return heads;
}

// Token `row` of a document of `length` tokens, `at` tokens from its start.
struct Place {
  int64_t at = 0;
  int64_t length = 0;
};

std::vector<Place> places(const BatchSpec& spec) {
  std::vector<Place> rows;
  for (int64_t length : spec.documents) {
    for (int64_t at = 0; at < length; ++at) rows.push_back({at, length});
  }
  return rows;
}

// The middle chunk's token 29, or the middle of a document too short for that.
bool is_spike(const Place& place) {
  const int64_t spike = place.length / 2 / 64 * 64 + 29;
  return place.at == (spike < place.length ? spike : place.length / 2);
}

double log_decay(const BatchSpec& spec, const RandomStream& random, uint64_t index, int64_t head,
                 const Place& place) {
  if (spec.gates == "zero") return 0;
  if (spec.gates == "strong") return -30 - 40 * random.uniform(index);
  if (spec.gates == "mixed") return head % 2 == 0 ? -88 : -1e-4;
  const double normal = random.normal(index);
  if (spec.gates == "fla") return -softplus(-normal) / 16;
  if (spec.gates == "spike" && is_spike(place)) return -1e4;
  if (spec.gates == "inf" && random.bits(~index) % 50 == 0) {
    return -std::numeric_limits<double>::infinity();
  }
  return -softplus(-normal - 5);  // slow
}

// Rows of g, [HV]: the log-decay, or what the kernel's activation makes it from.
RowMaker gates(const BatchSpec& spec, const std::vector<GateHead>& heads,
               const std::vector<Place>& rows) {
  const RandomStream random(spec.seed, kGate);
  return [&spec, &heads, &rows, random](int64_t row, std::vector<double>& values) {
    const bool raw = spec.options.gate_in_kernel;
    for (int64_t head = 0; head < spec.heads_v; ++head) {
      const auto index = static_cast<uint64_t>(row * spec.heads_v + head);
      if (spec.gates == "model") {
        const double a = random.normal(index);
        values[head] = raw ? a : -heads[head].A * softplus(a + heads[head].bias);
      } else {
        const double g = log_decay(spec, random, index, head, rows[row]);
        values[head] = raw ? inverse_softplus(-g) : g;
      }
    }
  };
}

// Rows of beta, [HV]: the factor, or the b whose sigmoid it is.
RowMaker betas(const BatchSpec& spec) {
  const RandomStream random(spec.seed, kBeta);
  const RandomStream zeros(spec.seed, kBetaZero);
  const bool raw = spec.options.beta_sigmoid;
  const double full = raw && spec.options.allow_neg_eigval ? 2 : 1;
  // sigmoid(40) is 1 and sigmoid(-1000) is 0 in fp64
  const auto logit = [](double p) {
    return p >= 1 ? 40.0 : p <= 0 ? -1000.0 : std::log(p / (1 - p));
  };
  return [=](int64_t row, std::vector<double>& values) {
    for (size_t head = 0; head < values.size(); ++head) {
      const uint64_t index = static_cast<uint64_t>(row) * values.size() + head;
      double fixed = -1;
      if (spec.beta == "one") fixed = 1;
      if (spec.beta == "two") fixed = 2;
      if (spec.beta == "tiny") fixed = 1e-10;
      if (spec.beta == "zeros" && zeros.bits(index) % 4 == 0) fixed = 0;
      const double b = fixed < 0 ? random.normal(index) : logit(fixed / full);
      values[head] = raw ? b : fixed < 0 ? sigmoid(b) : fixed;
    }
  };
}

void make_gate_parameters(const std::vector<GateHead>& heads, DType dtype, Batch& batch) {
  const int64_t n = batch.problem.heads_v;
  batch.A_log = HostTensor(dtype, {n});
  batch.dt_bias = HostTensor(dtype, {n});
  for (int64_t h = 0; h < n; ++h) {
    store_element(batch.A_log.view, h, std::log(heads[h].A));
    store_element(batch.dt_bias.view, h, heads[h].bias);
  }
}

}  // namespace

Result<Batch> make_batch(const BatchSpec& spec) {
  GDN_RETURN_IF_ERROR(check(spec));
  Batch batch;
  batch.cu_seqlens = {0};
  for (int64_t length : spec.documents)
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + length);
  const int64_t rows = batch.cu_seqlens.back();
  const int64_t tokens = rows + spec.slack;
  const int64_t documents = batch.num_documents();
  batch.problem = {.tokens = tokens,
                   .heads_qk = spec.heads_qk,
                   .heads_v = spec.heads_v,
                   .dim_k = spec.dim_k,
                   .dim_v = spec.dim_v,
                   .operand = spec.operand,
                   .device = {},
                   .options = spec.options};
  const DType state = batch.problem.state();
  const bool wide_gate = spec.operand == DType::kFloat64 && spec.gate != DType::kBFloat16;
  const DType gate = wide_gate ? DType::kFloat64 : spec.gate;

  constexpr int kNaN = 0xff;  // as every byte: slack rows keep it
  batch.q = HostTensor(spec.operand, {tokens, spec.heads_qk, spec.dim_k}, kNaN);
  batch.k = HostTensor(spec.operand, {tokens, spec.heads_qk, spec.dim_k}, kNaN);
  batch.v = HostTensor(spec.operand, {tokens, spec.heads_v, spec.dim_v}, kNaN);
  batch.g = HostTensor(gate, {tokens, spec.heads_v}, kNaN);
  batch.beta = HostTensor(gate, {tokens, spec.heads_v}, kNaN);
  const std::vector<GateHead> heads = gate_heads(spec);
  const std::vector<Place> token_places = places(spec);
  fill(batch.q, rows, keys(spec, kQ));
  fill(batch.k, rows, keys(spec, kK));
  fill(batch.v, rows, normals(spec, kV));
  fill(batch.g, rows, gates(spec, heads, token_places));
  fill(batch.beta, rows, betas(spec));
  if (spec.options.gate_in_kernel) make_gate_parameters(heads, state, batch);
  if (spec.backward) {
    batch.d_o = HostTensor(spec.operand, {tokens, spec.heads_v, spec.dim_v}, kNaN);
    fill(batch.d_o, rows, normals(spec, kDo));
  }
  if (spec.initial_state) {
    batch.initial_state = HostTensor(state, {documents, spec.heads_v, spec.dim_k, spec.dim_v});
    fill(batch.initial_state, documents, normals(spec, kInitialState));
  }
  if (spec.dfinal_state) {
    batch.dfinal_state = HostTensor(state, {documents, spec.heads_v, spec.dim_k, spec.dim_v});
    fill(batch.dfinal_state, documents, normals(spec, kDFinalState));
  }
  return batch;
}

Batch widen(const Batch& batch) {
  const auto wide = [](const HostTensor& from) {
    HostTensor to;
    if (!from.present()) return to;
    to.view = from.view;
    to.view.dtype = DType::kFloat64;
    to.buffer = AlignedBuffer(from.view.numel() * size_of(DType::kFloat64));
    to.view.data = to.buffer.data();
    const int64_t width = from.view.stride[0];
    parallel_for(from.view.shape[0], [&](int64_t row, int) {
      load_row(from.view.data, from.view.dtype, row * width, 1, width,
               to.as<double>() + row * width);
    });
    return to;
  };
  Batch result;
  result.problem = batch.problem;
  result.problem.operand = DType::kFloat64;
  result.cu_seqlens = batch.cu_seqlens;
  result.q = wide(batch.q);
  result.k = wide(batch.k);
  result.v = wide(batch.v);
  result.g = wide(batch.g);
  result.beta = wide(batch.beta);
  result.A_log = wide(batch.A_log);
  result.dt_bias = wide(batch.dt_bias);
  result.initial_state = wide(batch.initial_state);
  result.d_o = wide(batch.d_o);
  result.dfinal_state = wide(batch.dfinal_state);
  return result;
}

}  // namespace gdn
