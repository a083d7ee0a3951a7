// One process-wide pool of worker threads for loops over independent items. The split of items over
// threads never changes a result: every item writes its own outputs.
#pragma once

#include <cstdint>
#include <functional>

namespace gdn {

// Threads that parallel_for uses, the caller included: GDN_NUM_THREADS if set, else the number of
// cores this process may run on.
int num_threads();

// Calls body(item, worker) for every item in [0, items), in any order, on several threads;
// 0 <= worker < num_threads() names scratch that no other running item uses. Returns when all are
// done. Nested calls, and calls while another thread's loop holds the pool, run on the caller.
void parallel_for(int64_t items, const std::function<void(int64_t item, int worker)>& body);

}  // namespace gdn
