// The programs of one direction. With s_0, s_1, ... the segments of a local chain in walking order
// and u_0, u_1, ... the units of a crossing document likewise:
//   pack    X = part(s_0); X = M X + part(s_i); record <- X
//           X = M(s_0); X = M X; record <- X   (pack_maps where K and V differ: other columns)
//   fold    X = part(u_0) -> u_1; X = M X + part(u_i) -> u_{i+1}
//   spread  X = returned(unit) -> s_0, or X = part(s_0) -> s_1; X = M X + part(s_i) -> s_{i+1}
// The backward pass takes M transposed. A chain is the same steps whatever W is, and whichever of
// pack and spread has it: nothing enters a document that begins here, so its chain may run before
// the exchange, beside those that pack; it does where that does not hold the exchange up.
#include "plan/exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "gdn/tensor.h"
#include "plan/byte_text.h"
#include "plan/share.h"

namespace gdn {
namespace {

int64_t heads_before(const Plan& plan, int rank) {
  return share_begin(rank, plan.world_size, plan.options.heads_v);
}

int64_t heads_of(const Plan& plan, int rank) {
  return heads_before(plan, rank + 1) - heads_before(plan, rank);
}

// Elements that all ranks together hand to others in both directions.
int64_t total_moved(const UnitTable& units, const Plan& plan, ExchangeKind kind) {
  int64_t total = 0;
  for (int direction : {kForward, kBackward}) {
    for (int rank = 0; rank < plan.world_size; ++rank) {
      const int64_t sent = units.sent[direction][rank];
      const int64_t returned = units.returned[direction][rank];
      total += kind == ExchangeKind::kAllGather
                   ? (plan.world_size - 1) * plan.options.heads_v * sent
                   : (plan.options.heads_v - heads_of(plan, rank)) * (sent + returned);
    }
  }
  return total;
}

class Writer {
 public:
  Writer(const UnitTable& units, int direction, const Plan& plan)
      : units_(units),
        direction_(direction),
        plan_(plan),
        all_to_all_(plan.exchange == ExchangeKind::kAllToAll),
        map_(plan.options.dim_k * plan.options.dim_k),
        state_(plan.options.dim_k * plan.options.dim_v) {
    // Heads of one block: of this rank's share under all-to-all, all of them under all-gather.
    block_heads_ = all_to_all_ ? heads_of(plan, plan.rank) : plan.options.heads_v;
    received_at_ = block_starts(units.sent[direction]);
    received_map_at_ = block_starts(units.sent[kForward]);
    return_at_ = block_starts(units.returned[direction]);
  }

  ExchangePass write() {
    counts();
    open(pass_.pack, plan_.options.dim_v, 0, plan_.options.heads_v);
    open(pass_.spread, plan_.options.dim_v, 0, plan_.options.heads_v);
    if (direction_ == kForward)
      open(pass_.pack_maps, plan_.options.dim_k, 0, plan_.options.heads_v);
    for (const LocalChain& chain : units_.chains) {
      if (chain.unit != kAbsent) pack(chain);
    }
    const int64_t free_steps = longest_chain(pass_.pack);
    for (const LocalChain& chain : units_.chains) {
      const bool early = !enters(chain) && spread_steps(chain) <= free_steps;
      spread(chain, early ? pass_.pack : pass_.spread);
    }
    const int64_t first = all_to_all_ ? heads_before(plan_, plan_.rank) : 0;
    open(pass_.fold, plan_.options.dim_v, first, first + block_heads_);
    if (all_to_all_) pass_.fold.steps.reserve(units_.units.size());
    for (size_t doc = 0; block_heads_ > 0 && doc + 1 < units_.document_begin.size(); ++doc) {
      fold(units_.document_begin[doc], units_.document_begin[doc + 1]);
    }
    return std::move(pass_);
  }

