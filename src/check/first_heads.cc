#include "check/first_heads.h"

#include <cstring>

#include "base/thread_pool.h"

namespace gdn {
namespace {

// Rows [rows, heads of `from`, width], of which the first `heads` of the middle axis are kept.
HostTensor first(const HostTensor& from, int head_axis, int64_t heads) {
  HostTensor to;
  if (!from.present()) return to;
  to.view = from.view;
  to.view.shape[head_axis] = heads;
  const int64_t width = from.view.stride[head_axis];
  int64_t rows = 1;
  for (int axis = head_axis - 1; axis >= 0; --axis) {
    to.view.stride[axis] = rows * heads * width;
    rows *= from.view.shape[axis];
  }
  const int64_t element = size_of(from.view.dtype);
  const int64_t bytes = heads * width * element;
  const int64_t step = from.view.shape[head_axis] * width * element;
  to.buffer = AlignedBuffer(rows * bytes);
  to.view.data = to.buffer.data();
  parallel_for(bytes > 0 ? rows : 0, [&](int64_t row, int) {
    std::memcpy(to.as<std::byte>() + row * bytes, from.as<std::byte>() + row * step,
                static_cast<size_t>(bytes));
  });
  return to;
}

}  // namespace

Batch first_heads(const Batch& batch, int64_t key_heads) {
  const int64_t value_heads = key_heads * (batch.problem.heads_v / batch.problem.heads_qk);
  Batch part;
  part.problem = batch.problem;
  part.problem.heads_qk = key_heads;
  part.problem.heads_v = value_heads;
  part.cu_seqlens = batch.cu_seqlens;
  part.q = first(batch.q, 1, key_heads);
  part.k = first(batch.k, 1, key_heads);
  part.v = first(batch.v, 1, value_heads);
  part.g = first(batch.g, 1, value_heads);
  part.beta = first(batch.beta, 1, value_heads);
  part.A_log = first(batch.A_log, 0, value_heads);
  part.dt_bias = first(batch.dt_bias, 0, value_heads);
  part.initial_state = first(batch.initial_state, 1, value_heads);
  part.d_o = first(batch.d_o, 1, value_heads);
  part.dfinal_state = first(batch.dfinal_state, 1, value_heads);
  return part;
}

BatchResult first_heads(const BatchResult& result, const Problem& problem, int64_t key_heads) {
  const int64_t value_heads = key_heads * (problem.heads_v / problem.heads_qk);
  BatchResult part;
  part.backend = result.backend;
  for (const ResultTensor& output : kResultTensors) {
    const bool of_keys = output.member == &BatchResult::dq || output.member == &BatchResult::dk;
    part.*output.member =
        first(result.*output.member, output.head_axis, of_keys ? key_heads : value_heads);
  }
  return part;
}

}  // namespace gdn
