// Exceptions of the standard library, out of memory above all, as values.
#pragma once

#include <exception>
#include <new>

#include "gdn/status.h"

namespace gdn {

// What `body`, a callable returning Status, returns; kInternal where it throws.
template <typename Body>
Status guarded(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kInternal, "out of host memory"};
  } catch (const std::exception& error) {
    return {ErrorCode::kInternal, error.what()};
  }
}

}  // namespace gdn
