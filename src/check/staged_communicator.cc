#include "check/staged_communicator.h"

#include <numeric>
#include <vector>

#include "base/guarded.h"

namespace gdn {
namespace {

int64_t sum(std::span<const int64_t> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(Communicator& host, Place& place) : host_(host), place_(place) {}

  const char* name() const override { return "staged"; }
  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }

  Status all_to_all(const void* send, std::span<const int64_t> send_bytes, void* recv,
                    std::span<const int64_t> recv_bytes, Stream) override {
    return through_host(send, sum(send_bytes), recv, sum(recv_bytes),
                        [&](const void* from, void* to) {
                          return host_.all_to_all(from, send_bytes, to, recv_bytes, {});
                        });
  }
  Status all_gather(const void* send, void* recv, std::span<const int64_t> bytes, Stream) override {
    const auto me = static_cast<size_t>(rank());
    return through_host(
        send, me < bytes.size() ? bytes[me] : 0, recv, sum(bytes),
        [&](const void* from, void* to) { return host_.all_gather(from, to, bytes, {}); });
  }
  Status agree(const Status& local) override { return host_.agree(local); }
  Status agree_on(uint64_t digest, const std::string& what) override {
    return host_.agree_on(digest, what);
  }

 private:
  // collective(send, recv) between copies. A rank that has nothing to send because a copy failed
  // meets the others all the same: they learn that it does not call what they call.
  template <typename Collective>
  Status through_host(const void* send, int64_t send_bytes, void* recv, int64_t recv_bytes,
                      Collective&& collective) {
    std::vector<std::byte> out, in;
    const Status copied = guarded([&] {
      out.resize(static_cast<size_t>(send_bytes));
      in.resize(static_cast<size_t>(recv_bytes));
      return place_.to_host(out.data(), send, send_bytes);
    });
    if (!copied) {
      static_cast<void>(host_.agree(copied));
      return copied;
    }
    const int64_t sent = host_.bytes_sent();
    GDN_RETURN_IF_ERROR(collective(out.data(), in.data()));
    bytes_sent_ += host_.bytes_sent() - sent;
    return place_.from_host(recv, in.data(), recv_bytes);
  }

  Communicator& host_;
  Place& place_;
};

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(Communicator& host, Place& place) {
  return std::make_unique<StagedCommunicator>(host, place);
}

}  // namespace gdn
