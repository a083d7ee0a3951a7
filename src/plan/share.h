// Near-equal shares of whole numbers, the one rule behind every cut of this library.
#pragma once

#include <cstdint>

namespace gdn {

// floor(part * total / parts) without overflow for 0 <= part <= parts <= 2^31, 0 <= total < 2^63:
// with total = q parts + rem it is part q + floor(part rem / parts), and part rem < 2^62.
constexpr int64_t share_begin(int64_t part, int64_t parts, int64_t total) {
  return part * (total / parts) + part * (total % parts) / parts;
}

}  // namespace gdn
