// Which instruction sets the kernels are compiled for; included before highway.h. Vectors live in
// arrays here, so targets of unknown vector length are left out (NEON serves those machines), and
// so are steps between two targets that bring these kernels nothing. Sanitizer builds
// (GDN_FEW_TARGETS) keep the baseline and AVX2: more would only compile longer.
#pragma once

#define GDN_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_AVX3_DL)

#ifdef GDN_FEW_TARGETS
#define HWY_DISABLED_TARGETS (GDN_DISABLED_TARGETS | HWY_SSE4 | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS GDN_DISABLED_TARGETS
#endif
