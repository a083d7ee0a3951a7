// How times are taken and when they count, apart from any clock: the order of the arms, medians,
// and the rules of a claim. docs/benchmarks.md has the words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gdn::bench {

// A group is two blocks per arm in palindromic order (A B .. B A; in odd runs B A .. A B); a block
// is `warm_up` calls that are not counted and `timed` calls that are.
struct Protocol {
  std::string name;  // "short", "sustained", or what a reduced one is called
  int runs = 1;
  int groups = 1;  // of each run
  int warm_up = 1;
  int timed = 1;
  double idle_seconds = 0;  // before each block

  bool reduced() const { return name != "short" && name != "sustained"; }
};

Protocol short_protocol();      // 2 runs of 8 groups of 5 + 20 calls
Protocol quick_protocol();      // 2 runs of 1 group of 5 + 20 calls
Protocol sustained_protocol();  // 3 groups of 5 s idle and 20 + 300 calls
// "short: 2 runs of 8 groups, 2 blocks of 5 + 20 calls per arm and group"
std::string describe(const Protocol& protocol);

struct Block {
  int group = 0;  // of all runs together
  int arm = 0;
  bool operator==(const Block&) const = default;
};
std::vector<Block> schedule(const Protocol& protocol, int arms);

// The times of one arm, in the order they were taken.
struct Samples {
  std::vector<std::vector<double>> groups;  // ms
  int64_t power_readings = 0;               // how often the power cap could be read
  int64_t capped = 0;                       // and how often it held the clock down
};

double median(std::vector<double> values);  // 0 of nothing
std::vector<double> group_medians(const Samples& samples);
double value_ms(const Samples& samples);  // the median of the group medians

// How far the last group is from the first, as a share of the first.
double drift(const Samples& samples);
// The paired ratio: the median over groups of (arm's median / base's median), and how far the
// group that is farthest from it is, as a share of it.
struct PairedRatio {
  double ratio = 0;
  double spread = 0;
};
PairedRatio paired_ratio(const Samples& arm, const Samples& base);
double capped_share(const Samples& samples);

inline constexpr double kMostDrift = 0.02;
inline constexpr double kMostSpread = 0.01;
inline constexpr double kMostCapped = 0.05;  // this share is already too much
inline constexpr double kMostTwins = 0.03;   // between the first arm and the same again

// Why the times of `arm` beside those of `base` are shown but not claimed; empty where they are.
// `together`: both were measured in one process.
std::string why_not_claimed(const Samples& arm, const Samples& base, bool together);

}  // namespace gdn::bench
