#include "gdn/status.h"

namespace gdn {

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk: return "ok";
    case ErrorCode::kInvalidArgument: return "invalid argument";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kWorkspaceTooSmall: return "workspace too small";
    case ErrorCode::kPeerFailed: return "peer failed";
    case ErrorCode::kDevice: return "device error";
    case ErrorCode::kIo: return "i/o error";
    case ErrorCode::kInternal: return "internal error";
  }
  return "unknown error";
}

}  // namespace gdn
