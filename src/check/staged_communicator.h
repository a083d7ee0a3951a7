// A rank whose memory the communicator of its peers does not serve: collectives through copies in
// host memory. For ranks that share a GPU, or GPUs without NCCL between them.
#pragma once

#include <memory>

#include "check/place.h"
#include "gdn/communicator.h"

namespace gdn {

// `host` serves host memory; it and `place`, whose memory and stream the calls name, outlive this.
// The calling thread waits for its stream in every collective.
std::unique_ptr<Communicator> make_staged_communicator(Communicator& host, Place& place);

}  // namespace gdn
