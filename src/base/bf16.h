// bfloat16 as storage: the upper half of an IEEE float, rounded to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace gdn {

struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {  // NaN stays NaN: keep it quiet
      bits = static_cast<uint16_t>((u >> 16) | 0x0040u);
    } else {
      bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
  explicit operator double() const { return static_cast<float>(*this); }
};
static_assert(sizeof(BFloat16) == 2);

}  // namespace gdn
