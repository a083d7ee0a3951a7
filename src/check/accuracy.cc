// Sums of squares of every (document, head) part, in one pass and one fixed order. Why the floor
// and the factor are what they are: docs/accuracy.md.
#include "check/accuracy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/element.h"

namespace gdn {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A part is judged against its own norm, or against this share of what its norm would be at the
// tensor's root mean square, whichever is larger.
constexpr double kPartFloor = 0.1;

// The same for a part of no more numbers of one for each token and head, which may be as few as one
// independent one: the whole of what its norm would be.
constexpr int64_t kFewNumbers = 64;

// A part may be this much further away than the whole tensor.
constexpr double kPartFactor = 4.0;

struct Sums {
  double error = 0;      // sum (x - ref)^2
  double reference = 0;  // sum ref^2
  int64_t count = 0;

  void add(const Sums& other) {
    error += other.error;
    reference += other.reference;
    count += other.count;
  }
};

double ratio(double error, double reference) {
  if (!(error > 0) && !std::isnan(error)) return 0;
  const double value = reference > 0 ? error / reference : kInfinity;
  return std::isnan(value) ? kInfinity : value;
}

// Walks all elements; fills one Sums per head and the largest magnitudes.
class Walk {
 public:
  Walk(const TensorView& x, const TensorView& ref, int head_axis)
      : x_(x), ref_(ref), head_axis_(head_axis), heads_(head_axis < 0 ? 1 : x.shape[head_axis]) {}

  int64_t heads() const { return heads_; }
  double max_error() const { return ratio(max_error_, max_reference_); }
  bool finite() const { return finite_; }
  bool reference_finite() const { return reference_finite_; }

  // Sums of rows [begin, end) of axis 0, added to `heads`.
  void rows(int64_t begin, int64_t end, std::vector<Sums>& heads) {
    for (int64_t i = begin; i < end; ++i) {
      visit(1, i * x_.stride[0], i * ref_.stride[0], head_axis_ == 0 ? i : 0, heads);
    }
  }

 private:
  void visit(int axis, int64_t x_at, int64_t ref_at, int64_t head, std::vector<Sums>& heads) {
    if (axis == x_.rank) return element(x_at, ref_at, heads[static_cast<size_t>(head)]);
    for (int64_t i = 0; i < x_.shape[axis]; ++i) {
      visit(axis + 1, x_at + i * x_.stride[axis], ref_at + i * ref_.stride[axis],
            axis == head_axis_ ? i : head, heads);
    }
  }

  void element(int64_t x_at, int64_t ref_at, Sums& sums) {
    const double value = load_element(x_, x_at);
    const double reference = load_element(ref_, ref_at);
    const double error = std::abs(value - reference);
    finite_ = finite_ && std::isfinite(value);
    reference_finite_ = reference_finite_ && std::isfinite(reference);
    if (!(error <= max_error_)) max_error_ = std::isnan(error) ? kInfinity : error;
    max_reference_ = std::max(max_reference_, std::abs(reference));
    sums.error += error * error;
    sums.reference += reference * reference;
    ++sums.count;
  }

  const TensorView& x_;
  const TensorView& ref_;
  const int head_axis_;
  const int64_t heads_;
  bool finite_ = true, reference_finite_ = true;
  double max_error_ = 0;
  double max_reference_ = 0;
};

// `scalars`: the tensor has one number for each token and head.
double part_rms(const Sums& part, const Sums& whole, bool scalars) {
  const double number = whole.reference / static_cast<double>(std::max<int64_t>(whole.count, 1));
  const double share = kPartFloor * kPartFloor * static_cast<double>(part.count);
  const double few = scalars ? static_cast<double>(std::min(part.count, kFewNumbers)) : 0.0;
  const double norm = std::max(part.reference, std::max(share, few) * number);
  return std::sqrt(ratio(part.error, norm));
}

void find_worst(const std::vector<Sums>& parts, const Sums& whole, bool scalars, int64_t& worst,
                double& rms) {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].count == 0) continue;
    const double own = part_rms(parts[i], whole, scalars);
    if (worst < 0 || own > rms) {
      worst = static_cast<int64_t>(i);
      rms = own;
    }
  }
}

bool same_shape(const TensorView& x, const TensorView& ref) {
  if (x.rank != ref.rank) return false;
  for (int i = 0; i < x.rank; ++i) {
    if (x.shape[i] != ref.shape[i]) return false;
  }
  return true;
}

}  // namespace

Accuracy compare(const TensorView& x, const TensorView& ref, int head_axis,
                 std::span<const int64_t> cu_seqlens) {
  Accuracy result;
  if (!same_shape(x, ref) || head_axis >= x.rank ||
      (!cu_seqlens.empty() && cu_seqlens.back() > x.shape[0])) {
    result.finite = false;
    result.rel_rms = result.max_error = kInfinity;
    return result;
  }
  if (!x.present()) return result;

  Walk walk(x, ref, head_axis);
  std::vector<Sums> heads(static_cast<size_t>(walk.heads()));
  std::vector<Sums> documents;
  if (cu_seqlens.empty()) {
    walk.rows(0, x.shape[0], heads);
  } else {
    for (size_t doc = 0; doc + 1 < cu_seqlens.size(); ++doc) {
      std::vector<Sums> parts(heads.size());
      walk.rows(cu_seqlens[doc], cu_seqlens[doc + 1], parts);
      documents.emplace_back();
      for (size_t head = 0; head < heads.size(); ++head) {
        heads[head].add(parts[head]);
        documents.back().add(parts[head]);
      }
    }
  }
  Sums whole;
  for (const Sums& head : heads) whole.add(head);

  result.finite = walk.finite();
  result.reference_finite = walk.reference_finite();
  result.rel_rms = std::sqrt(ratio(whole.error, whole.reference));
  result.max_error = walk.max_error();
  const bool scalars = head_axis == x.rank - 1;
  if (head_axis >= 0) find_worst(heads, whole, scalars, result.worst_head, result.worst_head_rms);
  find_worst(documents, whole, scalars, result.worst_document, result.worst_document_rms);
  return result;
}

Bars bars(DType operand, const std::string& tensor) {
  switch (operand) {
    case DType::kFloat64:
      return {.rel_rms = 1e-12, .max_error = 1e-11};
    case DType::kFloat32:
      return {.rel_rms = 1e-5, .max_error = 1e-4};
    default:
      break;
  }
  const bool output = tensor == "o" || tensor == "final_state";
  return {.rel_rms = output ? 0.005 : 0.006, .max_error = 2e-2};
}

double bar_between_ranks(Device::Kind where, bool one_chunk_grid) {
  return where == Device::Kind::kCpu && one_chunk_grid ? 1e-3 : 5e-3;
}

bool passes(const Accuracy& accuracy, const Bars& bars) {
  return accuracy.finite && accuracy.rel_rms <= bars.rel_rms &&
         accuracy.max_error <= bars.max_error &&
         accuracy.worst_head_rms <= kPartFactor * bars.rel_rms &&
         accuracy.worst_document_rms <= kPartFactor * bars.rel_rms;
}

}  // namespace gdn
