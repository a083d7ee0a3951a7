// The few functions of NCCL that ranks need, found at run time: building needs no NCCL, and a
// process that already has one (torch brings it) uses that one. Declarations as in nccl.h 2.18 and
// newer; NCCL keeps them.
#pragma once

#include <cstddef>
#include <string>

#include "gdn/status.h"

namespace gdn::nccl {

using Comm = void*;    // ncclComm_t
using Stream = void*;  // cudaStream_t
struct UniqueId {
  char bytes[128];  // NCCL_UNIQUE_ID_BYTES
};
using Code = int;  // ncclResult_t
inline constexpr Code kSuccess = 0, kSystemError = 2, kRemoteError = 6, kInProgress = 7;
inline constexpr int kInt8 = 0;  // ncclDataType_t of one byte

struct Api {
  Code (*GetVersion)(int* version);
  const char* (*GetErrorString)(Code code);
  Code (*GetUniqueId)(UniqueId* id);
  Code (*CommInitRank)(Comm* comm, int ranks, UniqueId id, int rank);
  Code (*CommDestroy)(Comm comm);
  Code (*CommAbort)(Comm comm);
  Code (*CommGetAsyncError)(Comm comm, Code* code);
  Code (*CommCount)(Comm comm, int* count);
  Code (*CommUserRank)(Comm comm, int* rank);
  Code (*GroupStart)();
  Code (*GroupEnd)();
  Code (*Send)(const void* data, size_t count, int type, int peer, Comm comm, Stream stream);
  Code (*Recv)(void* data, size_t count, int type, int peer, Comm comm, Stream stream);
  Code (*AllGather)(const void* send, void* recv, size_t send_count, int type, Comm comm,
                    Stream stream);
};

// Looked for once per process: symbols already there, then libnccl.so.2 (GDN_NCCL_LIBRARY names
// another file). kUnsupported says what was missing.
Result<const Api*> api();

// Ok, or kPeerFailed / kDevice with `what` and NCCL's words.
Status check(const Api& api, Code code, const std::string& what);

}  // namespace gdn::nccl
