// The functions of backend/cuda/sm90/ptx.cuh and wgmma.cuh on the SIMT emulator. Not all of them do
// what the hardware does, so some races cannot be found here:
// - Fences do nothing (fence_async_proxy, fence_global_copies, barrier_init_fence), nor do
//   release and acquire of flags: nobody notices where one is missing.
// - A product runs at once when its 128 threads have met: it has read its operands and written its
//   sums then. wgmma_fence, wgmma_commit, wgmma_wait and settle do nothing, so operands that are
//   overwritten and sums that are read while a product runs are not found.
// - bulk_store_wait and bulk_store_complete are one: both end when this thread's stores have been
//   written. Who reads global memory after a bulk_store_wait alone is not found.
// - A copy or store happens at one moment, whole: half a box is never seen.
// - Cache policies and the registers of a warpgroup do nothing.
#pragma once

#include <cuda.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "simt/engine.h"
#include "simt/instructions.h"

namespace gdn::sm90 {

// ---- bf16 pairs
inline uint32_t bf16_pair(float low, float high) { return cuda::pack_bf16(low, high); }
inline uint32_t add_bf16(uint32_t a, uint32_t b) {
  return bf16_pair(cuda::bf16_half(a, 0) + cuda::bf16_half(b, 0),
                   cuda::bf16_half(a, 1) + cuda::bf16_half(b, 1));
}
inline uint32_t mul_bf16(uint32_t a, uint32_t b) {
  return bf16_pair(cuda::bf16_half(a, 0) * cuda::bf16_half(b, 0),
                   cuda::bf16_half(a, 1) * cuda::bf16_half(b, 1));
}
inline uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
  return bf16_pair(std::fma(cuda::bf16_half(a, 0), cuda::bf16_half(b, 0), cuda::bf16_half(c, 0)),
                   std::fma(cuda::bf16_half(a, 1), cuda::bf16_half(b, 1), cuda::bf16_half(c, 1)));
}

inline uint32_t fresh_thread_index() { return simt::thread_index().x; }
inline uint32_t made_anew(uint32_t x) { return x; }
inline bool elect_one() { return simt::thread_index().x % 32 == 0; }

// ---- mbarrier: its 64 bits
struct BarrierWord {
  uint16_t count, pending;  // arrivals of a phase; still missing
  int32_t state;            // 2 * bytes under way + parity of the phase that runs

  void settle_phase() {
    if (pending != 0 || state / 2 != 0) return;
    pending = count;
    state ^= 1;
  }
};
static_assert(sizeof(BarrierWord) == 8);
inline BarrierWord& word_of(uint64_t* bar) { return *reinterpret_cast<BarrierWord*>(bar); }

inline void barrier_init(uint64_t* bar, uint32_t count) {
  word_of(bar) = {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint64_t* bar) {
  BarrierWord& word = word_of(bar);
  if (word.pending == 0) simt::fail("more arrivals than a phase of an mbarrier has");
  --word.pending;
  word.settle_phase();
}
inline void barrier_expect_bytes(uint64_t* bar, uint32_t bytes) {
  word_of(bar).state += 2 * static_cast<int32_t>(bytes);
  barrier_arrive(bar);
}
inline void barrier_complete_bytes(uint64_t* bar, uint32_t bytes) {
  word_of(bar).state -= 2 * static_cast<int32_t>(bytes);
  word_of(bar).settle_phase();
}
struct SpinLimit {
  void turn(const void*) {}
};
inline void barrier_wait(uint64_t* bar, uint32_t parity) {
  struct Wait {
    uint64_t* bar;
    uint32_t parity;
  } mine{bar, parity};
  char what[32];
  std::snprintf(what, sizeof(what), "mbarrier at %#x",
                static_cast<unsigned>(reinterpret_cast<unsigned char*>(bar) -
                                      static_cast<unsigned char*>(simt::shared_memory())));
  simt::wait_until(
      [](const void* x) {
        const auto* wait = static_cast<const Wait*>(x);
        return (static_cast<uint32_t>(word_of(wait->bar).state) & 1) != wait->parity;
      },
      &mine, what);
}
inline void named_barrier(int id, int threads) { simt::named_barrier(id, threads); }

// ---- Copies
inline void fence_async_proxy() {}
inline void fence_global_copies() {}
inline uint64_t evict_first_policy() { return 0; }

// Calls visit(element of the tensor or null outside of it, byte in shared memory) for a box.
template <typename Visit>
void for_box(const CUtensorMap& map, unsigned char* shared, int c0, int c1, int c2, int c3,
             Visit&& visit) {
  const int64_t at[4] = {c0, c1, c2, c3};
  const auto* origin = shared;
  uint32_t row = 0;
  for (uint32_t d3 = 0; d3 < map.box[3]; ++d3) {
    for (uint32_t d2 = 0; d2 < map.box[2]; ++d2) {
      for (uint32_t d1 = 0; d1 < map.box[1]; ++d1, ++row) {
        for (uint32_t d0 = 0; d0 < map.box[0]; ++d0) {
          const int64_t place[4] = {at[0] + d0, at[1] + d1, at[2] + d2, at[3] + d3};
          const unsigned char* element = map.base;
          for (int i = 0; i < 4 && element != nullptr; ++i) {
            if (place[i] < 0 || place[i] >= static_cast<int64_t>(map.sizes[i])) {
              element = nullptr;
            } else {
              element += place[i] * static_cast<int64_t>(map.strides[i]);
            }
          }
          const uint32_t byte = row * 128 + ((d0 / 8) ^ (row % 8)) * 16 + d0 % 8 * 2;
          visit(const_cast<unsigned char*>(element), const_cast<unsigned char*>(origin) + byte);
        }
      }
    }
  }
}
inline uint32_t box_bytes(const CUtensorMap& map) {
  return 2 * map.box[0] * map.box[1] * map.box[2] * map.box[3];
}
// Where a box begins in shared memory, if all of it is there: rows of 128 bytes.
inline unsigned char* box_pointer(const CUtensorMap& map, const void* shared) {
  if (map.box[0] != 64) simt::fail("a swizzled box has rows of 64 elements");
  return cuda::smem_range(cuda::smem_address(shared), box_bytes(map), 1024);
}
inline unsigned char* bulk_pointer(const void* shared, const void* global, uint32_t bytes) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    simt::fail("misaligned bulk copy");
  }
  return cuda::smem_range(cuda::smem_address(shared), bytes, 16);
}

