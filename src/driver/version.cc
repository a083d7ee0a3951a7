#include "gdn/gdn.h"

namespace gdn {

const char* version() { return "0.1.0"; }

}  // namespace gdn
