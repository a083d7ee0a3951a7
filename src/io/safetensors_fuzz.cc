// libFuzzer target: any bytes as a safetensors file. Build with -DGDN_FUZZ=ON and clang.
#include <cstddef>
#include <cstdint>

#include "io/safetensors_property.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  gdn::check_safetensors(std::as_bytes(std::span(data, size)));
  return 0;
}
