// The functions of backend/cuda/common/ptx.cuh on the SIMT emulator.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/bf16.h"
#include "simt/engine.h"

#define GDN_DEVICE inline
#define GDN_SHARED(name) uint4* name = static_cast<uint4*>(::simt::shared_memory())
#define GDN_SHARED_BYTES(name, alignment) \
  auto* name = static_cast<uint8_t*>(::simt::shared_memory())
#define GDN_UNROLL

namespace gdn::cuda {

inline uint32_t smem_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) -
                      static_cast<const unsigned char*>(simt::shared_memory());
  if (offset < 0 || offset > simt::shared_size()) simt::fail("not a shared memory pointer");
  return static_cast<uint32_t>(offset);
}
// `bytes` of shared memory from an aligned address on.
inline unsigned char* smem_range(uint32_t address, int64_t bytes, uint32_t alignment) {
  if (address % alignment != 0) simt::fail("misaligned shared memory access");
  if (address + bytes > simt::shared_size()) simt::fail("access past the end of shared memory");
  return static_cast<unsigned char*>(simt::shared_memory()) + address;
}
inline unsigned char* smem_pointer(uint32_t address, int bytes) {
  return smem_range(address, bytes, static_cast<uint32_t>(bytes));
}

inline float bf16_half(uint32_t word, int half) {
  BFloat16 x;
  x.bits = static_cast<uint16_t>(half ? word >> 16 : word);
  return static_cast<float>(x);
}

struct LoadMatrix {
  uint32_t* r;
  uint32_t address;
};
template <bool kTranspose>
void load_matrices(void* const* all) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t rows[8][8];
    for (int row = 0; row < 8; ++row) {
      const uint32_t address = static_cast<LoadMatrix*>(all[8 * matrix + row])->address;
      std::memcpy(rows[row], smem_pointer(address, 16), 16);
    }
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = l % 4;
      const uint32_t low = kTranspose ? rows[2 * t][g] : rows[g][2 * t];
      const uint32_t high = kTranspose ? rows[2 * t + 1][g] : rows[g][2 * t + 1];
      static_cast<LoadMatrix*>(all[l])->r[matrix] = low | (high << 16);
    }
  }
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  LoadMatrix mine{r, address};
  simt::collective("ldmatrix", &mine, load_matrices<false>);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  LoadMatrix mine{r, address};
  simt::collective("ldmatrix.trans", &mine, load_matrices<true>);
}

inline uint32_t movmatrix_trans(uint32_t a) {
  simt::collective("movmatrix", &a, [](void* const* all) {
    uint16_t rows[8][8];
    for (int l = 0; l < 32; ++l) {
      const uint32_t word = *static_cast<uint32_t*>(all[l]);
      rows[l / 4][2 * (l % 4)] = static_cast<uint16_t>(word);
      rows[l / 4][2 * (l % 4) + 1] = static_cast<uint16_t>(word >> 16);
    }
    for (int l = 0; l < 32; ++l) {
      *static_cast<uint32_t*>(all[l]) =
          rows[2 * (l % 4)][l / 4] | (static_cast<uint32_t>(rows[2 * (l % 4) + 1][l / 4]) << 16);
    }
  });
  return a;
}

struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};
// c[16x8] += a[16 x kDepth] b, elements of a and b through functions of (arguments, row, column).
template <int kDepth, typename A, typename B>
void multiply(void* const* all, const A& a_at, const B& b_at) {
  float a[16][kDepth], b[kDepth][8];
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < kDepth; ++k) a[i][k] = a_at(i, k);
  }
  for (int k = 0; k < kDepth; ++k) {
    for (int j = 0; j < 8; ++j) b[k][j] = b_at(k, j);
  }
  for (int l = 0; l < 32; ++l) {
    float* c = static_cast<Product*>(all[l])->c;
    for (int e = 0; e < 4; ++e) {
      const int i = l / 4 + 8 * (e / 2), j = 2 * (l % 4) + e % 2;
      float sum = 0.0f;
      for (int k = 0; k < kDepth; ++k) sum += a[i][k] * b[k][j];
      c[e] += sum;
    }
  }
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product mine{c, a, {b0, b1}};
  simt::collective("mma.bf16", &mine, [](void* const* all) {
    const auto arg = [all](int l) { return static_cast<const Product*>(all[l]); };
    multiply<16>(
        all,
        [&](int i, int k) {
          return bf16_half(arg(i % 8 * 4 + k % 8 / 2)->a[i / 8 + 2 * (k / 8)], k % 2);
        },
        [&](int k, int j) { return bf16_half(arg(j * 4 + k % 8 / 2)->b[k / 8], k % 2); });
  });
}
inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product mine{c, a, {b0, b1}};
  simt::collective("mma.tf32", &mine, [](void* const* all) {
    const auto arg = [all](int l) { return static_cast<const Product*>(all[l]); };
    multiply<8>(
        all,
        [&](int i, int k) {
          return std::bit_cast<float>(arg(i % 8 * 4 + k % 4)->a[i / 8 + 2 * (k / 4)]);
        },
        [&](int k, int j) { return std::bit_cast<float>(arg(j * 4 + k % 4)->b[k / 4]); });
  });
}

inline void cp_async_16(uint32_t to, const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) simt::fail("misaligned global address");
  simt::copy_later(smem_pointer(to, 16), from, bytes, 16 - bytes);
}
inline void cp_async_commit() { simt::close_copies(); }
template <int kPending>
void cp_async_wait() {
  simt::await_copies(kPending);
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline uint32_t pack_bf16(float low, float high) {
  return BFloat16(low).bits | (static_cast<uint32_t>(BFloat16(high).bits) << 16);
}
inline uint32_t to_tf32(float x) {  // round to nearest, ties away, 10 bits of fraction
  return (std::bit_cast<uint32_t>(x) + 0x1000u) & 0xffffe000u;
}

}  // namespace gdn::cuda
