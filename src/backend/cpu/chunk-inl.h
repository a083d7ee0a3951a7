// What all walks share: where a chunk lies, its q and k rows in scratch, products that skip the
// zero upper half, and the solve from K S to E.
#if defined(GDN_BACKEND_CPU_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GDN_BACKEND_CPU_CHUNK_INL_H_
#undef GDN_BACKEND_CPU_CHUNK_INL_H_
#else
#define GDN_BACKEND_CPU_CHUNK_INL_H_
#endif

#include <cmath>
#include <cstdint>

#include "backend/cpu/gates-inl.h"
#include "backend/cpu/gemm-inl.h"
#include "backend/cpu/rows-inl.h"
#include "backend/cpu/stage_call.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu {
namespace HWY_NAMESPACE {

// Tokens [row, row + tokens) of a segment; kernels work on `rows`, tokens rounded up to 16, of
// which the last ones are zero.
struct Chunk {
  int64_t index = 0;  // among the rank's chunks
  int64_t row = 0;
  int64_t tokens = 0;
  int64_t rows = 0;

  Chunk(const Segment& segment, int64_t c)
      : index(segment.first_chunk + c),
        row(segment.row + c * kChunk),
        tokens(std::min(kChunk, segment.length - c * kChunk)),
        rows((tokens + 15) / 16 * 16) {}
};

// Products that one step of a walk can leave out: where the walked state is 0 before it, and where
// nobody needs it after it. Most of the work of documents of one chunk.
struct Ends {
  bool from_zero = false;
  bool last = false;
};

template <typename T>
T* prepared_record(const StageCall& call, const Chunk& chunk, int64_t head) {
  return static_cast<T*>(call.args->prepared) +
         (chunk.index * call.dims.heads_v + head) * PreparedRecord::kElements;
}

inline constexpr double kNormEpsilon = 1e-6;

// x's rows of one head; zeros past the chunk. With `norms` each row is normalised and its factor
// 1 / |x| kept there.
template <typename T>
void load_keys(const TensorView& x, const Chunk& chunk, int64_t head, int64_t dim, Mat<T> to,
               T* norms) {
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    load_row(x, chunk.row + i, head, to.row(i), dim);
    if (norms) {
      norms[i] = 1 / std::sqrt(dot(to.row(i), to.row(i), dim) + static_cast<T>(kNormEpsilon));
      scale_row(to.row(i), norms[i], to.row(i), dim);
    }
  }
  for (int64_t i = chunk.tokens; i < chunk.rows; ++i) zero_row(to.row(i), dim);
}

template <typename T>
void load_values(const TensorView& x, const Chunk& chunk, int64_t head, int64_t dim, Mat<T> to) {
  load_keys<T>(x, chunk, head, dim, to, nullptr);
}

// ---- Triangular products, in blocks of 16 rows
// ---------------------------------------------------- c [rows, rows] = lower half of a [rows,
// depth] b [depth, rows]; blocks above are not written.
template <typename T>
void product_lower(int64_t rows, int64_t depth, Mat<T> a, Mat<T> b, Mat<T> c) {
  for (int64_t i = 0; i < rows; i += 16) {
    gemm<Init::kZero>(16, i + 16, depth, a.at(i, 0).left(), b, c.at(i, 0));
  }
}

// c [rows, n] = init(c) + a b with a [rows, rows] lower (its diagonal blocks whole), b [rows, n].
template <Init init, typename T>
void lower_times(int64_t rows, int64_t n, Mat<T> a, Mat<T> b, Mat<T> c,
                 const T* row_scale = nullptr) {
  for (int64_t i = 0; i < rows; i += 16) {
    gemm<init>(16, n, i + 16, a.at(i, 0).left(), b, c.at(i, 0),
               init == Init::kScale ? row_scale + i : nullptr);
  }
}

// c [rows, n] = init(c) + a^T b, a as above.
template <Init init, typename T>
void lower_transposed_times(int64_t rows, int64_t n, Mat<T> a, Mat<T> b, Mat<T> c,
                            const T* row_scale = nullptr) {
  for (int64_t i = 0; i < rows; i += 16) {
    gemm<init>(16, n, rows - i, a.at(i, i).transposed(), b.at(i, 0), c.at(i, 0),
               init == Init::kScale ? row_scale + i : nullptr);
  }
}

