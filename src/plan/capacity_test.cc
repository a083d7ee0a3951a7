// Plans of a capacity: whatever the packing, its counts fit and its sizes are the same; the
// programs still follow the recurrence; what does not fit is refused.
#include "plan/capacity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "plan/partition_property.h"
#include "plan/plan_simulator.h"

namespace gdn {
namespace {

using Rows = std::vector<int64_t>;

Plan planned(const Partition& partition, int rank, const PlanOptions& options) {
  auto plan = Plan::make(partition, rank, options);
  EXPECT_TRUE(plan.is_ok()) << plan.status().message();
  return *plan;
}

// The least capacity that the partition fits in.
void fit(const Partition& partition, PlanOptions& options) {
  const int64_t world_size = partition.world_size();
  options.max_tokens = 1;
  options.max_fragments =
      std::max<int64_t>(1, (partition.num_documents() + world_size - 1) / world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    options.max_tokens = std::max(options.max_tokens, partition.local_tokens(rank));
    options.max_fragments =
        std::max<int64_t>(options.max_fragments, std::ssize(partition.fragments(rank)));
  }
}

// Everything that memory and launches are made for, as one list.
Rows sizes(const Plan& plan) {
  const PlanCounts& c = plan.capacity;
  Rows list{c.segments,  c.longest,         c.chunks,           c.entry_slots,     c.exit_slots,
            c.map_slots, c.empty_documents, plan.num_documents, int(plan.exchange)};
  for (const bool backward : {false, true}) {
    list.insert(list.end(), {plan.part_elements(backward), plan.boundary_elements(backward),
                             plan.sent_elements(backward)});
    const ExchangePass& pass = backward ? plan.backward : plan.forward;
    for (const auto* counts :
         {&pass.send, &pass.receive, &pass.return_send, &pass.return_receive}) {
      list.insert(list.end(), counts->begin(), counts->end());
    }
    list.insert(list.end(), {pass.send_elements, pass.received_elements, pass.return_send_elements,
                             pass.returned_elements});
    for (const auto* program : {&pass.pack, &pass.pack_maps, &pass.fold, &pass.spread}) {
      list.insert(list.end(), {program->max_steps, program->max_chains, program->rows,
                               program->cols, program->head_begin, program->head_end});
    }
  }
  list.push_back(plan.map_elements());
  return list;
}

void expect_fits(const Plan& plan) {
  const PlanCounts &n = plan.counts, &most = plan.capacity;
  EXPECT_LE(n.segments, most.segments);
  EXPECT_LE(n.longest, most.longest);
  EXPECT_LE(n.chunks, most.chunks);
  EXPECT_LE(n.entry_slots, most.entry_slots);
  EXPECT_LE(n.exit_slots, most.exit_slots);
  EXPECT_LE(n.map_slots, most.map_slots);
  EXPECT_LE(n.empty_documents, most.empty_documents);
  for (const ExchangePass* pass : {&plan.forward, &plan.backward}) {
    for (const auto* program : {&pass->pack, &pass->pack_maps, &pass->fold, &pass->spread}) {
      EXPECT_LE(std::ssize(program->steps), program->max_steps);
      EXPECT_LE(program->chains(), program->max_chains);
    }
  }
}

PlanOptions options_for(uint64_t seed, int64_t tile) {
  PlanOptions options;
  options.heads_v = 1 + int64_t(seed % 4);
  options.workers = 1 + int64_t(seed % 23);
  options.segments_per_worker = 1 + int64_t(seed % 2);
  options.segment_chunks = 1 + int64_t(seed % 3);
  options.dim_k = options.dim_v = 2;
  options.tile = tile;
  return options;
}

TEST(Capacity, HoldsRandomPackingsAndGivesThemOneSize) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    const int64_t tile = seed % 3 == 0 ? kChunk : 0;
    const auto partition = make_case(draw_case(seed, tile > 0 ? kChunk : 1));
    ASSERT_TRUE(partition.is_ok());
    const int world_size = partition->world_size();
    PlanOptions options = options_for(seed, tile);
    options.exchange = static_cast<ExchangePolicy>(seed % 3);
    fit(*partition, options);
    // The same capacity with the least of a packing: one token, or none.
    const int64_t last = std::min<int64_t>(1, int64_t(seed % 2));
    std::vector<std::vector<Fragment>> rest(world_size);
    if (last > 0) rest[0].push_back({0, 0, last});
    const Rows cu{0, last};
    const auto small = partition->layout() == Layout::kExplicit
                           ? Partition::make_explicit(cu, rest)
                           : Partition::make(cu, world_size, partition->layout());
    ASSERT_TRUE(small.is_ok());
    for (int rank = 0; rank < world_size; ++rank) {
      const Plan full = planned(*partition, rank, options), least = planned(*small, rank, options);
      expect_fits(full);
      expect_fits(least);
      EXPECT_EQ(sizes(full), sizes(least));
    }
  }
}

