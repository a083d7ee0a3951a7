// Ranks as threads of one process. A collective is: publish what I offer, meet, copy what I need
// from the others' memory, meet again (so that nobody reuses memory that is still being read).
//
// Meetings are numbered per rank. A meeting either completes for all ranks or fails for all of
// them: the last to arrive completes it; before that a timeout, a departure or contradicting offers
// fail it, and ranks that arrive later get the same error. So ranks never drift apart, and the
// collective after a failed one works again.
#include <fmt/format.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>

#include "comm/offer.h"
#include "gdn/communicator.h"

namespace gdn {
namespace {

class Hub {
 public:
  Hub(int size, std::chrono::milliseconds timeout)
      : size_(size), timeout_(timeout), offers_(size), sends_(size), gone_(size, false) {}

  int size() const { return size_; }
  // Read by all ranks between the two meetings of a collective.
  std::span<const Offer> offers() const { return offers_; }
  const std::byte* send(int rank) const { return sends_[rank]; }

  Status publish_and_meet(int rank, uint64_t meeting, Offer offer,
                          const std::byte* send = nullptr) {
    {
      std::lock_guard lock(mutex_);
      offers_[rank] = std::move(offer);
      sends_[rank] = send;
    }
    return meet(rank, meeting, /*check_offers=*/true);
  }

  Status meet(int rank, uint64_t number, bool check_offers = false) {
    std::unique_lock lock(mutex_);
    Meeting& meeting = meetings_[number];
    if (meeting.arrived.empty()) meeting.arrived.assign(size_, false);
    meeting.arrived[rank] = true;
    ++meeting.seen;
    if (!meeting.over) {
      if (complete(meeting)) {
        finish(meeting, check_offers ? fit(offers_) : Status::ok());
      } else {
        const bool came = changed_.wait_for(
            lock, timeout_, [&] { return meeting.over || missing_left(meeting) >= 0; });
        if (!meeting.over) finish(meeting, absent(meeting, came));
      }
    }
    const Status status = meeting.status;
    if (++meeting.left == size_) meetings_.erase(number);
    return status;
  }

  void leave(int rank) {
    std::lock_guard lock(mutex_);
    gone_[rank] = true;
    changed_.notify_all();
  }

 private:
  struct Meeting {
    std::vector<bool> arrived;
    int seen = 0;
    int left = 0;
    bool over = false;
    Status status;
  };

  bool complete(const Meeting& meeting) const { return meeting.seen == size_; }

  int missing_left(const Meeting& meeting) const {  // a rank that cannot come any more, or -1
    for (int r = 0; r < size_; ++r) {
      if (!meeting.arrived[r] && gone_[r]) return r;
    }
    return -1;
  }

  void finish(Meeting& meeting, Status status) {
    meeting.over = true;
    meeting.status = std::move(status);
    changed_.notify_all();
  }

  Status absent(const Meeting& meeting, bool left) const {
    if (left) {
      return {ErrorCode::kPeerFailed,
              fmt::format("rank {} left before the others were done", missing_left(meeting))};
    }
    std::string ranks;
    for (int r = 0; r < size_; ++r) {
      if (!meeting.arrived[r]) ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", r);
    }
    return {ErrorCode::kPeerFailed,
            fmt::format("rank {} did not arrive within {} ms", ranks, timeout_.count())};
  }

  const int size_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Offer> offers_;
  std::vector<const std::byte*> sends_;  // where each rank's blocks lie
  std::vector<bool> gone_;
  std::map<uint64_t, Meeting> meetings_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~ThreadCommunicator() override { hub_->leave(rank_); }

  const char* name() const override { return "threads"; }
  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }

  Status all_to_all(const void* send, std::span<const int64_t> send_bytes, void* recv,
                    std::span<const int64_t> recv_bytes, Stream) override {
    return exchange(offer_blocks("all_to_all", size(), send_bytes, recv_bytes), send, recv,
                    [&](const Offer& from) {
                      int64_t at = 0;
                      for (int p = 0; p < rank_; ++p) at += from.send_bytes[p];
                      return at;
                    });
  }

  Status all_gather(const void* send, void* recv, std::span<const int64_t> bytes, Stream) override {
    const bool fits = static_cast<int>(bytes.size()) == size();
    const std::vector<int64_t> same(size(), fits ? bytes[rank_] : 0);
    return exchange(offer_blocks("all_gather", size(), same, bytes), send, recv,
                    [](const Offer&) { return int64_t{0}; });
  }

  Status agree(const Status& local) override {
    Offer offer = offer_of("agree", size());
    offer.status = local;
    GDN_RETURN_IF_ERROR(hub_->publish_and_meet(rank_, meeting_++, std::move(offer)));
    const Status error = first_error(hub_->offers());
    GDN_RETURN_IF_ERROR(hub_->meet(rank_, meeting_++));
    return error;
  }

  Status agree_on(uint64_t digest, const std::string& what) override {
    Offer offer = offer_of("agree_on", size());
    offer.digest = digest;
    GDN_RETURN_IF_ERROR(hub_->publish_and_meet(rank_, meeting_++, std::move(offer)));
    const Status differing = same_digest(hub_->offers(), what);
    GDN_RETURN_IF_ERROR(hub_->meet(rank_, meeting_++));
    return differing;
  }

 private:
  // `block_at(offer)`: where in that rank's send memory this rank's block begins.
  template <typename BlockAt>
  Status exchange(Offer offer, const void* send, void* recv, BlockAt block_at) {
    GDN_RETURN_IF_ERROR(hub_->publish_and_meet(rank_, meeting_++, std::move(offer),
                                               static_cast<const std::byte*>(send)));
    std::byte* out = static_cast<std::byte*>(recv);
    for (int r = 0; r < size(); ++r) {
      const Offer& from = hub_->offers()[r];
      const int64_t bytes = from.send_bytes[rank_];
      if (bytes > 0) {
        std::memcpy(out, hub_->send(r) + block_at(from), static_cast<size_t>(bytes));
      }
      out += bytes;
      if (r != rank_) bytes_sent_ += hub_->offers()[rank_].send_bytes[r];
    }
    return hub_->meet(rank_, meeting_++);
  }

  std::shared_ptr<Hub> hub_;
  int rank_;
  uint64_t meeting_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int world_size, std::chrono::milliseconds timeout) {
  auto hub = std::make_shared<Hub>(world_size, timeout);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < world_size; ++r)
    ranks.push_back(std::make_unique<ThreadCommunicator>(hub, r));
  return ranks;
}

}  // namespace gdn
