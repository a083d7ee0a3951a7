#include <vector>

#include "base/memory.h"
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
    fill_bytes(buffer.data(), 0xff, bytes);
    return Memory{buffer.data(), buffer.bytes()};
  }
  Status to_host(void* host, const void* from, int64_t bytes) override {
    copy_bytes(host, from, bytes);
    return Status::ok();
  }
  Status from_host(void* to, const void* host, int64_t bytes) override {
    return to_host(to, host, bytes);
  }
  Status finish() override { return Status::ok(); }

 private:
  std::vector<AlignedBuffer> blocks_;
};

}  // namespace

std::unique_ptr<Place> make_host_place() { return std::make_unique<HostPlace>(); }

}  // namespace gdn
