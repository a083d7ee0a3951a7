// gdn: the gated delta rule on packed documents over ranks, from the shell.
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <sstream>

#include "base/thread_pool.h"
#include "command.h"
#include "gdn/gdn.h"
#include "help.h"

namespace {

using namespace gdn::cli;  // NOLINT: this file is the program

// What is wrong; CLI11 lists all words that it could not place, the last one first.
std::string words(const CLI::Error& error) {
  const std::string all = error.what();
  const size_t list = all.find(": ");
  const bool extras = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
  if (!extras || list == std::string::npos) return all;
  std::istringstream rest(all.substr(list + 2));
  std::string word, option;
  while (rest >> word) {
    if (word.starts_with('-')) option = word;
  }
  return option.empty() ? "expected no more words, got '" + word + "'"
                        : "expected an option of --help, got '" + option + "'";
}

// As every other error of the program, and where to read on.
std::string failure(const CLI::App* app, const CLI::Error& error) {
  const auto parsed = app->get_subcommands();
  const std::string command = parsed.empty() ? "" : parsed.front()->get_name();
  return "gdn: " + (command.empty() ? "" : command + ": ") + words(error) + "\nSee gdn " +
         (command.empty() ? "" : command + " ") + "--help\n";
}

int run(int argc, char** argv) {
  CLI::App app{
      "Gated DeltaNet on packed documents over ranks: plan, make data, run, check, time and "
      "predict.",
      "gdn"};
  app.footer(
      "gdn SUBCOMMAND --help lists its options. A first look: gdn check --docs 300,212 --ranks 2\n"
      "Environment: GDN_NUM_THREADS (default: the cores), GDN_BACKEND (a backend by name).\n"
      "Exit status: 0 done, 1 a check failed, 2 bad use or input.");
  app.failure_message(failure);
  app.set_version_flag("--version", std::string("gdn ") + gdn::version());
  app.require_subcommand(1);
  app.formatter(std::make_shared<HelpFormatter>());  // before the subcommands, which inherit it

  std::vector<std::unique_ptr<Command>> commands;
  for (auto* make :
       {make_info, make_plan, make_make, make_run, make_check, make_bench, make_simulate}) {
    commands.push_back(make());
  }
  std::vector<CLI::App*> entries;
  for (const auto& command : commands) entries.push_back(command->add_to(app));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::string known;
    bool found = false;
    for (const CLI::App* entry : entries) {
      known += (known.empty() ? "" : ", ") + entry->get_name();
      found |= argc > 1 && entry->get_name() == argv[1];
    }
    if (argc > 1 && argv[1][0] != '-' && !found) {
      print_note("expected one of " + known + ", got '" + argv[1] + "'");
      return kBadUse;
    }
    return app.exit(error) == 0 ? kSuccess : kBadUse;
  }
  if (const gdn::Status threads = gdn::check_num_threads(); !threads) {
    print_note(threads.message());
    return kBadUse;
  }
  for (size_t i = 0; i < commands.size(); ++i) {
    if (!entries[i]->parsed()) continue;
    const gdn::Result<int> code = commands[i]->run();
    if (code) return *code;
    if (commands[i]->speaks_of(code.status())) {
      print_note(entries[i]->get_name() + ": " + code.status().message());
    }
  }
  return kBadUse;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit is a failed write, not the end of the program
  int code = kBadUse;
  try {
    code = run(argc, argv);
  } catch (const std::bad_alloc&) {
    print_note("out of memory");
  } catch (const std::exception& error) {
    print_note(error.what());
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    print_note("cannot write to standard output");
    return kBadUse;
  }
  return code;
}
