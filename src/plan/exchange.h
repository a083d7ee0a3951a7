// Chooses the kind of exchange and writes its counts and fold programs. Private to src/plan/.
#pragma once

#include "plan/units.h"

namespace gdn {

// Fills plan.exchange and exchange_reason.
void choose_exchange(const UnitTable& units, Plan& plan);

// Fills plan.forward or plan.backward.
void write_pass(const UnitTable& units, int direction, Plan& plan);

}  // namespace gdn
