#include "command.h"

#include <fmt/format.h>

#include <cstdio>

namespace gdn::cli {

std::string format_table(const std::vector<std::vector<std::string>>& rows, size_t left,
                         bool remark) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const bool to_left = i < left || (remark && i + 1 == row.size());
      line += i == 0 ? "" : "  ";
      line += to_left ? fmt::format("{:<{}}", row[i], widths[i])
                      : fmt::format("{:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

void print_line(const std::string& text) {
  fmt::print("{}{}", text, text.empty() || text.back() != '\n' ? "\n" : "");
}

// Not-a-number and infinities become null, as JSON has neither.
void print_json(const Json& json) {
  print_line(json.dump(2, ' ', false, Json::error_handler_t::replace));
}

void print_note(const std::string& text) { fmt::print(stderr, "gdn: {}\n", text); }

}  // namespace gdn::cli
