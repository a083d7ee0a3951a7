// One process-wide pool of worker threads for loops over independent items. The split of items over
// threads never changes a result: every item writes its own outputs.
#pragma once

#include <cstdint>
#include <functional>

#include "gdn/status.h"

namespace gdn {

inline constexpr int kMostThreads = 1024;

// Threads that parallel_for uses, the caller included: GDN_NUM_THREADS if set and not empty, else
// the number of cores this process may run on. Read once.
int num_threads();

// Whether GDN_NUM_THREADS is a number from 1 to kMostThreads, or not set; num_threads() is as if
// not set otherwise, which callers refuse.
Status check_num_threads();

// What a text in GDN_NUM_THREADS asks for.
Result<int> parse_num_threads(const char* text);

// Calls body(item, worker) for every item in [0, items), in any order, on several threads;
// 0 <= worker < num_threads() names scratch that no other running item uses. Returns when all are
// done. Nested calls, and calls while another thread's loop holds the pool, run on the caller. A
// forked child has a pool of its own.
void parallel_for(int64_t items, const std::function<void(int64_t item, int worker)>& body);

}  // namespace gdn
