// Runs CUDA kernels on the host, thread by thread: every CUDA thread is a fiber, warps are taken in
// a random order and may sleep, lanes meet at warp-wide instructions, and asynchronous copies
// arrive only when they are waited for, those of the copy engine at random times. The blocks of a
// cooperative launch run beside each other. x86-64 only.
//
// No access is traced: a fault is found where it makes a result wrong, or where an instruction
// checks. So it finds wrong index maps; missing waits and barriers that an order it tried lets
// show; threads that wait for ever; lanes that meet at different instructions; named barriers
// entered with different counts; addresses of instructions outside shared memory.
//
// What it cannot find:
// - races that need two lanes of a warp out of step, or a switch between two instructions that do
//   not wait: a lane runs until it waits, meets others or polls;
// - missing fences and release or acquire: all memory is in order and seen by all at once;
// - what instructions of the Hopper kernels leave out: see hopper.h;
// - plain loads and stores outside shared memory, or outside a tensor in global memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "gdn/status.h"

namespace simt {

// Device 0 is like sm_90, 1 like sm_86, 2 like sm_80, by the shared memory a block may have.
inline constexpr int kDevices = 3;
struct DeviceKind {
  int compute_capability, shared_bytes;
};
inline constexpr DeviceKind kDeviceKinds[kDevices] = {
    {90, 227 * 1024}, {86, 99 * 1024}, {80, 163 * 1024}};

struct Launch {
  const char* name;
  std::function<void()> kernel;  // of one thread
  int64_t blocks;
  int threads, shared_bytes;
  bool cooperative;  // all blocks at once
};

struct Machine {
  int device = 0;  // the current one
  int multiprocessors = 4;
  uint64_t seed = 1;                       // of the order of warps; GDN_SIMT_SEED sets the first
  int64_t launches = 0;                    // so far
  std::vector<Launch>* capture = nullptr;  // where launches are noted instead of run
};
Machine& machine();

// Puts back the seed when it ends.
class SeedScope {
 public:
  SeedScope() = default;
  ~SeedScope() { machine().seed = before_; }
  SeedScope(const SeedScope&) = delete;
  SeedScope& operator=(const SeedScope&) = delete;

 private:
  uint64_t before_ = machine().seed;
};

// Runs the kernel once per thread of every block, or notes the launch.
gdn::Status launch(Launch launch);

struct Index {
  unsigned x;
};
Index thread_index();
Index block_index();
Index grid_size();
Index block_size();
int lane();
void* shared_memory();
int shared_size();

void block_barrier();
void warp_barrier();
// id 0 to 15; `threads`: whole warps, the same number for all that meet.
void named_barrier(int id, int threads);

// Goes on when `ready(argument)`; `what` is for the message if that never comes.
void wait_until(bool (*ready)(const void*), const void* argument, const char* what);
// Lets others run: for loops that poll memory.
void pause();

// All 128 threads of a warpgroup meet, likewise: see `collective`.
void warpgroup_collective(const char* operation, void* argument,
                          void (*execute)(void* const* arguments));

// All lanes of a warp meet: `execute` gets their 32 arguments once, then all go on. Lanes that meet
// with different `operation`s are an error.
void collective(const char* operation, void* argument, void (*execute)(void* const* arguments));

template <typename T>
T exchange(T value, int from) {
  struct Argument {
    T value, result;
    int from;
  } mine{value, T{}, from};
  collective("shfl", &mine, [](void* const* all) {
    for (int i = 0; i < 32; ++i) {
      auto* to = static_cast<Argument*>(all[i]);
      to->result = static_cast<const Argument*>(all[to->from])->value;
    }
  });
  return mine.result;
}
unsigned ballot(bool predicate);

// Asynchronous copies of the running thread.
void copy_later(void* to, const void* from, int bytes, int zeros);
void close_copies();
void await_copies(int pending);

// A copy of the copy engine: at some time, or when waited for. The running thread's stores: `read`
// when their source may be overwritten.
void copy_some_time(std::function<void()> copy);
void store_some_time(std::function<void()> store);
void await_stores();

[[noreturn]] void fail(const char* message);

}  // namespace simt
