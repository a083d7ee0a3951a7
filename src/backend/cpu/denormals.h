// Decays reach the denormal range all the time, where x86 cores take more than a hundred cycles per
// operation. While a guard lives, denormal inputs and results of this thread count as 0 (on x86;
// other machines handle them at speed): absolute errors of 1e-38 in fp32, 2e-308 in fp64.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace gdn::cpu {

class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
#else
  FlushDenormals() = default;
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

#if defined(__SSE2__)
 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x0040;
  unsigned saved_;
#endif
};

}  // namespace gdn::cpu
