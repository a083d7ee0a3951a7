#include "backend/cuda/sm90/chains.h"

#include <utility>

namespace gdn::sm90 {
namespace {

// A segment as it is walked.
struct Ends {
  bool begins_document, ends_document;  // there the walk meets a document's state
  int64_t from_slot, to_slot;

  Ends(const Segment& s, Direction direction)
      : begins_document(s.starts_document()),
        ends_document(s.ends_document()),
        from_slot(s.entry_slot),
        to_slot(s.exit_slot) {
    if (direction == Direction::kReverse) {
      std::swap(begins_document, ends_document);
      std::swap(from_slot, to_slot);
    }
  }
};

Chain chain_of(const Segment& s, Direction direction) {
  Chain chain;
  chain.row = s.row;
  chain.first_chunk = s.first_chunk;
  chain.tokens = s.length;
  chain.reverse = direction == Direction::kReverse;
  return chain;
}

}  // namespace

std::vector<Chain> run_chains(const Plan& plan, Direction direction) {
  std::vector<Chain> chains;
  for (const Segment& s : plan.segments) {
    const Ends ends(s, direction);
    Chain chain = chain_of(s, direction);
    chain.enter = ends.begins_document ? StateKind::kDocument : StateKind::kSlot;
    chain.enter_index = ends.begins_document ? s.doc : ends.from_slot;
    if (ends.ends_document) {
      chain.leave = StateKind::kDocument;
      chain.leave_index = s.doc;
    }
    chains.push_back(chain);
  }
  return chains;
}

std::vector<Chain> summary_chains(const Plan& plan, Direction direction) {
  std::vector<Chain> chains;
  for (const Segment& s : plan.segments) {
    const Ends ends(s, direction);
    if (ends.to_slot < 0) continue;
    Chain part = chain_of(s, direction);
    if (ends.begins_document) {
      part.enter = StateKind::kDocument;
      part.enter_index = s.doc;
    }
    part.leave = StateKind::kSlot;
    part.leave_index = ends.to_slot;
    chains.push_back(part);
    if (direction == Direction::kReverse || s.map_slot < 0) continue;
    Chain map = part;
    map.enter = map.leave = StateKind::kIdentity;
    map.leave_index = s.map_slot;
    chains.push_back(map);
  }
  return chains;
}

}  // namespace gdn::sm90