inline void tensor_load(void* dst, const CUtensorMap* map, uint64_t* bar, int c0, int c1, int c2,
                        int c3, uint64_t = 0) {
  unsigned char* to = box_pointer(*map, dst);
  simt::copy_some_time([=, box = *map] {  // the kernel's own map may be gone by then
    for_box(box, to, c0, c1, c2, c3, [](const unsigned char* from, unsigned char* at) {
      if (from != nullptr) {
        std::memcpy(at, from, 2);
      } else {
        std::memset(at, 0, 2);
      }
    });
    barrier_complete_bytes(bar, box_bytes(box));
  });
}
inline void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar, uint64_t = 0) {
  unsigned char* to = bulk_pointer(dst, src, bytes);
  simt::copy_some_time([=] {
    std::memcpy(to, src, bytes);
    barrier_complete_bytes(bar, bytes);
  });
}
inline void bulk_store(void* dst, const void* src, uint32_t bytes) {
  const unsigned char* from = bulk_pointer(src, dst, bytes);
  simt::store_some_time([=] { std::memcpy(dst, from, bytes); });
}
inline void tensor_store(const CUtensorMap* map, const void* src, int c0, int c1, int c2, int c3) {
  unsigned char* from = box_pointer(*map, src);
  simt::store_some_time([=, box = *map] {
    for_box(box, from, c0, c1, c2, c3, [](unsigned char* to, const unsigned char* at) {
      if (to != nullptr) std::memcpy(to, at, 2);
    });
  });
}
inline void tensor_add(const CUtensorMap* map, const void* src, int c0, int c1, int c2, int c3) {
  unsigned char* from = box_pointer(*map, src);
  simt::store_some_time([=, box = *map] {
    for_box(box, from, c0, c1, c2, c3, [](unsigned char* to, const unsigned char* at) {
      if (to == nullptr) return;
      uint16_t a, b;
      std::memcpy(&a, to, 2);
      std::memcpy(&b, at, 2);
      const auto sum = static_cast<uint16_t>(add_bf16(a, b));
      std::memcpy(to, &sum, 2);
    });
  });
}
inline void global_add_bf16(uint4* to, uint4 x) {
  *to = {add_bf16(to->x, x.x), add_bf16(to->y, x.y), add_bf16(to->z, x.z), add_bf16(to->w, x.w)};
}
inline void bulk_store_wait() { simt::await_stores(); }
inline void bulk_store_complete() { simt::await_stores(); }

// ---- Flags, registers
inline void flag_release(int* flag, int value) { *flag = value; }
inline int flag_acquire(const int* flag) { return *flag; }
template <int kRegisters>
void registers_increase() {}
template <int kRegisters>
void registers_decrease() {}

