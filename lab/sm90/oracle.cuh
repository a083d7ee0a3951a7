// What the studies check against: the recurrence token by token in fp64, one block per (document,
// head), inputs made on the device, and error sums per chunk and head. Slow and plain on purpose.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(x)                                                             \
  do {                                                                       \
    if (cudaError_t e_ = (x); e_ != cudaSuccess) {                           \
      std::printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); \
      std::exit(1);                                                          \
    }                                                                        \
  } while (0)

namespace lab {

using bf16 = __nv_bfloat16;

__device__ inline uint32_t hash(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return static_cast<uint32_t>(x);
}
__device__ inline float uniform(uint64_t i, uint64_t seed) {
  return (hash(i * 0x9e3779b97f4a7c15ull + seed * 1000003) + 0.5f) * 2.3283064e-10f;
}
__device__ inline float normal(uint64_t i, uint64_t seed) {
  return sqrtf(-2.0f * logf(uniform(i, 2 * seed))) * cospif(2.0f * uniform(i, 2 * seed + 1));
}

// Rows of [T, heads, 128] with any token stride: normal, one warp a row; normalised if asked.
// `pull` > 0 mixes in one fixed direction, so that keys correlate.
__global__ void make_rows(bf16* x, int64_t stride, int64_t tokens, int heads, uint64_t seed,
                          bool unit, float pull, float size) {
  const int64_t row = blockIdx.x * int64_t{blockDim.x / 32} + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= tokens * heads) return;
  const int64_t t = row / heads;
  const int h = static_cast<int>(row % heads);
  float value[4], sum = 0;
  for (int i = 0; i < 4; ++i) {
    value[i] =
        normal(row * 128 + lane + 32 * i, seed) + pull * normal(h * 128 + lane + 32 * i, seed + 77);
    sum += value[i] * value[i];
  }
  for (int s = 16; s; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
  const float f = unit ? rsqrtf(sum) : size;
  for (int i = 0; i < 4; ++i)
    x[t * stride + h * 128 + lane + 32 * i] = __float2bfloat16(value[i] * f);
}

enum Gate { kModel, kSlow, kZero, kStrong, kSpike };
// g as in training (A in [1, 16), dt bias), slow (about -0.01), 0, strong (-5), or slow with spikes
// of -1e4 and -inf.
__global__ void make_gates(float* g, float* beta, int64_t tokens, int heads, Gate gate) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= tokens * heads) return;
  const int h = static_cast<int>(i % heads);
  const float x = normal(i, 11);
  beta[i] = 1.0f / (1.0f + expf(-normal(i, 12)));
  if (gate == kModel) {
    const float A = 1 + 15 * uniform(h, 13), dt = expf(uniform(h, 14) * 4.605f - 6.908f);
    g[i] = -A * log1pf(expf(x + dt + logf(-expm1f(-dt))));
  } else if (gate == kZero) {
    g[i] = 0;
  } else if (gate == kStrong) {
    g[i] = -5;
  } else {
    g[i] = -log1pf(expf(-(x + 5)));
    if (gate == kSpike && i / heads % 97 == 40) g[i] = i / heads % 2 ? -1e4f : -INFINITY;
  }
}

struct Problem {
  const bf16 *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  const float *g, *beta;       // [T, HV]
  const float* initial_state;  // [N, HV, 128, 128] or null
  const int64_t* cu;           // [N + 1]
  int heads_k, heads_v;
  float scale;
  bool l2norm;
};

