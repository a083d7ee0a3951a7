// Small tables from the host to the device without waiting for it.
#pragma once

#include <vector>

#include "gdn/status.h"
#include "gdn/tensor.h"

namespace gdn::cuda {

// Copies `image` to `to`, ordered on the stream: the copy leaves from page-locked memory that this
// process keeps, so that the host goes on at once and may free `image`. kInvalidArgument while the
// stream is being captured.
Status upload_image(const std::vector<unsigned char>& image, void* to, Stream stream);

}  // namespace gdn::cuda
