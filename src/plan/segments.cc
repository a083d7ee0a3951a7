#include "plan/segments.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/counted.h"
#include "plan/share.h"

namespace gdn {
namespace {

int64_t chunks_of(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }

// Costs in units of 64^3 multiply-adds, K = V = 128 (docs/math.md): a chunk is 18 in the summary
// and 20 in the run; a slot adds a fold of 8 for its state and 8 for its map. Every head is a
// serial walk, so heads_v walks run at once without any cut. Cutting makes a pass summary + run (18
// + 20) instead of run (20) alone, about twice the work: it pays once workers outnumber the walks
// two to one. A fragment strictly inside its document needs its summary anyway: there it pays as
// soon as any worker idles.
int64_t pieces(int64_t length, bool inside, const PlanOptions& options) {
  return std::clamp<int64_t>(chunks_of(length) / options.segment_chunks, 1,
                             most_pieces(inside, options));
}

class Cutter {
 public:
  explicit Cutter(Plan& plan) : plan_(plan) {}

  void add(const Fragment& f, int64_t document_length, int64_t fragment, int64_t row, int64_t begin,
           int64_t end) {
    Segment s;
    s.doc = f.doc;
    s.fragment = fragment;
    s.row = row + begin;
    s.length = end - begin;
    PlanCounts& counts = plan_.counts;
    s.first_chunk = counts.chunks;
    const bool starts = f.offset + begin == 0;
    const bool ends = f.offset + end == document_length;
    if (!starts) s.entry_slot = counts.entry_slots++;
    if (!ends) s.exit_slot = counts.exit_slots++;
    if (!starts && !ends) s.map_slot = counts.map_slots++;
    counts.chunks += s.chunks();
    counts.longest = std::max(counts.longest, s.length);
    ++counts.segments;
    plan_.segments.push_back(s);
  }

 private:
  Plan& plan_;
};

std::string reason(const Plan& plan, int64_t fragments) {
  const PlanOptions& o = plan.options;
  const int64_t segments = static_cast<int64_t>(plan.segments.size());
  if (o.tile > 0) {
    return fmt::format("cut at every {} tokens of a document, for results that do not depend on W",
                       o.tile);
  }
  if (segments > fragments) {
    return fmt::format("{} cut in {}, each cut leaving {} or more: {}, {}",
                       counted(fragments, "fragment"), counted(segments, "segment"),
                       counted(o.segment_chunks, "chunk"), counted(o.workers, "worker"),
                       counted(o.heads_v, "head"));
  }
  if (o.workers <= o.heads_v) {
    return fmt::format("fragments whole: {} {} {} busy", counted(o.heads_v, "head"),
                       o.heads_v == 1 ? "keeps" : "keep", counted(o.workers, "worker"));
  }
  return fmt::format(
      "fragments whole: cutting would cost more than {} over {} gain, or leave less than {}",
      counted(o.workers, "worker"), counted(o.heads_v, "head"), counted(o.segment_chunks, "chunk"));
}

}  // namespace

int64_t segment_chunks_of_heads(int64_t heads_v, int64_t workers, int64_t pack_chunks,
                                int64_t least) {
  constexpr int64_t kFewHeads = 11;
  if (16 * heads_v <= workers) return std::min(least, kFewHeads);
  return std::max(least, pack_chunks * heads_v / workers);
}

int64_t segment_chunks_over(int world_size, int64_t of_one_rank) {
  constexpr int64_t kLeast = 64, kLeastOfMany = 21;
  if (world_size == 1) return of_one_rank;
  const int64_t least = world_size > 4 && of_one_rank > kLeast ? kLeastOfMany : kLeast;
  return std::max(std::min(of_one_rank, least), 4 * of_one_rank / (5 * world_size));
}

int64_t most_pieces(bool inside, const PlanOptions& options) {
  const int64_t walks = options.heads_v * (inside ? 1 : 2);
  if (options.workers <= walks) return 1;
  return (options.segments_per_worker * options.workers + options.heads_v - 1) / options.heads_v;
}

Status check_tiles(const Partition& partition, int64_t tile) {
  for (int rank = 0; tile > 0 && rank < partition.world_size(); ++rank) {
    const auto fragments = partition.fragments(rank);
    for (size_t i = 0; i < fragments.size(); ++i) {
      if (fragments[i].length > 0 && fragments[i].offset % tile != 0) {
        return {ErrorCode::kInvalidArgument,
                fmt::format("tile: expected every fragment to start at a multiple of {} tokens of "
                            "its document, got offset {} of document {} in fragments[{}][{}]",
                            tile, fragments[i].offset, fragments[i].doc, rank, i)};
      }
    }
  }
  return Status::ok();
}

void cut_segments(const Partition& partition, Plan& plan, std::vector<int64_t>& segment_begin) {
  const auto fragments = partition.fragments(plan.rank);
  const auto rows = partition.local_cu_seqlens(plan.rank);
  const auto cu = partition.cu_seqlens();
  Cutter cutter(plan);
  int64_t with_tokens = 0;
  segment_begin.assign(1, 0);
  for (size_t i = 0; i < fragments.size(); ++i) {
    const Fragment& f = fragments[i];
    const int64_t document_length = cu[f.doc + 1] - cu[f.doc];
    const auto add = [&](int64_t begin, int64_t end) {
      cutter.add(f, document_length, static_cast<int64_t>(i), rows[i], begin, end);
    };
    with_tokens += f.length > 0;
    if (f.length > 0 && plan.options.tile > 0) {
      for (int64_t at = 0; at < f.length; at += plan.options.tile) {
        add(at, std::min(f.length, at + plan.options.tile));
      }
    } else if (f.length > 0) {
      const bool inside = f.offset > 0 && f.offset + f.length < document_length;
      const int64_t parts = pieces(f.length, inside, plan.options);
      const int64_t chunks = chunks_of(f.length);
      for (int64_t p = 0; p < parts; ++p) {
        add(share_begin(p, parts, chunks) * kChunk,
            std::min(f.length, share_begin(p + 1, parts, chunks) * kChunk));
      }
    }
    segment_begin.push_back(static_cast<int64_t>(plan.segments.size()));
  }
  plan.segment_reason = reason(plan, with_tokens);
}

}  // namespace gdn
