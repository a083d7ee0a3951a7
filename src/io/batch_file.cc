#include "io/batch_file.h"

#include <fmt/format.h>

#include <set>
#include <span>

#include "base/element.h"
#include "io/safetensors.h"

namespace gdn {
namespace {

constexpr int64_t kAny = -1;  // a dim that the first tensor to have it decides

struct Dim {
  const char* name;
  int64_t& size;
};

std::string dims_string(std::span<const Dim> dims) {
  std::string out = "[";
  for (const Dim& dim : dims) {
    out += out.size() > 1 ? ", " : "";
    out += dim.size == kAny ? dim.name : fmt::format("{}={}", dim.name, dim.size);
  }
  return out + "]";
}

bool option(const SafetensorsFile& file, const std::optional<bool>& said, const char* name) {
  if (said) return *said;
  const auto& metadata = file.header().metadata;
  const auto found = metadata.find(name);
  return found != metadata.end() && found->second == "true";
}

class Loader {
 public:
  Loader(const SafetensorsFile& file, const LoadOptions& options)
      : file_(file), options_(options) {}

  Result<LoadedBatch> load() {
    GDN_RETURN_IF_ERROR(check_metadata());
    GDN_RETURN_IF_ERROR(load_tokens());
    GDN_RETURN_IF_ERROR(load_documents());
    GDN_RETURN_IF_ERROR(load_rest());
    batch_.problem.tokens = T_;
    batch_.problem.heads_qk = H_;
    batch_.problem.heads_v = HV_;
    batch_.problem.dim_k = K_;
    batch_.problem.dim_v = V_;
    LoadedBatch loaded;
    for (const SafetensorsEntry& entry : file_.header().entries) {
      if (!taken_.contains(entry.name)) loaded.ignored.push_back(entry.name);
    }
    loaded.batch = std::move(batch_);
    return loaded;
  }

 private:
  // An option the file spells differently must not be taken for "off".
  Status check_metadata() const {
    const auto& metadata = file_.header().metadata;
    for (const char* name : {"qk_l2norm", "gate_in_kernel", "beta_sigmoid", "allow_neg_eigval"}) {
      const auto found = metadata.find(name);
      if (found == metadata.end() || found->second == "true" || found->second == "false") continue;
      return {ErrorCode::kIo, fmt::format("{}: metadata {}: expected true or false, got {}",
                                          file_.path(), name, in_quotes(found->second))};
    }
    return Status::ok();
  }

  Status refuse(const std::string& name, const std::string& why) const {
    return {ErrorCode::kIo, fmt::format("{}: tensor {}: {}", file_.path(), in_quotes(name), why)};
  }

  // `name` with these dims; a tensor of tokens may have a batch dimension before them, which is
  // merged into T.
  Status take(const std::string& name, std::span<const Dim> dims, HostTensor& out) {
    const SafetensorsEntry* entry = file_.find(name);
    if (entry != nullptr && entry->dtype != "BF16" && entry->dtype != "F32" &&
        entry->dtype != "F64") {
      return refuse(name, fmt::format("expected BF16, F32 or F64, got {}", entry->dtype));
    }
    Result<HostTensor> tensor = file_.load(name);
    if (!tensor) return tensor.status();
    taken_.insert(name);
    TensorView& view = tensor->view;
    const std::string found = shape_string(view);
    const int rank = static_cast<int>(dims.size());
    if (&dims[0].size == &T_ && view.rank == rank + 1) {
      if (B_ == kAny) B_ = view.shape[0];
      if (view.shape[0] != 1 && view.shape[0] != B_) {
        return refuse(name, fmt::format("expected a batch dimension of {}, got {}", B_, found));
      }
      view.shape[1] *= view.shape[0];
      for (int i = 0; i < rank; ++i) {
        view.shape[i] = view.shape[i + 1];
        view.stride[i] = view.stride[i + 1];
      }
      view.shape[rank] = view.stride[rank] = 0;
      view.rank = rank;
    }
    const auto mismatch = [&] {
      return refuse(name, fmt::format("expected {}, got {}", dims_string(dims), found));
    };
    if (view.rank != rank) return mismatch();
    for (int i = 0; i < rank; ++i) {
      if (dims[i].size != kAny && view.shape[i] != dims[i].size) return mismatch();
    }
    for (int i = 0; i < rank; ++i) dims[i].size = view.shape[i];
    out = std::move(*tensor);
    return Status::ok();
  }

