// The header of a safetensors file, checked before anything else of the file is touched:
//   8 bytes, little-endian: header length n;  n bytes: JSON;  then the tensors, without holes.
// Accepts what the format's own library accepts, less what its text forbids or leaves ambiguous:
// names given twice, a header that does not begin with '{', dims beyond 63 bits.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "gdn/status.h"

namespace gdn {

// The format's cap on n, which keeps a lying length from becoming an allocation.
inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;           // as written: "BF16", "F32", "F16", ...
  std::vector<int64_t> shape;  // any rank
  int64_t begin = 0;           // bytes from the end of the header
  int64_t end = 0;

  bool operator==(const SafetensorsEntry&) const = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
};

// n, checked against the cap and the file's size. `source` names the file in messages.
Result<int64_t> parse_safetensors_length(std::span<const std::byte, 8> prefix, int64_t file_bytes,
                                         const std::string& source);

// json: the n header bytes; data_bytes: how many follow them.
Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> json,
                                                   int64_t data_bytes, const std::string& source);

// The reverse: prefix and JSON, padded with spaces to a multiple of 8 bytes.
std::string format_safetensors_header(const SafetensorsHeader& header);

}  // namespace gdn
