// Numbers of things as people read them: "1 rank", "2 ranks".
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

namespace gdn {

inline std::string counted(int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

}  // namespace gdn
