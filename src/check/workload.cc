// The named shapes of docs/workloads.md.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "check/batch.h"

namespace gdn {
namespace {

struct Shape {
  std::vector<int64_t> documents;
  int64_t heads_qk = 16;
  int64_t heads_v = 48;
};

const std::array<Shape, 14>& workload_shapes() {
  static const std::array<Shape, 14> shapes = {{
      {{98304, 65536, 57344, 40960}},
      {{22672, 131070, 108245}},
      {{128147, 131027}},
      {{254976}},
      {{28874, 38814, 60180, 121988}},
      {{126565, 32714, 33696, 15081, 22979, 10782}},
      {{3598, 4930, 6262, 7593, 8925, 10256, 11588, 12920, 14251, 15583, 16914, 18252}},
      {{49152, 32768, 28672, 20480}},
      {{24576, 16384, 14336, 10240}},
      {{15945, 21845, 27746}},
      {{25583, 5103, 5103, 5103}},
      {{20463, 10223, 5103, 2543}},
      {{12000, 9000, 6000, 3768, 2000}},
      {{2049, 3001, 3142}, 2, 6},
  }};
  return shapes;
}

}  // namespace

Result<BatchSpec> workload(const std::string& letter, int64_t shrink) {
  if (letter.size() != 1 || letter[0] < 'A' || letter[0] > 'N') {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("workload: expected a letter from A to N, got '{}'", letter));
  }
  if (shrink < 1)
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("shrink: expected at least 1, got {}", shrink));
  const Shape& shape = workload_shapes()[static_cast<size_t>(letter[0] - 'A')];
  BatchSpec spec;
  for (int64_t length : shape.documents) {
    spec.documents.push_back(std::max<int64_t>(1, length / shrink));
  }
  spec.heads_qk = shape.heads_qk;
  spec.heads_v = shape.heads_v;
  spec.operand = DType::kBFloat16;
  return spec;
}

}  // namespace gdn
