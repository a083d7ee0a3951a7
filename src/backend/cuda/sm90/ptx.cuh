// Thin wrappers over the sm_90a instructions the kernels use: mbarrier, bulk and tensor copies,
// wgmma, ldmatrix/stmatrix, mma.sync. No policy. With GDN_SM90_DEBUG every wait is bounded and
// traps with a message, so that a lost arrival ends the program instead of hanging the device.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "backend/cuda/common/ptx.cuh"
#ifdef GDN_SM90_DEBUG
#include <cstdio>
#endif

#ifndef __CUDACC__
#include "simt/hopper.h"
#endif

namespace gdn::sm90 {

using bf16 = __nv_bfloat16;

using cuda::bf16_high;
using cuda::bf16_low;
using cuda::exp2_approx;
using cuda::ldmatrix_x4;
using cuda::ldmatrix_x4_trans;
using cuda::mma_bf16;
using cuda::pack_bf16;
using cuda::smem_address;

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t add_bf16(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
__device__ __forceinline__ uint32_t mul_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ __forceinline__ uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// threadIdx.x, read anew.
__device__ __forceinline__ uint32_t fresh_thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// The same number, unknown to the compiler: what is made from it is made where it is used, not kept
// in registers over a loop.
__device__ __forceinline__ uint32_t made_anew(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// True in one lane of the warp, the same one every time; the compiler knows that it is one.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }"
               : "=r"(elected));
  return elected != 0;
}

// ---- mbarrier ---------------------------------------------------------------------------------
__device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(count)
               : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
__device__ __forceinline__ void barrier_expect_bytes(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)),
               "r"(bytes)
               : "memory");
}
// Counts the turns of a waiting loop; in debug builds too many of them end the program.
struct SpinLimit {
#ifdef GDN_SM90_DEBUG
  int64_t turns = 0;
  __device__ __forceinline__ void turn(const void* what) {
    if (++turns < 20'000'000) return;
    printf("sm90: block %d thread %d waits for %p\n", blockIdx.x, threadIdx.x, what);
    asm volatile("trap;");
  }
#else
  __device__ __forceinline__ void turn(const void*) {}
#endif
};
// Waits until the phase of parity `parity` has completed.
__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
  const uint32_t address = smem_address(bar);
  uint32_t done = 0;
  for (SpinLimit limit; !done; limit.turn(bar)) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3; "
        "selp.b32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address), "r"(parity), "r"(10000000)
        : "memory");
  }
}
// Named barrier of `threads` threads of this block.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Copies -----------------------------------------------------------------------------------
// Later asynchronous-proxy reads (wgmma, bulk copies) see this thread's earlier shared stores.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Box of a rank-4 tensor map to shared memory, completing on `bar`; with or without a cache policy.
__device__ __forceinline__ void tensor_load(void* dst, const CUtensorMap* map, uint64_t* bar,
                                            int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(dst)),
      "l"(map), "r"(smem_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void tensor_load(void* dst, const CUtensorMap* map, uint64_t* bar,
                                            int c0, int c1, int c2, int c3, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(dst)),
      "l"(map), "r"(smem_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}
// `bytes` contiguous bytes (a multiple of 16) to shared memory, completing on `bar`.
__device__ __forceinline__ void bulk_load(void* dst, const void* src, uint32_t bytes,
                                          uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(dst)),
      "l"(src), "r"(bytes), "r"(smem_address(bar))
      : "memory");
}
// The same with a cache policy.
__device__ __forceinline__ void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(smem_address(dst)),
      "l"(src), "r"(bytes), "r"(smem_address(bar)), "l"(policy)
      : "memory");
}
// `bytes` contiguous bytes, or a box, from shared memory; bulk_store_wait: this thread's stores
// have read theirs.
__device__ __forceinline__ void bulk_store(void* dst, const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
               "r"(smem_address(src)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, const void* src, int c0,
                                             int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(smem_address(src)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Adds to what is there, element by element, rounding to bf16.
__device__ __forceinline__ void tensor_add(const CUtensorMap* map, const void* src, int c0, int c1,
                                           int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(smem_address(src)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Adds eight bf16 to those in global memory, rounding to bf16. Who orders such additions orders
// their sum.
__device__ __forceinline__ void global_add_bf16(uint4* to, uint4 x) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
// Between this thread's ordinary accesses to global memory and its copies, either way round.
__device__ __forceinline__ void fence_global_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// This thread's stores and additions are done, and visible to whoever synchronises with it.
__device__ __forceinline__ void bulk_store_complete() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  fence_global_copies();
}
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// ---- Flags in global memory -------------------------------------------------------------------
__device__ __forceinline__ void flag_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ int flag_acquire(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
// ---- Registers of a warpgroup -----------------------------------------------------------------
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Matrix fragments -------------------------------------------------------------------------
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1,
                                                  uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
// c[16x8] += a[16x16] b[16x8], fp16 operands.
__device__ __forceinline__ void mma_half(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif  // __CUDACC__

__device__ __forceinline__ float2 unpack_bf16(uint32_t x) { return {bf16_low(x), bf16_high(x)}; }

// A pair of fp32 factors as sums of two bf16 each, 16 bits of precision together; and a pair of
// bf16 times such factors, rounded once.
struct SplitPair {
  uint32_t high, low;
};
__device__ __forceinline__ uint32_t scale_bf16(uint32_t x, SplitPair factor) {
  return fma_bf16(x, factor.high, mul_bf16(x, factor.low));
}
__device__ __forceinline__ uint32_t pack_half(float a, float b) {
  const __half2 pair = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}

}  // namespace gdn::sm90
