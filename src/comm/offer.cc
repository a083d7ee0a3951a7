#include "comm/offer.h"

#include <fmt/format.h>

namespace gdn {

Offer offer_of(const char* what, int world_size) {
  Offer offer;
  offer.what = what;
  offer.send_bytes.assign(world_size, 0);
  offer.recv_bytes.assign(world_size, 0);
  return offer;
}

Offer offer_blocks(const char* what, int world_size, std::span<const int64_t> send_bytes,
                   std::span<const int64_t> recv_bytes) {
  Offer offer = offer_of(what, world_size);
  const auto size = static_cast<size_t>(world_size);
  if (send_bytes.size() != size || recv_bytes.size() != size) {
    offer.send_bytes.assign(size, -1);
    return offer;
  }
  offer.send_bytes.assign(send_bytes.begin(), send_bytes.end());
  offer.recv_bytes.assign(recv_bytes.begin(), recv_bytes.end());
  return offer;
}

Status fit(std::span<const Offer> offers) {
  for (size_t r = 0; r < offers.size(); ++r) {
    if (offers[r].what != offers[0].what) {
      return {ErrorCode::kPeerFailed,
              fmt::format("rank 0 calls {}, rank {} calls {}", offers[0].what, r, offers[r].what)};
    }
    for (size_t p = 0; p < offers.size(); ++p) {
      if (offers[r].send_bytes[p] != offers[p].recv_bytes[r]) {
        return {
            ErrorCode::kPeerFailed,
            fmt::format("{}: rank {} sends {} bytes to rank {}, which expects {}", offers[0].what,
                        r, offers[r].send_bytes[p], p, offers[p].recv_bytes[r])};
      }
    }
  }
  return Status::ok();
}

Status first_error(std::span<const Offer> offers) {
  for (size_t r = 0; r < offers.size(); ++r) {
    const Status& status = offers[r].status;
    if (!status) return {status.code(), fmt::format("rank {}: {}", r, status.message())};
  }
  return Status::ok();
}

Status same_digest(std::span<const Offer> offers, const std::string& what) {
  std::string differing;
  for (size_t r = 1; r < offers.size(); ++r) {
    if (offers[r].digest != offers[0].digest) {
      differing += fmt::format("{}{}", differing.empty() ? "" : ", ", r);
    }
  }
  if (differing.empty()) return Status::ok();
  return {ErrorCode::kInvalidArgument,
          fmt::format("{}: differs between rank 0 and rank {}", what, differing)};
}

}  // namespace gdn
