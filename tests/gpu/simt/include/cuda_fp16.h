// fp16 for the SIMT emulator, by the compiler's own.
#pragma once

#include <vector_types.h>

using __half = _Float16;
struct __half2 {
  __half x, y;
};
inline __half __float2half_rn(float x) { return static_cast<__half>(x); }
inline __half2 __floats2half2_rn(float x, float y) {
  return {static_cast<__half>(x), static_cast<__half>(y)};
}
inline float2 __half22float2(__half2 x) {
  return {static_cast<float>(x.x), static_cast<float>(x.y)};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
  return {static_cast<__half>(a.x * b.x), static_cast<__half>(a.y * b.y)};
}
