#include "plan/plan_simulator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace gdn {
namespace {

using Matrix = std::vector<double>;  // row-major

// In [-1, 1), from the mixed bits of four numbers (the splitmix64 finaliser after each).
double hashed(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t x = 0;
  for (const uint64_t value : {a, b, c, d}) {
    x = (x + value + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1p-52 - 1;
}

// X <- op(A) X + add, X and add [rows, cols], A [rows, rows]; an absent map counts as 0.
void step(const double* map, bool transpose, const double* add, int64_t rows, int64_t cols,
          Matrix& x) {
  Matrix next(rows * cols, 0.0);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      double sum = 0;
      for (int64_t k = 0; map && k < rows; ++k) {
        sum += map[transpose ? k * rows + i : i * rows + k] * x[k * cols + j];
      }
      next[i * cols + j] = sum + (add ? add[i * cols + j] : 0.0);
    }
  }
  x = std::move(next);
}

// The values of one document and head. A_t is a rotation of neighbouring coordinates: products over
// thousands of tokens neither vanish nor grow, and differ from their transposes.
class Tokens {
 public:
  Tokens(uint64_t seed, int64_t head, const PlanOptions& o)
      : seed_(seed * 1000 + static_cast<uint64_t>(head)), k_(o.dim_k), v_(o.dim_v) {}

  Matrix state(uint64_t kind, int64_t token) const {
    Matrix m(k_ * v_);
    for (size_t i = 0; i < m.size(); ++i) m[i] = hashed(seed_, kind, token, i);
    return m;
  }
  Matrix initial() const { return state(0, 0); }
  Matrix dfinal() const { return state(1, 0); }

  void forward(int64_t begin, int64_t end, bool with_input, int64_t cols, Matrix& x) const {
    for (int64_t t = begin; t < end; ++t) {
      const Matrix a = rotation(t), b = with_input ? state(2, t) : Matrix{};
      step(a.data(), false, with_input ? b.data() : nullptr, k_, cols, x);
    }
  }
  void backward(int64_t begin, int64_t end, Matrix& x) const {
    for (int64_t t = end; t-- > begin;) {
      const Matrix a = rotation(t), c = state(3, t);
      step(a.data(), true, c.data(), k_, v_, x);
    }
  }

 private:
  Matrix rotation(int64_t token) const {
    const double sign = hashed(seed_, 4, token, 0) < 0 ? -1 : 1;
    if (k_ == 1) return {sign};
    const double angle = 3 * hashed(seed_, 5, token, 0);
    Matrix m(k_ * k_, 0.0);
    for (int64_t i = 0; i < k_; ++i) m[i * k_ + i] = 1;
    const int64_t i = token % (k_ - 1);
    m[i * k_ + i] = m[(i + 1) * k_ + i + 1] = std::cos(angle);
    m[i * k_ + i + 1] = -std::sin(angle);
    m[(i + 1) * k_ + i] = std::sin(angle);
    return m;
  }

  uint64_t seed_;
  int64_t k_, v_;
};

// One rank: its plan and tables. Tables start as NaN, so that a read of what nobody wrote shows.
class Rank {
 public:
  Rank(const Partition& partition, int rank, const PlanOptions& options,
       const std::vector<uint64_t>& seeds)
      : partition_(partition), seeds_(seeds) {
    auto made = Plan::make(partition, rank, options);
    if (made)
      plan_ = *made;
    else
      error_ = made.status().message();
  }

  const Plan& plan() const { return plan_; }
  const std::string& error() const { return error_; }
  Matrix& table(Table which) { return tables_[static_cast<int>(which)]; }

  void summarize(bool backward) {
    const PlanOptions& o = plan_.options;
    const ExchangePass& pass = backward ? plan_.backward : plan_.forward;
    if (backward)
      table(Table::kReceivedMap) = table(Table::kReceived);
    else
      resize(Table::kMap, plan_.map_elements());
    resize(Table::kPart, plan_.part_elements(backward));
    resize(Table::kBoundary, plan_.boundary_elements(backward));
    resize(Table::kSend, pass.send_elements);
    resize(Table::kReceived, pass.received_elements);
    resize(Table::kReturnSend, pass.return_send_elements);
    resize(Table::kReturned, pass.returned_elements);
    for (const Segment& s : plan_.segments) {
      for (int64_t head = 0; head < o.heads_v; ++head) summarize(s, head, backward);
    }
  }

