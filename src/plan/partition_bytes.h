// Any bytes as the arguments of the Partition constructors: the property that the fuzzer and its
// bounded twin check. Test support.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace gdn {

// What went wrong (a broken invariant, or an error without the name of an argument), or an empty
// string. Sizes are kept small, so that a call takes microseconds.
std::string check_partition_bytes(std::span<const uint8_t> bytes);

}  // namespace gdn
