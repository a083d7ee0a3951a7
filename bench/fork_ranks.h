// Processes of this host as ranks, forked before anything touches a device: what a program that
// times several GPUs needs where there is no MPI.
#pragma once

#include <functional>

#include "gdn/communicator.h"

namespace gdn {

// Runs body(host) in `world_size` child processes; host carries errors, digests and all-gathers of
// a few KiB through shared memory. Returns 0 if all returned 0; when one does not, the others are
// ended.
int fork_ranks(int world_size, const std::function<int(Communicator& host)>& body);

}  // namespace gdn
