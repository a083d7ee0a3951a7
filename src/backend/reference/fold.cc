// Fold programs: X <- op(map) X + add, in fp64 along a whole chain.
#include <algorithm>

#include "backend/reference/stages.h"
#include "base/element.h"
#include "base/thread_pool.h"

namespace gdn::reference {
namespace {

class Chain {
 public:
  Chain(const StageArgs& args, const FoldProgram& program, int64_t head, Scratch scratch)
      : args_(args),
        program_(program),
        head_(head),
        map_(scratch.take(program.rows * program.rows)),
        x_(scratch.take(program.rows * program.cols)),
        product_(scratch.take(program.rows * program.cols)) {}

  void step(const FoldStep& step) {
    const int64_t size = program_.rows * program_.cols;
    if (step.map.present()) {
      load(step.map, program_.rows * program_.rows, map_);
      multiply();
    } else {
      std::fill_n(x_, size, 0.0);
    }
    if (step.add.present()) {
      load(step.add, size, product_);
      for (int64_t i = 0; i < size; ++i) x_[i] += product_[i];
    }
    if (step.out.present()) {
      store_row(table(step.out), args_.problem.state(), offset(step.out), 1, size, x_);
    }
  }

 private:
  void* table(const FoldRef& ref) const { return args_.tables[static_cast<int>(ref.table)]; }
  int64_t offset(const FoldRef& ref) const { return ref.offset + head_ * ref.head_stride; }
  void load(const FoldRef& ref, int64_t size, double* out) const {
    load_row(table(ref), args_.problem.state(), offset(ref), 1, size, out);
  }

  void multiply() {  // x <- op(map) x
    const int64_t rows = program_.rows, cols = program_.cols;
    for (int64_t i = 0; i < rows; ++i) {
      double* out = product_ + i * cols;
      std::fill_n(out, cols, 0.0);
      for (int64_t j = 0; j < rows; ++j) {
        const double m = program_.transpose ? map_[j * rows + i] : map_[i * rows + j];
        const double* in = x_ + j * cols;
        for (int64_t c = 0; c < cols; ++c) out[c] += m * in[c];
      }
    }
    std::swap(x_, product_);
  }

  const StageArgs& args_;
  const FoldProgram& program_;
  const int64_t head_;  // counted from head_begin
  double *map_, *x_, *product_;
};

}  // namespace

Status fold(const StageArgs& args, const FoldProgram& program) {
  const int64_t elements = forward_scratch_elements(args.problem);
  const int64_t heads = program.head_end - program.head_begin;
  parallel_for(program.chains() * heads, [&](int64_t item, int worker) {
    const size_t index = static_cast<size_t>(item / heads);
    Chain chain(args, program, item % heads, Scratch(args, elements, worker));
    for (int64_t i = program.chain_begin[index]; i < program.chain_begin[index + 1]; ++i) {
      chain.step(program.steps[static_cast<size_t>(i)]);
    }
  });
  return Status::ok();
}

}  // namespace gdn::reference
