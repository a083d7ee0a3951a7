// Matrices in scratch memory.
#pragma once

#include <cstdint>

namespace gdn::cpu {

// Left operand of a product: element (m, k) at data[m * row + k * depth].
template <typename T>
struct Left {
  const T* data;
  int64_t row;
  int64_t depth;
};

// Row-major, rows `ld` elements apart.
template <typename T>
struct Mat {
  T* data = nullptr;
  int64_t ld = 0;

  T* row(int64_t i) const { return data + i * ld; }
  Mat at(int64_t i, int64_t j) const { return {data + i * ld + j, ld}; }
  Left<T> left() const { return {data, ld, 1}; }
  Left<T> transposed() const { return {data, 1, ld}; }
};

}  // namespace gdn::cpu
