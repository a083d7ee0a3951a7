#include "simt/engine.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

// Saves the callee-saved registers on the running stack and goes on with another one.
extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.globl simt_switch
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace simt {
namespace {

constexpr size_t kStackBytes = 96 * 1024;

struct Copy {
  void* to;
  const void* from;
  int bytes, zeros;
};

struct Block;
struct Lane {
  void* stack = nullptr;
  Block* block = nullptr;
  int thread = 0;
  bool finished = false, blocked = false;
  bool (*ready)(const void*) = nullptr;  // null: waits for nothing
  const void* argument = nullptr;
  const char* what = "";
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> closed;
};

// Threads that meet at an instruction.
struct Meeting {
  int arrived = 0;
  uint64_t met = 0;  // so far
  const char* operation = nullptr;
  void* arguments[128] = {};
};

constexpr int kNamedBarriers = 16;
struct NamedBarrier {
  int arrived = 0;
  int threads = 0;  // that meet in this phase, as the first one says
  uint64_t met = 0;
};

struct Block {
  std::vector<Lane> lanes;
  std::vector<Meeting> warps, groups;
  NamedBarrier named[kNamedBarriers];
  int live = 0, arrived = 0;
  unsigned index = 0;
  std::vector<unsigned char> memory;
  unsigned char* shared = nullptr;
};

// The launch that runs.
const char* name = "";
const std::function<void()>* kernel = nullptr;
std::vector<std::unique_ptr<Block>> blocks;
unsigned grid = 0;
int shared_bytes = 0;
void* scheduler = nullptr;
uint64_t random_state = 1;
int64_t pauses = 0;  // since anything else happened

struct Later {
  const Lane* by;  // whose store; null: a load
  std::function<void()> act;
};
std::vector<Later> later;

Lane* current = nullptr;

bool runnable(const Lane& lane) {
  return !lane.finished && !lane.blocked && (lane.ready == nullptr || lane.ready(lane.argument));
}

void switch_to_scheduler() { simt_switch(&current->stack, scheduler); }

// Goes on with the next runnable lane of the warp, or with the scheduler.
void leave() {
  Lane& me = *current;
  const int warp = me.thread / 32 * 32;
  for (int i = 1; i < 32; ++i) {
    Lane& next = me.block->lanes[warp + (me.thread + i) % 32];
    if (!runnable(next)) continue;
    current = &next;
    simt_switch(&me.stack, next.stack);
    return;
  }
  switch_to_scheduler();
}

void release_barrier(Block& block) {
  for (Lane& lane : block.lanes) lane.blocked = false;
  block.arrived = 0;
}

void enter() {
  (*kernel)();
  Block& block = *current->block;
  current->finished = true;
  current->open.clear();
  current->closed.clear();
  if (--block.live > 0 && block.arrived == block.live) release_barrier(block);
  leave();
  fail("a finished thread ran on");
}

class Stacks {
 public:
  unsigned char* of(size_t thread) {
    while (stacks_.size() <= thread) {
      stacks_.push_back(std::unique_ptr<unsigned char[]>(new unsigned char[kStackBytes]));
    }
    return stacks_[thread].get();
  }

 private:
  std::vector<std::unique_ptr<unsigned char[]>> stacks_;
};

void prepare_lane(Lane& lane, Block& block, int thread, unsigned char* stack) {
  lane.block = &block;
  lane.thread = thread;
  lane.finished = lane.blocked = false;
  lane.ready = nullptr;
  // Six saved registers, then the address that simt_switch returns to; rsp is then 16 n + 8, as at
  // any function's entry.
  auto top = reinterpret_cast<uintptr_t>(stack + kStackBytes) / 16 * 16 - 8;
  auto* words = reinterpret_cast<void**>(top);
  *--words = reinterpret_cast<void*>(&enter);
  for (int i = 0; i < 6; ++i) *--words = nullptr;
  lane.stack = words;
}

uint64_t next_random(uint64_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state % below;
}

// A copy that has not happened yet, in any order.
void copy_one() {
  const size_t i = next_random(later.size());
  std::swap(later[i], later.back());
  const Later one = std::move(later.back());
  later.pop_back();
  one.act();
}

[[noreturn]] void report_waiting() {
  for (const auto& block : blocks) {
    for (size_t w = 0; w < block->lanes.size(); w += 32) {
      const Lane& lane = block->lanes[w];
      if (lane.finished) continue;
      std::fprintf(stderr, "block %u warp %zu waits: %s\n", block->index, w / 32,
                   lane.blocked ? "__syncthreads" : lane.what);
    }
  }
  fail("no thread can go on");
}

// Runs the blocks of the grid from `first` on, `count` of them beside each other.
void run_blocks(int64_t first, int64_t count, int threads) {
  static Stacks stacks;
  blocks.resize(static_cast<size_t>(count));
  int64_t live = 0;
  for (int64_t b = 0; b < count; ++b) {
    auto& block = blocks[static_cast<size_t>(b)];
    if (!block) block = std::make_unique<Block>();
    block->index = static_cast<unsigned>(first + b);
    block->lanes.resize(static_cast<size_t>(threads));
    block->warps.assign(static_cast<size_t>(threads / 32), {});
    block->groups.assign(static_cast<size_t>((threads + 127) / 128), {});
    for (NamedBarrier& named : block->named) named = {};
    // Aligned as the tiles of the copy engine want it.
    block->memory.assign(static_cast<size_t>(shared_bytes) + 1024, 0xff);
    block->shared =
        block->memory.data() + (1024 - reinterpret_cast<uintptr_t>(block->memory.data()) % 1024);
    block->live = threads;
    block->arrived = 0;
    for (int t = 0; t < threads; ++t) {
      prepare_lane(block->lanes[static_cast<size_t>(t)], *block, t,
                   stacks.of(static_cast<size_t>(b * threads + t)));
    }
  }
  const int warps = threads / 32;
  const auto total = static_cast<size_t>(count * warps);
  // Some warps sleep for a while, or one does: they go on only when no other can. So every order
  // happens in which a warp comes late, also by all that the others can do without it.
  std::vector<char> asleep(total, 0);
  int64_t decisions = 0, change_at = 0;
  const auto choose_sleepers = [&] {
    change_at += int64_t{256} << next_random(10);
    const size_t one = next_random(2) == 0 ? next_random(total) : total;
    for (size_t w = 0; w < total; ++w) {
      asleep[w] = one < total ? w == one : next_random(4) == 0;
    }
  };
  const auto find = [&](bool sleeping) -> Lane* {
    const size_t start = next_random(total);
    for (size_t i = 0; i < total; ++i) {
      const size_t warp = (start + i) % total;
      if ((asleep[warp] != 0) != sleeping) continue;
      Block& block = *blocks[warp / static_cast<size_t>(warps)];
      const size_t from = warp % static_cast<size_t>(warps) * 32;
      for (size_t l = from; l < from + 32; ++l) {
        if (runnable(block.lanes[l])) return &block.lanes[l];
      }
    }
    return nullptr;
  };
  do {
    if (decisions++ == change_at) choose_sleepers();
    if (!later.empty() && next_random(4) == 0) copy_one();
    Lane* lane = find(false);
    if (lane == nullptr && later.empty()) lane = find(true);
    if (lane != nullptr) {
      current = lane;
      simt_switch(&scheduler, lane->stack);
    } else if (!later.empty()) {
      copy_one();
    } else {
      report_waiting();
    }
    live = 0;
    for (const auto& block : blocks) live += block->live;
  } while (live > 0);
  while (!later.empty()) copy_one();
}

}  // namespace

Machine& machine() {
  static Machine machine = [] {
    Machine made;
    if (const char* seed = std::getenv("GDN_SIMT_SEED"))
      made.seed = std::strtoull(seed, nullptr, 10);
    return made;
  }();
  return machine;
}

void fail(const char* message) {
  std::fprintf(stderr, "SIMT emulator: %s in %s, block %u, thread %d\n", message, name,
               current ? current->block->index : 0, current ? current->thread : -1);
  std::abort();
}

gdn::Status launch(Launch launch) {
  const int threads = launch.threads;
  if (launch.shared_bytes > kDeviceKinds[machine().device].shared_bytes || threads % 32 != 0) {
    return {gdn::ErrorCode::kDevice, std::string(launch.name) + ": shape"};
  }
  if (machine().capture != nullptr) {
    machine().capture->push_back(std::move(launch));
    return gdn::Status::ok();
  }
  ++machine().launches;
  name = launch.name;
  kernel = &launch.kernel;
  shared_bytes = launch.shared_bytes;
  grid = static_cast<unsigned>(launch.blocks);
  random_state = machine().seed * 0x9e3779b97f4a7c15u + 1;
  pauses = 0;
  const int64_t together = launch.cooperative ? launch.blocks : 1;
  for (int64_t i = 0; i < launch.blocks; i += together) run_blocks(i, together, threads);
  current = nullptr;
  return gdn::Status::ok();
}

Index thread_index() { return {static_cast<unsigned>(current->thread)}; }
Index block_index() { return {current->block->index}; }
Index grid_size() { return {grid}; }
Index block_size() { return {static_cast<unsigned>(current->block->lanes.size())}; }
int lane() { return current->thread & 31; }
void* shared_memory() { return current->block->shared; }
int shared_size() { return shared_bytes; }

void wait_until(bool (*ready)(const void*), const void* argument, const char* what) {
  Lane& me = *current;
  pauses = 0;
  if (ready(argument)) return;
  me.ready = ready;
  me.argument = argument;
  me.what = what;
  do {
    leave();
  } while (!ready(argument));
  me.ready = nullptr;
}

void pause() {
  if (++pauses > 10'000'000) fail("threads poll memory that does not change");
  switch_to_scheduler();
}

void block_barrier() {
  Lane& me = *current;
  Block& block = *me.block;
  me.blocked = true;
  if (++block.arrived == block.live) {
    release_barrier(block);
    return;
  }
  while (me.blocked) leave();
}

void named_barrier(int id, int threads) {
  if (id < 0 || id >= kNamedBarriers) fail("a named barrier's id is not 0 to 15");
  if (threads <= 0 || threads % 32 != 0) fail("a named barrier of no whole warps");
  NamedBarrier& barrier = current->block->named[id];
  if (barrier.arrived == 0) barrier.threads = threads;
  if (barrier.threads != threads) fail("threads meet at a named barrier with different counts");
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.met;
    return;
  }
  struct Wait {
    const NamedBarrier* barrier;
    uint64_t met;
  } mine{&barrier, barrier.met};
  wait_until(
      [](const void* x) {
        const auto* wait = static_cast<const Wait*>(x);
        return wait->barrier->met != wait->met;
      },
      &mine, "named barrier");
}

