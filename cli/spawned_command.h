// The command as a user sees it, for its tests: spawned, its exit status, output, errors and files.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/temporary_folder.h"

namespace gdn {

namespace fs = std::filesystem;
using Json = nlohmann::json;

struct Outcome {
  int code = -1;
  std::string out, err;
};

class CliTest : public TemporaryFolder {
 protected:
  CliTest() {
    ::unsetenv("GDN_BACKEND");
    ::unsetenv("GDN_NUM_THREADS");
  }

  // `gdn ARGS` in a shell, in the test's folder; `before` may set limits.
  Outcome gdn(const std::string& args, const std::string& before = "") const {
    const std::string errors =
        (fs::temp_directory_path() / (folder_.filename().string() + ".err")).string();
    const std::string line =
        fmt::format("cd {} && {} {} {} 2>{}", folder_.string(), before, GDN_PROGRAM, args, errors);
    Outcome outcome;
    FILE* pipe = ::popen(line.c_str(), "r");
    if (pipe == nullptr) return outcome;
    std::array<char, 4096> block;
    while (const size_t n = std::fread(block.data(), 1, block.size(), pipe)) {
      outcome.out.append(block.data(), n);
    }
    const int status = ::pclose(pipe);
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    std::ifstream in(errors);
    outcome.err.assign(std::istreambuf_iterator<char>(in), {});
    fs::remove(errors);
    return outcome;
  }
  Json json(const std::string& args) const {
    const Outcome outcome = gdn(args + " --json");
    EXPECT_EQ(outcome.code, 0) << args << ": " << outcome.err;
    EXPECT_EQ(outcome.err, "") << "no progress where standard error is no terminal";
    Json parsed = Json::parse(outcome.out, nullptr, false);
    EXPECT_FALSE(parsed.is_discarded()) << outcome.out;
    return parsed;
  }
  void expect_refusal(const std::string& args, const std::string& words,
                      const std::string& before = "") const {
    const Outcome outcome = gdn(args, before);
    EXPECT_EQ(outcome.code, 2) << args << "\n" << outcome.out << outcome.err;
    EXPECT_NE(outcome.err.find(words), std::string::npos)
        << args << "\n  expected: " << words << "\n  got: " << outcome.err;
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
};

inline constexpr const char* kSmall = "--docs 130,0,1,70 --heads 1,2 --dim 16 --dtype fp32";

}  // namespace gdn
