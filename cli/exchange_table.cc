#include "exchange_table.h"

#include <fmt/format.h>

#include <set>

#include "gdn/tensor.h"
#include "plan/byte_text.h"

namespace gdn::cli {

Result<std::vector<ExchangeRow>> exchange_rows(std::span<const int64_t> cu_seqlens, Layout layout,
                                               int world_size, const PlanOptions& options) {
  constexpr int64_t kMostFragments = 1'000'000;
  std::set<int> sizes = {2, 4, 8, 16, 32, 64, world_size};
  std::vector<ExchangeRow> rows;
  for (const int w : sizes) {
    if (w < 2 || 2 * w * std::ssize(cu_seqlens) > kMostFragments) continue;
    const auto partition = Partition::make(cu_seqlens, w, layout);
    if (!partition) return partition.status();
    PlanOptions untiled = options;  // cuts of another W need not be multiples of the tile
    untiled.tile = 0;
    const auto plan = Plan::make(*partition, 0, untiled);
    if (!plan) return plan.status();
    const int64_t bytes = size_of(DType::kFloat32);
    rows.push_back(
        {w, plan->all_gather_elements * bytes, plan->all_to_all_elements * bytes, plan->exchange});
  }
  return rows;
}

int crossover(const std::vector<ExchangeRow>& rows) {
  int from = 0;
  for (size_t i = rows.size(); i-- > 0;) {
    if (rows[i].all_to_all_bytes >= rows[i].all_gather_bytes) break;
    from = rows[i].world_size;
  }
  return from;
}

std::string text_of(const std::vector<ExchangeRow>& rows) {
  std::vector<std::vector<std::string>> cells{{"ranks", "all-gather", "all-to-all", "picked"}};
  for (const ExchangeRow& row : rows) {
    cells.push_back({std::to_string(row.world_size), byte_text(row.all_gather_bytes),
                     byte_text(row.all_to_all_bytes), to_string(row.picked)});
  }
  const int from = crossover(rows);
  return "boundary states that all ranks hand to others, forward and backward, fp32, no tiles:\n" +
         format_table(cells) +
         (from > 0 ? fmt::format("the all-to-all moves fewer bytes from {} ranks on\n", from)
                   : "the all-to-all moves fewer bytes for no number of ranks listed\n");
}

Json json_of(const std::vector<ExchangeRow>& rows) {
  Json list = Json::array();
  for (const ExchangeRow& row : rows) {
    list.push_back({{"ranks", row.world_size},
                    {"all_gather_bytes", row.all_gather_bytes},
                    {"all_to_all_bytes", row.all_to_all_bytes},
                    {"picked", to_string(row.picked)}});
  }
  return list;
}

}  // namespace gdn::cli
