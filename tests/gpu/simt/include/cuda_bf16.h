// bf16 for the SIMT emulator.
#pragma once

#include "base/bf16.h"

struct __nv_bfloat16 {
  unsigned short bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {gdn::BFloat16(x).bits}; }
inline float __bfloat162float(__nv_bfloat16 x) {
  gdn::BFloat16 y;
  y.bits = x.bits;
  return static_cast<float>(y);
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
