// The inputs that cuda-portable is tried on, each against the fp64 recurrence.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "device_batch.h"

namespace gdn {

struct GpuCase {
  std::string name;
  BatchSpec spec;
  DeviceRun run;
  bool ordinary = true;  // judged by the bars of ordinary inputs; else by what the contract allows
};
inline void PrintTo(const GpuCase& c, std::ostream* out) { *out << c.name; }

// Small enough for the SIMT emulator: every kernel, every branch, few chunks.
std::vector<GpuCase> small_cases();
// The wide sweep, for a GPU; holds the small ones too.
std::vector<GpuCase> all_cases();

// What is captured in a graph and replayed at other packings; documents are the test's.
std::vector<GpuCase> replay_cases();

}  // namespace gdn