namespace {

void meet(Meeting& meeting, int threads, int place, const char* operation, void* argument,
          void (*execute)(void* const* arguments)) {
  if (meeting.arrived == 0) meeting.operation = operation;
  if (std::strcmp(meeting.operation, operation) != 0)
    fail("threads meet at different instructions");
  meeting.arguments[place] = argument;
  if (++meeting.arrived == threads) {
    execute(meeting.arguments);
    meeting.arrived = 0;
    ++meeting.met;
    return;
  }
  struct Wait {
    const Meeting* meeting;
    uint64_t met;
  } mine{&meeting, meeting.met};
  wait_until(
      [](const void* x) {
        const auto* wait = static_cast<const Wait*>(x);
        return wait->meeting->met != wait->met;
      },
      &mine, operation);
}

}  // namespace

void collective(const char* operation, void* argument, void (*execute)(void* const* arguments)) {
  const int thread = current->thread;
  meet(current->block->warps[static_cast<size_t>(thread / 32)], 32, thread % 32, operation,
       argument, execute);
}

void warpgroup_collective(const char* operation, void* argument,
                          void (*execute)(void* const* arguments)) {
  const int thread = current->thread;
  meet(current->block->groups[static_cast<size_t>(thread / 128)], 128, thread % 128, operation,
       argument, execute);
}

