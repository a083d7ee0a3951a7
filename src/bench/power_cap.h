// Whether the software power cap holds a GPU's clock down, as NVML tells. The library is looked for
// at run time: nothing links it.
#pragma once

#include <memory>
#include <optional>
#include <string>

namespace gdn::bench {

class PowerCap {
 public:
  // pci_bus_id: as the CUDA runtime writes it, e.g. "0000:1B:00.0".
  explicit PowerCap(const std::string& pci_bus_id, const char* library = "libnvidia-ml.so.1");
  ~PowerCap();
  PowerCap(const PowerCap&) = delete;
  PowerCap& operator=(const PowerCap&) = delete;

  const std::string& why_not() const { return why_not_; }  // empty: readable
  std::optional<bool> held() const;                        // absent where it cannot be read

 private:
  using Device = struct NvmlDevice*;
  using Reasons = int (*)(Device, unsigned long long*);

  void* library_ = nullptr;
  Device device_ = nullptr;
  Reasons reasons_ = nullptr;
  std::string why_not_;
};

}  // namespace gdn::bench
