// Counter-based random numbers: value i of stream s of a seed is a pure function of (seed, s, i),
// so that a tensor does not depend on threads, on the order of filling or on other tensors.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace gdn {

class RandomStream {
 public:
  RandomStream(uint64_t seed, uint64_t stream) : key_(mix(mix(seed) + (stream + 1) * kWeyl)) {}

  uint64_t bits(uint64_t index) const { return mix(key_ + (index + 1) * kWeyl); }

  // In [0, 1), 53 bits.
  double uniform(uint64_t index) const { return static_cast<double>(bits(index) >> 11) * 0x1p-53; }

  // Box-Muller: normals 2 p and 2 p + 1 share the uniforms 2 p and 2 p + 1.
  void normal_pair(uint64_t pair, double& first, double& second) const {
    const double radius = std::sqrt(-2 * std::log(1 - uniform(2 * pair)));
    const double angle = 2 * std::numbers::pi * uniform(2 * pair + 1);
    first = radius * std::cos(angle);
    second = radius * std::sin(angle);
  }

  double normal(uint64_t index) const {
    double value[2];
    normal_pair(index / 2, value[0], value[1]);
    return value[index % 2];
  }

  // out[i] = normal(first + i)
  void normals(uint64_t first, int64_t n, double* out) const {
    int64_t i = 0;
    if (first % 2 == 1 && n > 0) out[i++] = normal(first);
    for (; i + 1 < n; i += 2) {
      normal_pair((first + static_cast<uint64_t>(i)) / 2, out[i], out[i + 1]);
    }
    if (i < n) out[i] = normal(first + static_cast<uint64_t>(i));
  }

 private:
  static constexpr uint64_t kWeyl = 0x9e3779b97f4a7c15;  // odd, 2^64 / golden ratio

  // A bijection of 64-bit words in which every input bit moves about half of the output bits: two
  // rounds of xor-shift and multiplication by odd constants (the splitmix64 finaliser).
  static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  uint64_t key_;
};

}  // namespace gdn
