// Ranks over a communicator of NCCL that belongs to this library: a call's collectives are enqueued
// on its own stream, in one op, instead of one by one from Python.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "calls.h"
#include "gdn/communicator.h"

namespace gdn_torch {
namespace {

Registry<gdn::Communicator>& communicators() {
  static auto* registry = new Registry<gdn::Communicator>;
  return *registry;
}

constexpr int64_t kIdBytes = sizeof(gdn::NcclId);

// Why this process has no NCCL; empty: it has one.
std::string nccl_missing() { return gdn::find_nccl().message(); }

// uint8 [128] on the CPU: what one rank hands to the others.
Tensor nccl_id() {
  const gdn::NcclId id = value_of(gdn::make_nccl_id());
  const Tensor bytes = aligned_bytes(kIdBytes, {});
  std::memcpy(bytes.data_ptr(), id.bytes.data(), id.bytes.size());
  return bytes;
}

// This rank's communicator on the device of `like`; waits for the others.
int64_t nccl_join(const Tensor& bytes, int64_t rank, int64_t size, const Tensor& like) {
  if (bytes.numel() != kIdBytes) {
    raise(gdn::ErrorCode::kInvalidArgument,
          "id: expected 128 bytes, got " + std::to_string(bytes.numel()));
  }
  gdn::NcclId id;
  std::memcpy(id.bytes.data(), bytes.data_ptr(), id.bytes.size());
  const auto guard = guard_for(device_of(like));
  return communicators().add(
      value_of(gdn::make_nccl_communicator(id, static_cast<int>(rank), static_cast<int>(size))));
}

// Another rank is gone: what waits for it ends. The handle stays, for calls that then fail.
void nccl_abandon(int64_t communicator) {
  if (const auto comm = communicators().get(communicator)) comm->abandon();
}

// A begun call up to its first collective.
void call_start(int64_t handle) {
  const auto pending = pending_at(handle);
  const auto guard = guard_for(pending->prepared->context.problem().device);
  check(pending->call->advance(pending->message));
}

// A started call to its end; the handle is gone, whatever comes.
void call_complete(int64_t handle, int64_t communicator) {
  const auto pending = pending_at(handle);
  pendings().take(handle);
  const auto comm = communicators().get(communicator);
  if (!comm) raise(gdn::ErrorCode::kInternal, "communicator: expected one that is joined");
  const auto guard = guard_for(pending->prepared->context.problem().device);
  check(pending->call->complete(*comm, pending->stream, pending->message));
  note_path(*pending->prepared);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(gdn_kcp, m) {
  m.def("nccl_missing() -> str");
  m.def("nccl_id() -> Tensor");
  m.def("nccl_join(Tensor id, int rank, int size, Tensor like) -> int");
  m.def("nccl_abandon(int communicator) -> ()");
  m.def("call_start(int call) -> ()");
  m.def("call_complete(int call, int communicator) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gdn_kcp, CompositeExplicitAutograd, m) {
  m.impl("nccl_missing", TORCH_BOX(&nccl_missing));
  m.impl("nccl_id", TORCH_BOX(&nccl_id));
  m.impl("nccl_join", TORCH_BOX(&nccl_join));
  m.impl("nccl_abandon", TORCH_BOX(&nccl_abandon));
  m.impl("call_start", TORCH_BOX(&call_start));
  m.impl("call_complete", TORCH_BOX(&call_complete));
}

}  // namespace gdn_torch
