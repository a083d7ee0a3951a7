// gdn info: what this build has and what a given problem would run on, with every refusal.
#include <fmt/format.h>

#include "base/counted.h"
#include "base/thread_pool.h"
#include "command.h"
#include "gdn/gdn.h"
#include "options.h"

namespace gdn::cli {
namespace {

class Info : public Command {
 public:
  CLI::App* add_to(CLI::App& app) override {
    auto* sub = app.add_subcommand(
        "info", "Version, threads, backends; which of them would take a problem, and why not");
    sub->option_defaults()->group("Problem");
    shape_.add_to(*sub, "16,48");
    sub->add_option("--dtype", dtype_, "of q, k, v: bf16, fp32 or fp64 [default: bf16]");
    sub->add_option("--backend", backend_, "ask for this one by name, as if it were forced")
        ->check(not_empty());
    operator_.add_to(*sub);
    sub->option_defaults()->group("Options");
    sub->add_flag("--json", json_, "as JSON");
    sub->footer("Example: gdn info --heads 16,48 --norm");
    return sub;
  }

  Result<int> run() override {
    Problem problem{.tokens = 4096,
                    .heads_qk = 16,
                    .heads_v = 48,
                    .dim_k = 128,
                    .dim_v = 128,
                    .operand = DType::kBFloat16,
                    .device = {},
                    .options = operator_.options()};
    GDN_RETURN_IF_ERROR(check_operator(problem.options));
    GDN_RETURN_IF_ERROR(
        shape_.apply(problem.heads_qk, problem.heads_v, problem.dim_k, problem.dim_v));
    const Result<DType> dtype = parse_dtype(dtype_);
    if (!dtype) return dtype.status();
    problem.operand = *dtype;

    Json list = Json::array();
    for (const Backend* backend : backends()) {
      // Each is asked about the problem on the device that it serves.
      Problem there = problem;
      there.device.kind = backend->device_kind();
      const auto why_not = backend->why_not(there);
      list.push_back({{"name", backend->name()},
                      {"description", backend->description()},
                      {"in_build", true},
                      {"device", backend->device_kind() == Device::Kind::kCpu ? "cpu" : "cuda"},
                      {"workers", backend->workers()},
                      {"takes_problem", !why_not.has_value()},
                      {"why_not", why_not ? Json(*why_not) : Json(nullptr)}});
    }
    for (const AbsentBackend& absent : absent_backends()) {
      list.push_back({{"name", absent.name},
                      {"in_build", false},
                      {"takes_problem", false},
                      {"why_not", absent.why}});
    }
    // The pick for tensors in host memory; a caller with device tensors gets the first of theirs.
    const Result<const Backend*> picked = pick_backend(problem, backend_);
    const std::string on =
        fmt::format("H={}, HV={}, K={}, V={}, {}, on the CPU", problem.heads_qk, problem.heads_v,
                    problem.dim_k, problem.dim_v, dtype_name(problem.operand));
    if (json_) {
      print_json({{"version", version()},
                  {"threads", num_threads()},
                  {"problem", on},
                  {"backends", list},
                  {"picked", picked ? Json((*picked)->name()) : Json(nullptr)},
                  {"why_none", picked ? Json(nullptr) : Json(picked.status().message())}});
      return picked ? kSuccess : kBadUse;
    }
    print_line(fmt::format("gdn {}   {} (GDN_NUM_THREADS changes it)", version(),
                           counted(num_threads(), "thread")));
    print_line("backends, fastest first:");
    for (const Json& backend : list) {
      if (!backend["in_build"].get<bool>()) {
        print_line(fmt::format("  {:<14} {}", backend["name"].get<std::string>(),
                               backend["why_not"].get<std::string>()));
        continue;
      }
      print_line(fmt::format("  {:<14} {}", backend["name"].get<std::string>(),
                             backend["description"].get<std::string>()));
      const auto workers = backend["workers"].get<int64_t>();
      print_line(fmt::format("  {:<14} {}, {}, {}", "", backend["device"].get<std::string>(),
                             counted(workers, "worker"),
                             backend["takes_problem"].get<bool>()
                                 ? "takes the problem"
                                 : "refuses: " + backend["why_not"].get<std::string>()));
    }
    print_line("problem: " + on);
    if (!picked) return picked.status();
    print_line(fmt::format("picked:  {}", (*picked)->name()));
    return kSuccess;
  }

 private:
  ShapeOptions shape_;
  OperatorOptions operator_;
  std::string dtype_ = "bf16", backend_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_info() { return std::make_unique<Info>(); }

}  // namespace gdn::cli
