// Runs a batch on a GPU (or the SIMT emulator): operands are placed in device memory in a chosen
// form, W ranks are driven side by side with their messages copied between them, results come back
// in the batch's own order. Outputs, workspace and everything between rows start as NaN.
#pragma once

#include <string>

#include "check/batch.h"
#include "gdn/gdn.h"

namespace gdn {

struct DeviceForm {
  bool packed = false;  // q, k, v as columns of one row, gradients likewise; g and beta of another
  bool state_v_first = false;  // states as [N, HV, V, K] memory
  std::string d_o = "rows";    // or "expanded" (one element), "transposed" ([HV, V, T]), "sliced"
  int64_t padding = 0;         // extra elements per packed row, a multiple of 8
};

struct DeviceRun {
  int world_size = 1;
  Layout layout = Layout::kContiguous;
  std::vector<std::vector<Fragment>> fragments;  // with Layout::kExplicit
  ContextOptions context;
  bool keep_saved = true;
  int backwards = 1;  // of one forward; without `replays`
  DeviceForm form;
  int device = 0;
  // With a capacity (context.max_tokens; the batch has world_size * max_fragments documents, those
  // at its end without tokens left out of its partition). With packings here (cu_seqlens), forward
  // and backward are captured in a CUDA graph at the first, refilled with and replayed at every
  // other, and at last at the batch's own. Several ranks, whose messages the host carries: made
  // with the first, and run at the batch's own.
  std::vector<std::vector<int64_t>> replays;
};

// A batch of kCuda problem whose tensors are in host memory. Fails also if a byte between rows of
// an output was touched, or one of a saved set by a backward.
Result<BatchResult> run_on_device(const Batch& batch, const DeviceRun& run);

// The number of devices that can be used: 0 without a driver.
int usable_devices();
std::string device_summary();

}  // namespace gdn
