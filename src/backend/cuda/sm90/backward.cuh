// Device code of k_backward: the walk of reverse.cuh and, beside it, every gradient of its chunks,
// so that neither dS nor U ever leaves the multiprocessor. In rows (tokens), with S the state that
// enters the chunk, dS the gradient of the one that leaves it, dY = beta U = d_v:
//   dP = rq_i rk_j beta_j e^{G_i-G_j} (dO E^T)_ij, j <= i
//   N  = -rk_i rk_j beta_j e^{G_i-G_j} (dY E^T)_ij, j < i
//   dq = d (dO S^T) + dP K                                     d, c, ab as in reverse.cuh
//   dk = -(gam / |k|) (dY S^T) + (c beta E) dS^T + dP^T Q + (N + N^T) K
// rq = scale / |q|, rk = 1 / |k|: with raw q and k as operands the sums are r times the gradient of
// the normalised row, so its gradient is sum - r^2 x (x . sum). docs/math.md has dg and dbeta = U .
// E.
//
// Warpgroups: 0 copies and sums (warp 0 fills, 1 writes d_v, 2 adds to dq and dk, 3 writes dg and
// dbeta), 1 and 2 state (64 rows of V each; 1 also makes P and the per-token factors, 2 also N), 3
// gradients. 512 threads, one block per SM; registers 40 + 2 * 168 + 136 = 512 = 65,536 / 128.
//
// A chunk's chain: keys_full -> 1: P (p_ready) -> 1, 2: dS, U (solved) -> 2: N (n_ready) -> 3: dk
// (squares_empty) -> the next chunk's P. Beside it 3 makes dP and dq after p_ready, and what of dk
// needs no N after solved.
//
// dq and dk are sums over the G value heads of a group, whose blocks walk the same pieces: block 0
// stores its rows (bf16), every other one adds its own in L2 when the block before it has. So the
// order of the sum is fixed, and no block waits for a later one.
//
// Buffers are single but k and q, each loaded as soon as its last reader of the chunk before is
// done: d_o, W after the state's update and dO S^T, S after dY S^T, E after E dS^T. The next
// chunk's are prefetched to L2. Shared, KiB: k and q 2 x 32, S 32, dS 32, E, d_o, d_v, rows out 16
// each, W, P (then N), dP 8 each, sums and vectors 11 = 227.
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
      fill_chunks(p.walk, s);
    } else if (warp == 1) {
      write_d_v(p.walk, s);
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
    run_state(p.walk, s, warpgroup - 1);
  }
}

}  // namespace gdn::sm90
