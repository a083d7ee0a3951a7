// Device code of k_backward: every gradient but d_v, by a forward walk with S^T in registers
// (reverse_walk.cuh has left dS of every chunk, of the state that leaves it, and d_v before that).
// In rows (tokens), with S the state that enters the chunk and dY = beta U = d_v:
//   Y = V - a (K S)       E = Y + W (beta Y)       S <- gam_C S + K^T (c E)       as in walk.cuh
//   dP = rq_i rk_j beta_j e^{G_i-G_j} (dO E^T)_ij, j <= i
//   N  = -rk_i rk_j beta_j e^{G_i-G_j} (dY E^T)_ij, j < i
//   dk = -(gam / |k|) (dY S^T) + (c E) dS^T + dP^T Q + (N + N^T) K            c = e^{G_C-G} beta /
//   |k| dq = d (dO S^T) + dP K                                                  d = gam scale / |q|
// rq = scale / |q|, rk = 1 / |k|: with raw q and k as operands the sums are r times the gradient of
// the normalised row, so its gradient is sum - r^2 x (x . sum). docs/math.md has dg and dbeta =
// U . E, E . (f U) over f, E still in fp32.
//
// Warpgroups: 0 copies and sums (warp 0 fills, 1 makes factors, 2 adds to dq and dk, 3 writes dg
// and dbeta), 1 and 2 state (64 rows of V each; then 1 makes dP, 2 N; then each half of dq), 3 dk.
// 512 threads, one block per SM; registers 40 + 2 * 168 + 136 = 512 = 65,536 / 128.
//
// A chunk: S's image (states_ready) -> E (e_ready) -> dP, N (dp_ready, n_ready) -> dq in 1 and 2;
// beside it 3 makes dY S^T, then E dS^T, then the rest of dk.
//
// dq and dk are sums over the G value heads of a group, whose blocks walk the same pieces: block 0
// stores its rows (bf16), every other one adds its own in L2 when the block before it has. So the
// order of the sum is fixed, and no block waits for a later one.
//
// Code: a multiprocessor holds 32 KB of it, and what does not fit is read again for every chunk, at
// 128 bytes a clock for up to 18 multiprocessors. So loops are kept rolled, and roles share code.
//
// Buffers are single but k, each loaded as soon as its last reader of the chunk before is done. The
// next chunk's are prefetched to L2. Shared, KiB: k 2 x 16, S 32, dS 32, q, V, d_o, d_v, E, rows
// out 16 each, W, dP, N 8 each, sums and factors 9 = 225.
#pragma once

#include "backend/cuda/sm90/backward_copies.cuh"
#include "backend/cuda/sm90/backward_gradients.cuh"
#include "backend/cuda/sm90/backward_state.cuh"

namespace gdn::sm90 {

__device__ __forceinline__ void backward_block(const BackwardParams& p, BackwardShared& s) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  init_barriers(s);
  clear_tile(s.w);
  fence_async_proxy();
  __syncthreads();
  if (warpgroup == 0) {
    registers_decrease<40>();
    if (warp == 0) {
      fill_chunks(p, s);
    } else if (warp == 1) {
      make_factors(p, s);
    } else if (warp == 2) {
      write_sums(p, s);
    } else {
      write_scalars(p, s);
    }
  } else if (warpgroup == 3) {
    registers_increase<136>();
    run_gradients(p, s);
  } else {
    registers_increase<168>();
    run_state(p, s, warpgroup - 1);
  }
}

}  // namespace gdn::sm90
