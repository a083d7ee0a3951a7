// The communicator of one rank: every collective is a copy to itself.
#include <cstring>

#include "gdn/communicator.h"

namespace gdn {
namespace {

class SingleCommunicator final : public Communicator {
 public:
  const char* name() const override { return "single"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }

  Status all_to_all(const void* send, std::span<const int64_t> send_bytes, void* recv,
                    std::span<const int64_t> recv_bytes, Stream) override {
    if (send_bytes.size() != 1 || recv_bytes.size() != 1 || send_bytes[0] != recv_bytes[0]) {
      return {ErrorCode::kInvalidArgument, "all_to_all: one rank sends itself one block"};
    }
    if (send_bytes[0] > 0) std::memcpy(recv, send, static_cast<size_t>(send_bytes[0]));
    return Status::ok();
  }

  Status all_gather(const void* send, void* recv, std::span<const int64_t> bytes,
                    Stream stream) override {
    return all_to_all(send, bytes, recv, bytes, stream);
  }

  Status agree(const Status& local) override { return local; }
  Status agree_on(uint64_t, const std::string&) override { return Status::ok(); }
};

}  // namespace

std::unique_ptr<Communicator> make_single_communicator() {
  return std::make_unique<SingleCommunicator>();
}

}  // namespace gdn
