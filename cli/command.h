// What a subcommand of `gdn` is, and what all of them share. Results go to standard output, errors
// and progress to standard error; the exit status is 0, kCheckFailed or kBadUse.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gdn/status.h"

namespace gdn::cli {

using Json = nlohmann::ordered_json;

inline constexpr int kSuccess = 0;
inline constexpr int kCheckFailed = 1;  // results were computed and are not what they should be
inline constexpr int kBadUse = 2;       // arguments, files or a problem that cannot be run

class Command {
 public:
  virtual ~Command() = default;
  // Adds the subcommand with its options; they outlive the parsing.
  virtual CLI::App* add_to(CLI::App& app) = 0;
  // The exit status, or an error for the user.
  virtual Result<int> run() = 0;
  // Is the error that run() gave for this process to say? Many processes may share one.
  virtual bool speaks_of(const Status& error) const { return true; }
};

std::unique_ptr<Command> make_info();
std::unique_ptr<Command> make_plan();
std::unique_ptr<Command> make_make();
std::unique_ptr<Command> make_run();
std::unique_ptr<Command> make_check();
std::unique_ptr<Command> make_bench();
std::unique_ptr<Command> make_simulate();

// Rows of equal length; columns are aligned, to the right but for the first `left` and the last
// where it is a remark.
std::string format_table(const std::vector<std::vector<std::string>>& rows, size_t left = 1,
                         bool remark = false);

void print_line(const std::string& text);
void print_json(const Json& json);
// On standard error, after "gdn: ".
void print_note(const std::string& text);

}  // namespace gdn::cli
