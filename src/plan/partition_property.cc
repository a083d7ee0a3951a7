#include "plan/partition_property.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <random>

namespace gdn {
namespace {

using Random = std::mt19937_64;

// In [low, high]; modulo, so that a seed gives the same case with every standard library.
int64_t between(Random& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

// Mostly ordinary ranks, sometimes all on one or two, so that others stay empty.
int pick_rank(Random& random, int world_size, bool few) {
  return static_cast<int>(between(random, 0, few ? std::min(1, world_size - 1) : world_size - 1));
}

std::vector<std::vector<Fragment>> ragged_table(Random& random, const std::vector<int64_t>& cu,
                                                int world_size, int64_t unit) {
  std::vector<std::vector<Fragment>> table(world_size);
  const bool few = between(random, 0, 3) == 0;
  for (size_t doc = 0; doc + 1 < cu.size(); ++doc) {
    const int64_t length = cu[doc + 1] - cu[doc];
    int64_t at = 0;
    while (at < length) {
      const int64_t most = std::max<int64_t>(1, length / unit / between(random, 1, 4));
      const int64_t piece = std::min(length - at, unit * between(random, 1, most));
      table[pick_rank(random, world_size, few)].push_back({int64_t(doc), at, piece});
      at += piece;
    }
    if (between(random, 0, 7) == 0) {
      const int64_t offset = unit * between(random, 0, length / unit);
      table[pick_rank(random, world_size, few)].push_back({int64_t(doc), offset, 0});
    }
  }
  for (auto& list : table) {  // Fisher-Yates by the seed's own numbers
    for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[random() % i]);
  }
  return table;
}

// What the definition says of one token: who holds it, and in which local row.
struct Place {
  int rank = -1;
  int64_t fragment = -1;
  int64_t row = -1;
};

class Checker {
 public:
  explicit Checker(const Partition& partition) : p_(partition), place_(p_.num_tokens()) {}

  std::string run() {
    for (int rank = 0; rank < p_.world_size(); ++rank) {
      if (std::string why = check_rows(rank); !why.empty()) return why;
    }
    for (size_t token = 0; token < place_.size(); ++token) {
      if (place_[token].rank < 0) return fmt::format("token {} is on no rank", token);
    }
    for (int64_t doc = 0; doc < p_.num_documents(); ++doc) {
      if (std::string why = check_holders(doc); !why.empty()) return why;
    }
    for (int rank = 0; rank < p_.world_size(); ++rank) {
      if (std::string why = check_crossing(rank); !why.empty()) return why;
      if (std::string why = check_halo(rank); !why.empty()) return why;
    }
    return {};
  }

 private:
  int64_t global(const Fragment& f) const { return p_.cu_seqlens()[f.doc] + f.offset; }

  bool crosses(int64_t doc) const {
    for (int64_t t = p_.cu_seqlens()[doc]; t < p_.cu_seqlens()[doc + 1]; ++t) {
      if (place_[t].rank != place_[p_.cu_seqlens()[doc]].rank) return true;
    }
    return false;
  }

  std::string check_rows(int rank) {
    const auto local = p_.fragments(rank);
    const auto cu = p_.local_cu_seqlens(rank);
    const std::vector<int64_t> rows = p_.token_indices(rank);
    if (cu.size() != local.size() + 1 || cu[0] != 0 || cu.back() != p_.local_tokens(rank) ||
        static_cast<int64_t>(rows.size()) != p_.local_tokens(rank)) {
      return fmt::format("rank {}: sizes do not agree", rank);
    }
    for (size_t i = 0; i < local.size(); ++i) {
      const Fragment& f = local[i];
      if (cu[i + 1] - cu[i] != f.length) return fmt::format("rank {}: local_cu_seqlens", rank);
      if (p_.layout() != Layout::kExplicit) {
        if (f.length == 0) return fmt::format("rank {}: fragment {} is empty", rank, i);
        if (i > 0 && local[i - 1].doc == f.doc &&
            local[i - 1].offset + local[i - 1].length == f.offset)
          return fmt::format("rank {}: fragment {} continues the one before it", rank, i);
      }
      for (int64_t t = 0; t < f.length; ++t) {
        const int64_t token = global(f) + t;
        if (rows[cu[i] + t] != token) return fmt::format("rank {}: token_indices", rank);
        if (token >= p_.cu_seqlens()[f.doc + 1]) return fmt::format("rank {}: beyond", rank);
        if (place_[token].rank >= 0) return fmt::format("token {} is held twice", token);
        place_[token] = {rank, static_cast<int64_t>(i), cu[i] + t};
      }
    }
    return {};
  }

  std::string check_holders(int64_t doc) const {
    int64_t at = 0;
    for (const auto& holder : p_.holders(doc)) {
      const Fragment& f = p_.fragments(holder.rank)[holder.fragment];
      if (f.doc != doc || f.offset != at || f.length == 0) {
        return fmt::format("holders of document {} are out of order", doc);
      }
      at += f.length;
    }
    const int64_t length = p_.cu_seqlens()[doc + 1] - p_.cu_seqlens()[doc];
    return at == length ? "" : fmt::format("holders of document {} are incomplete", doc);
  }

