// k_prepare: the chunk records of params.h. One block per (chunk, key head): its three warps make A
// together, then each solves for W of its own value heads, with no block barrier in between. W = A
// - A B W is solved without dividing by beta. Forward substitution in fp32 on the eight 8 x 8
// diagonal blocks, then W21 = (I - W22 B2) A21 (I - B1 W11) for 8 -> 16 -> 32 -> 64 by mma.sync,
// fp16 operands, fp32 sums. For |k| = 1 and beta <= 2 every entry met on the way is a product k_i^T
// prod(I - beta k k^T) k_j and at most 1, so fp16 neither overflows nor loses to growth. The decay
// e^{G_i-G_j} between two different 8-blocks is a row factor times a column factor that meet at the
// end of the column's block, each at most 1. 96 threads, 6 blocks per SM: 34.8 KiB shared = K tile
// 16 (later the three record images, 4.5 each) + 3 x (W 3 + vectors 0.9) + A 5 fp16 + 2 fp32. At
// most 112 registers (18 warps x 32 x 112 = 64,512).
#include "backend/cuda/common/launch.h"
#include "backend/cuda/common/scalars.cuh"
#include "backend/cuda/sm90/prepare.h"
#include "backend/cuda/sm90/ptx.cuh"

namespace gdn::sm90 {
namespace {

constexpr int kWarps = 3;
constexpr int kThreads = 32 * kWarps;
// e^-88 is below the smallest normal float: a token that decays more forgets the state exactly, and
// the sums of later, small decays keep their digits.
constexpr float kLowestDecay = -88.0f;
constexpr int kImageBytes = kRecordElements * 2;
constexpr int kBlockBytes = 16 * 16 * 2;  // fp16 block, see block_address
constexpr int kSubPitch = 68;  // floats of an 8 x 8 fp32 block: 4 blocks, 4 different banks

// What one warp keeps of the value head it works on.
struct Slot {
  alignas(128) uint8_t w[6 * kBlockBytes];  // W blocks (0,0) (1,1) (2,2) (3,3) (1,0) (3,2), fp16
  alignas(16) float gate[kChunkTokens];
  alignas(16) float beta[kChunkTokens];
  alignas(16) float column[kChunkTokens];  // e^(G at the end of token j's 8-block - G_j)
  alignas(16) __half minus_beta[kChunkTokens];
};

struct Shared {
  union {
    alignas(128) uint8_t k[kChunkTokens * kDim * 2];  // 16-byte piece c of row r at c ^ (r % 8)
    alignas(128) uint8_t image[kWarps][kImageBytes];
  };
  Slot slot[kWarps];
  alignas(128) uint8_t a[10 * kBlockBytes];  // A block (r, j) at r (r + 1) / 2 + j, fp16
  alignas(16) float diagonal[8][kSubPitch];  // [8-block][column * 8 + row] of A
  float square[kChunkTokens];                // |k|^2
};

// Byte offset of piece `piece` (8 columns) of row `row` of a 16 x 16 fp16 block: eight rows of one
// piece lie in different banks.
__device__ __forceinline__ int block_offset(int row, int piece) {
  return row * 32 + ((piece ^ ((row / 4) % 2)) * 16);
}
// Byte offset of 8 x 8 block (i, j), j <= i, of a record image.
__device__ __forceinline__ int image_offset(int i, int j) { return (i * (i + 1) / 2 + j) * 128; }
// This lane's row of an x4 matrix access to a whole block: the matrices are (rows 0-7, columns
// 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15), which is the order of an A operand and of an
// accumulator.
__device__ __forceinline__ uint32_t whole_block(const uint8_t* blocks, int index, int lane) {
  return smem_address(blocks + index * kBlockBytes + block_offset(lane % 16, lane / 16));
}
// The same for quadrant (8 row8, 8 column8) of four blocks given by their index.
__device__ __forceinline__ uint32_t quadrant(const uint8_t* blocks, int index, int row8,
                                             int column8, int lane) {
  return smem_address(blocks + index * kBlockBytes + block_offset(8 * row8 + lane % 8, column8));
}
__device__ __forceinline__ int a_block(int r, int j) { return r * (r + 1) / 2 + j; }

// log2 of the decay of one token, from the operand; NaN stays.
__device__ __forceinline__ float log2_decay(const PrepareParams& p, float g, int head) {
  const float decay = cuda::activate_gate(p.activation, g, head).log_decay;
  return (decay < kLowestDecay ? kLowestDecay : decay) * cuda::kLog2E;
}

// Inclusive sums of the log2 decays (two tokens a lane) and beta, to the slot and to the record.
__device__ __forceinline__ void load_gates(const PrepareParams& p, const cuda::ChunkRow& chunk,
                                           int64_t record, int value_head, int lane, Slot& slot) {
  const int t = 2 * lane, last = chunk.tokens - 1;
  const int64_t row0 = chunk.row + min(t, last), row1 = chunk.row + min(t + 1, last);
  float g0 = cuda::load_scalar(p.g, row0, value_head);
  float g1 = cuda::load_scalar(p.g, row1, value_head);
  float b0 = cuda::load_scalar(p.beta, row0, value_head);
  float b1 = cuda::load_scalar(p.beta, row1, value_head);
  g0 = t <= last ? log2_decay(p, g0, value_head) : 0.0f;
  g1 = t < last ? log2_decay(p, g1, value_head) : 0.0f;
  b0 = t <= last ? cuda::activate_beta(p.activation, b0) : 0.0f;
  b1 = t < last ? cuda::activate_beta(p.activation, b1) : 0.0f;
  float sum = g0 + g1;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  float before = __shfl_up_sync(0xffffffffu, sum, 1);
  if (lane == 0) before = 0.0f;
  g0 += before;
  g1 += g0;
  // Past the end: G of the last token, bit by bit.
  const float last0 = __shfl_sync(0xffffffffu, g0, last / 2);
  const float last1 = __shfl_sync(0xffffffffu, g1, last / 2);
  const float last_gate = last % 2 ? last1 : last0;
  if (t > last) g0 = last_gate;
  if (t + 1 > last) g1 = last_gate;
  const float end = __shfl_sync(0xffffffffu, g1, lane | 3);  // four lanes hold an 8-block
  reinterpret_cast<float2*>(slot.gate)[lane] = {g0, g1};
  reinterpret_cast<float2*>(slot.beta)[lane] = {b0, b1};
  reinterpret_cast<float2*>(slot.column)[lane] = {exp2_approx(end - g0), exp2_approx(end - g1)};
  reinterpret_cast<uint32_t*>(slot.minus_beta)[lane] = pack_half(-b0, -b1);
  auto* out = reinterpret_cast<float2*>(p.gates + record * 2 * kChunkTokens);
  out[lane] = {g0, g1};
  out[32 + lane] = {b0, b1};
}

__device__ __forceinline__ void load_keys(const PrepareParams& p, const cuda::ChunkRow& chunk,
                                          int key_head, Shared& s) {
  const bf16* from = p.k + chunk.row * p.k_stride + int64_t{key_head} * kDim;
  for (int i = threadIdx.x; i < kChunkTokens * 16; i += kThreads) {
    const int row = i / 16, piece = i % 16;
    const bool there = row < chunk.tokens;
    cuda::cp_async_16(smem_address(s.k + row * 256 + ((piece ^ (row % 8)) * 16)),
                      there ? from + row * p.k_stride + piece * 8 : from, there ? 16 : 0);
  }
  cuda::cp_async_commit();
}

// scale / |q| of the chunk's rows: 16 lanes a row, all rows of the warp in flight at once.
__device__ __forceinline__ void store_query_norms(const PrepareParams& p,
                                                  const cuda::ChunkRow& chunk, int key_head,
                                                  int warp, int lane, float* norms) {
  const bf16* from = p.q + chunk.row * p.q_stride + int64_t{key_head} * kDim + (lane % 16) * 8;
  constexpr int kTurns = (kChunkTokens / 2 + kWarps - 1) / kWarps;
  uint4 x[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = 2 * (warp + kWarps * i) + lane / 16;
    x[i] = {0, 0, 0, 0};
    if (row < chunk.tokens) x[i] = *reinterpret_cast<const uint4*>(from + row * p.q_stride);
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = 2 * (warp + kWarps * i) + lane / 16;
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 pair = unpack_bf16((&x[i].x)[e]);
      sum += pair.x * pair.x + pair.y * pair.y;
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane % 16 == 0 && row < kChunkTokens) norms[row] = p.scale * rsqrtf(sum + 1e-6f);
  }
}

// The 16 x 8 halves of a 16 x 16 block in accumulator layout.
__device__ __forceinline__ float (&half_of(float (&d)[8], int h))[4] {
  return reinterpret_cast<float(&)[4]>(d[4 * h]);
}
__device__ __forceinline__ void multiply(float (&d)[8], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  mma_half(half_of(d, 0), a, b[0], b[1]);
  mma_half(half_of(d, 1), a, b[2], b[3]);
}

// acc[j]: block (r, j) of K K^T, j <= r.
__device__ __forceinline__ void multiply_keys(float (&acc)[4][8], int r, int lane,
                                              const Shared& s) {
  const uint32_t tile = smem_address(s.k);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[j][i] = 0.0f;
  }
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) {
    uint32_t a[4], b[4];
    const int row = 16 * r + lane % 16;
    ldmatrix_x4(a, tile + row * 256 + (((2 * kk + lane / 16) ^ (row % 8)) * 16));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > r) break;
      const int column = 16 * j + lane % 8 + 8 * (lane / 16);
      ldmatrix_x4(b, tile + column * 256 + (((2 * kk + (lane / 8) % 2) ^ (column % 8)) * 16));
      mma_bf16(half_of(acc[j], 0), a, b[0], b[1]);
      mma_bf16(half_of(acc[j], 1), a, b[2], b[3]);
    }
  }
}