void copy_some_time(std::function<void()> copy) { later.push_back({nullptr, std::move(copy)}); }
void store_some_time(std::function<void()> store) { later.push_back({current, std::move(store)}); }
void await_stores() {
  for (size_t i = 0; i < later.size();) {
    if (later[i].by != current) {
      ++i;
      continue;
    }
    const Later one = std::move(later[i]);
    later.erase(later.begin() + static_cast<std::ptrdiff_t>(i));
    one.act();
  }
}

void warp_barrier() {
  collective("syncwarp", nullptr, [](void* const*) {});
}

unsigned ballot(bool predicate) {
  struct Argument {
    bool predicate;
    unsigned result;
  } mine{predicate, 0};
  collective("ballot", &mine, [](void* const* all) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) {
      bits |= static_cast<unsigned>(static_cast<const Argument*>(all[i])->predicate) << i;
    }
    for (int i = 0; i < 32; ++i) static_cast<Argument*>(all[i])->result = bits;
  });
  return mine.result;
}

void copy_later(void* to, const void* from, int bytes, int zeros) {
  current->open.push_back({to, from, bytes, zeros});
}

void close_copies() {
  current->closed.push_back(std::move(current->open));
  current->open.clear();
}

void await_copies(int pending) {
  while (static_cast<int>(current->closed.size()) > pending) {
    for (const Copy& copy : current->closed.front()) {
      if (copy.bytes > 0) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
      std::memset(static_cast<unsigned char*>(copy.to) + copy.bytes, 0,
                  static_cast<size_t>(copy.zeros));
    }
    current->closed.pop_front();
  }
}

}  // namespace simt