  std::string check_crossing(int rank) const {
    const auto local = p_.fragments(rank);
    std::vector<Crossing> expected;
    for (size_t i = 0; i < local.size(); ++i) {
      const Fragment& f = local[i];
      if (f.length == 0 || !crosses(f.doc)) continue;
      Crossing c;
      c.fragment = static_cast<int64_t>(i);
      if (f.offset > 0) {
        c.predecessor_rank = place_[global(f) - 1].rank;
        c.predecessor_fragment = place_[global(f) - 1].fragment;
      }
      if (global(f) + f.length < p_.cu_seqlens()[f.doc + 1]) {
        c.successor_rank = place_[global(f) + f.length].rank;
        c.successor_fragment = place_[global(f) + f.length].fragment;
      }
      expected.push_back(c);
    }
    if (p_.crossing(rank) != expected) return fmt::format("rank {}: crossing", rank);
    if (!expected.empty() && !p_.has_crossing()) return "has_crossing";
    return {};
  }

  std::string check_halo(int rank) const {
    const auto local = p_.fragments(rank);
    for (const int width : {1, 2, 4, 9}) {
      // Every row that is needed, as (fragment, rows before it, owner, owner's row).
      std::vector<std::array<int64_t, 4>> expected, got;
      for (size_t i = 0; i < local.size(); ++i) {
        if (local[i].length == 0) continue;
        for (int64_t before = std::min<int64_t>(width - 1, local[i].offset); before > 0; --before) {
          const Place& place = place_[global(local[i]) - before];
          expected.push_back({static_cast<int64_t>(i), before, place.rank, place.row});
        }
      }
      for (const HaloRun& run : p_.halo(rank, width)) {
        if (run.length < 1) return fmt::format("rank {}: empty halo run", rank);
        for (int64_t j = 0; j < run.length; ++j) {
          got.push_back({run.fragment, run.rows_before - j, run.owner_rank, run.owner_row + j});
        }
      }
      if (got != expected) return fmt::format("rank {}: halo of width {}", rank, width);
    }
    return {};
  }

  const Partition& p_;
  std::vector<Place> place_;  // [tokens]
};

}  // namespace

PartitionCase draw_case(uint64_t seed, int64_t unit) {
  Random random(seed);
  PartitionCase drawn;
  drawn.cu_seqlens = {0};
  const int64_t longest = unit * (random() % 2 ? 12 : 90);
  for (int64_t i = between(random, 0, 6); i > 0; --i) {
    const int64_t length = between(random, 0, 4) == 0 ? 0 : between(random, 0, longest);
    drawn.cu_seqlens.push_back(drawn.cu_seqlens.back() + length);
  }
  constexpr int kWorldSizes[] = {1, 2, 3, 4, 5, 8, 64};
  return redraw_case(drawn, random(), kWorldSizes[random() % std::size(kWorldSizes)], unit);
}

PartitionCase redraw_case(const PartitionCase& drawn, uint64_t seed, int world_size, int64_t unit) {
  Random random(seed);
  PartitionCase again;
  again.cu_seqlens = drawn.cu_seqlens;
  again.world_size = world_size;
  constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument,
                                 Layout::kExplicit};
  again.layout = unit > 1 ? Layout::kExplicit : kLayouts[random() % std::size(kLayouts)];
  if (again.layout == Layout::kExplicit) {
    again.fragments = ragged_table(random, again.cu_seqlens, world_size, unit);
  } else if (again.layout == Layout::kZigzagPerDocument && random() % 2) {
    for (size_t doc = 0; doc + 1 < again.cu_seqlens.size(); ++doc) {
      const int64_t length = again.cu_seqlens[doc + 1] - again.cu_seqlens[doc];
      std::vector<int64_t> cuts{0, length};
      while (static_cast<int>(cuts.size()) < 2 * world_size + 1) {
        cuts.push_back(between(random, 0, length));
      }
      std::sort(cuts.begin(), cuts.end());
      again.cut_points.insert(again.cut_points.end(), cuts.begin(), cuts.end());
    }
  }
  return again;
}

Result<Partition> make_case(const PartitionCase& drawn) {
  if (drawn.layout == Layout::kExplicit) {
    return Partition::make_explicit(drawn.cu_seqlens, drawn.fragments);
  }
  if (!drawn.cut_points.empty()) {
    return Partition::make_with_cuts(drawn.cu_seqlens, drawn.world_size, drawn.cut_points);
  }
  return Partition::make(drawn.cu_seqlens, drawn.world_size, drawn.layout);
}

std::string broken_invariant(const Partition& partition) { return Checker(partition).run(); }

}  // namespace gdn
