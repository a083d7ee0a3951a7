// What a rank brings to a collective, and what all of them see once they have met: the same verdict
// on every rank, because every rank holds the same offers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gdn/status.h"

namespace gdn {

struct Offer {
  std::string what;                 // the collective's name: all ranks must call the same one
  std::vector<int64_t> send_bytes;  // [W] for each peer
  std::vector<int64_t> recv_bytes;  // [W] from each peer
  Status status;                    // of agree
  uint64_t digest = 0;              // of agree_on
};

// Nothing to send to any of `world_size` ranks.
Offer offer_of(const char* what, int world_size);

// An exchange of blocks. Counts of another length than W cannot fit: they are offered as counts
// that nobody expects, so that all ranks meet and all get the error.
Offer offer_blocks(const char* what, int world_size, std::span<const int64_t> send_bytes,
                   std::span<const int64_t> recv_bytes);

// Do the offers of one collective fit each other? kPeerFailed, naming the first two that do not.
Status fit(std::span<const Offer> offers);

// The error of the lowest rank that has one, naming that rank.
Status first_error(std::span<const Offer> offers);

// kInvalidArgument, naming the ranks whose digest differs from rank 0's.
Status same_digest(std::span<const Offer> offers, const std::string& what);

}  // namespace gdn