 private:
  // ---- Sizes ----
  void counts() {
    const int w = plan_.world_size;
    const auto& sent = units_.sent[direction_];
    const auto& returned = units_.returned[direction_];
    for (auto* list : {&pass_.send, &pass_.receive, &pass_.return_send, &pass_.return_receive}) {
      list->assign(w, 0);
    }
    for (int peer = 0; peer < w && plan_.exchange != ExchangeKind::kNone; ++peer) {
      pass_.send[peer] =
          (all_to_all_ ? heads_of(plan_, peer) : plan_.options.heads_v) * sent[plan_.rank];
      pass_.receive[peer] = block_heads_ * sent[peer];
      if (!all_to_all_) continue;
      pass_.return_send[peer] = block_heads_ * returned[peer];
      pass_.return_receive[peer] = heads_of(plan_, peer) * returned[plan_.rank];
    }
    pass_.send_elements = plan_.options.heads_v * sent[plan_.rank];
    pass_.returned_elements = plan_.options.heads_v * returned[plan_.rank];
    pass_.received_elements =
        std::accumulate(pass_.receive.begin(), pass_.receive.end(), int64_t{0});
    pass_.return_send_elements =
        std::accumulate(pass_.return_send.begin(), pass_.return_send.end(), int64_t{0});
  }

  // Element at which each rank's block starts.
  std::vector<int64_t> block_starts(const std::vector<int64_t>& per_head) const {
    std::vector<int64_t> starts(per_head.size());
    for (size_t rank = 1; rank < starts.size(); ++rank) {
      starts[rank] = starts[rank - 1] + block_heads_ * per_head[rank - 1];
    }
    return starts;
  }

  // ---- References ----
  FoldRef map(const Segment& s) const {
    return {Table::kMap, s.map_slot * map_, plan_.capacity.map_slots * map_};
  }
  FoldRef part(const Segment& s) const {
    const bool forward = direction_ == kForward;
    return {Table::kPart, (forward ? s.exit_slot : s.entry_slot) * state_,
            (forward ? plan_.capacity.exit_slots : plan_.capacity.entry_slots) * state_};
  }
  FoldRef boundary(const Segment& s) const {
    const bool forward = direction_ == kForward;
    return {Table::kBoundary, (forward ? s.entry_slot : s.exit_slot) * state_,
            (forward ? plan_.capacity.entry_slots : plan_.capacity.exit_slots) * state_};
  }
  FoldRef send(int64_t offset) const {
    return {Table::kSend, offset, units_.sent[direction_][plan_.rank]};
  }
  FoldRef received_part(const Unit& unit) const {
    return {Table::kReceived, received_at_[unit.rank] + unit.part[direction_],
            units_.sent[direction_][unit.rank]};
  }
  FoldRef received_map(const Unit& unit) const {
    return {direction_ == kForward ? Table::kReceived : Table::kReceivedMap,
            received_map_at_[unit.rank] + unit.map, units_.sent[kForward][unit.rank]};
  }
  FoldRef returned(const Unit& unit) const {
    return {Table::kReturned, unit.returned[direction_], units_.returned[direction_][unit.rank]};
  }
  // Where the fold leaves a unit's boundary state; absent where this rank has no use for it.
  FoldRef folded(const Unit& unit) const {
    if (!all_to_all_) return unit.rank == plan_.rank ? returned(unit) : FoldRef{};
    return {Table::kReturnSend, return_at_[unit.rank] + unit.returned[direction_],
            units_.returned[direction_][unit.rank]};
  }

  // ---- Programs ----
  void open(FoldProgram& program, int64_t cols, int64_t head_begin, int64_t head_end) const {
    program.chain_begin.assign(1, 0);
    program.rows = plan_.options.dim_k;
    program.cols = cols;
    program.transpose = direction_ == kBackward;
    program.head_begin = static_cast<int>(head_begin);
    program.head_end = static_cast<int>(head_end);
  }

  static int64_t longest_chain(const FoldProgram& program) {
    int64_t longest = 0;
    for (int64_t c = 0; c < program.chains(); ++c) {
      longest = std::max(longest, program.chain_begin[c + 1] - program.chain_begin[c]);
    }
    return longest;
  }

  // Ends a chain, if it has steps.
  static void close(FoldProgram& program) {
    const int64_t steps = static_cast<int64_t>(program.steps.size());
    if (steps > program.chain_begin.back()) program.chain_begin.push_back(steps);
  }

  // Segment i of the chain in walking order.
  const Segment& segment(const LocalChain& chain, int64_t i) const {
    const int64_t at = direction_ == kForward ? chain.begin + i : chain.end - 1 - i;
    return plan_.segments[units_.chain_segments[at]];
  }

  // A state from another rank comes before the chain's segments.
  bool enters(const LocalChain& chain) const {
    return chain.unit != kAbsent && units_.units[chain.unit].returned[direction_] != kAbsent;
  }
  int64_t spread_steps(const LocalChain& chain) const {
    return chain.end - chain.begin - (enters(chain) ? 0 : 1);
  }

