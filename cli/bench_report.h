// The report of `gdn bench` as JSON, in which times from elsewhere can be judged too, and as a
// table.
//
// {"device": "...", "protocol": "...", "power_cap": "read by NVML" | why not,
//  "rows": [{"shape": "M", "norm": false, "operation": "fwd", "tokens": 32768,
//            "of_ranks": "G CP4 Z"       optional: the row is one of all ranks of this name
//            "arms": [{"name": "cuda-sm90a", "process": 0,
//                      "groups": [[ms, ...], ...]  one list per group, in the order taken
//                      "power_readings": 320, "capped": 0,      optional, as are the rest
//                      "again": true       the first arm's code once more
//                      "flop": 2.6e11      of one call
//                      "why_no_time": "..."   then no groups
//                      "unchecked": true      its outputs were not compared
//                      "host_us": 12          shown as it is
//                     }]}]}
// judge() adds to every arm with times: ms, first_over_this, spread, drift, capped_share, claimed,
// why_not_claimed.
#pragma once

#include <string>

#include "bench/protocol.h"
#include "command.h"

namespace gdn::cli {

Json json_of(const bench::Samples& samples);

// From a file. Where it is not of the form above the error names the place, what was expected there
// and what is there.
Result<Json> read_report(const std::string& path);
// Judges the times of a report of that form.
void judge(Json& report);
// Of a judged report.
std::string table_of(const Json& report);
// Of a judged report: for each partition with a row per rank its slowest, a line each; or nothing.
std::string slowest_ranks(const Json& report);
// One row in one line: "M pre-norm fwd: cuda-sm90a 0.534, cuda-portable 1.435 ms"
std::string line_of(const Json& row);

}  // namespace gdn::cli