// |k|^2 of block row r: the diagonal of its last block.
__device__ __forceinline__ void publish_squares(const float (&acc)[4][8], int r, int lane,
                                                Shared& s) {
  const int row = lane / 4, odd = row - 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j == r && (odd == 0 || odd == 1)) {
      s.square[16 * r + row] = odd ? acc[j][1] : acc[j][0];
      s.square[16 * r + 8 + row] = odd ? acc[j][7] : acc[j][6];
    }
  }
}

// Block row r of A: fp16 whole, and in fp32 the two 8 x 8 blocks on the diagonal.
__device__ __forceinline__ void publish_a(float (&acc)[4][8], int r, bool l2norm, int lane,
                                          Shared& s) {
  const int row = lane / 4, column = 2 * (lane % 4);
  float r0 = 1.0f, r1 = 1.0f;
  if (l2norm) {
    r0 = rsqrtf(s.square[16 * r + row] + 1e-6f);
    r1 = rsqrtf(s.square[16 * r + row + 8] + 1e-6f);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > r) break;
    if (l2norm) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float c = rsqrtf(s.square[16 * j + column + 8 * (i / 4) + i % 2] + 1e-6f);
        acc[j][i] *= ((i / 2) % 2 ? r1 : r0) * c;
      }
    }
    stmatrix_x4(whole_block(s.a, a_block(r, j), lane), pack_half(acc[j][0], acc[j][1]),
                pack_half(acc[j][2], acc[j][3]), pack_half(acc[j][4], acc[j][5]),
                pack_half(acc[j][6], acc[j][7]));
    if (j == r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s.diagonal[2 * r + h][column * 8 + row] = acc[j][6 * h];
        s.diagonal[2 * r + h][(column + 1) * 8 + row] = acc[j][6 * h + 1];
      }
    }
  }
}