// ---- Matrix fragments
struct StoreMatrix {
  uint32_t address, r[4];
};
template <bool kTranspose>
void store_matrices(void* const* all) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t rows[8][8];
    for (int l = 0; l < 32; ++l) {
      const uint32_t word = static_cast<const StoreMatrix*>(all[l])->r[matrix];
      for (int half = 0; half < 2; ++half) {
        const int g = l / 4, t = 2 * (l % 4) + half;
        (kTranspose ? rows[t][g] : rows[g][t]) = static_cast<uint16_t>(half ? word >> 16 : word);
      }
    }
    for (int row = 0; row < 8; ++row) {
      const uint32_t address = static_cast<const StoreMatrix*>(all[8 * matrix + row])->address;
      std::memcpy(cuda::smem_pointer(address, 16), rows[row], 16);
    }
  }
}
inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  StoreMatrix mine{address, {r0, r1, r2, r3}};
  simt::collective("stmatrix", &mine, store_matrices<false>);
}
inline void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                              uint32_t r3) {
  StoreMatrix mine{address, {r0, r1, r2, r3}};
  simt::collective("stmatrix.trans", &mine, store_matrices<true>);
}
inline float half_of(uint32_t word, int half) {
  const auto bits = static_cast<uint16_t>(half ? word >> 16 : word);
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}
inline void mma_half(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda::Product mine{c, a, {b0, b1}};
  simt::collective("mma.f16", &mine, [](void* const* all) {
    const auto arg = [all](int l) { return static_cast<const cuda::Product*>(all[l]); };
    cuda::multiply<16>(
        all,
        [&](int i, int k) {
          return half_of(arg(i % 8 * 4 + k % 8 / 2)->a[i / 8 + 2 * (k / 8)], k % 2);
        },
        [&](int k, int j) { return half_of(arg(j * 4 + k % 8 / 2)->b[k / 8], k % 2); });
  });
}

// ---- Warpgroup products
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
template <int kCount>
void settle(float (&)[kCount]) {}

// The two words of a shared operand.
struct OperandWords {
  uint32_t low, high;

  // Element (row of M or N, k).
  float at(int row, int k, bool transposed) const {
    const uint32_t start = (low & 0x3fff) << 4, leading = (low >> 16) << 4;
    const uint32_t stride = (high & 0x3fff) << 4;
    const auto r = static_cast<uint32_t>(row), c = static_cast<uint32_t>(k);
    uint32_t address = start;
    if ((high >> 30) == 0) {  // 8 x 8 blocks of 128 bytes
      address += transposed ? c / 8 * leading + r / 8 * stride + c % 8 * 16 + r % 8 * 2
                            : c / 8 * leading + r / 8 * stride + r % 8 * 16 + c % 8 * 2;
    } else {  // rows of 128 bytes, swizzled
      address += transposed ? r / 64 * leading + c / 8 * stride + c % 8 * 128 + r % 64 * 2
                            : r / 8 * stride + r % 8 * 128 + c * 2;
      address ^= (address >> 7 & 7) << 4;
    }
    uint16_t bits;
    std::memcpy(&bits, cuda::smem_pointer(address, 2), 2);
    return cuda::bf16_half(bits, 0);
  }
};

struct GroupProduct {
  float* d;
  uint32_t a[4];  // of a fragment
  OperandWords left, right;
  int columns;
  bool accumulate, from_registers, trans_a, trans_b;
};
inline void multiply_group(void* const* all) {
  const auto arg = [all](int t) { return static_cast<const GroupProduct*>(all[t]); };
  const GroupProduct& one = *arg(0);
  static float a[64][16], b[16][128], c[64][128];
  for (int m = 0; m < 64; ++m) {
    for (int k = 0; k < 16; ++k) {
      const int thread = 32 * (m / 16) + m % 8 * 4 + k % 8 / 2;
      a[m][k] = one.from_registers
                    ? cuda::bf16_half(arg(thread)->a[m % 16 / 8 + 2 * (k / 8)], k % 2)
                    : one.left.at(m, k, one.trans_a);
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < one.columns; ++n) b[k][n] = one.right.at(n, k, one.trans_b);
  }
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < one.columns; ++n) c[m][n] = 0.0f;
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < one.columns; ++n) c[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int t = 0; t < 128; ++t) {
    const GroupProduct& mine = *arg(t);
    if (mine.columns != one.columns || mine.right.low != one.right.low ||
        mine.left.low != one.left.low || mine.accumulate != one.accumulate) {
      simt::fail("threads of a warpgroup differ in a product's operands");
    }
    for (int i = 0; i < one.columns / 2; ++i) {
      const int row = 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2);
      const int column = 8 * (i / 4) + 2 * (t % 4) + i % 2;
      mine.d[i] = (mine.accumulate ? mine.d[i] : 0.0f) + c[row][column];
    }
  }
}
inline void group_product(GroupProduct mine) {
  simt::warpgroup_collective("wgmma", &mine, multiply_group);
}

}  // namespace gdn::sm90
