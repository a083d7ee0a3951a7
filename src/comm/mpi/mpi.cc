// A collective is two rounds of messages between all pairs: headers, from which every rank sees the
// same offers and so the same verdict, then blocks. Every wait has a deadline. MPI keeps messages
// of one pair and tag in order, so neither round needs a number.
//
// A rank whose wait ends without what it waited for tells the others why (kNotice) and is over;
// they look for notices whenever they wait, and are over too, with the same words.
#include "gdn/mpi.h"

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "comm/offer.h"

namespace gdn {
namespace {

using Clock = std::chrono::steady_clock;

enum Tag : int { kHeader = 1, kBlock = 2, kNotice = 3 };
enum class What : int64_t { kLeave, kAllToAll, kAllGather, kAgree, kAgreeOn };
constexpr const char* kNames[] = {"leave", "all_to_all", "all_gather", "agree", "agree_on"};

constexpr int64_t kPiece = int64_t{1} << 30;  // bytes of one message: MPI counts are int
constexpr size_t kNoticeBytes = 1024;

// A header is this and then send_bytes[W], recv_bytes[W].
struct Fixed {
  int64_t what, code, message_bytes;
  uint64_t digest;
};
constexpr size_t kFixed = sizeof(Fixed) / sizeof(int64_t);

std::string words_of(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return fmt::format("error {}", code);
  return std::string(text, static_cast<size_t>(length));
}

// Ranks may outnumber cores: first the others get a turn, then this one sleeps.
void pause(int64_t turn) {
  constexpr int64_t kYields = 1000;
  if (turn < kYields) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Requests of one round and the peer of each, for words about who did not come.
struct Round {
  std::vector<MPI_Request> requests;
  std::vector<int> peers;
  std::vector<bool> receives;

  MPI_Request* add(int peer, bool receive) {
    peers.push_back(peer);
    receives.push_back(receive);
    return &requests.emplace_back(MPI_REQUEST_NULL);
  }
};

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, std::chrono::milliseconds timeout)
      : comm_(comm), timeout_(timeout) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }

