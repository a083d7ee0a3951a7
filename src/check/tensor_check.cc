#include "check/tensor_check.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace gdn {
namespace {

bool same_bits(const HostTensor& a, const HostTensor& b) {
  return a.buffer.bytes() == b.buffer.bytes() &&
         (a.buffer.bytes() == 0 ||
          std::memcmp(a.view.data, b.view.data, static_cast<size_t>(a.buffer.bytes())) == 0);
}

}  // namespace

std::vector<TensorCheck> check_results(const BatchResult& result, const BatchResult& reference,
                                       std::span<const int64_t> cu_seqlens,
                                       const std::function<Bars(const std::string&)>& bar_of) {
  std::vector<int64_t> documents(cu_seqlens.size());
  std::iota(documents.begin(), documents.end(), int64_t{0});
  std::vector<TensorCheck> checks;
  for (const ResultTensor& output : kResultTensors) {
    const HostTensor& x = result.*output.member;
    const HostTensor& ref = reference.*output.member;
    if (!x.present() && !ref.present()) continue;
    std::span<const int64_t> parts;
    if (output.rows == ResultTensor::Rows::kTokens) parts = cu_seqlens;
    if (output.rows == ResultTensor::Rows::kDocuments) parts = documents;
    TensorCheck check{output.name, compare(x.view, ref.view, output.head_axis, parts),
                      bar_of(output.name), false, same_bits(x, ref)};
    check.passed = passes(check.accuracy, check.bars);
    checks.push_back(std::move(check));
  }
  return checks;
}

bool all_passed(std::span<const TensorCheck> checks) {
  return std::all_of(checks.begin(), checks.end(), [](const TensorCheck& c) { return c.passed; });
}

}  // namespace gdn
