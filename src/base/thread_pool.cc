#include "base/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace gdn {
namespace {

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

// The count, or why GDN_NUM_THREADS holds none.
const Result<int>& threads() {
  static const Result<int> result = [] {
    const char* text = std::getenv("GDN_NUM_THREADS");
    return text == nullptr || *text == '\0' ? Result<int>(cores()) : parse_num_threads(text);
  }();
  return result;
}

class Pool {
 public:
  explicit Pool(int threads) {
    for (int worker = 1; worker < threads; ++worker) {
      threads_.emplace_back([this, worker](std::stop_token stop) { serve(stop, worker); });
    }
  }

  ~Pool() {
    for (auto& thread : threads_) thread.request_stop();
    wake_.notify_all();
  }

  void run(int64_t items, const std::function<void(int64_t, int)>& body) {
    std::unique_lock busy(busy_, std::try_to_lock);
    if (!busy.owns_lock() || inside_ || threads_.empty() || items <= 1) {
      for (int64_t i = 0; i < items; ++i) body(i, 0);
      return;
    }
    {
      std::lock_guard lock(mutex_);
      body_ = &body;
      items_ = items;
      next_.store(0);
      running_ = static_cast<int>(threads_.size());
      ++generation_;
    }
    wake_.notify_all();
    work(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void work(int worker) {
    inside_ = true;
    for (int64_t i; (i = next_.fetch_add(1)) < items_;) (*body_)(i, worker);
    inside_ = false;
  }

  void serve(std::stop_token stop, int worker) {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        if (!wake_.wait(lock, stop, [&] { return generation_ != seen; })) return;
        seen = generation_;
      }
      work(worker);
      std::lock_guard lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  static thread_local bool inside_;

  std::mutex busy_;  // held by the thread whose loop the pool runs
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::condition_variable done_;
  const std::function<void(int64_t, int)>* body_ = nullptr;
  int64_t items_ = 0;
  std::atomic<int64_t> next_{0};
  int running_ = 0;
  uint64_t generation_ = 0;
  std::vector<std::jthread> threads_;  // last: stops before the rest is destroyed
};

thread_local bool Pool::inside_ = false;

// The process's pool. A forked child has the object but none of its threads, which nobody could
// join: it leaves that as it is and makes one of its own.
class PoolOfProcess {
 public:
  ~PoolOfProcess() {
    if (owner_ == getpid()) delete pool_;
  }

  Pool& get() {
    const pid_t self = getpid();
    if (owner_.load(std::memory_order_acquire) != self) {
      const std::lock_guard lock(making_);
      if (owner_ != self) {
        parents_ = pool_;
        pool_ = new Pool(num_threads());
        owner_.store(self, std::memory_order_release);
      }
    }
    return *pool_;
  }

 private:
  std::mutex making_;
  Pool* pool_ = nullptr;
  Pool* parents_ = nullptr;
  std::atomic<pid_t> owner_{0};
};

}  // namespace

int num_threads() { return threads() ? *threads() : cores(); }

Status check_num_threads() { return threads().status(); }

Result<int> parse_num_threads(const char* text) {
  int n = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, n);
  if (error == std::errc() && stop == end && n >= 1 && n <= kMostThreads) return n;
  return Status{ErrorCode::kInvalidArgument, "GDN_NUM_THREADS: expected a number from 1 to " +
                                                 std::to_string(kMostThreads) + ", got '" + text +
                                                 "'"};
}

void parallel_for(int64_t items, const std::function<void(int64_t, int)>& body) {
  static PoolOfProcess pool;
  pool.get().run(items, body);
}

}  // namespace gdn
