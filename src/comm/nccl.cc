// Ranks over NCCL: blocks of device memory, enqueued on the caller's stream. All-to-all is one
// group of sends and receives; all-gather is ncclAllGather where all blocks are equal, else such a
// group.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <thread>

#include "comm/nccl_api.h"
#include "gdn/communicator.h"

namespace gdn {
namespace {

class NcclCommunicator final : public Communicator {
 public:
  struct Shape {
    int rank = 0;
    int size = 0;
  };
  NcclCommunicator(const nccl::Api& api, nccl::Comm comm, Shape shape, Communicator* host,
                   bool owned)
      : api_(api), comm_(comm), shape_(shape), host_(host), owned_(owned) {}
  ~NcclCommunicator() override {
    if (!owned_ || abandoned_) return;
    // Destroying waits for the peers; after a failure there may be none.
    static_cast<void>(failed_ ? api_.CommAbort(comm_) : api_.CommDestroy(comm_));
  }

  const char* name() const override { return "nccl"; }
  int rank() const override { return shape_.rank; }
  int size() const override { return shape_.size; }

  Status all_to_all(const void* send, std::span<const int64_t> send_bytes, void* recv,
                    std::span<const int64_t> recv_bytes, Stream stream) override {
    if (std::ssize(send_bytes) != size() || std::ssize(recv_bytes) != size()) {
      return counts_error("all_to_all", std::min(send_bytes.size(), recv_bytes.size()));
    }
    int64_t at = 0;
    std::vector<const std::byte*> blocks;
    for (const int64_t bytes : send_bytes) {
      blocks.push_back(static_cast<const std::byte*>(send) + at);
      at += bytes;
    }
    return exchange(blocks, send_bytes, recv, recv_bytes, stream);
  }

  Status all_gather(const void* send, void* recv, std::span<const int64_t> bytes,
                    Stream stream) override {
    if (std::ssize(bytes) != size()) return counts_error("all_gather", bytes.size());
    const int64_t mine = bytes[rank()];
    if (std::count(bytes.begin(), bytes.end(), mine) == size()) {
      GDN_RETURN_IF_ERROR(alive());
      if (mine == 0) return Status::ok();
      GDN_RETURN_IF_ERROR(done(
          api_.AllGather(send, recv, static_cast<size_t>(mine), nccl::kInt8, comm_, stream.handle),
          "ncclAllGather"));
      bytes_sent_ += mine * (size() - 1);
      return Status::ok();
    }
    const std::vector<const std::byte*> blocks(size(), static_cast<const std::byte*>(send));
    const std::vector<int64_t> send_bytes(size(), mine);
    return exchange(blocks, send_bytes, recv, bytes, stream);
  }

  // A caller's ncclComm_t is the caller's to abort.
  void abandon() override {
    if (owned_ && !abandoned_) static_cast<void>(api_.CommAbort(comm_));
    abandoned_ = true;
  }

  Status agree(const Status& local) override { return host_ ? host_->agree(local) : local; }
  Status agree_on(uint64_t digest, const std::string& what) override {
    return host_ ? host_->agree_on(digest, what) : Status::ok();
  }

 private:
  Status counts_error(const char* what, size_t got) const {
    return {ErrorCode::kInvalidArgument,
            fmt::format("{}: expected {} counts, got {}", what, size(), got)};
  }

  // What earlier work came to, as far as the host knows.
  Status alive() {
    if (abandoned_) return {ErrorCode::kPeerFailed, "nccl: another rank is gone"};
    nccl::Code code = nccl::kSuccess;
    GDN_RETURN_IF_ERROR(done(api_.CommGetAsyncError(comm_, &code), "ncclCommGetAsyncError"));
    return code == nccl::kInProgress ? Status::ok() : done(code, "an earlier collective");
  }

  // A non-blocking communicator answers "in progress" until the work is enqueued.
  Status done(nccl::Code code, const char* what) {
    while (code == nccl::kInProgress) {
      std::this_thread::yield();
      if (api_.CommGetAsyncError(comm_, &code) != nccl::kSuccess) break;
    }
    const Status status = nccl::check(api_, code, what);
    failed_ |= !status;
    return status;
  }

