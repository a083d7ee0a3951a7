// Names of rows: "G CP4 Z r3" is workload G over 4 ranks, zigzag, as rank 3 sees it.
#pragma once

#include <optional>
#include <string>

#include "gdn/partition.h"
#include "gdn/status.h"

namespace gdn::bench {

struct Proxy {
  std::string workload;  // "A".."N"
  int world_size = 1;
  Layout layout = Layout::kContiguous;
  std::optional<int> rank;  // absent: every rank

  bool operator==(const Proxy&) const = default;
};

// LETTER CPn LAYOUT [rR], apart by blanks; LAYOUT: C contiguous, Z zigzag, D zigzag per document.
Result<Proxy> parse_proxy(const std::string& name);
std::string name_of(const Proxy& proxy);

}  // namespace gdn::bench