// Lengths around the cutting rule's steps, as many tokens and fragments as the capacity has.
TEST(Capacity, HoldsDocumentsThatAreCut) {
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 3000; ++trial) {
    SCOPED_TRACE(trial);
    PlanOptions options = options_for(random(), 0);
    const int64_t step = options.segment_chunks * kChunk;
    Rows cu{0};
    for (int64_t documents = 1 + int64_t(random() % 6); documents > 0; --documents) {
      const int64_t length = int64_t(random() % 7) * step + int64_t(random() % 3) - 1;
      cu.push_back(cu.back() + std::max<int64_t>(0, length));
    }
    const int world_size = 1 + int(random() % 4);
    const auto layout = static_cast<Layout>(random() % 3);
    const auto partition = Partition::make(cu, world_size, layout);
    ASSERT_TRUE(partition.is_ok());
    fit(*partition, options);
    for (int rank = 0; rank < world_size; ++rank) {
      expect_fits(planned(*partition, rank, options));
    }
  }
}

// One packing fills the tables: nothing is held that none needs.
TEST(Capacity, IsReached) {
  PlanOptions options;
  options.heads_v = 1;
  options.workers = 4;
  options.max_tokens = 64 * 32 * 8;
  options.max_fragments = 1;
  const auto one = Partition::make(Rows{0, options.max_tokens}, 1, Layout::kContiguous);
  Plan plan = planned(*one, 0, options);
  plan.counts.longest = plan.capacity.longest;                  // of a packing that is not cut
  plan.counts.empty_documents = plan.capacity.empty_documents;  // of one without tokens
  EXPECT_EQ(plan.counts, plan.capacity);
  options.max_fragments = 5;
  options.max_tokens = 64 * 2 + 5;
  const auto short_ones = Partition::make(Rows{0, 1, 2, 3, 4, 133}, 1, Layout::kContiguous);
  plan = planned(*short_ones, 0, options);
  EXPECT_EQ(plan.counts.chunks, plan.capacity.chunks);
  EXPECT_EQ(plan.counts.segments, plan.capacity.segments);
}

TEST(Capacity, ProgramsFollowTheRecurrence) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(seed);
    const int64_t tile = seed % 3 == 0 ? kChunk : 0;
    const auto partition = make_case(draw_case(seed, tile > 0 ? kChunk : 1));
    ASSERT_TRUE(partition.is_ok());
    PlanOptions options = options_for(seed, tile);
    options.exchange = static_cast<ExchangePolicy>(1 + seed % 2);
    std::vector<uint64_t> seeds;
    for (int64_t doc = 0; doc < partition->num_documents(); ++doc) seeds.push_back(100 + doc);
    const Boundaries exact = simulate(*partition, options, seeds);
    fit(*partition, options);
    options.max_tokens += int64_t(seed % 5) * 100;
    options.max_fragments += int64_t(seed % 4);
    const Boundaries roomy = simulate(*partition, options, seeds);
    ASSERT_EQ(exact.error + roomy.error, "");
    EXPECT_EQ(exact.forward, roomy.forward);
    EXPECT_EQ(exact.backward, roomy.backward);
  }
}

TEST(Capacity, PadsWithDocumentsWithoutTokens) {
  PlanOptions options;
  options.max_tokens = 10;
  options.max_fragments = 4;
  const auto p = Partition::make(Rows{0, 3, 3, 9}, 1, Layout::kContiguous);
  const Plan plan = planned(*p, 0, options);
  EXPECT_EQ(plan.num_documents, 4);
  EXPECT_EQ(plan.empty_documents, (Rows{1, 3}));
  EXPECT_EQ(plan.local_tokens, 9);
}

TEST(CapacityErrors, NameTheArgument) {
  const auto p = Partition::make(Rows{0, 10, 10, 30}, 2, Layout::kContiguous);
  const auto message = [&](int64_t tokens, int64_t fragments) {
    PlanOptions options;
    options.max_tokens = tokens;
    options.max_fragments = fragments;
    const Status a = Plan::make(*p, 0, options).status(), b = Plan::make(*p, 1, options).status();
    EXPECT_EQ(a.message(), b.message());  // whichever rank it concerns
    EXPECT_TRUE(a.is_ok() || a.code() == ErrorCode::kInvalidArgument);
    return a.message();
  };
  EXPECT_EQ(message(15, 2), "");
  EXPECT_EQ(message(14, 2), "max_tokens: expected at least 15, the rows of rank 0, got 14");
  EXPECT_EQ(message(15, 1), "max_fragments: expected at least 2, the fragments of rank 0, got 1");
  EXPECT_EQ(message(15, 0), "max_fragments: expected at least 1, as both or neither, got 0");
  EXPECT_EQ(message(0, 2), "max_tokens: expected at least 1, as both or neither, got 0");
  EXPECT_EQ(message(-1, 2), "max_tokens: expected 0 to 281474976710656, got -1");
  EXPECT_EQ(message(15, -2), "max_fragments: expected 0 to 2147483647, got -2");
  const auto empty = Partition::make(Rows{0, 0, 0, 0}, 2, Layout::kContiguous);
  PlanOptions options;
  options.max_tokens = options.max_fragments = 1;
  EXPECT_EQ(
      Plan::make(*empty, 0, options).status().message(),
      "max_fragments: expected at least 2, for 3 documents with and without tokens on 2 ranks, "
      "got 1");
}

}  // namespace
}  // namespace gdn
