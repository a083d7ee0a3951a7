// The protocol carried out on a machine.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "bench/machine.h"
#include "bench/protocol.h"

namespace gdn::bench {

// One Samples per call, in their order. `after_block`, where given, is called after each block.
Result<std::vector<Samples>> measure(Machine& machine, const Protocol& protocol,
                                     std::span<const TimedCall> calls,
                                     const std::function<void()>& after_block = {});

}  // namespace gdn::bench