  // q, k, v, do: all of one dtype, or converted to the one asked for.
  Status take_operand(const std::string& name, std::span<const Dim> dims, HostTensor& out) {
    GDN_RETURN_IF_ERROR(take(name, dims, out));
    DType& operand = batch_.problem.operand;
    if (options_.operand) {
      operand = *options_.operand;
      out = convert(out, operand);
    } else if (name == "q") {
      operand = out.view.dtype;
    } else if (out.view.dtype != operand) {
      return refuse(name,
                    fmt::format("expected {} like q, got {} (or {})", safetensors_dtype(operand),
                                safetensors_dtype(out.view.dtype), options_.how_to_convert));
    }
    return Status::ok();
  }

  Status load_tokens() {
    const Dim qk[] = {{"T", T_}, {"H", H_}, {"K", K_}};
    const Dim vo[] = {{"T", T_}, {"HV", HV_}, {"V", V_}};
    const Dim gates[] = {{"T", T_}, {"HV", HV_}};
    GDN_RETURN_IF_ERROR(take_operand("q", qk, batch_.q));
    GDN_RETURN_IF_ERROR(take_operand("k", qk, batch_.k));
    GDN_RETURN_IF_ERROR(take_operand("v", vo, batch_.v));
    if (H_ == 0 || HV_ == 0 || K_ == 0 || V_ == 0) {
      return refuse("v",
                    fmt::format("expected heads and dims of at least 1, got H={}, HV={}, K={}, "
                                "V={}",
                                H_, HV_, K_, V_));
    }
    if (HV_ % H_ != 0) {
      return refuse("v", fmt::format("expected HV to be a multiple of H={} (of q and k), got HV={}",
                                     H_, HV_));
    }
    for (auto [name, tensor] : {std::pair{"g", &batch_.g}, std::pair{"beta", &batch_.beta}}) {
      GDN_RETURN_IF_ERROR(take(name, gates, *tensor));
      const bool wide = batch_.problem.operand == DType::kFloat64;
      if (options_.operand && wide) *tensor = convert(*tensor, DType::kFloat64);
      if (!wide && tensor->view.dtype == DType::kFloat64) {
        *tensor = convert(*tensor, DType::kFloat32);
      }
    }
    if (options_.backward && file_.find("do") != nullptr) {
      GDN_RETURN_IF_ERROR(take_operand("do", vo, batch_.d_o));
    }
    return Status::ok();
  }

  Status load_documents() {
    if (file_.find("cu_seqlens") == nullptr) {
      const int64_t documents = std::max<int64_t>(B_, 1);
      if (documents > 1 && T_ == 0) {
        // Nothing in the file stands for them: a header alone could claim any number.
        return refuse("q", fmt::format("expected tokens in {} documents without cu_seqlens, got "
                                       "none",
                                       documents));
      }
      for (int64_t i = 0; i <= documents; ++i) batch_.cu_seqlens.push_back(T_ / documents * i);
    } else {
      taken_.insert("cu_seqlens");
      if (B_ > 1) {
        return refuse("q",
                      fmt::format("expected no batch dimension beside cu_seqlens, got {}", B_));
      }
      Result<std::vector<int64_t>> cu = load_cu_seqlens(file_.path());
      if (!cu) return cu.status();
      if (cu->back() > T_) {
        return refuse("cu_seqlens",
                      fmt::format("ends at token {}, the other tensors have T={}", cu->back(), T_));
      }
      batch_.cu_seqlens = std::move(*cu);
    }
    N_ = batch_.num_documents();
    return Status::ok();
  }

  Status load_rest() {
    const Dim states[] = {{"N", N_}, {"HV", HV_}, {"K", K_}, {"V", V_}};
    const Dim heads[] = {{"HV", HV_}};
    Options& options = batch_.problem.options;
    options.scale = options_.scale;
    options.qk_l2norm = option(file_, options_.qk_l2norm, "qk_l2norm");
    options.gate_in_kernel = option(file_, options_.gate_in_kernel, "gate_in_kernel");
    options.beta_sigmoid = option(file_, options_.beta_sigmoid, "beta_sigmoid");
    // The file's factor 2 goes with its sigmoid where the caller turns that off.
    const bool raw_beta = options_.beta_sigmoid.value_or(true);
    options.allow_neg_eigval = options_.allow_neg_eigval.value_or(
        raw_beta && option(file_, std::nullopt, "allow_neg_eigval"));
    const auto take_if = [&](bool wanted, const char* name, std::span<const Dim> dims,
                             HostTensor& out) {
      if (!wanted) return Status::ok();
      GDN_RETURN_IF_ERROR(take(name, dims, out));
      out = convert(out, batch_.problem.state());
      return Status::ok();
    };
    const auto has = [&](const char* name) { return file_.find(name) != nullptr; };
    GDN_RETURN_IF_ERROR(
        take_if(has("initial_state"), "initial_state", states, batch_.initial_state));
    GDN_RETURN_IF_ERROR(take_if(options_.backward && has("dfinal_state"), "dfinal_state", states,
                                batch_.dfinal_state));
    GDN_RETURN_IF_ERROR(take_if(options.gate_in_kernel, "A_log", heads, batch_.A_log));
    return take_if(options.gate_in_kernel && has("dt_bias"), "dt_bias", heads, batch_.dt_bias);
  }