// W and its gated image on the diagonal 8-blocks: a lane holds one column, four blocks at a time.
__device__ __forceinline__ void substitute(int lane, const Shared& s, Slot& slot, uint8_t* image) {
  const int column = lane % 8;
#pragma unroll
  for (int round = 0; round < 2; ++round) {
    const int block = 4 * round + lane / 8;
    const float* a = s.diagonal[block];
    float w[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = i > column ? a[column * 8 + i] : 0.0f;
#pragma unroll
    for (int m = 1; m < 7; ++m) {
      const float u = w[m] * slot.beta[8 * block + m];
#pragma unroll
      for (int i = m + 1; i < 8; ++i) w[i] -= a[m * 8 + i] * u;
    }
    const float gate = slot.gate[8 * block + column];
    const int quarter = block % 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 8 * quarter + i;
      *reinterpret_cast<__half*>(slot.w + (block / 2) * kBlockBytes + block_offset(row, quarter) +
                                 column * 2) = __float2half_rn(w[i]);
      const float value = i > column ? -w[i] * exp2_approx(slot.gate[8 * block + i] - gate) : 0.0f;
      *reinterpret_cast<bf16*>(image + image_offset(block, block) + i * 16 + column * 2) =
          __float2bfloat16_rn(value);
    }
  }
}