  void pack(const LocalChain& chain) {
    const Unit& unit = units_.units[chain.unit];
    const int64_t n = chain.end - chain.begin;
    if (unit.part[direction_] != kAbsent) {
      for (int64_t i = 0; i < n; ++i) {
        const Segment& s = segment(chain, i);
        pass_.pack.steps.push_back({i > 0 ? map(s) : FoldRef{}, part(s),
                                    i == n - 1 ? send(unit.part[direction_]) : FoldRef{}});
      }
      close(pass_.pack);
    }
    if (direction_ == kForward && unit.map != kAbsent) {
      FoldProgram& maps = maps_are_packed_apart(plan_.options) ? pass_.pack_maps : pass_.pack;
      for (int64_t i = 0; i < n; ++i) {
        const Segment& s = segment(chain, i);
        maps.steps.push_back({i > 0 ? map(s) : FoldRef{}, i == 0 ? map(s) : FoldRef{},
                              i == n - 1 ? send(unit.map) : FoldRef{}});
      }
      close(maps);
    }
  }

  void spread(const LocalChain& chain, FoldProgram& program) {
    const int64_t n = chain.end - chain.begin;
    const bool entered = enters(chain);
    if (entered) {
      program.steps.push_back(
          {{}, returned(units_.units[chain.unit]), boundary(segment(chain, 0))});
    }
    for (int64_t i = 0; i + 1 < n; ++i) {
      const Segment& s = segment(chain, i);
      program.steps.push_back(
          {entered || i > 0 ? map(s) : FoldRef{}, part(s), boundary(segment(chain, i + 1))});
    }
    close(program);
  }

  // Units [begin, end) are one document in document order.
  void fold(int64_t begin, int64_t end) {
    const auto unit = [&](int64_t i) -> const Unit& {
      return units_.units[direction_ == kForward ? begin + i : end - 1 - i];
    };
    // Nobody here needs what lies past the last unit with a use.
    int64_t steps = end - begin - 1;
    while (steps > 0 && !folded(unit(steps)).present()) --steps;
    for (int64_t i = 0; i < steps; ++i) {
      pass_.fold.steps.push_back(
          {i > 0 ? received_map(unit(i)) : FoldRef{}, received_part(unit(i)), folded(unit(i + 1))});
    }
    close(pass_.fold);
  }

  const UnitTable& units_;
  const int direction_;
  const Plan& plan_;
  const bool all_to_all_;
  const int64_t map_;    // elements of M
  const int64_t state_;  // elements of a state
  int64_t block_heads_ = 0;
  std::vector<int64_t> received_at_, received_map_at_, return_at_;
  ExchangePass pass_;
};

}  // namespace

bool maps_are_packed_apart(const PlanOptions& options) { return options.dim_k != options.dim_v; }

void choose_exchange(const UnitTable& units, Plan& plan) {
  const auto& sent = units.sent[kForward];  // a document that crosses hands over B
  if (std::all_of(sent.begin(), sent.end(), [](int64_t n) { return n == 0; })) {
    plan.exchange = ExchangeKind::kNone;
    plan.exchange_reason = "no document spans two ranks";
    return;
  }
  const int64_t gather = total_moved(units, plan, ExchangeKind::kAllGather);
  const int64_t a2a = total_moved(units, plan, ExchangeKind::kAllToAll);
  plan.all_gather_elements = gather;
  plan.all_to_all_elements = a2a;
  const char* why = "forced";
  switch (plan.options.exchange) {
    case ExchangePolicy::kAllGather:
      plan.exchange = ExchangeKind::kAllGather;
      break;
    case ExchangePolicy::kAllToAll:
      plan.exchange = ExchangeKind::kAllToAll;
      break;
    case ExchangePolicy::kAuto:
      plan.exchange = a2a < gather ? ExchangeKind::kAllToAll : ExchangeKind::kAllGather;
      why = a2a == gather ? "equal bytes, one collective less" : "fewer bytes";
      break;
  }
  plan.exchange_reason = fmt::format(
      "{} ({}): all-gather moves {}, all-to-all {}, over all ranks, forward and backward, in fp32",
      to_string(plan.exchange), why, byte_text(gather * size_of(DType::kFloat32)),
      byte_text(a2a * size_of(DType::kFloat32)));
}

void write_pass(const UnitTable& units, int direction, Plan& plan) {
  ExchangePass& pass = direction == kForward ? plan.forward : plan.backward;
  pass = Writer(units, direction, plan).write();
}

}  // namespace gdn
