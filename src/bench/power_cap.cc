#include "bench/power_cap.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace gdn::bench {
namespace {

constexpr int kNvmlSuccess = 0;
constexpr unsigned long long kSoftwarePowerCap = 0x4;  // nvmlClocksEventReasonSwPowerCap

template <typename Function>
Function* find(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

PowerCap::PowerCap(const std::string& pci_bus_id, const char* library) {
  library_ = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) {
    why_not_ = fmt::format("{} is not here", library);
    return;
  }
  auto* init = find<int()>(library_, "nvmlInit_v2");
  auto* by_bus = find<int(const char*, Device*)>(library_, "nvmlDeviceGetHandleByPciBusId_v2");
  Reasons reasons =
      find<int(Device, unsigned long long*)>(library_, "nvmlDeviceGetCurrentClocksEventReasons");
  if (reasons == nullptr) {  // its name before driver 535
    reasons = find<int(Device, unsigned long long*)>(library_,
                                                     "nvmlDeviceGetCurrentClocksThrottleReasons");
  }
  if (init == nullptr || by_bus == nullptr || reasons == nullptr) {
    why_not_ = fmt::format("{} lacks the calls", library);
    return;
  }
  unsigned long long unused = 0;
  int code = init();
  if (code == kNvmlSuccess) code = by_bus(pci_bus_id.c_str(), &device_);
  if (code == kNvmlSuccess) code = reasons(device_, &unused);
  if (code != kNvmlSuccess) {
    why_not_ = fmt::format("NVML refuses with code {}", code);
    return;
  }
  reasons_ = reasons;
}

PowerCap::~PowerCap() {
  if (library_ != nullptr) dlclose(library_);
}

std::optional<bool> PowerCap::held() const {
  unsigned long long reasons = 0;
  if (reasons_ == nullptr || reasons_(device_, &reasons) != kNvmlSuccess) return std::nullopt;
  return (reasons & kSoftwarePowerCap) != 0;
}

}  // namespace gdn::bench
