// Chooses the kind of exchange and writes its counts and fold programs. Private to src/plan/.
#pragma once

#include "plan/units.h"

namespace gdn {

// M has K columns, a state V: chains of one program have one width.
bool maps_are_packed_apart(const PlanOptions& options);

// Fills plan.exchange and exchange_reason.
void choose_exchange(const UnitTable& units, Plan& plan);

// Fills plan.forward or plan.backward.
void write_pass(const UnitTable& units, int direction, Plan& plan);

}  // namespace gdn