  // blocks[p]: what rank p gets.
  Status exchange(const std::vector<const std::byte*>& blocks, std::span<const int64_t> send_bytes,
                  void* recv, std::span<const int64_t> recv_bytes, Stream stream) {
    GDN_RETURN_IF_ERROR(alive());
    GDN_RETURN_IF_ERROR(done(api_.GroupStart(), "ncclGroupStart"));
    Status first;
    const auto keep = [&](nccl::Code code, const char* what) {
      if (code == nccl::kInProgress) return;  // answered by the end of the group
      if (const Status status = nccl::check(api_, code, what); first && !status) first = status;
    };
    std::byte* out = static_cast<std::byte*>(recv);
    for (int p = 0; p < size(); ++p) {
      if (send_bytes[p] > 0) {
        keep(api_.Send(blocks[p], static_cast<size_t>(send_bytes[p]), nccl::kInt8, p, comm_,
                       stream.handle),
             "ncclSend");
      }
      if (recv_bytes[p] > 0) {
        keep(api_.Recv(out, static_cast<size_t>(recv_bytes[p]), nccl::kInt8, p, comm_,
                       stream.handle),
             "ncclRecv");
      }
      out += recv_bytes[p];
    }
    const Status end = done(api_.GroupEnd(), "ncclGroupEnd");
    failed_ |= !first;
    GDN_RETURN_IF_ERROR(first);
    GDN_RETURN_IF_ERROR(end);
    for (int p = 0; p < size(); ++p) bytes_sent_ += p == rank() ? 0 : send_bytes[p];
    return Status::ok();
  }

  const nccl::Api& api_;
  const nccl::Comm comm_;
  const Shape shape_;
  Communicator* const host_;
  const bool owned_;
  bool failed_ = false;
  bool abandoned_ = false;
};

}  // namespace

Result<std::unique_ptr<Communicator>> make_nccl_communicator(void* nccl_comm, Communicator* host) {
  const Result<const nccl::Api*> api = nccl::api();
  if (!api) return api.status();
  if (nccl_comm == nullptr) {
    return Status(ErrorCode::kInvalidArgument, "nccl_comm: expected an ncclComm_t, got null");
  }
  NcclCommunicator::Shape shape;
  GDN_RETURN_IF_ERROR(
      nccl::check(**api, (*api)->CommCount(nccl_comm, &shape.size), "ncclCommCount"));
  GDN_RETURN_IF_ERROR(
      nccl::check(**api, (*api)->CommUserRank(nccl_comm, &shape.rank), "ncclCommUserRank"));
  if (host != nullptr && (host->size() != shape.size || host->rank() != shape.rank)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("host: expected rank {} of {}, as in nccl_comm, got rank {} of {}",
                              shape.rank, shape.size, host->rank(), host->size()));
  }
  return std::unique_ptr<Communicator>(
      std::make_unique<NcclCommunicator>(**api, nccl_comm, shape, host, /*owned=*/false));
}

Status find_nccl() { return nccl::api().status(); }

Result<NcclId> make_nccl_id() {
  const Result<const nccl::Api*> api = nccl::api();
  if (!api) return api.status();
  nccl::UniqueId made{};
  GDN_RETURN_IF_ERROR(nccl::check(**api, (*api)->GetUniqueId(&made), "ncclGetUniqueId"));
  return NcclId{std::bit_cast<decltype(NcclId::bytes)>(made.bytes)};
}

Result<std::unique_ptr<Communicator>> make_nccl_communicator(const NcclId& id, int rank, int size,
                                                             Communicator* host) {
  const Result<const nccl::Api*> api = nccl::api();
  if (!api) return api.status();
  nccl::Comm comm = nullptr;
  GDN_RETURN_IF_ERROR(nccl::check(
      **api, (*api)->CommInitRank(&comm, size, std::bit_cast<nccl::UniqueId>(id.bytes), rank),
      "ncclCommInitRank"));
  return std::unique_ptr<Communicator>(std::make_unique<NcclCommunicator>(
      **api, comm, NcclCommunicator::Shape{rank, size}, host, /*owned=*/true));
}

Result<std::unique_ptr<Communicator>> make_nccl_communicator(Communicator& host) {
  GDN_RETURN_IF_ERROR(host.agree(find_nccl()));
  Result<NcclId> id = host.rank() == 0 ? make_nccl_id() : NcclId{};
  GDN_RETURN_IF_ERROR(host.agree(id.status()));
  std::vector<int64_t> bytes(host.size(), 0);
  bytes[0] = sizeof(NcclId);
  NcclId shared;
  GDN_RETURN_IF_ERROR(host.all_gather(&*id, &shared, bytes, {}));
  auto made = make_nccl_communicator(shared, host.rank(), host.size(), &host);
  if (const Status all = host.agree(made.status()); !all) {
    if (made) (*made)->abandon();
    return all;
  }
  return made;
}

}  // namespace gdn