  void fold(const FoldProgram& program) {
    if (program.empty()) return;
    for (int64_t chain = 0; chain < program.chains(); ++chain) {
      for (int64_t h = 0; h < program.head_end - program.head_begin; ++h) {
        Matrix x;
        for (int64_t i = program.chain_begin[chain]; i < program.chain_begin[chain + 1]; ++i) {
          const FoldStep& s = program.steps[i];
          if (s.map.present() == (i == program.chain_begin[chain])) error_ = "map of a first step";
          const double* map = place(s.map, h, program.rows * program.rows, false);
          const double* add = place(s.add, h, program.rows * program.cols, false);
          step(map, program.transpose, add, program.rows, program.cols, x);
          if (double* out = place(s.out, h, program.rows * program.cols, true)) {
            std::copy(x.begin(), x.end(), out);
          }
        }
      }
    }
  }

  // Every boundary slot by its place in the document.
  void collect(bool backward, std::map<BoundaryKey, Matrix>& into) {
    const int64_t state = plan_.options.dim_k * plan_.options.dim_v;
    const int64_t slots = backward ? plan_.capacity.exit_slots : plan_.capacity.entry_slots;
    for (const Segment& s : plan_.segments) {
      const int64_t slot = backward ? s.exit_slot : s.entry_slot;
      if (slot < 0) continue;
      Matrix& values = into[{s.doc, offset(s) + (backward ? s.length : 0)}];
      for (int64_t head = 0; head < plan_.options.heads_v; ++head) {
        const auto at = table(Table::kBoundary).begin() + (head * slots + slot) * state;
        values.insert(values.end(), at, at + state);
      }
    }
  }

 private:
  void resize(Table which, int64_t elements) {
    table(which).assign(elements, std::numeric_limits<double>::quiet_NaN());
  }

  int64_t offset(const Segment& s) const {
    return partition_.fragments(plan_.rank)[s.fragment].offset + s.row -
           partition_.local_cu_seqlens(plan_.rank)[s.fragment];
  }

  double* place(const FoldRef& ref, int64_t head, int64_t elements, bool write) {
    if (!ref.present()) return nullptr;
    const int64_t at = ref.offset + head * ref.head_stride;
    Matrix& values = table(ref.table);
    if (at < 0 || at + elements > static_cast<int64_t>(values.size())) {
      error_ = fmt::format("table {}: element {} of {}", int(ref.table), at, values.size());
      return nullptr;
    }
    for (int64_t i = at; i < at + elements; ++i) {
      if (write != std::isnan(values[i])) {
        error_ = fmt::format("table {}: {} twice, or read before", int(ref.table), i);
      }
    }
    return values.data() + at;
  }

  void summarize(const Segment& s, int64_t head, bool backward) {
    const PlanOptions& o = plan_.options;
    const Tokens tokens(seeds_[s.doc], head, o);
    const int64_t begin = offset(s), state = o.dim_k * o.dim_v, map = o.dim_k * o.dim_k;
    if (backward ? s.entry_slot >= 0 : s.exit_slot >= 0) {
      Matrix x(state, 0.0);
      if (backward && s.ends_document()) x = tokens.dfinal();
      if (!backward && s.starts_document()) x = tokens.initial();
      if (backward)
        tokens.backward(begin, begin + s.length, x);
      else
        tokens.forward(begin, begin + s.length, true, o.dim_v, x);
      const int64_t slot = backward ? s.entry_slot : s.exit_slot;
      const int64_t slots = backward ? plan_.capacity.entry_slots : plan_.capacity.exit_slots;
      std::copy(x.begin(), x.end(), table(Table::kPart).begin() + (head * slots + slot) * state);
    }
    if (!backward && s.map_slot >= 0) {
      Matrix x(map, 0.0);
      for (int64_t i = 0; i < o.dim_k; ++i) x[i * o.dim_k + i] = 1;
      tokens.forward(begin, begin + s.length, false, o.dim_k, x);
      std::copy(x.begin(), x.end(),
                table(Table::kMap).begin() + (head * plan_.capacity.map_slots + s.map_slot) * map);
    }
  }

