#include "help.h"

#include <sstream>

namespace gdn::cli {
namespace {

constexpr size_t kWidth = 100;
constexpr size_t kColumn = 32;  // where descriptions begin

// Lines of at most `width` columns, broken between words.
std::string wrap(const std::string& text, size_t width) {
  std::istringstream words(text);
  std::string out, line, word;
  while (words >> word) {
    if (!line.empty() && line.size() + 1 + word.size() > width) {
      out += line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return out + line;
}

}  // namespace

HelpFormatter::HelpFormatter() { column_width(kColumn); }

std::string HelpFormatter::make_help(const CLI::App* app, std::string name,
                                     CLI::AppFormatMode mode) const {
  return CLI::detail::find_and_replace(Formatter::make_help(app, name, mode), "\n\n\n", "\n\n");
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  return wrap(app->get_description(), kWidth) + "\n\n";
}

std::string HelpFormatter::make_subcommand(const CLI::App* sub) const {
  constexpr size_t kNames = 10;
  std::ostringstream out;
  CLI::detail::format_help(out, sub->get_name(), wrap(sub->get_description(), kWidth - kNames),
                           kNames);
  return out.str();
}

std::string HelpFormatter::make_option_name(const CLI::Option* option, bool is_positional) const {
  std::string name = option->get_name(is_positional, !is_positional);
  const std::string negated = "{false}";  // CLI11's mark of the flag that turns another off
  if (const size_t at = name.find(negated); at != std::string::npos) name.erase(at, negated.size());
  if (const size_t at = name.find(','); at != std::string::npos) name.insert(at + 1, " ");
  return name;
}

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  if (!option->get_option_text().empty()) return " " + option->get_option_text();
  if (option->get_expected_max() == 0) return "";  // a flag
  const std::string type = option->get_type_name();
  const bool number = type.find("INT") != std::string::npos;
  return number ? " N" : type.find("FLOAT") != std::string::npos ? " X" : " NAME";
}

std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
  return wrap(option->get_description() + (option->get_required() ? " [required]" : ""),
              kWidth - kColumn);
}

}  // namespace gdn::cli
