// The fuzzer's bounded twin: the same property on a fixed number of mutated files, the same ones on
// every machine and run.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "io/safetensors_property.h"

namespace gdn {
namespace {

using Random = std::mt19937_64;  // its numbers are the same everywhere, unlike the distributions'

std::string seed_file(Random& random) {
  SafetensorsHeader header;
  int64_t at = 0;
  const uint64_t tensors = random() % 4;
  for (uint64_t i = 0; i < tensors; ++i) {
    SafetensorsEntry entry{fmt::format("t{}", i), random() % 2 ? "F32" : "BF16", {}, at, at};
    int64_t bytes = entry.dtype == "F32" ? 4 : 2;
    for (uint64_t rank = random() % 4; rank > 0; --rank) {
      entry.shape.push_back(static_cast<int64_t>(random() % 4));
      bytes *= entry.shape.back();
    }
    entry.end = at = entry.begin + bytes;
    header.entries.push_back(entry);
  }
  if (random() % 2) header.metadata["k"] = "v";
  return format_safetensors_header(header) + std::string(static_cast<size_t>(at), 'd');
}

// Pieces that a byte-wise mutator rarely finds.
const std::string kPieces[] = {"[",
                               "]",
                               "{",
                               "}",
                               ",",
                               ":",
                               "\"",
                               "-1",
                               "1e9",
                               "NaN",
                               "null",
                               "true",
                               "18446744073709551615",
                               "18446744073709551616",
                               "9223372036854775807",
                               "0.5",
                               "\\u0000",
                               "\\ud800",
                               "\xff",
                               "\xc3\xa9",
                               "\"a\":",
                               "\"dtype\":\"F64\"",
                               "\"shape\":[0]",
                               "\"data_offsets\":[0,0]",
                               "\"__metadata__\":{}",
                               "\"x\":[[[[]]]]",
                               " ",
                               std::string(1, '\0'),
                               "\xef\xbb\xbf",
                               "/**/"};

void mutate(std::string& bytes, Random& random) {
  const auto place = [&] { return random() % (bytes.size() + 1); };
  switch (random() % 7) {
    case 0:
      if (!bytes.empty()) bytes[random() % bytes.size()] = static_cast<char>(random());
      break;
    case 1:
      bytes.insert(place(), kPieces[random() % std::size(kPieces)]);
      break;
    case 2:
      bytes.resize(place());
      break;
    case 3: {
      const size_t from = place();
      bytes.erase(from, random() % 8);
      break;
    }
    case 4: {
      const std::string copy = bytes.substr(place(), random() % 64);
      bytes.insert(place(), copy);
      break;
    }
    case 5:
      if (!bytes.empty()) bytes[random() % std::min<size_t>(bytes.size(), 8)] ^= 1 << random() % 8;
      break;
    default: {  // a digit becomes another
      const size_t digit = bytes.find_first_of("0123456789", place());
      if (digit != std::string::npos) bytes[digit] = static_cast<char>('0' + random() % 10);
    }
  }
}

// Makes the length agree with the JSON again, so that more mutants get past it.
void repair_length(std::string& bytes) {
  const size_t end = bytes.rfind('}');
  if (bytes.size() < 8 || end == std::string::npos || end < 8) return;
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>((end + 1 - 8) >> (8 * i) & 0xff);
}

TEST(SafetensorsMutationTest, PropertyHoldsForMutants) {
  Random random(20240607);
  int64_t accepted = 0, refused = 0;
  for (int round = 0; round < 100'000; ++round) {
    std::string bytes = seed_file(random);
    for (uint64_t n = random() % 6; n > 0; --n) mutate(bytes, random);
    if (random() % 2) repair_length(bytes);
    ++(check_safetensors(std::as_bytes(std::span(bytes))) ? accepted : refused);
  }
  // Both branches must have been exercised for this to mean anything.
  EXPECT_GT(accepted, 10'000);
  EXPECT_GT(refused, 10'000);
}

}  // namespace
}  // namespace gdn
