// What must hold for any bytes given to the safetensors reader; shared by the fuzzer and its
// bounded twin among the tests. Breaking it is fatal, so that a fuzzer sees it.
#pragma once

#include <cstdlib>
#include <optional>
#include <span>

#include "io/safetensors_header.h"

namespace gdn {

// The header of a file with these bytes, or nothing if it is refused. What is accepted tiles the
// data and survives being written and read again; what is refused says why.
inline std::optional<SafetensorsHeader> check_safetensors(std::span<const std::byte> bytes) {
  const auto require = [](bool held) {
    if (!held) std::abort();
  };
  if (bytes.size() < 8) return std::nullopt;
  const auto size = static_cast<int64_t>(bytes.size());
  const Result<int64_t> length = parse_safetensors_length(bytes.first<8>(), size, "input");
  require(length.is_ok() || !length.status().message().empty());
  if (!length) return std::nullopt;
  require(*length >= 0 && *length <= size - 8);
  const int64_t data_bytes = size - 8 - *length;
  Result<SafetensorsHeader> header =
      parse_safetensors_header(bytes.subspan(8, static_cast<size_t>(*length)), data_bytes, "input");
  require(header.is_ok() || header.status().message().size() > sizeof("input: "));
  if (!header) return std::nullopt;

  int64_t at = 0;
  for (const SafetensorsEntry& entry : header->entries) {
    require(entry.begin == at && entry.end >= at && entry.end <= data_bytes);
    at = entry.end;
  }
  require(at == data_bytes);

  const std::string text = format_safetensors_header(*header);
  const auto again =
      parse_safetensors_header(std::as_bytes(std::span(text)).subspan(8), data_bytes, "input");
  require(again.is_ok() && again->entries == header->entries &&
          again->metadata == header->metadata);
  return std::move(*header);
}

}  // namespace gdn
