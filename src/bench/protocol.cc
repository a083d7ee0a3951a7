#include "bench/protocol.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace gdn::bench {

Protocol short_protocol() { return {"short", 2, 8, 5, 20, 0}; }
Protocol quick_protocol() { return {"quick", 2, 1, 5, 20, 0}; }
Protocol sustained_protocol() { return {"sustained", 1, 3, 20, 300, 5}; }

std::string describe(const Protocol& p) {
  std::string text =
      fmt::format("{}: {} run{} of {} group{}, 2 blocks of {} + {} calls per arm", p.name, p.runs,
                  p.runs == 1 ? "" : "s", p.groups, p.groups == 1 ? "" : "s", p.warm_up, p.timed);
  if (p.idle_seconds > 0) text += fmt::format(", each after {:g} s idle", p.idle_seconds);
  if (p.reduced()) text += " (reduced)";
  return text;
}

std::vector<Block> schedule(const Protocol& protocol, int arms) {
  std::vector<Block> blocks;
  for (int run = 0; run < protocol.runs; ++run) {
    for (int g = 0; g < protocol.groups; ++g) {
      const int group = run * protocol.groups + g;
      for (int i = 0; i < 2 * arms; ++i) {
        const int out = i < arms ? i : 2 * arms - 1 - i;
        blocks.push_back({group, run % 2 == 0 ? out : arms - 1 - out});
      }
    }
  }
  return blocks;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

std::vector<double> group_medians(const Samples& samples) {
  std::vector<double> medians;
  for (const std::vector<double>& group : samples.groups) medians.push_back(median(group));
  return medians;
}

double value_ms(const Samples& samples) { return median(group_medians(samples)); }

double drift(const Samples& samples) {
  const std::vector<double> medians = group_medians(samples);
  return medians.empty() ? 0 : std::abs(medians.back() / medians.front() - 1);
}

PairedRatio paired_ratio(const Samples& arm, const Samples& base) {
  const std::vector<double> a = group_medians(arm), b = group_medians(base);
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) ratios.push_back(a[i] / b[i]);
  PairedRatio paired{median(ratios), 0};
  for (double ratio : ratios) {
    paired.spread = std::max(paired.spread, std::abs(ratio / paired.ratio - 1));
  }
  return paired;
}

double capped_share(const Samples& samples) {
  return samples.power_readings == 0
             ? 0
             : static_cast<double>(samples.capped) / static_cast<double>(samples.power_readings);
}

std::string why_not_claimed(const Samples& arm, const Samples& base, bool together) {
  std::string reasons;
  const auto add = [&](const std::string& reason) {
    reasons += (reasons.empty() ? "" : "; ") + reason;
  };
  if (!together) add("measured in another process");
  if (arm.groups.size() != base.groups.size()) {
    add(fmt::format("{} groups beside {}", arm.groups.size(), base.groups.size()));
  }
  const double drifted = std::max(drift(arm), drift(base));
  const double spread = paired_ratio(arm, base).spread;
  if (drifted > kMostDrift && spread > kMostSpread) {
    add(fmt::format("drift {:.1f} %, group ratios up to {:.1f} % apart from their median",
                    100 * drifted, 100 * spread));
  }
  const double capped = std::max(capped_share(arm), capped_share(base));
  if (capped >= kMostCapped) {
    add(fmt::format("{:.0f} % of the calls under the power cap", 100 * capped));
  }
  return reasons;
}

}  // namespace gdn::bench