  const SafetensorsFile& file_;
  const LoadOptions& options_;
  Batch batch_;
  std::set<std::string> taken_;
  int64_t B_ = kAny, T_ = kAny, H_ = kAny, HV_ = kAny, K_ = kAny, V_ = kAny, N_ = kAny;
};

void add(std::vector<NamedTensor>& tensors, const char* name, const HostTensor& tensor) {
  if (tensor.present()) tensors.push_back({name, tensor.view});
}

}  // namespace

HostTensor convert(const HostTensor& from, DType dtype) {
  HostTensor to;
  to.view = from.view;
  to.view.dtype = dtype;
  const int64_t n = from.view.numel();
  to.buffer = AlignedBuffer(n * size_of(dtype));
  to.view.data = to.buffer.data();
  constexpr int64_t kBlock = 4096;
  double block[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t count = std::min(kBlock, n - at);
    load_row(from.view.data, from.view.dtype, at, 1, count, block);
    store_row(to.view.data, dtype, at, 1, count, block);
  }
  return to;
}

Result<std::vector<int64_t>> load_cu_seqlens(const std::string& path) {
  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  if (!file) return file.status();
  const Result<HostTensor> tensor = file->load("cu_seqlens");
  if (!tensor) return tensor.status();
  const TensorView& view = tensor->view;
  const auto refuse = [&](const std::string& why) {
    return Status{ErrorCode::kIo, fmt::format("{}: tensor 'cu_seqlens': {}", path, why)};
  };
  if (view.rank != 1 || view.shape[0] < 1 || is_floating(view.dtype)) {
    return refuse(fmt::format("expected [N+1] I32 or I64, got {} {}", shape_string(view),
                              safetensors_dtype(view.dtype)));
  }
  std::vector<int64_t> cu;
  for (int64_t i = 0; i < view.shape[0]; ++i) {
    cu.push_back(view.dtype == DType::kInt64 ? view.as<int64_t>()[i] : view.as<int32_t>()[i]);
    if (i == 0 && cu[0] != 0) return refuse(fmt::format("[0]: expected 0, got {}", cu[0]));
    if (i > 0 && cu[i] < cu[i - 1]) {
      return refuse(fmt::format("[{}]: expected at least {}, got {}", i, cu[i - 1], cu[i]));
    }
  }
  return cu;
}

Result<LoadedBatch> load_batch(const std::string& path, const LoadOptions& options) {
  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  if (!file) return file.status();
  return Loader(*file, options).load();
}

Status save_batch(const std::string& path, const Batch& batch,
                  std::map<std::string, std::string> metadata) {
  const Options& options = batch.problem.options;
  if (options.qk_l2norm) metadata["qk_l2norm"] = "true";
  if (options.gate_in_kernel) metadata["gate_in_kernel"] = "true";
  if (options.beta_sigmoid) metadata["beta_sigmoid"] = "true";
  if (options.allow_neg_eigval) metadata["allow_neg_eigval"] = "true";
  std::vector<int64_t> cu = batch.cu_seqlens;
  std::vector<NamedTensor> tensors;
  add(tensors, "q", batch.q);
  add(tensors, "k", batch.k);
  add(tensors, "v", batch.v);
  add(tensors, "g", batch.g);
  add(tensors, "beta", batch.beta);
  add(tensors, "A_log", batch.A_log);
  add(tensors, "dt_bias", batch.dt_bias);
  add(tensors, "initial_state", batch.initial_state);
  add(tensors, "do", batch.d_o);
  add(tensors, "dfinal_state", batch.dfinal_state);
  tensors.push_back({"cu_seqlens", TensorView::contiguous(cu.data(), DType::kInt64,
                                                          {static_cast<int64_t>(cu.size())})});
  return write_safetensors(path, tensors, metadata);
}

Status save_result(const std::string& path, const BatchResult& result,
                   const std::map<std::string, std::string>& metadata) {
  std::vector<NamedTensor> tensors;
  for (const ResultTensor& t : kResultTensors) add(tensors, t.name, result.*t.member);
  return write_safetensors(path, tensors, metadata);
}

}  // namespace gdn
