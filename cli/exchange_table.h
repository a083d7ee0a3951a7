// How the exchange of a pack grows with the number of ranks: bytes of both kinds, and from which W
// on the all-to-all moves fewer.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "command.h"
#include "gdn/plan.h"

namespace gdn::cli {

struct ExchangeRow {
  int world_size = 1;
  int64_t all_gather_bytes = 0, all_to_all_bytes = 0;  // all ranks, forward and backward, fp32
  ExchangeKind picked = ExchangeKind::kNone;
};

// For W = 2, 4, 8, .. 64 and `world_size`, in ascending order; W that would cut the pack in more
// than a million fragments are left out.
Result<std::vector<ExchangeRow>> exchange_rows(std::span<const int64_t> cu_seqlens, Layout layout,
                                               int world_size, const PlanOptions& options);

// The smallest W listed from which on the all-to-all moves fewer bytes; 0: never.
int crossover(const std::vector<ExchangeRow>& rows);

std::string text_of(const std::vector<ExchangeRow>& rows);
Json json_of(const std::vector<ExchangeRow>& rows);

}  // namespace gdn::cli
