#include "io/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

namespace gdn {
namespace {

static_assert(std::endian::native == std::endian::little, "the format's numbers are little-endian");

constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kInt32,
                             DType::kInt64};

std::optional<DType> dtype_of(const std::string& name) {
  for (DType dtype : kDTypes) {
    if (name == safetensors_dtype(dtype)) return dtype;
  }
  return std::nullopt;
}

bool is_row_major(const TensorView& view) {
  int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.shape[i] != 1 && view.stride[i] != step) return false;
    step *= view.shape[i];
  }
  return true;
}

}  // namespace

const char* safetensors_dtype(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat32:
      return "F32";
    case DType::kFloat64:
      return "F64";
    case DType::kInt32:
      return "I32";
    case DType::kInt64:
      return "I64";
  }
  return "";
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  Result<InputFile> file = InputFile::open(path);
  if (!file) return file.status();
  if (file->size() < 8) {
    return Status{ErrorCode::kIo,
                  fmt::format("{}: not a safetensors file: {} bytes, expected at least 8", path,
                              file->size())};
  }
  std::array<std::byte, 8> prefix{};
  GDN_RETURN_IF_ERROR(file->read(0, prefix));
  const Result<int64_t> length = parse_safetensors_length(prefix, file->size(), path);
  if (!length) return length.status();
  std::vector<std::byte> json(static_cast<size_t>(*length));
  GDN_RETURN_IF_ERROR(file->read(8, json));
  Result<SafetensorsHeader> header =
      parse_safetensors_header(json, file->size() - 8 - *length, path);
  if (!header) return header.status();
  return SafetensorsFile(std::move(*file), std::move(*header), 8 + *length);
}

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found =
      std::find_if(header_.entries.begin(), header_.entries.end(),
                   [&](const SafetensorsEntry& entry) { return entry.name == name; });
  return found == header_.entries.end() ? nullptr : &*found;
}

Result<HostTensor> SafetensorsFile::load(const std::string& name) const {
  const SafetensorsEntry* entry = find(name);
  const auto refuse = [&](const std::string& why) {
    return Status{ErrorCode::kIo, fmt::format("{}: tensor {}: {}", path(), in_quotes(name), why)};
  };
  if (entry == nullptr) return refuse("not in the file");
  const std::optional<DType> dtype = dtype_of(entry->dtype);
  if (!dtype) {
    return refuse(fmt::format("dtype {}, expected one of BF16, F32, F64, I32, I64", entry->dtype));
  }
  const size_t rank = entry->shape.size();
  if (rank < 1 || rank > TensorView::kMaxRank) {
    return refuse(fmt::format("rank {}, expected 1 to {}", rank, TensorView::kMaxRank));
  }
  HostTensor tensor;
  tensor.buffer = AlignedBuffer(entry->end - entry->begin);
  tensor.view.data = tensor.buffer.data();
  tensor.view.dtype = *dtype;
  tensor.view.rank = static_cast<int>(rank);
  int64_t step = 1;
  for (size_t i = rank; i-- > 0;) {
    tensor.view.shape[i] = entry->shape[i];
    tensor.view.stride[i] = step;
    step *= entry->shape[i];
  }
  GDN_RETURN_IF_ERROR(
      file_.read(data_begin_ + entry->begin,
                 {tensor.buffer.as<std::byte>(), static_cast<size_t>(tensor.buffer.bytes())}));
  return tensor;
}

Status write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                         const std::map<std::string, std::string>& metadata) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& tensor : tensors) {
    if (!tensor.view.present() || tensor.view.device.kind != Device::Kind::kCpu ||
        !is_row_major(tensor.view)) {
      return {ErrorCode::kInvalidArgument,
              fmt::format("{}: tensor {}: expected row-major host memory", path,
                          in_quotes(tensor.name))};
    }
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    const int64_t size_a = size_of(a->view.dtype), size_b = size_of(b->view.dtype);
    return size_a != size_b ? size_a > size_b : a->name < b->name;
  });

  SafetensorsHeader header{.entries = {}, .metadata = metadata};
  int64_t at = 0;
  for (const NamedTensor* tensor : order) {
    const TensorView& view = tensor->view;
    const int64_t bytes = view.numel() * size_of(view.dtype);
    header.entries.push_back({tensor->name,
                              safetensors_dtype(view.dtype),
                              {view.shape.begin(), view.shape.begin() + view.rank},
                              at,
                              at + bytes});
    at += bytes;
  }
  const std::string head = format_safetensors_header(header);
  const auto head_bytes = std::as_bytes(std::span(head));
  // What we write must be what we read back: this refuses names given twice and the like.
  const Result<SafetensorsHeader> again = parse_safetensors_header(head_bytes.subspan(8), at, path);
  if (!again) return {ErrorCode::kInvalidArgument, again.status().message()};

  Result<AtomicFile> file = AtomicFile::create(path);
  if (!file) return file.status();
  GDN_RETURN_IF_ERROR(file->write(head_bytes));
  for (const NamedTensor* tensor : order) {
    const size_t bytes = static_cast<size_t>(tensor->view.numel() * size_of(tensor->view.dtype));
    GDN_RETURN_IF_ERROR(file->write({tensor->view.as<const std::byte>(), bytes}));
  }
  return file->commit();
}

}  // namespace gdn
