#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace gdn::cli {
namespace {

constexpr auto kFirst = std::chrono::milliseconds(300);  // what is over by then shows no bar
constexpr auto kEvery = std::chrono::milliseconds(100);
constexpr int kBar = 30;  // columns

}  // namespace

Progress::Progress(std::string label, int64_t total) : label_(std::move(label)), total_(total) {
  if (::isatty(STDERR_FILENO) == 0) return;
  ticker_ = std::jthread([this](const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    auto wait = kFirst;
    while (!wake_.wait_for(lock, stop, wait, [&] { return stop.stop_requested(); })) {
      if (stop.stop_requested()) break;
      draw();
      wait = kEvery;
    }
    fmt::print(stderr, "\r\x1b[K");
    std::fflush(stderr);
  });
}

Progress::~Progress() = default;

void Progress::draw() const {
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  std::string bar;
  if (total_ > 0) {
    const int64_t done = std::min<int64_t>(done_, total_);
    const auto full = static_cast<size_t>(done * kBar / total_);
    bar = fmt::format("[{}{}] {:3} %  ", std::string(full, '#'), std::string(kBar - full, '.'),
                      done * 100 / total_);
  }
  fmt::print(stderr, "\r\x1b[K{}  {}{:.1f} s", label_, bar, seconds);
  std::fflush(stderr);
}

}  // namespace gdn::cli
