#include "comm/nccl_api.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

namespace gdn::nccl {
namespace {

struct Loaded {
  Api api{};
  Status status;
};

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

// The first function that `library` lacks; null: none.
const char* fill(void* library, Api& api) {
#define GDN_NCCL_FIND(name) \
  if (!find(library, "nccl" #name, api.name)) return "nccl" #name
  GDN_NCCL_FIND(GetVersion);
  GDN_NCCL_FIND(GetErrorString);
  GDN_NCCL_FIND(GetUniqueId);
  GDN_NCCL_FIND(CommInitRank);
  GDN_NCCL_FIND(CommDestroy);
  GDN_NCCL_FIND(CommAbort);
  GDN_NCCL_FIND(CommGetAsyncError);
  GDN_NCCL_FIND(CommCount);
  GDN_NCCL_FIND(CommUserRank);
  GDN_NCCL_FIND(GroupStart);
  GDN_NCCL_FIND(GroupEnd);
  GDN_NCCL_FIND(Send);
  GDN_NCCL_FIND(Recv);
  GDN_NCCL_FIND(AllGather);
#undef GDN_NCCL_FIND
  return nullptr;
}

Loaded load() {
  Loaded loaded;
  const char* named = std::getenv("GDN_NCCL_LIBRARY");
  if (named == nullptr && fill(RTLD_DEFAULT, loaded.api) == nullptr) return loaded;
  const std::string file = named != nullptr ? named : "libnccl.so.2";
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    loaded.status = {ErrorCode::kUnsupported,
                     fmt::format("nccl: cannot load {}: {}", file, why != nullptr ? why : "")};
  } else if (const char* missing = fill(library, loaded.api)) {
    loaded.status = {ErrorCode::kUnsupported, fmt::format("nccl: {} lacks {}", file, missing)};
  }
  return loaded;
}

}  // namespace

Result<const Api*> api() {
  static const Loaded loaded = load();
  if (!loaded.status) return loaded.status;
  return &loaded.api;
}

Status check(const Api& api, Code code, const std::string& what) {
  if (code == kSuccess) return Status::ok();
  const bool peer = code == kSystemError || code == kRemoteError;
  return {peer ? ErrorCode::kPeerFailed : ErrorCode::kDevice,
          fmt::format("{}: {}", what, api.GetErrorString(code))};
}

}  // namespace gdn::nccl
