// What one rank will compute and exchange, decided before anything runs: segments, boundary slots,
// the messages and the fold programs. Pure arithmetic over a Partition; printable; no device.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gdn/partition.h"
#include "gdn/status.h"

namespace gdn {

inline constexpr int64_t kChunk = 64;  // tokens of a chunk; the chunk grid restarts at each segment

// ---- Segments ---------------------------------------------------------------------------------
// A chunk-aligned part of a local fragment, the unit of work of every stage. Let S_in and S_out be
// the states before and after it: S_out = M S_in + B (docs/math.md). Backward: dS_in = M^T dS_out
// + C. The first segment of a document starts from initial_state (or 0) and is walked from there,
// so that its exit state is B itself; the last one is walked backward from dfinal_state (or 0).
// Hence B is needed of all but the last segment of a document, C of all but the first, and M only
// of those strictly inside.
struct Segment {
  int64_t doc = 0;          // global document index
  int64_t fragment = 0;     // local fragment index
  int64_t row = 0;          // first local row (token)
  int64_t length = 0;       // tokens, > 0; a multiple of kChunk unless it ends its fragment
  int64_t first_chunk = 0;  // chunks of all earlier segments of this rank
  int64_t entry_slot = -1;  // slot of S_in (and of C); -1: starts its document
  int64_t exit_slot = -1;   // slot of B (and of dS_out); -1: ends its document
  int64_t map_slot = -1;    // slot of M; -1: not needed

  int64_t chunks() const { return (length + kChunk - 1) / kChunk; }
  bool starts_document() const { return entry_slot < 0; }
  bool ends_document() const { return exit_slot < 0; }
  bool operator==(const Segment&) const = default;
};

// ---- Fold programs ----------------------------------------------------------------------------
// Boundary tables hold, per value head, a number of K x V states or K x K maps in the state dtype
// (fp32; fp64 for fp64 operands). Tables are head-major, so that the heads of one peer are one
// contiguous slab and no message needs packing.
enum class Table : uint8_t {
  kNone,
  kMap,          // [HV][map slots][K, K]      M of segments
  kPart,         // [HV][slots][K, V]          forward: B (exit slots); backward: C (entry slots)
  kBoundary,     // [HV][slots][K, V]          forward: S_in (entry slots); backward: dS_out (exit)
  kSend,         // [HV][send elements]        this rank's records, one per unit
  kReceived,     // per source rank [heads][its send elements]
  kReceivedMap,  // backward only: kReceived of the forward, where the M of the units are
  kReturnSend,   // per destination rank [my heads][its return elements]; all-to-all only
  kReturned,     // [HV][return elements]      boundary states of this rank's units
};
inline constexpr int kNumTables = 9;

// Element offset of one matrix: offset + (head - head_begin) * head_stride within `table`.
struct FoldRef {
  Table table = Table::kNone;
  int64_t offset = 0;
  int64_t head_stride = 0;

  bool present() const { return table != Table::kNone; }
  bool operator==(const FoldRef&) const = default;
};

// X <- op(map) X + add, absent map: X <- add; then out <- X where out is present.
struct FoldStep {
  FoldRef map;  // [K, K]; op is the transpose where the program says so
  FoldRef add;  // [K, cols]; absent: 0
  FoldRef out;  // [K, cols]
  bool operator==(const FoldStep&) const = default;
};

// Independent chains of steps, each run in order for every head of [head_begin, head_end).
// The first step of a chain has no map. Backends implement this one stage for every fold.
struct FoldProgram {
  std::vector<FoldStep> steps;
  std::vector<int64_t> chain_begin;  // [chains + 1] into steps
  int64_t rows = 0;                  // K
  int64_t cols = 0;                  // V for states, K for products of maps
  bool transpose = false;
  int head_begin = 0;
  int head_end = 0;
  int64_t max_steps = 0;   // what device copies and launches are made for: the program's own
  int64_t max_chains = 0;  // steps and chains, or with a capacity the most of any packing within it

  int64_t chains() const { return chain_begin.empty() ? 0 : int64_t(chain_begin.size()) - 1; }
  bool empty() const { return steps.empty(); }
};

// ---- Exchange ---------------------------------------------------------------------------------
enum class ExchangeKind : uint8_t {
  kNone,       // no document crosses ranks: no collective at all
  kAllGather,  // every rank receives every unit's record and folds what it needs
  kAllToAll,   // rank r folds heads [r HV/W, (r+1) HV/W) of every crossing document, returns states
};
enum class ExchangePolicy : uint8_t { kAuto, kAllGather, kAllToAll };

const char* to_string(ExchangeKind kind);
Result<ExchangePolicy> parse_exchange(const std::string& name);  // "auto", "allgather", "a2a"

// One direction (forward or backward) of the exchange. Counts are elements of the state dtype.
struct ExchangePass {
  // Before the collective: kPart, and in the forward kMap, -> kSend records; and those chains of
  // `spread` that wait for nobody and are no longer than the records'. All run at once.
  FoldProgram pack;
  FoldProgram pack_maps;  // the forward's kMap -> kSend where K and V differ, else among `pack`
  FoldProgram fold;       // kReceived -> kReturnSend (all-to-all) or kReturned (all-gather)
  FoldProgram spread;     // kReturned and kPart -> kBoundary; also serves undivided documents

  std::vector<int64_t> send;         // [W] elements for each peer (all-gather: the same slab)
  std::vector<int64_t> receive;      // [W] elements from each peer
  std::vector<int64_t> return_send;  // [W]; all-to-all only
  std::vector<int64_t> return_receive;