// o [T, HV, 128] and final_state [N, HV, 128, 128], fp32 roundings of fp64 sums. 512 threads: four
// per column of S.
__global__ void __launch_bounds__(512) recurrence(const Problem p, float* o, float* final_state) {
  const int doc = blockIdx.x / p.heads_v, head = blockIdx.x % p.heads_v,
            key_head = head / (p.heads_v / p.heads_k);
  const int column = threadIdx.x / 4, part = threadIdx.x % 4;
  __shared__ double k[2][128], q[2][128], norms[2][2][4];
  double s[32];
  const float* init = p.initial_state + (int64_t{doc} * p.heads_v + head) * 128 * 128;
  for (int i = 0; i < 32; ++i) s[i] = p.initial_state ? init[(part + 4 * i) * 128 + column] : 0.0;
  const int64_t begin = p.cu[doc], end = p.cu[doc + 1];
  const int which = threadIdx.x / 128, e = threadIdx.x % 128;
  for (int64_t t = begin; t < end; ++t) {
    const int b = t & 1;
    if (which < 2) {
      const bf16* row = which ? p.q + t * p.q_stride : p.k + t * p.k_stride;
      const double x = __bfloat162float(row[key_head * 128 + e]);
      (which ? q : k)[b][e] = x;
      double sum = x * x;
      for (int w = 16; w; w /= 2) sum += __shfl_xor_sync(~0u, sum, w);
      if (e % 32 == 0) norms[b][which][e / 32] = sum;
    }
    __syncthreads();
    double rk = 1, rq = p.scale;
    if (p.l2norm) {
      const double* n = norms[b][0];
      rk = rsqrt(n[0] + n[1] + n[2] + n[3] + 1e-6);
      n = norms[b][1];
      rq *= rsqrt(n[0] + n[1] + n[2] + n[3] + 1e-6);
    }
    const double decay = exp(double(p.g[t * p.heads_v + head]));
    double dot = 0;
    for (int i = 0; i < 32; ++i) s[i] *= decay, dot += s[i] * k[b][part + 4 * i];
    dot += __shfl_xor_sync(~0u, dot, 1);
    dot += __shfl_xor_sync(~0u, dot, 2);
    const double value = __bfloat162float(p.v[t * p.v_stride + head * 128 + column]);
    const double u = p.beta[t * p.heads_v + head] * (value - dot * rk) * rk;
    double out = 0;
    for (int i = 0; i < 32; ++i) s[i] += k[b][part + 4 * i] * u, out += s[i] * q[b][part + 4 * i];
    out += __shfl_xor_sync(~0u, out, 1);
    out += __shfl_xor_sync(~0u, out, 2);
    if (part == 0) o[(t * p.heads_v + head) * 128 + column] = float(out * rq);
  }
  float* last = final_state + (int64_t{doc} * p.heads_v + head) * 128 * 128;
  for (int i = 0; i < 32; ++i) last[(part + 4 * i) * 128 + column] = float(s[i]);
}

// sums[block][3] = |x - ref|^2, |ref|^2, max |x - ref| over rows [row[b], row[b] + rows[b]) of one
// head of [T, heads, 128]; a NaN counts as 1e30.
struct Rows {
  int64_t row;
  int32_t rows, head;
};
template <typename T>
__global__ void compare(const T* x, int64_t stride, const float* ref, int heads, const Rows* rows,
                        double* sums) {
  const Rows r = rows[blockIdx.x];
  double diff = 0, square = 0, worst = 0;
  for (int i = threadIdx.x; i < r.rows * 128; i += blockDim.x) {
    const int64_t t = r.row + i / 128;
    const double b = ref[(t * heads + r.head) * 128 + i % 128];
    double d = double(float(x[t * stride + r.head * 128 + i % 128])) - b;
    if (!(fabs(d) < 1e15)) d = 1e15;
    diff += d * d, square += b * b, worst = fmax(worst, fabs(d));
  }
  __shared__ double part[3][32];
  for (int s = 16; s; s /= 2) {
    diff += __shfl_xor_sync(~0u, diff, s), square += __shfl_xor_sync(~0u, square, s);
    worst = fmax(worst, __shfl_xor_sync(~0u, worst, s));
  }
  if (threadIdx.x % 32 == 0)
    part[0][threadIdx.x / 32] = diff, part[1][threadIdx.x / 32] = square,
                          part[2][threadIdx.x / 32] = worst;
  __syncthreads();
  if (threadIdx.x == 0) {
    diff = square = worst = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w)
      diff += part[0][w], square += part[1][w], worst = fmax(worst, part[2][w]);
    sums[3 * blockIdx.x] = diff, sums[3 * blockIdx.x + 1] = square,
             sums[3 * blockIdx.x + 2] = worst;
  }
}

}  // namespace lab
