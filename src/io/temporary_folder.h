// For tests: a folder of its own for each test, gone with it.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace gdn {

class TemporaryFolder : public ::testing::Test {
 protected:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "gdn_test_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~TemporaryFolder() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::filesystem::path folder_;
};

}  // namespace gdn