// ---- Values -----------------------------------------------------------------------------------
// e [rows, n]: K S on entry, E on return: E = Y + Z (beta o Y), Y = V - exp(G) o K S. v absent: 0.
// by [rows, n] is scratch.
template <typename T>
void solve_values(const Chunk& chunk, const ChunkGates<T>& gates, Mat<T> z, const TensorView& v,
                  int64_t head, int64_t n, Mat<T> e, Mat<T> by) {
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < chunk.rows; ++i) {
    T* HWY_RESTRICT y = e.row(i);
    T* HWY_RESTRICT b = by.row(i);
    if (v.present() && i < chunk.tokens) {
      load_row(v, chunk.row + i, head, b, n);
    } else {
      zero_row(b, n);
    }
    const auto gamma = hn::Set(d, gates.from_start[i]);
    const auto beta = hn::Set(d, gates.beta[i]);
    for (int64_t j = 0; j < n; j += lanes<T>()) {
      const auto yj = hn::NegMulAdd(gamma, hn::LoadU(d, y + j), hn::LoadU(d, b + j));
      hn::StoreU(yj, d, y + j);
      hn::StoreU(hn::Mul(beta, yj), d, b + j);
    }
  }
  lower_times<Init::kAdd>(chunk.rows, n, z, by, e);
}

// to_end o beta o E: what enters the state.
template <typename T>
void weigh_values(const Chunk& chunk, const ChunkGates<T>& gates, int64_t n, Mat<T> e, Mat<T> to) {
  for (int64_t i = 0; i < chunk.rows; ++i) {
    scale_row(e.row(i), gates.to_end[i] * gates.beta[i], to.row(i), n);
  }
}

template <typename T>
void zero_matrix(int64_t m, int64_t n, Mat<T> to) {
  for (int64_t i = 0; i < m; ++i) zero_row(to.row(i), n);
}

// One chunk of the state recurrence: state [K, n] <- exp(G_C) state + K^T (to_end o Vd). e and by
// [rows, n] are scratch; e returns E.
template <typename T>
void advance_state(const StageCall& call, const Chunk& chunk, const ChunkGates<T>& gates, Mat<T> z,
                   Mat<T> k, const TensorView& v, int64_t head, int64_t n, Mat<T> state, Mat<T> e,
                   Mat<T> by, Ends ends) {
  if (ends.from_zero) {
    zero_matrix(chunk.rows, n, e);
  } else {
    gemm<Init::kZero>(chunk.rows, n, call.dims.k, k.left(), state, e);
  }
  solve_values(chunk, gates, z, v, head, n, e, by);
  if (ends.last) return;
  weigh_values(chunk, gates, n, e, by);
  gemm<Init::kScale>(call.dims.k, n, chunk.rows, k.transposed(), by, state, gates.decay);
}

// ---- States -----------------------------------------------------------------------------------
// x [N, HV, K, V] of any strides, or absent: 0.
template <typename T>
void load_state(const TensorView& x, int64_t doc, int64_t head, const Dims& dims, Mat<T> to) {
  for (int64_t i = 0; i < dims.k; ++i) {
    if (!x.present()) {
      zero_row(to.row(i), dims.v);
      continue;
    }
    const T* from = x.as<const T>() + doc * x.stride[0] + head * x.stride[1] + i * x.stride[2];
    for (int64_t j = 0; j < dims.v; ++j) to.row(i)[j] = from[j * x.stride[3]];
  }
}

template <typename T>
void store_state(Mat<T> from, const TensorView& x, int64_t doc, int64_t head, const Dims& dims) {
  for (int64_t i = 0; i < dims.k; ++i) {
    T* to = x.as<T>() + doc * x.stride[0] + head * x.stride[1] + i * x.stride[2];
    for (int64_t j = 0; j < dims.v; ++j) to[j * x.stride[3]] = from.row(i)[j];
  }
}

// Slot of a boundary table [HV][slots][K, n].
template <typename T>
Mat<T> table_slot(const void* table, int64_t head, int64_t slots, int64_t slot, int64_t k,
                  int64_t n) {
  return {static_cast<T*>(const_cast<void*>(table)) + (head * slots + slot) * k * n, n};
}

template <typename T>
void copy_matrix(int64_t m, int64_t n, Mat<T> from, Mat<T> to) {
  for (int64_t i = 0; i < m; ++i) copy_row(from.row(i), to.row(i), n);
}

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#endif  // GDN_BACKEND_CPU_CHUNK_INL_H_
