// A model of one training step over ranks: compute from measured times per chunk, boundary states
// over a link. docs/scaling.md derives it and holds it against measured runs.
//
//   pass = launch + even * C + max(chain * longest, walk * C)
//          + summary * Cs + summary_chain * min(longest_s, forget) + fold(HV) * F + exchange
//
// C: chunk-heads of a rank (64-token chunks times value heads), longest: chunks of its longest
// segment (one head's walk is serial), Cs, longest_s: the same of segments whose summary somebody
// needs, F: fold steps one after another. The step waits for the slowest rank.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gdn/plan.h"

namespace gdn::model {

// Of one direction of one backend on one device.
struct PassRates {
  double launch_us = 0;         // independent of the work
  double even_ns = 0;           // per chunk-head, whole device: stages that spread over all SMs
  double walk_ns = 0;           // per chunk-head, whole device busy with walks
  double chain_us = 0;          // per chunk of one walk alone
  double summary_ns = 0;        // per chunk-head of a segment that is summarised
  double summary_chain_us = 0;  // per chunk of the longest walk of a summary
};

struct DeviceRates {
  std::string name;  // the backend
  PassRates forward, backward;
  int64_t forget_chunks = 0;  // the longest walk of a summary: further back all has decayed
  double fold_us = 0;         // per fold step in a row, and what each value head adds to it
  double fold_head_us = 0;
  double copy_gb_s = 0;  // device copy, read + write
  int64_t workers = 1;   // SMs
  int64_t segments_per_worker = 2;
  int64_t segment_chunks = 32;  // of one rank, at least
  int64_t pack_chunks = 0;      // and a worker's share of so many with all their heads
};
// Measured on an H200, by backend.
std::span<const DeviceRates> device_rates();
Result<DeviceRates> find_rates(const std::string& name);

// What one rank can send, and at the same time receive.
struct Link {
  double gb_s = 0;
  double latency_us = 0;  // of one collective
};
struct Network {
  // NVLink of one host: 450 GB/s each way on paper, NCCL moves about 350; 6 to 9 us a collective on
  // two H200s, beside the bytes, on the rank that waits least.
  Link host{350, 8};
  Link between{40, 40};  // 400 Gbit/s per GPU between hosts
  int ranks_per_host = 8;

  // The slowest link that `world_size` ranks use.
  const Link& link(int world_size) const { return world_size <= ranks_per_host ? host : between; }
};

struct Shape {
  std::vector<int64_t> documents;  // tokens
  int64_t heads_qk = 16, heads_v = 48, dim_k = 128, dim_v = 128;
};

struct PassTime {
  double compute_ms = 0;  // slowest rank, folds included
  double exchange_ms = 0;
  int64_t sent_bytes = 0;  // the most that one rank hands to others

  double total_ms() const { return compute_ms + exchange_ms; }
};

struct StepTime {
  PassTime forward, backward;
  ExchangeKind exchange = ExchangeKind::kNone;

  double total_ms() const { return forward.total_ms() + backward.total_ms(); }
};

// One rank's compute in one direction.
double pass_compute_ms(const Plan& plan, bool backward, const DeviceRates& rates);
// One direction's collectives; sent_bytes, too.
PassTime pass_exchange(std::span<const Plan> ranks, bool backward, const Link& link);

// KCP: every rank its fragments, boundary states between them.
Result<StepTime> kcp_step(const Shape& shape, int world_size, Layout layout,
                          const DeviceRates& rates, const Network& network);

// Head-split all-to-all: every rank all tokens of ceil(HV / W) heads; q, k, v, g, beta travel there
// (again for nothing in the backward, where they are kept), o back; gradients the other way. Ranks
// beyond HV have nothing to do.
Result<StepTime> head_split_step(const Shape& shape, int world_size, const DeviceRates& rates,
                                 const Network& network);

}  // namespace gdn::model
