// gdn simulate: predicted times of a step over ranks (docs/scaling.md): KCP in every layout against
// head-split all-to-all, for the named workloads.
#include <fmt/format.h>

#include <algorithm>
#include <climits>

#include "command.h"
#include "input.h"
#include "model/step_model.h"

namespace gdn::cli {
namespace {

using model::StepTime;

constexpr int64_t kMostRanks = 4096;  // a plan is made for each
constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument};

struct Row {
  int world_size = 1;
  StepTime kcp[3];  // by kLayouts
  StepTime head_split;

  const StepTime& best() const {
    return *std::min_element(std::begin(kcp), std::end(kcp), [](const auto& a, const auto& b) {
      return a.total_ms() < b.total_ms();
    });
  }
  bool kcp_wins() const { return best().total_ms() < head_split.total_ms(); }
};

struct Table {
  std::string letter;
  std::vector<Row> rows;  // the first is one rank
};

Json json_of(const StepTime& step) {
  const auto pass = [](const model::PassTime& p) {
    return Json{{"ms", p.total_ms()},
                {"compute_ms", p.compute_ms},
                {"exchange_ms", p.exchange_ms},
                {"sent_bytes", p.sent_bytes}};
  };
  return {{"forward", pass(step.forward)},
          {"backward", pass(step.backward)},
          {"ms", step.total_ms()},
          {"exchange", to_string(step.exchange)}};
}

class Simulate : public Command {
 public:
  CLI::App* add_to(CLI::App& app) override {
    auto* sub = app.add_subcommand("simulate",
                                   "Predict forward and backward of a step over 1 to 64 ranks from "
                                   "times measured on one GPU and "
                                   "a link: context parallelism in three layouts (C contiguous, Z "
                                   "zigzag, D zigzag per document) "
                                   "against head-split all-to-all");
    sub->option_defaults()->group("Options");
    sub->add_option("--workload", letters_,
                    "letters of docs/workloads.md, e.g. M,H [default: all, A to N]")
        ->delimiter(',');
    add_list(*sub, "--ranks", ranks_, 1, 64, "how many, e.g. 2,8,64 [default: 2,4,8,16,32,64]");
    sub->add_option("--rates", rates_,
                    "whose measured times: cuda-portable or cuda-sm90a [default: cuda-portable]");
    sub->add_option("--ranks-per-host", network_.ranks_per_host,
                    "up to so many ranks talk over --link, more over --network [default: 8]")
        ->transform(integer(1, INT_MAX));
    const auto link = [&](const char* name, const char* what, model::Link& l) {
      sub->add_option(fmt::format("--{}-gbs", name), l.gb_s,
                      fmt::format("GB/s that a rank sends over {} [default: {}]", what, l.gb_s))
          ->check(number(1e-9));
      sub->add_option(
             fmt::format("--{}-us", name), l.latency_us,
             fmt::format("microseconds of a collective over {} [default: {}]", what, l.latency_us))
          ->check(number(0));
    };
    link("link", "the link inside a host", network_.host);
    link("network", "the network between hosts", network_.between);
    sub->add_flag("--json", json_, "as JSON");
    return sub;
  }

  Result<int> run() override {
    for (const int64_t many : ranks_) {
      if (many > kMostRanks) {
        return Status(ErrorCode::kInvalidArgument,
                      fmt::format("--ranks: expected at most {}, got {}", kMostRanks, many));
      }
    }
    const auto rates = model::find_rates(rates_);
    if (!rates) return rates.status();
    std::vector<std::string> letters = letters_;
    for (char letter = 'A'; letters_.empty() && letter <= 'N'; ++letter) {
      letters.push_back(std::string(1, letter));
    }
    std::vector<Table> tables;
    for (const std::string& letter : letters) {
      auto table = predict(letter, *rates);
      if (!table) return table.status();
      tables.push_back(std::move(*table));
    }
    if (json_) {
      print_json(as_json(tables));
    } else {
      print_line(as_text(tables));
    }
    return kSuccess;
  }

