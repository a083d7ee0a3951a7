// The specification in code: fp64 arithmetic, token by token, from the recurrence and its adjoint.
// No chunks, no approximations, no device: every other backend is judged by it.
#pragma once

#include "gdn/backend.h"

namespace gdn {

const Backend& reference_backend();

}  // namespace gdn
