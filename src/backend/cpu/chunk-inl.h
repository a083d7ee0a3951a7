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

// One chunk of one value head: all that prepare left of it.
template <typename T>
struct HeadChunk {
  const StageCall& call;
  const Chunk& chunk;
  int64_t head;
  Mat<T> z;  // [64, 64]
  T scale;
  ChunkGates<T> gates;

  HeadChunk(const StageCall& stage, const Chunk& of, int64_t value_head)
      : call(stage),
        chunk(of),
        head(value_head),
        z{prepared_record<T>(stage, of, value_head) + PreparedRecord::kZ, kChunk},
        scale(static_cast<T>(stage.args->problem.scale())),
        gates(prepared_record<T>(stage, of, value_head), scale, stage.dims.k) {}
};

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

// ---- Triangular products, in blocks of 16 rows ------------------------------------------------
// c [rows, rows] = lower half of a [rows, depth] b [depth, rows]; blocks above are not written.
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
void solve_values(const HeadChunk<T>& x, const TensorView& v, int64_t n, Mat<T> e, Mat<T> by) {
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < x.chunk.rows; ++i) {
    T* HWY_RESTRICT y = e.row(i);
    T* HWY_RESTRICT b = by.row(i);
    if (v.present() && i < x.chunk.tokens) {
      load_row(v, x.chunk.row + i, x.head, b, n);
    } else {
      zero_row(b, n);
    }
    const auto gamma = hn::Set(d, x.gates.from_start[i]);
    const auto beta = hn::Set(d, x.gates.beta[i]);
    for (int64_t j = 0; j < n; j += lanes<T>()) {
      const auto yj = hn::NegMulAdd(gamma, hn::LoadU(d, y + j), hn::LoadU(d, b + j));
      hn::StoreU(yj, d, y + j);
      hn::StoreU(hn::Mul(beta, yj), d, b + j);
    }
  }
  lower_times<Init::kAdd>(x.chunk.rows, n, x.z, by, e);
}

// A state (or map) on its way through a segment: [K, n], driven by the values v, or by none. e and
// by [64, n] are scratch; e holds E after a step.
template <typename T>
struct StateWalk {
  Mat<T> k;  // [64, K]: the chunk's keys
  TensorView v;
  int64_t n;
  Mat<T> state;
  Mat<T> e, by;
};

// One chunk: state <- exp(G_C) state + K^T (to_end o Vd), Vd = beta o E.
template <typename T>
void advance_state(const HeadChunk<T>& x, const StateWalk<T>& walk, Ends ends) {
  const int64_t rows = x.chunk.rows;
  if (ends.from_zero) {
    zero_matrix(rows, walk.n, walk.e);
  } else {
    gemm<Init::kZero>(rows, walk.n, x.call.dims.k, walk.k.left(), walk.state, walk.e);
  }
  solve_values(x, walk.v, walk.n, walk.e, walk.by);
  if (ends.last) return;
  for (int64_t i = 0; i < rows; ++i) {
    scale_row(walk.e.row(i), x.gates.to_end[i] * x.gates.beta[i], walk.by.row(i), walk.n);
  }
  gemm<Init::kScale>(x.call.dims.k, walk.n, rows, walk.k.transposed(), walk.by, walk.state,
                     x.gates.decay);
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

}  // namespace HWY_NAMESPACE
}  // namespace gdn::cpu
HWY_AFTER_NAMESPACE();

#endif  // GDN_BACKEND_CPU_CHUNK_INL_H_
