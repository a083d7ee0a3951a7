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

constexpr size_t kStackBytes = 128 * 1024;

struct Copy {
  void* to;
  const void* from;
  int bytes, zeros;
};

struct Lane {
  void* stack = nullptr;
  int thread = 0;
  bool finished = false, blocked = false;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> closed;
};

struct Warp {
  int arrived = 0;
  uint64_t met = 0;  // collectives so far
  const char* operation = nullptr;
  void* arguments[32] = {};
};

struct Block {
  const char* name = "";
  const std::function<void()>* kernel = nullptr;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  int live = 0, arrived = 0;
  unsigned index = 0;
  unsigned grid = 0;
  void* scheduler = nullptr;
  unsigned char* shared = nullptr;
  int shared_bytes = 0;
};

Block block;
Lane* current = nullptr;

bool runnable(const Lane& lane) { return !lane.finished && !lane.blocked; }

void switch_to_scheduler() { simt_switch(&current->stack, block.scheduler); }

// Goes on with the next runnable lane of the warp, or with the scheduler.
void leave() {
  Lane& me = *current;
  const int warp = me.thread / 32 * 32;
  for (int i = 1; i < 32; ++i) {
    Lane& next = block.lanes[warp + (me.thread + i) % 32];
    if (!runnable(next)) continue;
    current = &next;
    simt_switch(&me.stack, next.stack);
    return;
  }
  switch_to_scheduler();
}

void release_barrier() {
  for (Lane& lane : block.lanes) lane.blocked = false;
  block.arrived = 0;
}

void enter() {
  (*block.kernel)();
  current->finished = true;
  current->open.clear();
  current->closed.clear();
  if (--block.live > 0 && block.arrived == block.live) release_barrier();
  leave();
  fail("a finished thread ran on");
}

class Stacks {
 public:
  unsigned char* of(int thread) {
    while (static_cast<int>(stacks_.size()) <= thread) {
      stacks_.push_back(std::make_unique<unsigned char[]>(kStackBytes));
    }
    return stacks_[thread].get();
  }

 private:
  std::vector<std::unique_ptr<unsigned char[]>> stacks_;
};

void prepare_lane(Lane& lane, int thread, unsigned char* stack) {
  lane.thread = thread;
  lane.finished = lane.blocked = false;
  // Six saved registers, then the address that simt_switch returns to; rsp is then 16 n + 8, as at
  // any function's entry.
  auto top = reinterpret_cast<uintptr_t>(stack + kStackBytes) / 16 * 16 - 8;
  auto* words = reinterpret_cast<void**>(top);
  *--words = reinterpret_cast<void*>(&enter);
  for (int i = 0; i < 6; ++i) *--words = nullptr;
  lane.stack = words;
}

uint64_t next_random(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

void run_block(uint64_t& random) {
  static Stacks stacks;
  const int threads = static_cast<int>(block.lanes.size());
  for (int t = 0; t < threads; ++t) prepare_lane(block.lanes[t], t, stacks.of(t));
  for (Warp& warp : block.warps) warp = {};
  block.live = threads;
  block.arrived = 0;
  std::memset(block.shared, 0xff, static_cast<size_t>(block.shared_bytes));
  const int warps = static_cast<int>(block.warps.size());
  while (block.live > 0) {
    const int first = static_cast<int>(next_random(random) % static_cast<uint64_t>(warps));
    Lane* lane = nullptr;
    for (int i = 0; i < threads && lane == nullptr; ++i) {
      Lane& candidate = block.lanes[(first * 32 + i) % threads];
      if (runnable(candidate)) lane = &candidate;
    }
    if (lane == nullptr) fail("no thread can go on");
    current = lane;
    simt_switch(&block.scheduler, lane->stack);
  }
}

}  // namespace

Machine& machine() {
  static Machine machine;
  return machine;
}

void fail(const char* message) {
  std::fprintf(stderr, "SIMT emulator: %s in %s, block %u, thread %d\n", message, block.name,
               block.index, current ? current->thread : -1);
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
  std::vector<unsigned char> shared(static_cast<size_t>(launch.shared_bytes) + 128);
  block.name = launch.name;
  block.kernel = &launch.kernel;
  block.lanes.resize(threads);
  block.warps.resize(threads / 32);
  block.shared = shared.data() + (128 - reinterpret_cast<uintptr_t>(shared.data()) % 128);
  block.shared_bytes = launch.shared_bytes;
  block.grid = static_cast<unsigned>(launch.blocks);
  uint64_t random = machine().seed * 0x9e3779b97f4a7c15u + 1;
  for (int64_t i = 0; i < launch.blocks; ++i) {
    block.index = static_cast<unsigned>(i);
    run_block(random);
  }
  current = nullptr;
  return gdn::Status::ok();
}

Index thread_index() { return {static_cast<unsigned>(current->thread)}; }
Index block_index() { return {block.index}; }
Index grid_size() { return {block.grid}; }
int lane() { return current->thread & 31; }
void* shared_memory() { return block.shared; }
int shared_size() { return block.shared_bytes; }

void block_barrier() {
  Lane& me = *current;
  me.blocked = true;
  if (++block.arrived == block.live) {
    release_barrier();
    return;
  }
  while (me.blocked) leave();
}

void collective(const char* operation, void* argument, void (*execute)(void* const* arguments)) {
  Lane& me = *current;
  Warp& warp = block.warps[me.thread / 32];
  if (warp.arrived == 0) warp.operation = operation;
  if (std::strcmp(warp.operation, operation) != 0) fail("lanes meet at different instructions");
  warp.arguments[me.thread & 31] = argument;
  if (++warp.arrived == 32) {
    execute(warp.arguments);
    warp.arrived = 0;
    ++warp.met;
    return;
  }
  const uint64_t met = warp.met;
  for (int tries = 0; warp.met == met; ++tries) {
    if (tries > 64) fail("lanes of the warp are missing at an instruction");
    leave();
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
