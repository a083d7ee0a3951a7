// Runs the plans of all ranks in fp64 on the host, with token maps drawn from a hash instead of a
// model: S_t = A_t S_{t-1} + b_t, backward dS_{t-1} = A_t^T dS_t + c_t. Test support for the fold
// programs, the layouts of the tables and the counts of the messages.
#pragma once

#include <compare>
#include <map>
#include <string>
#include <vector>

#include "gdn/plan.h"

namespace gdn {

struct BoundaryKey {
  int64_t doc = 0;
  int64_t token = 0;  // tokens of the document before the boundary
  auto operator<=>(const BoundaryKey&) const = default;
};

// Boundary states by place, [HV][K][V] each.
struct Boundaries {
  std::map<BoundaryKey, std::vector<double>> forward;   // S before the token
  std::map<BoundaryKey, std::vector<double>> backward;  // dS there
  std::string error;  // a broken rule of the plans (sizes, counts, an unwritten element)
};

// `seed_of_doc` names the hash stream of each document, so that one document can be put in several
// packs with the same values.
Boundaries simulate(const Partition& partition, const PlanOptions& options,
                    const std::vector<uint64_t>& seed_of_doc);

// The states of the plain recurrence over whole documents, at the places of `like`.
Boundaries recurrence(const Partition& partition, const PlanOptions& options,
                      const std::vector<uint64_t>& seed_of_doc, const Boundaries& like);

}  // namespace gdn