// Zeros in the upper right quadrants of the diagonal W blocks.
__device__ __forceinline__ void clear_upper(int lane, Slot& slot) {
  *reinterpret_cast<uint4*>(slot.w + (lane / 8) * kBlockBytes + block_offset(lane % 8, 1)) = {0, 0,
                                                                                              0, 0};
}

// What the merges of one value head need in registers.
struct Lane {
  float gate[8];           // G of this lane's row (lane / 4) of each 8-block
  uint32_t minus_beta[8];  // -beta of this lane's column pair (2 (lane % 4)) of each 8-block, fp16
};

__device__ __forceinline__ uint32_t multiply_half2(uint32_t x, uint32_t y) {
  const __half2 z = __hmul2(reinterpret_cast<__half2&>(x), reinterpret_cast<__half2&>(y));
  return reinterpret_cast<const uint32_t&>(z);
}

// W[.][j] B_j, negated, as a left operand; index: which block.
__device__ __forceinline__ void left_wb(uint32_t (&out)[4], const Slot& slot, int index, int j,
                                        const Lane& own, int lane) {
  ldmatrix_x4(out, whole_block(slot.w, index, lane));
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = multiply_half2(out[i], own.minus_beta[2 * j + i / 2]);
}
// B_j W[j][.], negated, as a right operand.
__device__ __forceinline__ void right_bw(uint32_t (&out)[4], const Slot& slot, int index, int j,
                                         const Lane& own, int lane) {
  ldmatrix_x4_trans(out, whole_block(slot.w, index, lane));
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = multiply_half2(out[i], own.minus_beta[2 * j + i % 2]);
}
__device__ __forceinline__ void right_a(uint32_t (&out)[4], const Shared& s, int r, int j,
                                        int lane) {
  ldmatrix_x4_trans(out, whole_block(s.a, a_block(r, j), lane));
}
__device__ __forceinline__ void unpack_block(float (&d)[8], const uint32_t (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(x[i]));
    d[2 * i] = pair.x;
    d[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void start_from_a(float (&d)[8], const Shared& s, int r, int j,
                                             int lane) {
  uint32_t x[4];
  ldmatrix_x4(x, whole_block(s.a, a_block(r, j), lane));
  unpack_block(d, x);
}
__device__ __forceinline__ void to_operand(uint32_t (&t)[4], const float (&d)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) t[i] = pack_half(d[2 * i], d[2 * i + 1]);
}

// A lane's two entries x, y of W in 8-block (row8, column8), gated and negated, as bf16.
__device__ __forceinline__ uint32_t gated(float x, float y, int row8, int column8, const Slot& slot,
                                          const Lane& own, int lane) {
  const float factor = -exp2_approx(own.gate[row8] - slot.gate[8 * column8 + 7]);
  const float2 column =
      *reinterpret_cast<const float2*>(&slot.column[8 * column8 + 2 * (lane % 4)]);
  return pack_bf16(x * (factor * column.x), y * (factor * column.y));
}
__device__ __forceinline__ void store_gated(const float (&d)[8], int r, int n, const Slot& slot,
                                            const Lane& own, uint8_t* image, int lane) {
  const int block = image_offset(2 * r + (lane / 8) % 2, 2 * n + lane / 16);
  stmatrix_x4(smem_address(image + block + (lane % 8) * 16),
              gated(d[0], d[1], 2 * r, 2 * n, slot, own, lane),
              gated(d[2], d[3], 2 * r + 1, 2 * n, slot, own, lane),
              gated(d[4], d[5], 2 * r, 2 * n + 1, slot, own, lane),
              gated(d[6], d[7], 2 * r + 1, 2 * n + 1, slot, own, lane));
}

// 8 -> 16 in all four diagonal blocks at once: two blocks share a product, block-diagonally.
__device__ __forceinline__ void merge_8(const Shared& s, Slot& slot, const Lane& own,
                                        uint8_t* image, int lane) {
  uint32_t left[4], right[4], start[4], last[4];
  const int matrix = lane / 8;
  ldmatrix_x4(left, quadrant(slot.w, matrix, 1, 1, lane));
  ldmatrix_x4_trans(last, quadrant(slot.w, matrix, 0, 0, lane));
  const int a = a_block(matrix, matrix);
  ldmatrix_x4(start, quadrant(s.a, a, 1, 0, lane));
  ldmatrix_x4_trans(right, quadrant(s.a, a, 1, 0, lane));
  float d[8];
  unpack_block(d, start);
  uint32_t merged[4], out[4];
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    float(&t)[4] = half_of(d, pair);
    const int b = 2 * pair;  // blocks b and b + 1
    uint32_t wide[4] = {multiply_half2(left[b], own.minus_beta[2 * b + 1]), 0, 0,
                        multiply_half2(left[b + 1], own.minus_beta[2 * b + 3])};
    mma_half(t, wide, right[b], right[b + 1]);
    wide[0] = pack_half(t[0], t[1]);
    wide[3] = pack_half(t[2], t[3]);
    mma_half(t, wide, multiply_half2(last[b], own.minus_beta[2 * b]),
             multiply_half2(last[b + 1], own.minus_beta[2 * b + 2]));
    merged[b] = pack_half(t[0], t[1]);
    merged[b + 1] = pack_half(t[2], t[3]);
    out[b] = gated(t[0], t[1], 2 * b + 1, 2 * b, slot, own, lane);
    out[b + 1] = gated(t[2], t[3], 2 * b + 3, 2 * b + 2, slot, own, lane);
  }
  stmatrix_x4(quadrant(slot.w, matrix, 1, 0, lane), merged[0], merged[1], merged[2], merged[3]);
  stmatrix_x4(smem_address(image + image_offset(2 * matrix + 1, 2 * matrix) + (lane % 8) * 16),
              out[0], out[1], out[2], out[3]);
}

