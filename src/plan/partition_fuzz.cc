// libFuzzer target: any bytes as the arguments of the Partition constructors. Build with clang and
// -DGDN_FUZZ=ON; partition_fuzz_test is its bounded twin.
#include <cstdio>
#include <cstdlib>

#include "plan/partition_bytes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string broken = gdn::check_partition_bytes({data, size});
  if (!broken.empty()) {
    std::fprintf(stderr, "%s\n", broken.c_str());
    std::abort();
  }
  return 0;
}
