// A host tensor that owns its memory; `view` is what the library is given.
#pragma once

#include "base/memory.h"
#include "gdn/tensor.h"

namespace gdn {

struct HostTensor {
  AlignedBuffer buffer;
  TensorView view;

  HostTensor() = default;

  // Row-major, every byte `fill` (0xff makes floats NaN, so that unwritten elements show).
  template <int R>
  HostTensor(DType dtype, const int64_t (&shape)[R], int fill = 0)
      : view(TensorView::contiguous(nullptr, dtype, shape)) {
    buffer = AlignedBuffer(view.numel() * size_of(dtype));
    view.data = buffer.data();
    fill_bytes(buffer.data(), fill, buffer.bytes());
  }

  bool present() const { return view.present(); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(view.data);
  }
};

}  // namespace gdn
