#include "bench/proxy.h"

#include <fmt/format.h>

#include <charconv>
#include <sstream>
#include <vector>

namespace gdn::bench {
namespace {

constexpr int kMostRanks = 4096;
constexpr std::pair<const char*, Layout> kLayouts[] = {
    {"C", Layout::kContiguous}, {"Z", Layout::kZigzag}, {"D", Layout::kZigzagPerDocument}};

// The number after `prefix`, if that is all there is.
std::optional<int> number_after(const std::string& prefix, const std::string& word) {
  if (word.compare(0, prefix.size(), prefix) != 0) return std::nullopt;
  int value = 0;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data() + prefix.size(), end, value);
  return error == std::errc() && stop == end && value >= 0 ? std::optional(value) : std::nullopt;
}

}  // namespace

Result<Proxy> parse_proxy(const std::string& name) {
  const auto refuse = [&](const std::string& expected, const std::string& got) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("proxy '{}': expected {}, got '{}'", name, expected, got));
  };
  std::istringstream words(name);
  std::vector<std::string> parts;
  for (std::string word; words >> word;) parts.push_back(word);
  if (parts.size() != 3 && parts.size() != 4) {
    return refuse("LETTER CPn LAYOUT [rR], e.g. G CP4 Z r3", name);
  }
  Proxy proxy;
  proxy.workload = parts[0];
  if (parts[0].size() != 1 || parts[0][0] < 'A' || parts[0][0] > 'N') {
    return refuse("a workload from A to N", parts[0]);
  }
  const auto world = number_after("CP", parts[1]);
  if (!world || *world < 1 || *world > kMostRanks) {
    return refuse(fmt::format("CP1 to CP{}", kMostRanks), parts[1]);
  }
  proxy.world_size = *world;
  bool known = false;
  for (const auto& [letter, layout] : kLayouts) {
    if (parts[2] != letter) continue;
    proxy.layout = layout;
    known = true;
  }
  if (!known) return refuse("layout C, Z or D", parts[2]);
  if (parts.size() == 4) {
    proxy.rank = number_after("r", parts[3]);
    if (!proxy.rank || *proxy.rank >= proxy.world_size) {
      return refuse(fmt::format("r0 to r{}", proxy.world_size - 1), parts[3]);
    }
  }
  return proxy;
}

std::string name_of(const Proxy& proxy) {
  const char* letter = "?";
  for (const auto& [name, layout] : kLayouts) {
    if (layout == proxy.layout) letter = name;
  }
  return fmt::format("{} CP{} {}{}", proxy.workload, proxy.world_size, letter,
                     proxy.rank ? fmt::format(" r{}", *proxy.rank) : "");
}

}  // namespace gdn::bench
