// Device code of k_backward: every gradient but d_v, by a forward walk with S^T in registers
// (reverse_walk.cuh has left dS of every chunk, of the state that leaves it, and d_v before that).
// In rows (tokens), with S the state that enters the chunk and dY = beta U = d_v:
//   Y = V - a (K S)       E = Y + W (beta Y)       S <- gam_C S + K^T (c E)       as in walk.cuh
//   dP = rq_i rk_j beta_j e^{G_i-G_j} (dO E^T)_ij, j <= i
//   N  = -rk_i rk_j beta_j e^{G_i-G_j} (dY E^T)_ij, j < i
//   dq = d (dO S^T) + dP K                                                      d = gam scale / |q|
//   dk = -(gam / |k|) (dY S^T) + (c E) dS^T + dP^T Q + (N + N^T) K    c = e^{G_C-G} beta / |k|
// rq = scale / |q|, rk = 1 / |k|: with raw q and k as operands the sums are r times the gradient of
// the normalised row, so its gradient is sum - r^2 x (x . sum). docs/math.md has dg, and dbeta as
// U . E; here it is E . (f U) over f, E still in fp32.
//
// Warpgroups: 0 copies and sums (warp 0 fills, 1 makes factors, 2 sends dq and dk out, 3 writes dg
// and dbeta), 1 and 2 state (64 rows of V each, then a half of K of dq, and <dS, S>), 3 and 4
// gradients (3 makes dP and 4 N, by one code, then each a half of K of dk).
// 640 threads, one block per SM. A launch of 640 has 96 registers a thread, 480 a lane of the five
// warpgroups: 48 + 2 * 144 + 2 * 72.
//
// A chunk: S's image (states_ready) -> E (e_ready) -> dP, N (squares_ready) -> rows of dq, of dk.
// dO S^T and gam_C <dS, S> come before dP is needed; the state, which is decayed by then, takes
// K^T (c E) after them. The next chunk's S takes the place of the image when dY S^T is done too.
//
// dq and dk are sums over the G value heads of a group, whose blocks walk the same pieces: block 0
// stores its rows (bf16), every other one adds its own when the block before it has: those of dk in
// L2, those of dq in fp32 to what it loads, since dq takes more of the roundings. So the order of
// the sum is fixed, and no block waits for a later one.
//
// Code: a multiprocessor holds 32 KB of it, and a chunk uses 45: what does not fit is read again
// every time, at 128 bytes a clock for up to 18 multiprocessors, of which this kernel takes nine
// tenths. So loops are kept rolled, roles share code, and what only the norm inside needs is in a
// kernel of its own.
//
// Each buffer is loaded as soon as its last reader of the chunk before is done. What is made of a
// chunk takes the place of what has been read: E that of V, rows of dq that of d_o, rows of dk that
// of k. Shared, KiB: k and q 2 x 16 each, S 32, dS 32, V, c E, d_o, d_v 16 each, W, dP, N 8 each,
// sums and factors 11 = 227.
#pragma once

#include "backend/cuda/sm90/backward_copies.cuh"
#include "backend/cuda/sm90/backward_squares.cuh"
#include "backend/cuda/sm90/backward_state.cuh"

namespace gdn::sm90 {

// kNorm: q and k are normalised inside. Code that does not run costs too, where it is between what
// does.
template <bool kNorm>
__device__ __forceinline__ void backward_block(const BackwardParams& p, BackwardShared& s) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  init_barriers(s, !p.d_o.rows);
  if (threadIdx.x == 0) s.walk = Walk(p.walk);
  clear_tile(s.w);
  clear_tile(s.dp);
  fence_async_proxy();
  __syncthreads();
  if (warpgroup == 0) {
    registers_decrease<48>();
    if (warp == 0) {
      fill_chunks(p, s);
    } else if (warp == 1) {
      make_factors(p, s);
    } else if (warp == 2) {
      write_sums(p, s);
    } else {
      write_scalars(p, s);
    }
  } else if (warpgroup < 3) {
    registers_increase<144>();
    run_state<kNorm>(p, s, warpgroup - 1);
  } else {
    registers_decrease<72>();
    run_gradients<kNorm>(p, s, warpgroup - 3);
  }
}

}  // namespace gdn::sm90
