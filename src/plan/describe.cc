// A plan as text: segments (the middle left out where there are many), slots, exchange, and what
// goes to and comes from each rank. Bytes are those of fp32 states.
#include <fmt/format.h>

#include <algorithm>

#include "base/counted.h"
#include "gdn/plan.h"
#include "gdn/tensor.h"
#include "plan/byte_text.h"

namespace gdn {
namespace {

constexpr int64_t kHead = 12;  // rows shown of a long table, first and last
constexpr int64_t kTail = 4;

std::string bytes(int64_t elements) { return byte_text(elements * size_of(DType::kFloat32)); }

// Calls row(i) for the rows that are shown, and says how many are left out between.
template <typename Row>
void table(std::string& out, int64_t rows, const char* what, const Row& row) {
  const bool all = rows <= kHead + kTail + 1;
  for (int64_t i = 0; i < rows; ++i) {
    if (!all && i == kHead) {
      out += fmt::format("  ... {} more {} ...\n", rows - kHead - kTail, what);
      i = rows - kTail;
    }
    row(i);
  }
}

std::string slot(int64_t index) { return index < 0 ? "-" : fmt::format("{}", index); }

void describe_segments(const Plan& plan, std::string& out) {
  out += fmt::format("segments: {} of {}; {}\n", plan.segments.size(),
                     counted(plan.counts.chunks, "chunk"), plan.segment_reason);
  if (plan.segments.empty()) return;
  out += fmt::format("  {:>8} {:>8} {:>12} {:>10} {:>7} {:>6} {:>6} {:>6}\n", "document",
                     "fragment", "first row", "tokens", "chunks", "entry", "exit", "map");
  table(out, std::ssize(plan.segments), "segments", [&](int64_t i) {
    const Segment& s = plan.segments[i];
    out += fmt::format("  {:>8} {:>8} {:>12} {:>10} {:>7} {:>6} {:>6} {:>6}\n", s.doc, s.fragment,
                       s.row, s.length, s.chunks(), slot(s.entry_slot), slot(s.exit_slot),
                       slot(s.map_slot));
  });
}

void describe_messages(const Plan& plan, const char* name, const ExchangePass& pass, int64_t sent,
                       std::string& out) {
  const bool returns = plan.exchange == ExchangeKind::kAllToAll;
  out += fmt::format("{}: {} to other ranks; {} in {}\n", name, bytes(sent),
                     counted(std::ssize(pass.fold.steps), "fold step"),
                     counted(pass.fold.chains(), "chain"));
  out += fmt::format("  {:>6} {:>11} {:>11}", "rank", "sent", "received");
  out += returns ? fmt::format(" {:>11} {:>11}\n", "return", "returned") : "\n";
  table(out, plan.world_size, "ranks", [&](int64_t peer) {
    out += fmt::format("  {:>6} {:>11} {:>11}", peer, bytes(pass.send[peer]),
                       bytes(pass.receive[peer]));
    if (returns) {
      out += fmt::format(" {:>11} {:>11}", bytes(pass.return_send[peer]),
                         bytes(pass.return_receive[peer]));
    }
    out += peer == plan.rank ? "  (kept here)\n" : "\n";
  });
}

}  // namespace

std::string describe(const Plan& plan) {
  std::string out =
      fmt::format("rank {} of {}: {}, {} of {} x {}\n", plan.rank, plan.world_size,
                  counted(plan.local_tokens, "token"), counted(plan.options.heads_v, "value head"),
                  plan.options.dim_k, plan.options.dim_v);
  describe_segments(plan, out);
  if (!plan.empty_documents.empty()) {
    out +=
        fmt::format("documents without tokens: {}, kept by rank 0\n", plan.empty_documents.size());
  }
  out += fmt::format(
      "boundary slots: {} entry, {} exit, {} map; maps {}, forward states {}, backward states {}\n",
      plan.counts.entry_slots, plan.counts.exit_slots, plan.counts.map_slots,
      bytes(plan.map_elements()), bytes(plan.part_elements(false) + plan.boundary_elements(false)),
      bytes(plan.part_elements(true) + plan.boundary_elements(true)));
  out += fmt::format("exchange: {}\n", plan.exchange == ExchangeKind::kNone
                                           ? "none, " + plan.exchange_reason
                                           : plan.exchange_reason);
  if (plan.exchange != ExchangeKind::kNone) {
    describe_messages(plan, "forward", plan.forward, plan.sent_elements(false), out);
    describe_messages(plan, "backward", plan.backward, plan.sent_elements(true), out);
  }
  return out;
}

}  // namespace gdn
