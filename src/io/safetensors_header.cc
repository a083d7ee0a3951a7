#include "io/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <unordered_set>

#include "io/file.h"

namespace gdn {
namespace {

using Json = nlohmann::json;

struct NamedBits {
  const char* name;
  int bits;
};
// Every dtype of the format (version 0.8 of its library), so that a valid file is never refused
// for a tensor that nobody asks for.
constexpr NamedBits kDtypes[] = {
    {"BOOL", 8},        {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8},     {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},
    {"U16", 16},        {"F16", 16},        {"BF16", 16},   {"I32", 32},    {"U32", 32},
    {"F32", 32},        {"C64", 64},        {"F64", 64},    {"I64", 64},    {"U64", 64},
    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
};

std::optional<int64_t> bits_of(const std::string& dtype) {
  for (const NamedBits& known : kDtypes) {
    if (dtype == known.name) return known.bits;
  }
  return std::nullopt;
}

// Walks the JSON as events, so that depth costs no stack, no tree is built from hostile input, and
// duplicate names are seen. Every method returns false to stop, with `error` set.
class HeaderReader {
 public:
  SafetensorsHeader header;
  std::string error;

  bool null() {
    if (where_ != Where::kMetadataValue) return value("null");
    where_ = Where::kTop;
    return true;
  }
  bool boolean(bool) { return value("a boolean"); }
  bool number_integer(Json::number_integer_t) { return value("a negative number"); }
  bool number_float(Json::number_float_t, const std::string& text) {
    return value("the number " + in_quotes(text));
  }
  bool number_unsigned(Json::number_unsigned_t number) {
    if (skipping()) return true;
    if (where_ != Where::kShape && where_ != Where::kOffsets) return value("a number");
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return fail(fmt::format("{} too large: {}", at(), number));
    }
    if (where_ == Where::kShape) {
      entry_.shape.push_back(static_cast<int64_t>(number));
    } else if (offsets_ < 2) {
      (offsets_++ == 0 ? entry_.begin : entry_.end) = static_cast<int64_t>(number);
    } else {
      return fail(fmt::format("{}: expected 2 numbers, found more", at()));
    }
    return true;
  }
  bool string(std::string& text) {
    if (skipping()) return true;
    if (where_ == Where::kDtypeValue) {
      entry_.dtype = text;
      where_ = Where::kTensor;
      return true;
    }
    if (where_ == Where::kMetadataEntry) {
      header.metadata[metadata_key_] = text;
      where_ = Where::kMetadata;
      return true;
    }
    return value("a string");
  }
  bool binary(Json::binary_t&) { return value("binary data"); }

  bool start_object(size_t) {
    if (skipping_) return deeper();
    switch (where_) {
      case Where::kStart:
        where_ = Where::kTop;
        return true;
      case Where::kMetadataValue:
        where_ = Where::kMetadata;
        return true;
      case Where::kTensorValue:
        where_ = Where::kTensor;
        return true;
      case Where::kSkip:
        return deeper();
      default:
        return value("an object");
    }
  }
  bool key(std::string& text) {
    if (skipping_) return true;
    switch (where_) {
      case Where::kTop:
        return top_key(text);
      case Where::kMetadata:
        metadata_key_ = text;
        where_ = Where::kMetadataEntry;
        return true;
      default:
        return tensor_key(text);
    }
  }
  bool end_object() {
    if (skipping_) return shallower();
    if (where_ == Where::kTensor) return end_tensor();
    where_ = where_ == Where::kMetadata ? Where::kTop : Where::kEnd;
    return true;
  }
  bool start_array(size_t) {
    if (skipping_ || where_ == Where::kSkip) return deeper();
    if (where_ == Where::kShapeValue) {
      where_ = Where::kShape;
    } else if (where_ == Where::kOffsetsValue) {
      where_ = Where::kOffsets;
    } else {
      return value("an array");
    }
    return true;
  }
  bool end_array() {
    if (skipping_) return shallower();
    if (where_ == Where::kOffsets && offsets_ != 2) {
      return fail(fmt::format("{}: expected 2 numbers, found {}", at(), offsets_));
    }
    where_ = Where::kTensor;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const Json::exception&) {
    return fail(fmt::format("header is not valid JSON (seen at its byte {})", position));
  }