  const Partition& partition_;
  const std::vector<uint64_t>& seeds_;
  Plan plan_;
  std::string error_;
  std::array<Matrix, kNumTables> tables_;
};

// Blocks `from`[me -> peer] of every rank arrive in rank order; counts of both sides must agree.
std::string deliver(std::vector<Rank>& ranks, Table from, Table to, bool gather,
                    std::vector<int64_t> ExchangePass::*send,
                    std::vector<int64_t> ExchangePass::*receive, bool backward) {
  const auto pass = [&](size_t r) -> const ExchangePass& {
    return backward ? ranks[r].plan().backward : ranks[r].plan().forward;
  };
  for (size_t r = 0; r < ranks.size(); ++r) {
    int64_t at = 0;
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      const int64_t count = (pass(peer).*send)[r];
      if (count != (pass(r).*receive)[peer]) return fmt::format("counts {} -> {}", peer, r);
      int64_t begin = 0;
      for (size_t p = 0; p < r && !gather; ++p) begin += (pass(peer).*send)[p];
      Matrix& source = ranks[peer].table(from);
      Matrix& target = ranks[r].table(to);
      if (begin + count > int64_t(source.size()) || at + count > int64_t(target.size())) {
        return fmt::format("sizes {} -> {}", peer, r);
      }
      std::copy_n(source.begin() + begin, count, target.begin() + at);
      at += count;
    }
    if (at != int64_t(ranks[r].table(to).size())) return fmt::format("rank {} wants more", r);
  }
  return {};
}

std::string run_pass(std::vector<Rank>& ranks, bool backward) {
  const ExchangeKind kind = ranks[0].plan().exchange;
  const auto each = [&](FoldProgram ExchangePass::*program) {
    for (Rank& r : ranks) r.fold((backward ? r.plan().backward : r.plan().forward).*program);
  };
  for (Rank& r : ranks) {
    if (r.plan().exchange != kind) return "ranks chose different exchanges";
    r.summarize(backward);
  }
  if (kind != ExchangeKind::kNone) {
    each(&ExchangePass::pack);
    each(&ExchangePass::pack_maps);
    std::string error =
        deliver(ranks, Table::kSend, Table::kReceived, kind == ExchangeKind::kAllGather,
                &ExchangePass::send, &ExchangePass::receive, backward);
    if (!error.empty()) return error;
    each(&ExchangePass::fold);
    if (kind == ExchangeKind::kAllToAll) {
      error = deliver(ranks, Table::kReturnSend, Table::kReturned, false,
                      &ExchangePass::return_send, &ExchangePass::return_receive, backward);
      if (!error.empty()) return error;
    }
  }
  each(&ExchangePass::spread);
  for (const Rank& r : ranks) {
    if (!r.error().empty()) return fmt::format("rank {}: {}", r.plan().rank, r.error());
  }
  return {};
}

}  // namespace

Boundaries simulate(const Partition& partition, const PlanOptions& options,
                    const std::vector<uint64_t>& seed_of_doc) {
  Boundaries result;
  std::vector<Rank> ranks;
  for (int r = 0; r < partition.world_size(); ++r) {
    ranks.emplace_back(partition, r, options, seed_of_doc);
    if (!ranks.back().error().empty()) result.error = ranks.back().error();
  }
  for (const bool backward : {false, true}) {
    if (result.error.empty()) result.error = run_pass(ranks, backward);
    if (!result.error.empty()) return result;
    for (Rank& r : ranks) r.collect(backward, backward ? result.backward : result.forward);
  }
  return result;
}

Boundaries recurrence(const Partition& partition, const PlanOptions& options,
                      const std::vector<uint64_t>& seed_of_doc, const Boundaries& like) {
  Boundaries result;
  const auto cu = partition.cu_seqlens();
  for (int64_t head = 0; head < options.heads_v; ++head) {
    Matrix x;
    int64_t doc = -1, at = 0;
    for (const auto& [key, unused] : like.forward) {  // ascending: one walk per document
      const Tokens tokens(seed_of_doc[key.doc], head, options);
      if (key.doc != doc) x = tokens.initial(), doc = key.doc, at = 0;
      tokens.forward(at, key.token, true, options.dim_v, x);
      at = key.token;
      auto& values = result.forward[key];
      values.insert(values.end(), x.begin(), x.end());
    }
    doc = -1;
    for (auto it = like.backward.rbegin(); it != like.backward.rend(); ++it) {
      const BoundaryKey& key = it->first;
      const Tokens tokens(seed_of_doc[key.doc], head, options);
      if (key.doc != doc) x = tokens.dfinal(), doc = key.doc, at = cu[doc + 1] - cu[doc];
      tokens.backward(key.token, at, x);
      at = key.token;
      auto& values = result.backward[key];
      values.insert(values.end(), x.begin(), x.end());
    }
  }
  return result;
}

}  // namespace gdn
