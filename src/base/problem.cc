#include "gdn/problem.h"

#include <cmath>

namespace gdn {

double Problem::scale() const {
  return options.scale.value_or(1.0 / std::sqrt(static_cast<double>(dim_k)));
}

}  // namespace gdn