 private:
  enum class Where {
    kStart,
    kTop,            // in the outer object
    kMetadataValue,  // after "__metadata__":
    kMetadata,       // in it
    kMetadataEntry,  // after one of its keys
    kTensorValue,    // after a tensor's name
    kTensor,         // in its object
    kDtypeValue,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kSkip,  // after an unknown key of a tensor, whose value is ignored as the format's library does
    kEnd,
  };
  // The format's library gives up at 128 levels; ours starts at the outer object.
  static constexpr int kMaxDepth = 120;

  bool fail(std::string message) {
    if (error.empty()) error = std::move(message);
    return false;
  }
  std::string at() const {
    switch (where_) {
      case Where::kStart:
      case Where::kTop:
      case Where::kEnd:
        return "header";
      case Where::kMetadataValue:
      case Where::kMetadata:
      case Where::kMetadataEntry:
        return "__metadata__";
      case Where::kDtypeValue:
        return fmt::format("tensor {}: dtype", in_quotes(entry_.name));
      case Where::kShapeValue:
      case Where::kShape:
        return fmt::format("tensor {}: shape", in_quotes(entry_.name));
      case Where::kOffsetsValue:
      case Where::kOffsets:
        return fmt::format("tensor {}: data_offsets", in_quotes(entry_.name));
      default:
        return fmt::format("tensor {}", in_quotes(entry_.name));
    }
  }
  const char* expected() const {
    switch (where_) {
      case Where::kDtypeValue:
      case Where::kMetadataEntry:
        return "a string";
      case Where::kShapeValue:
        return "an array";
      case Where::kOffsetsValue:
        return "an array of 2 numbers";
      case Where::kShape:
      case Where::kOffsets:
        return "integers >= 0";
      default:
        return "an object";
    }
  }
  // A value that the current place does not take, unless it is being ignored.
  bool value(const std::string& found) {
    return skipping() || fail(fmt::format("{}: expected {}, found {}", at(), expected(), found));
  }

  bool skipping() {
    if (where_ == Where::kSkip && !skipping_) {
      where_ = Where::kTensor;
      return true;
    }
    return skipping_ > 0;
  }
  bool deeper() {
    return ++skipping_ <= kMaxDepth || fail(fmt::format("{}: nested too deeply", at()));
  }
  bool shallower() {
    if (--skipping_ == 0) where_ = Where::kTensor;
    return true;
  }

  bool top_key(const std::string& text) {
    if (!names_.insert(text).second) return fail(fmt::format("{} is given twice", in_quotes(text)));
    if (text == "__metadata__") {
      where_ = Where::kMetadataValue;
      return true;
    }
    entry_ = {};
    entry_.name = text;
    seen_dtype_ = seen_shape_ = seen_offsets_ = false;
    offsets_ = 0;
    where_ = Where::kTensorValue;
    return true;
  }
  bool tensor_key(const std::string& text) {
    const auto once = [&](bool& seen, Where next) {
      if (seen) {
        return fail(fmt::format("tensor {}: {} is given twice", in_quotes(entry_.name), text));
      }
      seen = true;
      where_ = next;
      return true;
    };
    if (text == "dtype") return once(seen_dtype_, Where::kDtypeValue);
    if (text == "shape") return once(seen_shape_, Where::kShapeValue);
    if (text == "data_offsets") return once(seen_offsets_, Where::kOffsetsValue);
    where_ = Where::kSkip;
    return true;
  }
  bool end_tensor() {
    const char* missing = !seen_dtype_     ? "dtype"
                          : !seen_shape_   ? "shape"
                          : !seen_offsets_ ? "data_offsets"
                                           : nullptr;
    if (missing != nullptr) return fail(fmt::format("{}: {} is missing", at(), missing));
    header.entries.push_back(std::move(entry_));
    where_ = Where::kTop;
    return true;
  }

