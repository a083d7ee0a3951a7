// A progress bar on standard error while something long runs; silent where that is no terminal.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace gdn::cli {

class Progress {
 public:
  // total: steps that advance() will count; 0: unknown, only the time runs.
  explicit Progress(std::string label, int64_t total = 0);
  ~Progress();  // removes the bar

  void advance(int64_t steps = 1) { done_ += steps; }

 private:
  void draw() const;

  std::string label_;
  int64_t total_;
  std::atomic<int64_t> done_{0};
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::jthread ticker_;  // last, so that it ends before what it uses
};

}  // namespace gdn::cli
