#include <vector>

#include "check/place.h"

namespace gdn {
namespace {

class HostPlace final : public Place {
 public:
  Device device() const override { return {}; }
  Result<TensorView> in(const HostTensor& tensor) override { return tensor.view; }
  Result<TensorView> out(const HostTensor& tensor) override { return tensor.view; }
  Result<Memory> block(int64_t bytes) override {
    AlignedBuffer& buffer = blocks_.emplace_back(bytes);
    if (bytes > 0) std::memset(buffer.data(), 0xff, static_cast<size_t>(bytes));
    return Memory{buffer.data(), buffer.bytes()};
  }
  Status finish() override { return Status::ok(); }

 private:
  std::vector<AlignedBuffer> blocks_;
};

}  // namespace

std::unique_ptr<Place> make_host_place() { return std::make_unique<HostPlace>(); }

}  // namespace gdn
