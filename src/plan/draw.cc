// A partition as text: the packed stream from left to right, and one bar per rank with the tokens
// it holds. Upper case: the rank holds all tokens of the column; lower case: some; '.': none.
// '#' and '+' stand for columns in which the rank holds several documents.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "base/counted.h"
#include "gdn/plan.h"
#include "plan/share.h"

namespace gdn {
namespace {

constexpr int64_t kMinColumns = 10;
constexpr int kMaxRanks = 64;

char letter_of(int64_t doc) { return static_cast<char>('A' + doc % 26); }

// What one bar holds in one column.
struct Cell {
  int64_t tokens = 0;
  int64_t doc = -1;
  bool several = false;
};

class Bar {
 public:
  Bar(int64_t columns, int64_t tokens) : cells_(columns), tokens_(tokens) {}

  // Tokens [begin, end) of the stream, all of one document.
  void add(int64_t doc, int64_t begin, int64_t end) {
    if (begin == end) return;
    for (int64_t c = column_of(begin); c < std::ssize(cells_) && first_token(c) < end; ++c) {
      const int64_t held = std::min(end, end_token(c)) - std::max(begin, first_token(c));
      if (held <= 0) continue;
      Cell& cell = cells_[c];
      cell.several |= cell.tokens > 0 && cell.doc != doc;
      cell.doc = doc;
      cell.tokens += held;
    }
  }

  std::string text() const {
    std::string out;
    for (int64_t c = 0; c < std::ssize(cells_); ++c) {
      const Cell& cell = cells_[c];
      const bool full = cell.tokens == end_token(c) - first_token(c);
      const char letter = letter_of(cell.doc);
      if (cell.tokens == 0)
        out += '.';
      else if (cell.several)
        out += full ? '#' : '+';
      else
        out += full ? letter : static_cast<char>(std::tolower(letter));
    }
    return out;
  }

 private:
  // Where a column is less than a token, it shows the token that it lies in.
  int64_t first_token(int64_t c) const { return share_begin(c, std::ssize(cells_), tokens_); }
  int64_t end_token(int64_t c) const {
    return std::max(first_token(c) + 1, share_begin(c + 1, std::ssize(cells_), tokens_));
  }
  // The first column with end_token(c) > token.
  int64_t column_of(int64_t token) const {
    int64_t low = 0, high = std::ssize(cells_);
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (end_token(middle) > token)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }

  std::vector<Cell> cells_;
  int64_t tokens_;
};

// "A 16, B 24": as many documents as fit.
std::string legend(const Partition& partition, int width) {
  std::string line = "documents  ";
  const auto cu = partition.cu_seqlens();
  for (int64_t doc = 0; doc < partition.num_documents(); ++doc) {
    const int64_t left = partition.num_documents() - doc;
    const std::string entry =
        fmt::format("{}{} {}", doc > 0 ? ", " : "", letter_of(doc), cu[doc + 1] - cu[doc]);
    const std::string more = fmt::format(", and {} more", left);
    if (std::ssize(line) + std::ssize(entry) + std::ssize(more) > width) return line + more + "\n";
    line += entry;
  }
  return line + "\n";
}

int64_t count_crossing(const Partition& partition) {
  int64_t crossing = 0;
  for (int64_t doc = 0; partition.has_crossing() && doc < partition.num_documents(); ++doc) {
    const auto holders = partition.holders(doc);
    crossing += std::any_of(holders.begin(), holders.end(),
                            [&](const auto& h) { return h.rank != holders[0].rank; });
  }
  return crossing;
}

}  // namespace

std::string draw(const Partition& partition, int width) {
  const int64_t tokens = partition.num_tokens();
  const int ranks = std::min(partition.world_size(), kMaxRanks);
  std::vector<std::string> labels{"stream "}, notes{"  " + counted(tokens, "token")};
  for (int r = 0; r < ranks; ++r) {
    labels.push_back(fmt::format("rank {} ", r));
    notes.push_back(
        fmt::format("  {} in {}", partition.local_tokens(r), partition.fragments(r).size()));
  }
  const auto longest = [](const std::vector<std::string>& list) {
    size_t n = 0;
    for (const auto& s : list) n = std::max(n, s.size());
    return static_cast<int64_t>(n);
  };
  int64_t columns = std::max(kMinColumns, width - longest(labels) - longest(notes));
  if (tokens > 0 && tokens < columns) columns -= columns % tokens;  // whole columns per token

  std::string out = fmt::format(
      "{}: {} over {}, {} of them on several; {} per column\n", to_string(partition.layout()),
      counted(partition.num_documents(), "document"), counted(partition.world_size(), "rank"),
      count_crossing(partition),
      tokens == columns ? "1 token"
                        : fmt::format("{:.3g} tokens",
                                      static_cast<double>(tokens) / static_cast<double>(columns)));
  out += legend(partition, width);
  const auto line = [&](int index, const Bar& bar) {
    out += fmt::format("{:<{}}{}{}\n", labels[index], longest(labels),
                       tokens > 0 ? bar.text() : std::string(), notes[index]);
  };
  const auto cu = partition.cu_seqlens();
  Bar stream(columns, tokens);
  for (int64_t doc = 0; doc < partition.num_documents(); ++doc) {
    stream.add(doc, cu[doc], cu[doc + 1]);
  }
  line(0, stream);
  for (int r = 0; r < ranks; ++r) {
    Bar bar(columns, tokens);
    for (const Fragment& f : partition.fragments(r)) {
      bar.add(f.doc, cu[f.doc] + f.offset, cu[f.doc] + f.offset + f.length);
    }
    line(r + 1, bar);
  }
  if (ranks < partition.world_size()) {
    out += fmt::format("and {}\n", counted(partition.world_size() - ranks, "more rank"));
  }
  return out;
}

}  // namespace gdn
