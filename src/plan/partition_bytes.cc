#include "plan/partition_bytes.h"

#include <algorithm>

#include "gdn/plan.h"
#include "plan/partition_property.h"

namespace gdn {
namespace {

constexpr int64_t kCheckedTokens =
    4096;  // of accepted partitions whose rows are checked one by one

class Bytes {
 public:
  explicit Bytes(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  uint8_t next() {
    if (at_ == bytes_.size()) return 0;
    return bytes_[at_++];
  }

  // Mostly small, sometimes negative, sometimes near the ends of int64.
  int64_t number() {
    const uint8_t kind = next();
    if (kind < 0xf0) return kind;
    int64_t value = 0;
    for (int i = 0; i < 8; ++i) value = static_cast<int64_t>(uint64_t(value) << 8 | next());
    return kind < 0xf8 ? value % 1000 : value;
  }

  // Small differences more often than free numbers, so that many inputs are valid.
  std::vector<int64_t> offsets(int64_t count) {
    const bool free = next() % 4 == 0;
    std::vector<int64_t> list;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t value = i == 0 ? next() % 8 == 7 : number();
      list.push_back(free || i == 0 ? value : list.back() + (value & 0xff));
    }
    return list;
  }

 private:
  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
};

Result<Partition> make_from(Bytes& bytes) {
  const uint8_t how = bytes.next() % 6;
  const std::vector<int64_t> cu = bytes.offsets(bytes.next() % 9);
  const int world_size = static_cast<int>(bytes.next() % 10) - 1;
  if (how < 3) return Partition::make(cu, world_size, static_cast<Layout>(how));
  if (how == 3) {
    std::vector<int64_t> cuts;
    for (size_t doc = 0; doc + 1 < cu.size(); ++doc) {
      const auto row = bytes.offsets(2 * world_size + 1);
      cuts.insert(cuts.end(), row.begin(), row.end());
      if (bytes.next() % 8 != 0 && !cuts.empty()) {  // most rows end where they should
        const int64_t length = static_cast<int64_t>(uint64_t(cu[doc + 1]) - uint64_t(cu[doc]));
        for (size_t i = cuts.size() - row.size(); i < cuts.size(); ++i) {
          cuts[i] = std::min(cuts[i], length);
        }
        cuts.back() = length;
      }
    }
    return Partition::make_with_cuts(cu, world_size, cuts);
  }
  // Fragments one after another, each on a rank of its own choice, with some entries disturbed.
  std::vector<std::vector<Fragment>> table(std::max(0, world_size));
  for (size_t doc = 0; !table.empty() && doc + 1 < cu.size(); ++doc) {
    int64_t at = 0;
    const int64_t length = static_cast<int64_t>(uint64_t(cu[doc + 1]) - uint64_t(cu[doc]));
    for (int i = 0; i < 12 && at < length; ++i) {
      Fragment f{static_cast<int64_t>(doc), at, std::min<int64_t>(length - at, bytes.next())};
      if (i == 11) f.length = length - at;
      at += f.length;
      const uint8_t disturb = how == 4 ? 0xff : bytes.next();
      if (disturb == 0) f.doc = bytes.number();
      if (disturb == 1) f.offset = bytes.number();
      if (disturb == 2) f.length = bytes.number();
      table[bytes.next() % table.size()].push_back(f);
    }
  }
  return Partition::make_explicit(cu, std::move(table));
}

}  // namespace

std::string check_partition_bytes(std::span<const uint8_t> data) {
  Bytes bytes(data);
  const auto partition = make_from(bytes);
  if (!partition) {
    const std::string message = partition.status().message();
    const bool named = partition.status().code() == ErrorCode::kInvalidArgument &&
                       message.find(": expected ") != std::string::npos &&
                       message.find(", got ") != std::string::npos;
    return named ? "" : "an error that does not say what was expected: " + message;
  }
  PlanOptions options;
  options.heads_v = 1 + bytes.next() % 4;
  options.tile = bytes.next() % 4 == 0 ? kChunk : 0;
  // Tiles of a document of 2^48 tokens would not fit in memory.
  if (partition->num_tokens() > kCheckedTokens) options.tile = 0;
  for (int rank = 0; rank < partition->world_size(); ++rank) {
    const auto plan = Plan::make(*partition, rank, options);
    if (!plan && options.tile == 0) return plan.status().message();
    if (plan && plan->local_tokens != partition->local_tokens(rank)) return "local tokens";
  }
  return partition->num_tokens() <= kCheckedTokens ? broken_invariant(*partition) : "";
}

}  // namespace gdn
