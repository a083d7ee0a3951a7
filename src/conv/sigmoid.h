// Logistic function in forms a compiler vectorises: the float one without calls.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace gdn {

// exp to about 1 ulp on [-87, 88], clamped outside: x = n ln2 + r, |r| <= ln2 / 2, and a degree-6
// polynomial, whose truncation error r^7 / 7! <= 1.2e-7 is half an ulp of 1.
inline float exp_clamped(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const auto bits = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  return p * std::bit_cast<float>((bits + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_clamped(-x)); }
inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

}  // namespace gdn
