#include "bench_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <span>

namespace gdn::cli {
namespace {

using bench::Samples;

Samples samples_of(const Json& arm) {
  Samples samples;
  samples.groups = arm.at("groups").get<std::vector<std::vector<double>>>();
  samples.power_readings = arm.value("power_readings", int64_t{0});
  samples.capped = arm.value("capped", int64_t{0});
  return samples;
}

bool has_time(const Json& arm) { return arm.contains("groups"); }

void judge_arm(Json& arm, const Samples& samples, const Json& base, const Samples& base_samples,
               const Json& pair, const Samples& pair_samples, double twins) {
  const auto process = [](const Json& one) { return one.value("process", 0); };
  const bench::PairedRatio ratio = bench::paired_ratio(base_samples, samples);
  std::string why_not =
      bench::why_not_claimed(samples, pair_samples, process(arm) == process(pair));
  if (std::abs(twins - 1) > bench::kMostTwins) {
    why_not += fmt::format("{}the first arm again took {:.3f} of its time",
                           why_not.empty() ? "" : "; ", twins);
  }
  if (arm.value("unchecked", false) || base.value("unchecked", false)) {
    why_not += (why_not.empty() ? "" : "; ") + std::string("accuracy not checked");
  }
  arm["ms"] = bench::value_ms(samples);
  arm["first_over_this"] = ratio.ratio;
  arm["spread"] = bench::paired_ratio(samples, pair_samples).spread;
  arm["drift"] = bench::drift(samples);
  arm["capped_share"] = bench::capped_share(samples);
  arm["claimed"] = why_not.empty();
  arm["why_not_claimed"] = why_not;
}

// The first arm is held against its own twin where there is one, all others against the first.
void judge_row(Json& row) {
  Json& arms = row.at("arms");
  const auto base = std::find_if(arms.begin(), arms.end(), has_time);
  if (base == arms.end()) return;
  const Samples base_samples = samples_of(*base);
  auto twin = std::find_if(arms.begin(), arms.end(), [](const Json& arm) {
    return has_time(arm) && arm.value("again", false);
  });
  if (twin == arms.end()) twin = base;
  const Samples twin_samples = samples_of(*twin);
  const double twins = bench::paired_ratio(twin_samples, base_samples).ratio;
  for (auto arm = arms.begin(); arm != arms.end(); ++arm) {
    if (!has_time(*arm)) continue;
    const bool first = arm == base;
    judge_arm(*arm, samples_of(*arm), *base, base_samples, first ? *twin : *base,
              first ? twin_samples : base_samples, twins);
  }
}

// 1.234e11 as "123.4 G", 1.234e14 as "123.4 T".
std::string rate(double per_second) {
  for (const auto& [unit, name] :
       {std::pair{1e12, " T"}, std::pair{1e9, " G"}, std::pair{1e6, " M"}, std::pair{1e3, " k"}}) {
    if (per_second >= unit) return fmt::format("{:.1f}{}", per_second / unit, name);
  }
  return fmt::format("{:.1f}", per_second);
}

const char* norm_of(const Json& row) {
  return row.at("norm").get<bool>() ? "norm inside" : "pre-norm";
}

std::string label_of(const Json& row) {
  return fmt::format("{} {}", row.at("shape").get<std::string>(), norm_of(row));
}

// What a report may hold, and must.
struct Field {
  const char* name;
  bool (Json::*is)() const noexcept;
  const char* expected;
  bool required = false;
};
constexpr Field kReportFields[] = {{"rows", &Json::is_array, "a list", true},
                                   {"device", &Json::is_string, "a text"},
                                   {"protocol", &Json::is_string, "a text"},
                                   {"power_cap", &Json::is_string, "a text"},
                                   {"checked", &Json::is_string, "a text"}};
constexpr Field kRowFields[] = {{"shape", &Json::is_string, "a text", true},
                                {"norm", &Json::is_boolean, "true or false", true},
                                {"operation", &Json::is_string, "a text", true},
                                {"tokens", &Json::is_number, "a number", true},
                                {"arms", &Json::is_array, "a list", true},
                                {"of_ranks", &Json::is_string, "a text"}};
constexpr Field kArmFields[] = {{"name", &Json::is_string, "a text", true},
                                {"process", &Json::is_number, "a number"},
                                {"groups", &Json::is_array, "a list of lists of times in ms"},
                                {"power_readings", &Json::is_number, "a number"},
                                {"capped", &Json::is_number, "a number"},
                                {"again", &Json::is_boolean, "true or false"},
                                {"flop", &Json::is_number, "a number"},
                                {"why_no_time", &Json::is_string, "a text"},
                                {"unchecked", &Json::is_boolean, "true or false"}};

Status wrong(const std::string& where, const std::string& expected, const std::string& got) {
  return {ErrorCode::kInvalidArgument,
          fmt::format("{}: expected {}, got {}", where, expected, got)};
}

// `where`: empty, or a place in the report that ends with a dot.
Status check_fields(const Json& object, const std::string& where, std::span<const Field> fields) {
  if (!object.is_object()) {
    return wrong(where.empty() ? "report" : where.substr(0, where.size() - 1), "an object",
                 object.type_name());
  }
  for (const Field& field : fields) {
    const auto found = object.find(field.name);
    if (found == object.end()) {
      if (field.required) return wrong(where + field.name, field.expected, "nothing");
    } else if (!((*found).*field.is)()) {
      return wrong(where + field.name, field.expected, found->type_name());
    }
  }
  return Status::ok();
}

Status check_groups(const Json& groups, const std::string& where) {
  const char* expected = "at least one list of times in ms, none of them empty";
  if (groups.empty()) return wrong(where, expected, "none");
  for (const Json& group : groups) {
    if (!group.is_array()) return wrong(where, expected, group.type_name());
    if (group.empty()) return wrong(where, expected, "an empty one");
    for (const Json& time : group) {
      if (!time.is_number()) return wrong(where, expected, time.type_name());
    }
  }
  return Status::ok();
}

// Is it of the form of bench_report.h? An error names the place, what was expected there and what
// is there.
Status check_report(const Json& report) {
  GDN_RETURN_IF_ERROR(check_fields(report, "", kReportFields));
  for (size_t r = 0; r < report["rows"].size(); ++r) {
    const Json& row = report["rows"][r];
    const std::string row_at = fmt::format("rows[{}].", r);
    GDN_RETURN_IF_ERROR(check_fields(row, row_at, kRowFields));
    for (size_t a = 0; a < row["arms"].size(); ++a) {
      const Json& arm = row["arms"][a];
      const std::string arm_at = fmt::format("{}arms[{}].", row_at, a);
      GDN_RETURN_IF_ERROR(check_fields(arm, arm_at, kArmFields));
      if (has_time(arm)) GDN_RETURN_IF_ERROR(check_groups(arm["groups"], arm_at + "groups"));
    }
  }
  return Status::ok();
}

std::string note_of(const Json& arm) {
  const std::string why_not = arm.at("why_not_claimed");
  return why_not.empty() ? "" : "not claimed: " + why_not;
}

}  // namespace

Json json_of(const Samples& samples) {
  return {{"groups", samples.groups},
          {"power_readings", samples.power_readings},
          {"capped", samples.capped}};
}

Result<Json> read_report(const std::string& path) {
  std::ifstream file(path);
  if (!file) return Status{ErrorCode::kIo, fmt::format("{}: cannot open", path)};
  Json report;
  try {
    report = Json::parse(file);
  } catch (const Json::parse_error& error) {
    return Status{ErrorCode::kInvalidArgument,
                  fmt::format("{}: expected JSON as gdn bench --output writes it, got something "
                              "else at byte {}",
                              path, error.byte)};
  }
  if (const Status status = check_report(report); !status) {
    return Status{status.code(), fmt::format("{}: {}", path, status.message())};
  }
  return report;
}

void judge(Json& report) {
  for (Json& row : report.at("rows")) judge_row(row);
}

std::string table_of(const Json& report) {
  std::vector<std::vector<std::string>> cells{
      {"row", "operation", "arm", "ms", "first/this", "drift", "FLOP/s", "tokens/s", ""}};
  std::string last;
  for (const Json& row : report.at("rows")) {
    const std::string label = label_of(row);
    std::string operation = row.at("operation");
    for (const Json& arm : row.at("arms")) {
      std::vector<std::string> line{label == last ? "" : label, operation, arm.at("name")};
      last = label;
      operation.clear();
      if (has_time(arm)) {
        const double seconds = arm.at("ms").get<double>() / 1e3;
        line.push_back(fmt::format("{:.3f}", 1e3 * seconds));
        line.push_back(fmt::format("{:.3f}", arm.at("first_over_this").get<double>()));
        line.push_back(fmt::format("{:.1f} %", 100 * arm.at("drift").get<double>()));
        const double flop = arm.value("flop", 0.0);
        line.push_back(flop > 0 ? rate(flop / seconds) : "");
        line.push_back(rate(row.at("tokens").get<double>() / seconds));
        line.push_back(note_of(arm));
      } else {
        line.insert(line.end(), {"-", "", "", "", "", arm.value("why_no_time", "")});
      }
      cells.push_back(std::move(line));
    }
  }
  return format_table(cells, 3, true);
}

std::string slowest_ranks(const Json& report) {
  struct Slowest {
    double ms = 0;
    std::string row;
  };
  std::vector<std::pair<std::string, Slowest>> found;  // in the order of the rows
  for (const Json& row : report.at("rows")) {
    if (!row.contains("of_ranks")) continue;
    for (const Json& arm : row.at("arms")) {
      if (!has_time(arm)) continue;
      const std::string key =
          fmt::format("{} {} {}, {}", row.at("of_ranks").get<std::string>(), norm_of(row),
                      row.at("operation").get<std::string>(), arm.at("name").get<std::string>());
      auto at = std::find_if(found.begin(), found.end(),
                             [&](const auto& entry) { return entry.first == key; });
      if (at == found.end()) at = found.insert(found.end(), {key, {}});
      const double ms = arm.at("ms");
      if (ms > at->second.ms) at->second = {ms, row.at("shape")};
    }
  }
  std::string text;
  for (const auto& [key, slowest] : found) {
    text += fmt::format("{}: slowest {:.3f} ms, {}\n", key, slowest.ms, slowest.row);
  }
  return text;
}

std::string line_of(const Json& row) {
  std::string text = fmt::format("{} {}:", label_of(row), row.at("operation").get<std::string>());
  for (const Json& arm : row.at("arms")) {
    text += fmt::format(" {} {}{}", arm.at("name").get<std::string>(),
                        has_time(arm) ? fmt::format("{:.3f}", arm.at("ms").get<double>()) : "-",
                        &arm == &row.at("arms").back() ? " ms" : ",");
  }
  return text;
}

}  // namespace gdn::cli
