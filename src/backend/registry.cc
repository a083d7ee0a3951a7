// The list of backends, fastest first, and the choice among them.
#include <fmt/format.h>

#include <array>
#include <cstdlib>

#include "backend/cpu/cpu.h"
#include "backend/reference/reference.h"
#include "gdn/backend.h"
#ifdef GDN_WITH_CUDA
#include "backend/cuda/portable/portable.h"
#include "backend/cuda/sm90/sm90.h"
#endif

namespace gdn {

std::span<const Backend* const> backends() {
  static const std::array list = {
#ifdef GDN_WITH_CUDA
      &cuda_sm90_backend(),
      &cuda_portable_backend(),
#endif
      &cpu_backend(),
      &reference_backend(),
  };
  return list;
}

std::span<const AbsentBackend> absent_backends() {
#ifdef GDN_WITH_CUDA
  return {};
#else
  constexpr const char* kWhy = "not in this build (configure with -DGDN_CUDA=ON)";
  static constexpr std::array list = {AbsentBackend{"cuda-sm90a", kWhy},
                                      AbsentBackend{"cuda-portable", kWhy}};
  return list;
#endif
}

const Backend* find_backend(std::string_view name) {
  for (const Backend* backend : backends()) {
    if (name == backend->name()) return backend;
  }
  return nullptr;
}

Status check_backend_name(const std::string& name) {
  if (find_backend(name) != nullptr) return Status::ok();
  std::string names;
  for (const Backend* backend : backends()) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", backend->name());
  }
  for (const AbsentBackend& absent : absent_backends()) {
    if (name != absent.name) continue;
    return {ErrorCode::kUnsupported, fmt::format("backend: {} is {}", name, absent.why)};
  }
  return {ErrorCode::kInvalidArgument,
          fmt::format("backend: expected one of {}, got '{}'", names, name)};
}

std::string wanted_backend(const std::string& forced) {
  const char* named = forced.empty() ? std::getenv("GDN_BACKEND") : nullptr;
  return named != nullptr ? named : forced;
}

Result<const Backend*> pick_backend(const Problem& problem, const std::string& forced) {
  const std::string wanted = wanted_backend(forced);
  if (!wanted.empty()) GDN_RETURN_IF_ERROR(check_backend_name(wanted));
  std::string refusals;
  for (const Backend* backend : backends()) {
    if (!wanted.empty() && wanted != backend->name()) continue;
    const auto why_not = backend->why_not(problem);
    if (!why_not) return backend;
    refusals += fmt::format("{}{}: {}", refusals.empty() ? "" : "; ", backend->name(), *why_not);
  }
  return Status(ErrorCode::kUnsupported, "no backend takes this: " + refusals);
}

}  // namespace gdn