  Where where_ = Where::kStart;
  int skipping_ = 0;  // open arrays and objects of an ignored value
  SafetensorsEntry entry_;
  bool seen_dtype_ = false, seen_shape_ = false, seen_offsets_ = false;
  int offsets_ = 0;
  std::string metadata_key_;
  std::unordered_set<std::string> names_;
};

// Whether dtype, shape and data_offsets of one tensor agree.
Status check_extent(const SafetensorsEntry& entry, const std::string& source) {
  const auto refuse = [&](const std::string& why) {
    return Status{ErrorCode::kIo,
                  fmt::format("{}: tensor {}: {}", source, in_quotes(entry.name), why)};
  };
  const std::optional<int64_t> bits = bits_of(entry.dtype);
  if (!bits) return refuse(fmt::format("unknown dtype {}", in_quotes(entry.dtype)));
  const std::string shape = fmt::format("{} [{}]", entry.dtype, fmt::join(entry.shape, ", "));
  // Zero dims count as 1 until the end, so that no later product over some of the dims overflows.
  int64_t total = *bits;
  bool empty = false;
  for (int64_t dim : entry.shape) {
    empty |= dim == 0;
    if (__builtin_mul_overflow(total, std::max<int64_t>(dim, 1), &total)) {
      return refuse(fmt::format("{} has more than 2^63 bits", shape));
    }
  }
  if (empty) total = 0;
  if (total % 8 != 0) return refuse(fmt::format("{} is not a whole number of bytes", shape));
  if (entry.begin > entry.end || entry.end - entry.begin != total / 8) {
    return refuse(fmt::format("{} needs {} bytes, data_offsets [{}, {}] hold {}", shape, total / 8,
                              entry.begin, entry.end, entry.end - entry.begin));
  }
  return Status::ok();
}

}  // namespace

Result<int64_t> parse_safetensors_length(std::span<const std::byte, 8> prefix, int64_t file_bytes,
                                         const std::string& source) {
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | std::to_integer<uint64_t>(prefix[i]);
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeader)) {
    return Status{ErrorCode::kIo,
                  fmt::format("{}: not a safetensors file: header length {} (at most {})", source,
                              length, kMaxSafetensorsHeader)};
  }
  const auto n = static_cast<int64_t>(length);
  if (n > file_bytes - 8) {
    return Status{ErrorCode::kIo,
                  fmt::format("{}: header of {} bytes expected, the file has {} after its length",
                              source, n, file_bytes - 8)};
  }
  return n;
}

Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> json,
                                                   int64_t data_bytes, const std::string& source) {
  if (json.empty() || json[0] != std::byte{'{'}) {
    return Status{ErrorCode::kIo, fmt::format("{}: header must begin with '{{'", source)};
  }
  const char* text = reinterpret_cast<const char*>(json.data());
  HeaderReader reader;
  if (!Json::sax_parse(text, text + json.size(), &reader)) {
    return Status{ErrorCode::kIo, fmt::format("{}: {}", source, reader.error)};
  }
  SafetensorsHeader header = std::move(reader.header);
  for (const SafetensorsEntry& entry : header.entries) {
    GDN_RETURN_IF_ERROR(check_extent(entry, source));
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  int64_t at = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin != at) {
      return Status{ErrorCode::kIo,
                    fmt::format("{}: tensor {}: begins at byte {} of the data, expected {} ({})",
                                source, in_quotes(entry.name), entry.begin, at,
                                entry.begin < at ? "overlaps the one before" : "a hole before it")};
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    return Status{ErrorCode::kIo, fmt::format("{}: the header describes {} bytes of data, the file "
                                              "has {}",
                                              source, at, data_bytes)};
  }
  return header;
}

std::string format_safetensors_header(const SafetensorsHeader& header) {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) root["__metadata__"] = header.metadata;
  for (const SafetensorsEntry& entry : header.entries) {
    root[entry.name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string json = root.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  json.resize((json.size() + 7) / 8 * 8, ' ');
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i) out[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return out + json;
}

}  // namespace gdn
