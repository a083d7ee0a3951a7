#include "bench/measure.h"

namespace gdn::bench {

Result<std::vector<Samples>> measure(Machine& machine, const Protocol& protocol,
                                     std::span<const TimedCall> calls,
                                     const std::function<void()>& after_block) {
  std::vector<Samples> samples(calls.size());
  for (Samples& s : samples) {
    s.groups.resize(static_cast<size_t>(protocol.runs) * static_cast<size_t>(protocol.groups));
  }
  for (const Block& block : schedule(protocol, static_cast<int>(calls.size()))) {
    Samples& s = samples[static_cast<size_t>(block.arm)];
    if (protocol.idle_seconds > 0) machine.idle(protocol.idle_seconds);
    for (int i = -protocol.warm_up; i < protocol.timed; ++i) {
      const Result<Machine::Time> time = machine.time(calls[static_cast<size_t>(block.arm)]);
      if (!time) return time.status();
      if (i < 0) continue;
      s.groups[static_cast<size_t>(block.group)].push_back(time->ms);
      if (time->capped) {
        ++s.power_readings;
        s.capped += *time->capped;
      }
    }
    if (after_block) after_block();
  }
  return samples;
}

}  // namespace gdn::bench
