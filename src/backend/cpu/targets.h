// Which instruction sets the kernels are compiled for; included before highway.h. Vectors live in
// arrays here, so targets of unknown vector length are left out (NEON serves those machines), and
// so are steps between two targets that bring these kernels nothing.
#pragma once

#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_AVX3_DL)