  // Whoever comes to another collective meets this instead of an offer. Waits for the others, since
  // MPI may give this communicator's number to the next one while a message is under way.
  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) return;
    static_cast<void>(meet(What::kLeave, offer_of("leave", size_)));
    if (health_) MPI_Comm_free(&comm_);  // after a failure it stays, notices and all
  }

  const char* name() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status all_to_all(const void* send, std::span<const int64_t> send_bytes, void* recv,
                    std::span<const int64_t> recv_bytes, Stream) override {
    Offer offer = offer_blocks("all_to_all", size_, send_bytes, recv_bytes);
    GDN_RETURN_IF_ERROR(meet(What::kAllToAll, std::move(offer)));
    std::vector<const std::byte*> blocks;
    const std::byte* at = static_cast<const std::byte*>(send);
    for (const int64_t bytes : send_bytes) {
      blocks.push_back(at);
      at += bytes;
    }
    return move(blocks, recv);
  }

  Status all_gather(const void* send, void* recv, std::span<const int64_t> bytes, Stream) override {
    const std::vector<int64_t> same(size_, std::ssize(bytes) == size_ ? bytes[rank_] : 0);
    Offer offer = offer_blocks("all_gather", size_, same, bytes);
    GDN_RETURN_IF_ERROR(meet(What::kAllGather, std::move(offer)));
    return move(std::vector(size_, static_cast<const std::byte*>(send)), recv);
  }

  Status agree(const Status& local) override {
    Offer offer = offer_of("agree", size_);
    offer.status = local;
    GDN_RETURN_IF_ERROR(meet(What::kAgree, std::move(offer)));
    const auto failed =
        std::find_if(offers_.begin(), offers_.end(), [](const Offer& o) { return !o.status; });
    if (failed == offers_.end()) return Status::ok();
    // Its words travel only now, from the lowest rank that has an error.
    const int source = static_cast<int>(failed - offers_.begin());
    std::string words = failed->status.message();
    Round round;
    for (int p = 0; p < size_ && rank_ == source; ++p) {
      if (p != rank_) post_send(words.data(), std::ssize(words), p, kBlock, round);
    }
    if (rank_ != source) post_receive(words.data(), std::ssize(words), source, kBlock, round);
    GDN_RETURN_IF_ERROR(wait(round));
    failed->status = {failed->status.code(), words};
    return first_error(offers_);
  }

  Status agree_on(uint64_t digest, const std::string& what) override {
    Offer offer = offer_of("agree_on", size_);
    offer.digest = digest;
    GDN_RETURN_IF_ERROR(meet(What::kAgreeOn, std::move(offer)));
    return same_digest(offers_, what);
  }

 private:
  // ---- Headers ----
  size_t header_length() const { return kFixed + 2 * static_cast<size_t>(size_); }

  std::vector<int64_t> encode(What what, const Offer& offer) const {
    std::vector<int64_t> header(kFixed);
    const Fixed fixed{static_cast<int64_t>(what), static_cast<int64_t>(offer.status.code()),
                      std::ssize(offer.status.message()), offer.digest};
    std::memcpy(header.data(), &fixed, sizeof(fixed));
    header.insert(header.end(), offer.send_bytes.begin(), offer.send_bytes.end());
    header.insert(header.end(), offer.recv_bytes.begin(), offer.recv_bytes.end());
    return header;
  }

  // The message of an error is as long as it will be, and blank until it comes.
  Offer decode(const int64_t* header) const {
    Fixed fixed;
    std::memcpy(&fixed, header, sizeof(fixed));
    Offer offer;
    offer.what = kNames[fixed.what];
    offer.send_bytes.assign(header + kFixed, header + kFixed + size_);
    offer.recv_bytes.assign(header + kFixed + size_, header + kFixed + 2 * size_);
    offer.digest = fixed.digest;
    if (fixed.code != 0) {
      offer.status = {static_cast<ErrorCode>(fixed.code),
                      std::string(static_cast<size_t>(fixed.message_bytes), ' ')};
    }
    return offer;
  }

  // Headers of all ranks into offers_; an error where they do not fit each other.
  Status meet(What what, Offer mine) {
    GDN_RETURN_IF_ERROR(health_);
    header_ = encode(what, mine);
    headers_.assign(header_length() * static_cast<size_t>(size_), 0);
    Round round;
    for (int p = 0; p < size_; ++p) {
      if (p == rank_) continue;
      int64_t* theirs = headers_.data() + header_length() * static_cast<size_t>(p);
      post_receive(theirs, int64_t(header_length() * sizeof(int64_t)), p, kHeader, round);
      post_send(header_.data(), int64_t(header_length() * sizeof(int64_t)), p, kHeader, round);
    }
    const bool leaving = what == What::kLeave;
    GDN_RETURN_IF_ERROR(wait(round, [&](int peer) {
      const int64_t* theirs = headers_.data() + header_length() * static_cast<size_t>(peer);
      return !leaving && theirs[0] == static_cast<int64_t>(What::kLeave);
    }));
    if (leaving) return Status::ok();
    offers_.clear();
    for (int p = 0; p < size_; ++p) {
      offers_.push_back(p == rank_ ? std::move(mine)
                                   : decode(headers_.data() + header_length() * size_t(p)));
    }
    return fit(offers_);
  }

  // ---- Blocks ----
  // blocks[p]: what rank p gets of this one; byte counts are those of offers_.
  Status move(const std::vector<const std::byte*>& blocks, void* recv) {
    const Offer& mine = offers_[rank_];
    Round round;
    std::byte* out = static_cast<std::byte*>(recv);
    for (int p = 0; p < size_; ++p) {
      if (p == rank_) {
        const auto bytes = static_cast<size_t>(mine.send_bytes[p]);
        if (bytes > 0) std::memcpy(out, blocks[p], bytes);
      } else {
        post_receive(out, mine.recv_bytes[p], p, kBlock, round);
      }
      out += mine.recv_bytes[p];
    }
    for (int p = 0; p < size_; ++p) {
      if (p != rank_) post_send(blocks[p], mine.send_bytes[p], p, kBlock, round);
    }
    GDN_RETURN_IF_ERROR(wait(round));
    for (int p = 0; p < size_; ++p) bytes_sent_ += p == rank_ ? 0 : mine.send_bytes[p];
    return Status::ok();
  }

  void post_receive(void* data, int64_t bytes, int peer, Tag tag, Round& round) {
    for (int64_t at = 0; at < bytes; at += kPiece) {
      const int some = static_cast<int>(std::min(kPiece, bytes - at));
      note(MPI_Irecv(static_cast<std::byte*>(data) + at, some, MPI_BYTE, peer, tag, comm_,
                     round.add(peer, true)));
    }
  }
  void post_send(const void* data, int64_t bytes, int peer, Tag tag, Round& round) {
    for (int64_t at = 0; at < bytes; at += kPiece) {
      const int some = static_cast<int>(std::min(kPiece, bytes - at));
      note(MPI_Isend(static_cast<const std::byte*>(data) + at, some, MPI_BYTE, peer, tag, comm_,
                     round.add(peer, false)));
    }
  }
  void note(int code) {
    if (code != MPI_SUCCESS && mpi_code_ == MPI_SUCCESS) mpi_code_ = code;
  }

  // ---- Waiting ----
  // Until all requests are complete. left(peer): has the message that just came from `peer` ended
  // it?
  template <typename Left>
  Status wait(Round& round, const Left& left) {
    const auto deadline = Clock::now() + timeout_;
    std::vector<int> done(round.requests.size());
    for (int64_t turn = 0;; ++turn) {
      int count = 0;
      note(MPI_Testsome(static_cast<int>(round.requests.size()), round.requests.data(), &count,
                        done.data(), MPI_STATUSES_IGNORE));
      if (mpi_code_ != MPI_SUCCESS) return fail("MPI: " + words_of(mpi_code_), round);
      if (count == MPI_UNDEFINED) return notice(round);  // nothing is open any more
      for (int i = 0; i < count; ++i) {
        if (!round.receives[done[i]] || !left(round.peers[done[i]])) continue;
        return fail(fmt::format("rank {} left before the others were done", round.peers[done[i]]),
                    round);
      }
      GDN_RETURN_IF_ERROR(notice(round));
      if (Clock::now() > deadline) return fail(absent(round), round);
      pause(turn);
    }
  }
  Status wait(Round& round) {
    return wait(round, [](int) { return false; });
  }

  std::string absent(const Round& round) const {
    std::vector<bool> open(size_, false);
    for (size_t i = 0; i < round.requests.size(); ++i) {
      if (round.requests[i] != MPI_REQUEST_NULL) open[round.peers[i]] = true;
    }
    std::string ranks;
    for (int p = 0; p < size_; ++p) {
      if (open[p]) ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", p);
    }
    return fmt::format("rank {} did not arrive within {} ms", ranks, timeout_.count());
  }

  // ---- The end ----
  // Another rank's reason to be over, if one is here.
  Status notice(Round& round) {
    int here = 0;
    MPI_Status from;
    note(MPI_Iprobe(MPI_ANY_SOURCE, kNotice, comm_, &here, &from));
    if (here == 0) return Status::ok();
    std::string words(kNoticeBytes, '\0');
    int length = 0;
    note(MPI_Recv(words.data(), static_cast<int>(kNoticeBytes), MPI_BYTE, from.MPI_SOURCE, kNotice,
                  comm_, &from));
    MPI_Get_count(&from, MPI_BYTE, &length);
    words.resize(static_cast<size_t>(std::max(length, 0)));
    return end(words, round);
  }

  Status fail(const std::string& words, Round& round) {
    notice_ = words.substr(0, kNoticeBytes);
    for (int p = 0; p < size_; ++p) {
      if (p == rank_) continue;
      MPI_Request request = MPI_REQUEST_NULL;
      if (MPI_Isend(notice_.data(), static_cast<int>(notice_.size()), MPI_BYTE, p, kNotice, comm_,
                    &request) == MPI_SUCCESS) {
        notices_.push_back(request);
      }
    }
    return end(words, round);
  }

  // Receives are cancelled; sends to ranks that live get a moment, since they read caller's memory.
  Status end(const std::string& words, Round& round) {
    health_ = {ErrorCode::kPeerFailed, words};
    for (size_t i = 0; i < round.requests.size(); ++i) {
      if (round.receives[i] && round.requests[i] != MPI_REQUEST_NULL) {
        MPI_Cancel(&round.requests[i]);
      }
    }
    round.requests.insert(round.requests.end(), notices_.begin(), notices_.end());
    const auto deadline = Clock::now() + std::chrono::milliseconds(200);
    int all = 0;
    for (int64_t turn = 0; all == 0 && Clock::now() < deadline; ++turn) {
      if (MPI_Testall(static_cast<int>(round.requests.size()), round.requests.data(), &all,
                      MPI_STATUSES_IGNORE) != MPI_SUCCESS) {
        break;
      }
      pause(turn);
    }
    for (MPI_Request& request : round.requests) {
      if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    }
    return health_;
  }

  MPI_Comm comm_;
  const std::chrono::milliseconds timeout_;
  int rank_ = 0, size_ = 1;
  std::vector<Offer> offers_;              // [W] of the present collective
  std::vector<int64_t> header_, headers_;  // mine, theirs
  int mpi_code_ = MPI_SUCCESS;             // first error of an MPI call
  Status health_;                          // not ok: why this communicator has ended
  std::string notice_;
  std::vector<MPI_Request> notices_;
};

}  // namespace

