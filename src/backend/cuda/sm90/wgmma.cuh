// Warpgroup products m64nNk16, bf16 operands, fp32 accumulators: A in registers or shared memory, B
// in shared memory. A shared operand is made of tiles of 64 rows x 64 bf16 (8,192 bytes, 1,024-byte
// aligned, 128-byte swizzle): element (r, c) at byte r*128 + ((c/8) ^ (r%8))*16 + (c%8)*2.
// `K-major` B is stored [n][k] (one k step of 16 = +32 bytes), `transposed` B is stored [k][n]
// (+2,048). Accumulator i of a thread: row 16*warp + lane/4 + 8*((i/2)%2), column 8*(i/4) +
// 2*(lane%4) + i%2.
#pragma once

#include <cstdint>

#include "backend/cuda/sm90/ptx.cuh"

namespace gdn::sm90 {

inline constexpr int kTileBytes = 64 * 64 * 2;

// Where an operand of a product lies and how: the two words of its descriptor. Steps are added to
// the first word (in units of 16 bytes), so that a step costs one instruction.
struct Operand {
  uint32_t low, high;

  __device__ __forceinline__ Operand at(uint32_t bytes) const { return {low + (bytes >> 4), high}; }
  __device__ __forceinline__ uint64_t descriptor() const {
    return static_cast<uint64_t>(high) << 32 | low;
  }
};

// A 128-byte-swizzled operand. K-major: leading offset unused, 1,024 bytes between groups of 8
// rows. Transposed: `leading` bytes between tiles of 64 columns.
__device__ __forceinline__ Operand operand(uint32_t address, uint32_t leading = 16) {
  return {((address & 0x3FFFF) >> 4) | (leading >> 4) << 16, (1024 >> 4) | 1u << 30};
}

// The same without a swizzle: 8 x 8 blocks of 128 contiguous bytes. K-major: `leading` bytes
// between blocks that are neighbours in k, `stride` bytes between groups of 8 rows.
__device__ __forceinline__ Operand plain_operand(uint32_t address, uint32_t leading,
                                                 uint32_t stride) {
  return {((address & 0x3FFFF) >> 4) | (leading >> 4) << 16, stride >> 4};
}

#ifdef __CUDACC__
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading an accumulator before the wait that precedes this call.
template <int kCount>
__device__ __forceinline__ void settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operand lists. A product that begins a sum only writes its accumulators ("=f"): what they held
// before need not be kept.
#define GDN_ACC8(c, d, o) \
  c(d[o]), c(d[o + 1]), c(d[o + 2]), c(d[o + 3]), c(d[o + 4]), c(d[o + 5]), c(d[o + 6]), c(d[o + 7])
#define GDN_ACC16(c, d, o) GDN_ACC8(c, d, o), GDN_ACC8(c, d, o + 8)
#define GDN_ACC32(c, d, o) \
  GDN_ACC8(c, d, o), GDN_ACC8(c, d, o + 8), GDN_ACC8(c, d, o + 16), GDN_ACC8(c, d, o + 24)
#define GDN_ACC64(c, d, o) GDN_ACC32(c, d, o), GDN_ACC32(c, d, o + 32)
#define GDN_NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GDN_NAMES32                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GDN_NAMES64                                                                         \
  GDN_NAMES32                                                                               \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GDN_WGMMA_RS(n, names, acc, a0, a1, a2, a3, b, accumulates, trans_b)                     \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " accumulates                                     \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" names "}, {" a0 \
               ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, " trans_b "; }\n"                     \
               : acc                                                                             \
               : "r"(r0), "r"(r1), "r"(r2), "r"(r3), "l"(right.descriptor()),                    \
                 "r"(int{accumulate}), "n"(kTransB))
#define GDN_WGMMA_SS(n, names, acc, a, b, accumulates, trans_a, trans_b)                       \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " accumulates                                   \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" names "}, " a \
               ", " b ", p, 1, 1, " trans_a ", " trans_b "; }\n"                               \
               : acc                                                                           \
               : "l"(left.descriptor()), "l"(right.descriptor()), "r"(int{accumulate}),        \
                 "n"(kTransA), "n"(kTransB))