 private:
  Result<Table> predict(const std::string& letter, const model::DeviceRates& rates) const {
    const Result<BatchSpec> spec = workload(letter);
    if (!spec) return spec.status();
    const model::Shape shape{spec->documents, spec->heads_qk, spec->heads_v, spec->dim_k,
                             spec->dim_v};
    Table table{letter, {}};
    std::vector<int64_t> ranks = ranks_;
    ranks.insert(ranks.begin(), 1);
    for (const int64_t many : ranks) {
      const int w = static_cast<int>(many);
      Row row{.world_size = w, .kcp = {}, .head_split = {}};
      for (size_t i = 0; i < std::size(kLayouts); ++i) {
        auto step = model::kcp_step(shape, w, kLayouts[i], rates, network_);
        if (!step) return step.status();
        row.kcp[i] = *step;
      }
      auto split = model::head_split_step(shape, w, rates, network_);
      if (!split) return split.status();
      row.head_split = *split;
      table.rows.push_back(row);
    }
    return table;
  }

  std::string as_text(const std::vector<Table>& tables) const {
    std::string out = fmt::format(
        "predicted forward + backward, ms (times as fast as one rank), {} on H200; up to {} ranks "
        "over "
        "{} GB/s and {} us, more over {} GB/s and {} us\n",
        rates_, network_.ranks_per_host, network_.host.gb_s, network_.host.latency_us,
        network_.between.gb_s, network_.between.latency_us);
    for (const Table& table : tables) {
      const double one = table.rows[0].kcp[0].total_ms();
      const auto cell = [&](const StepTime& step) {
        return fmt::format("{:.2f} ({:.1f}x)", step.total_ms(), one / step.total_ms());
      };
      std::vector<std::vector<std::string>> cells{
          {"workload " + table.letter, "C", "Z", "D", "head split", "faster"}};
      for (const Row& row : table.rows) {
        cells.push_back({fmt::format("{} rank{}", row.world_size, row.world_size == 1 ? "" : "s"),
                         cell(row.kcp[0]), cell(row.kcp[1]), cell(row.kcp[2]), cell(row.head_split),
                         row.world_size == 1 ? ""
                         : row.kcp_wins()    ? "KCP"
                                             : "head split"});
      }
      out += "\n" + format_table(cells) + plot(table);
    }
    return out;
  }

  // Bars of times as fast as one rank: k the best layout of KCP, h head split.
  static std::string plot(const Table& table) {
    constexpr double kColumns = 60;
    const double one = table.rows[0].kcp[0].total_ms();
    double most = 1;
    for (const Row& row : table.rows) {
      most = std::max({most, one / row.best().total_ms(), one / row.head_split.total_ms()});
    }
    std::string out;
    const auto bar = [&](char mark, double speed) {
      const auto columns = static_cast<size_t>(speed / most * kColumns + 0.5);
      return fmt::format("{} {:.1f}x\n", std::string(std::max<size_t>(columns, 1), mark), speed);
    };
    for (size_t i = 1; i < table.rows.size(); ++i) {
      const Row& row = table.rows[i];
      out += fmt::format("{:>4} ", row.world_size) + bar('k', one / row.best().total_ms());
      out += "     " + bar('h', one / row.head_split.total_ms());
    }
    return out;
  }

  Json as_json(const std::vector<Table>& tables) const {
    Json list = Json::array();
    for (const Table& table : tables) {
      Json rows = Json::array();
      for (const Row& row : table.rows) {
        Json one{{"ranks", row.world_size}};
        for (size_t i = 0; i < std::size(kLayouts); ++i) {
          one[to_string(kLayouts[i])] = json_of(row.kcp[i]);
        }
        one["head_split"] = json_of(row.head_split);
        one["faster"] = row.kcp_wins() ? "kcp" : "head_split";
        rows.push_back(std::move(one));
      }
      list.push_back({{"workload", table.letter}, {"rows", rows}});
    }
    const auto link = [](const model::Link& l) {
      return Json{{"gb_per_s", l.gb_s}, {"latency_us", l.latency_us}};
    };
    return {{"rates", rates_},
            {"ranks_per_host", network_.ranks_per_host},
            {"link", link(network_.host)},
            {"network", link(network_.between)},
            {"workloads", list}};
  }

  std::vector<std::string> letters_;
  std::vector<int64_t> ranks_ = {2, 4, 8, 16, 32, 64};
  std::string rates_ = "cuda-portable";
  model::Network network_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_simulate() { return std::make_unique<Simulate>(); }

}  // namespace gdn::cli