// 16 -> 32: blocks (1, 0) and (3, 2).
__device__ __forceinline__ void merge_16(const Shared& s, Slot& slot, const Lane& own,
                                         uint8_t* image, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = 2 * h + 1;
    float d[8];
    uint32_t left[4], right[4];
    start_from_a(d, s, r, r - 1, lane);
    left_wb(left, slot, r, r, own, lane);
    right_a(right, s, r, r - 1, lane);
    multiply(d, left, right);
    to_operand(left, d);
    right_bw(right, slot, r - 1, r - 1, own, lane);
    multiply(d, left, right);
    stmatrix_x4(whole_block(slot.w, 4 + h, lane), pack_half(d[0], d[1]), pack_half(d[2], d[3]),
                pack_half(d[4], d[5]), pack_half(d[6], d[7]));
    store_gated(d, r, r - 1, slot, own, image, lane);
  }
}

// 32 -> 64: blocks (2, 0), (2, 1), (3, 0), (3, 1).
__device__ __forceinline__ void merge_32(const Shared& s, const Slot& slot, const Lane& own,
                                         uint8_t* image, int lane) {
  uint32_t right2[2][4], right3[2][4], bw00[4], bw10[4], bw11[4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    right_a(right2[n], s, 2, n, lane);
    right_a(right3[n], s, 3, n, lane);
  }
  right_bw(bw00, slot, 0, 0, own, lane);
  right_bw(bw11, slot, 1, 1, own, lane);
  right_bw(bw10, slot, 4, 1, own, lane);
#pragma unroll
  for (int r = 2; r < 4; ++r) {
    float d0[8], d1[8];
    uint32_t left[4], t0[4], t1[4];
    start_from_a(d0, s, r, 0, lane);
    start_from_a(d1, s, r, 1, lane);
    left_wb(left, slot, r == 2 ? 2 : 5, 2, own, lane);
    multiply(d0, left, right2[0]);
    multiply(d1, left, right2[1]);
    if (r == 3) {
      left_wb(left, slot, 3, 3, own, lane);
      multiply(d0, left, right3[0]);
      multiply(d1, left, right3[1]);
    }
    to_operand(t0, d0);
    to_operand(t1, d1);
    multiply(d0, t0, bw00);
    multiply(d0, t1, bw10);
    multiply(d1, t1, bw11);
    store_gated(d0, r, 0, slot, own, image, lane);
    store_gated(d1, r, 1, slot, own, image, lane);
  }
}