Status start_mpi() {
  int already = 0;
  MPI_Initialized(&already);
  if (already != 0) return Status::ok();
  int level = MPI_THREAD_SINGLE;
  const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
  if (code != MPI_SUCCESS) return {ErrorCode::kPeerFailed, "MPI_Init_thread: " + words_of(code)};
  return Status::ok();
}

void finish_mpi(int exit_code, bool abandon) {
  if (abandon) {
    MPI_Abort(MPI_COMM_WORLD, exit_code);
  } else {
    MPI_Finalize();
  }
}

Result<std::unique_ptr<Communicator>> make_mpi_communicator(const void* mpi_comm,
                                                            std::chrono::milliseconds timeout) {
  int running = 0, finalized = 0;
  MPI_Initialized(&running);
  MPI_Finalized(&finalized);
  if (running == 0 || finalized != 0) {
    return Status(ErrorCode::kInvalidArgument,
                  "mpi_comm: expected MPI to be running, got a process where it is not");
  }
  const MPI_Comm parent =
      mpi_comm != nullptr ? *static_cast<const MPI_Comm*>(mpi_comm) : MPI_COMM_WORLD;
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_Comm_idup(parent, &comm, &request);
  const auto deadline = Clock::now() + timeout;
  int done = 0;
  for (int64_t turn = 0; code == MPI_SUCCESS && done == 0; ++turn) {
    if (Clock::now() > deadline) {
      return Status(ErrorCode::kPeerFailed,
                    fmt::format("mpi_comm: not all ranks arrived within {} ms", timeout.count()));
    }
    code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    pause(turn);
  }
  if (code != MPI_SUCCESS) {
    return Status(ErrorCode::kPeerFailed, "MPI_Comm_idup: " + words_of(code));
  }
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  return std::unique_ptr<Communicator>(std::make_unique<MpiCommunicator>(comm, timeout));
}

}  // namespace gdn