// d (+)= a b, N = 64; a: four registers of this thread's fragment. kTransB: B is stored [k][n].
// `accumulate` must be known when compiling.
template <int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[32], uint32_t r0, uint32_t r1, uint32_t r2,
                                         uint32_t r3, Operand right, bool accumulate) {
  if (accumulate) {
    GDN_WGMMA_RS("64", GDN_NAMES32, GDN_ACC32("+f", d, 0), "%32", "%33", "%34", "%35", "%36", "%37",
                 "%38");
  } else {
    GDN_WGMMA_RS("64", GDN_NAMES32, GDN_ACC32("=f", d, 0), "%32", "%33", "%34", "%35", "%36", "%37",
                 "%38");
  }
}

// The same with N = 128.
template <int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[64], uint32_t r0, uint32_t r1, uint32_t r2,
                                         uint32_t r3, Operand right, bool accumulate) {
  if (accumulate) {
    GDN_WGMMA_RS("128", GDN_NAMES64, GDN_ACC64("+f", d, 0), "%64", "%65", "%66", "%67", "%68",
                 "%69", "%70");
  } else {
    GDN_WGMMA_RS("128", GDN_NAMES64, GDN_ACC64("=f", d, 0), "%64", "%65", "%66", "%67", "%68",
                 "%69", "%70");
  }
}

// d (+)= a b, N = 32, both in shared memory. kTransA: A is stored [k][m].
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[16], Operand left, Operand right,
                                         bool accumulate) {
  if (accumulate) {
    GDN_WGMMA_SS("32", GDN_NAMES16, GDN_ACC16("+f", d, 0), "%16", "%17", "%18", "%19", "%20");
  } else {
    GDN_WGMMA_SS("32", GDN_NAMES16, GDN_ACC16("=f", d, 0), "%16", "%17", "%18", "%19", "%20");
  }
}

// The same with N = 64.
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[32], Operand left, Operand right,
                                         bool accumulate) {
  if (accumulate) {
    GDN_WGMMA_SS("64", GDN_NAMES32, GDN_ACC32("+f", d, 0), "%32", "%33", "%34", "%35", "%36");
  } else {
    GDN_WGMMA_SS("64", GDN_NAMES32, GDN_ACC32("=f", d, 0), "%32", "%33", "%34", "%35", "%36");
  }
}

// The same with N = 128.
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[64], Operand left, Operand right,
                                         bool accumulate) {
  if (accumulate) {
    GDN_WGMMA_SS("128", GDN_NAMES64, GDN_ACC64("+f", d, 0), "%64", "%65", "%66", "%67", "%68");
  } else {
    GDN_WGMMA_SS("128", GDN_NAMES64, GDN_ACC64("=f", d, 0), "%64", "%65", "%66", "%67", "%68");
  }
}

#undef GDN_WGMMA_SS
#undef GDN_WGMMA_RS
#undef GDN_ACC8
#undef GDN_ACC16
#undef GDN_ACC32
#undef GDN_ACC64
#undef GDN_NAMES16
#undef GDN_NAMES32
#undef GDN_NAMES64
#else
// The same on the emulator.
template <int kTransB, int kCount>
void wgmma_rs(float (&d)[kCount], uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3, Operand right,
              bool accumulate) {
  group_product({d,
                 {r0, r1, r2, r3},
                 {},
                 {right.low, right.high},
                 2 * kCount,
                 accumulate,
                 true,
                 false,
                 kTransB == 1});
}
template <int kTransA, int kTransB, int kCount>
void wgmma_ss(float (&d)[kCount], Operand left, Operand right, bool accumulate) {
  group_product({d,
                 {},
                 {left.low, left.high},
                 {right.low, right.high},
                 2 * kCount,
                 accumulate,
                 false,
                 kTransA == 1,
                 kTransB == 1});
}
#endif

// Byte address of element (row, column) of a swizzled tile; column a multiple of 8.
__device__ __forceinline__ uint32_t tile_address(uint32_t tile, int row, int column) {
  return tile + row * 128 + (((column / 8) ^ (row % 8)) * 16);
}

}  // namespace gdn::sm90