// One value head: the record's tile, from the slot's gates and the block's A.
__device__ __forceinline__ void solve_head(const Shared& s, Slot& slot, uint8_t* image, bf16* tile,
                                           int lane) {
  substitute(lane, s, slot, image);
  clear_upper(lane, slot);
  Lane own;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    own.gate[i] = slot.gate[8 * i + lane / 4];
    own.minus_beta[i] =
        *reinterpret_cast<const uint32_t*>(&slot.minus_beta[8 * i + 2 * (lane % 4)]);
  }
  __syncwarp();
  merge_8(s, slot, own, image, lane);
  __syncwarp();
  merge_16(s, slot, own, image, lane);
  __syncwarp();
  merge_32(s, slot, own, image, lane);
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) bulk_store(tile, image, kImageBytes);
}

__global__ void __launch_bounds__(kThreads, 6)
    prepare_kernel(const __grid_constant__ PrepareParams p) {
  GDN_SHARED_BYTES(raw_shared, 128);
  auto& s = *reinterpret_cast<Shared*>(raw_shared);
  const int64_t chunk_index = blockIdx.x / p.heads_k;
  const int key_head = static_cast<int>(blockIdx.x % p.heads_k);
  const int group = p.heads_v / p.heads_k;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (chunk_index >= *p.num_chunks) return;
  const cuda::ChunkRow chunk = p.chunks[chunk_index];
  const int64_t first_record = chunk_index * p.heads_v + key_head * group;
  Slot& slot = s.slot[warp];

  load_keys(p, chunk, key_head, s);
  if (warp < group) {
    load_gates(p, chunk, first_record + warp, key_head * group + warp, lane, slot);
  }
  float* norms = p.norms + (chunk_index * p.heads_k + key_head) * 2 * kChunkTokens;
  if (p.l2norm) {
    store_query_norms(p, chunk, key_head, warp, lane, norms);
  } else if (threadIdx.x < kChunkTokens) {
    norms[threadIdx.x] = p.scale;
  }
  cuda::cp_async_wait<0>();
  __syncthreads();
  // Block rows 3 | 2 | 1 and 0: 4, 3 and 3 of the ten blocks.
  float acc[4][8], first[4][8];
  const int r = 3 - warp;
  multiply_keys(acc, r, lane, s);
  publish_squares(acc, r, lane, s);
  if (warp == 2) {
    multiply_keys(first, 0, lane, s);
    publish_squares(first, 0, lane, s);
  }
  __syncthreads();
  publish_a(acc, r, p.l2norm, lane, s);
  if (warp == 2) publish_a(first, 0, p.l2norm, lane, s);
  if (threadIdx.x < kChunkTokens) {
    norms[kChunkTokens + threadIdx.x] = p.l2norm ? rsqrtf(s.square[threadIdx.x] + 1e-6f) : 1.0f;
  }
  __syncthreads();
  for (int h = warp; h < group; h += kWarps) {
    if (h != warp) {
      if (lane == 0) bulk_store_wait();
      __syncwarp();
      load_gates(p, chunk, first_record + h, key_head * group + h, lane, slot);
    }
    __syncwarp();
    solve_head(s, slot, s.image[warp], p.tiles + (first_record + h) * kRecordElements, lane);
  }
  if (lane == 0) bulk_store_wait();  // shared memory is read to the end
}

}  // namespace

Status launch_prepare(const PrepareParams& params, Stream stream) {
  const cuda::LaunchShape shape{.blocks = params.max_chunks * params.heads_k,
                                .threads = kThreads,
                                .shared_bytes = sizeof(Shared)};
  return cuda::launch("k_prepare_sm90", prepare_kernel, shape, stream, params);
}

}  // namespace gdn::sm90