  int64_t send_elements = 0;      // size of kSend
  int64_t received_elements = 0;  // size of kReceived
  int64_t return_send_elements = 0;
  int64_t returned_elements = 0;
};

// ---- Plan -------------------------------------------------------------------------------------
struct PlanOptions {
  int64_t heads_v = 1;              // HV
  int64_t dim_k = 128;              // K
  int64_t dim_v = 128;              // V
  int64_t workers = 1;              // SMs or threads that should all have work
  int64_t heads_qk = 0;             // H, for backends that keep a group's walks together; 0: HV
  int64_t segments_per_worker = 2;  // how many to aim for where documents are cut at all,
  int64_t segment_chunks = 32;      // and the fewest chunks of each
  // 0: segments and units as is fastest. > 0, a multiple of kChunk: the W-independent mode. Every
  // document is cut at multiples of `tile` tokens from its start, each tile is a segment and a
  // unit of the exchange, and results are bitwise the same for every partition whose cuts are
  // multiples of the tile.
  int64_t tile = 0;
  ExchangePolicy exchange = ExchangePolicy::kAuto;
  // The capacity: at most this many local rows and fragments on any rank, and world_size *
  // max_fragments documents. All sizes are then those of the capacity, whatever the packing.
  // 0 and 0: exactly this packing.
  int64_t max_tokens = 0;
  int64_t max_fragments = 0;

  bool has_capacity() const { return max_tokens > 0; }
  bool operator==(const PlanOptions&) const = default;
};

// PlanOptions::segment_chunks of a backend whose walks are one per head and segment. A pack of
// `pack_chunks` gives every worker pack_chunks heads_v / workers of them, and a document no longer
// than that does not hold such a pack up: it is left whole. Where sixteen such documents would not
// fill the device, one's own time counts: in pieces of 11 chunks summaries and runs take as long as
// 22, and on an H200 their folds as long as 10 more.
int64_t segment_chunks_of_heads(int64_t heads_v, int64_t workers, int64_t pack_chunks,
                                int64_t least = 32);

// PlanOptions::segment_chunks over ranks, of a backend that takes `of_one_rank` for a whole pack. A
// rank holds a W-th of the pack, and a chain longer than its mean load holds it up, which summaries
// and folds come before: so much shorter, and a fifth more, may segments be. Not under 64 chunks over
// up to four ranks: each cut adds steps to the folds on both sides of the exchange, 10 to 20 us each
// on an H200, where 64 chunks are walked in 0.14 ms forward, 0.53 backward. Over more, fragments are
// short and leave most workers idle, and segments of 21 chunks pay (docs/scaling.md), but for a
// backend that takes short ones on one rank too.
int64_t segment_chunks_over(int world_size, int64_t of_one_rank);

// Rows of a rank's tables.
struct PlanCounts {
  int64_t segments = 0;
  int64_t longest = 0;          // tokens of the longest segment
  int64_t chunks = 0;           // of all segments
  int64_t entry_slots = 0;      // segments that do not start their document
  int64_t exit_slots = 0;       // segments that do not end it
  int64_t map_slots = 0;        // segments that do neither
  int64_t empty_documents = 0;  // rank 0 only

  bool operator==(const PlanCounts&) const = default;
};

// Every rank's rows and fragments, and the documents, fit the capacity: the same answer on every
// rank. 0 and 0: there is none.
Status check_capacity(const Partition& partition, int64_t max_tokens, int64_t max_fragments);

// Whether `next` can take the place of `from` in what was made with a capacity.
Status check_refill(const Partition& from, const Partition& next, int64_t max_tokens,
                    int64_t max_fragments);

// Segments never depend on a document's neighbours in the pack: a fragment is cut by its own
// length, HV and workers alone, so that a document's results do not change by a bit with them.
struct Plan {
  static Result<Plan> make(const Partition& partition, int rank, const PlanOptions& options);

  PlanOptions options;
  int rank = 0;
  int world_size = 1;
  int64_t num_documents = 0;  // rows of the states; a capacity pads with documents without tokens
  int64_t local_tokens = 0;

  std::vector<Segment> segments;
  std::vector<int64_t> empty_documents;  // rank 0 only: final_state = initial_state there
  std::string segment_reason;            // why they are cut as they are, one sentence
  PlanCounts counts;                     // of this packing
  // What memory, strides of tables and launches are made for: `counts`, or with a capacity the most
  // of any packing within it.
  PlanCounts capacity;

  ExchangeKind exchange = ExchangeKind::kNone;
  std::string exchange_reason;  // bytes of both kinds, one sentence
  // What all ranks together would hand to others in both directions, whichever kind is picked.
  int64_t all_gather_elements = 0;
  int64_t all_to_all_elements = 0;
  ExchangePass forward;
  ExchangePass backward;

  // Elements of a table in the forward or backward pass.
  int64_t map_elements() const {
    return options.heads_v * capacity.map_slots * options.dim_k * options.dim_k;
  }
  int64_t part_elements(bool backward_pass) const {
    return options.heads_v * (backward_pass ? capacity.entry_slots : capacity.exit_slots) *
           options.dim_k * options.dim_v;
  }
  int64_t boundary_elements(bool backward_pass) const {
    return options.heads_v * (backward_pass ? capacity.exit_slots : capacity.entry_slots) *
           options.dim_k * options.dim_v;
  }
  // Elements this rank hands to other ranks (never counting what it keeps).
  int64_t sent_elements(bool backward_pass) const;
};

// A drawing for people: one bar per rank with its fragments, then segments, slots and bytes.
// `width` is the number of columns of the terminal.
std::string draw(const Partition& partition, int width = 100);
std::string describe(const Plan& plan);

}  // namespace gdn
