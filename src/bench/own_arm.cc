// A backend of this build as an arm: calls through the driver, stages straight at the backend.
// Without a communicator messages to other ranks are dropped, which makes a single rank of many a
// proxy without communication; what it would have received stays as it was allocated, zeros.
#include <fmt/format.h>

#include <algorithm>

#include "bench/arm.h"
#include "check/run_batch.h"
#include "driver/memory_map.h"

namespace gdn::bench {
namespace {

Status drive(Result<Call> call) {
  if (!call) return call.status();
  Message dropped;
  do {
    GDN_RETURN_IF_ERROR(call->advance(dropped));
  } while (dropped.kind != Message::Kind::kNone);
  return Status::ok();
}

class OwnArm final : public Arm {
 public:
  OwnArm(const Case& what, bool keep_saved, Context context)
      : Arm(what, keep_saved), context_(std::move(context)) {}

  Status set_up(Machine& machine) {
    const auto take = [&](int64_t bytes, Memory& memory) -> Status {
      Result<Storage> made = machine.allocate(bytes);
      if (!made) return made.status();
      memory = made->memory();
      storage_.push_back(std::move(*made));
      return Status::ok();
    };
    facts_ = {context_.backend().name(), static_cast<int64_t>(context_.plan().segments.size()),
              context_.saved_bytes(), context_.forward_workspace_bytes(),
              context_.backward_workspace_bytes(keep_saved_)};
    Memory resident;
    GDN_RETURN_IF_ERROR(take(context_.resident_bytes(), resident));
    GDN_RETURN_IF_ERROR(take(facts_.saved_bytes, saved_));
    GDN_RETURN_IF_ERROR(take(facts_.forward_workspace_bytes, forward_space_));
    if (case_.training) GDN_RETURN_IF_ERROR(take(facts_.backward_workspace_bytes, backward_space_));
    GDN_RETURN_IF_ERROR(context_.upload(resident));
    place_stages();
    return Status::ok();
  }

  const ArmFacts& facts() const override { return facts_; }

  Status offers(Operation operation) const override {
    const Plan& plan = context_.plan();
    const auto none = [&](const char* why) { return Status(ErrorCode::kUnsupported, why); };
    if (needs_backward(operation) && !case_.training) return none("the operands have no do");
    if (!is_stage(operation)) return Status::ok();
    if (!keep_saved_) return none("stages are timed with a saved set");
    if (operation == Operation::kSummarize && plan.counts.exit_slots == 0)
      return none("no segment ends inside its document");
    if (operation == Operation::kSummarizeBackward && plan.counts.entry_slots == 0) {
      return none("no segment begins inside its document");
    }
    if (operation == Operation::kFold && all_empty(plan.forward)) return none("nothing to fold");
    if (operation == Operation::kFoldBackward && all_empty(plan.backward)) {
      return none("nothing to fold");
    }
    return Status::ok();
  }

 protected:
  Status forward(bool keep) override {
    const Memory* saved = keep ? &saved_ : nullptr;
    return case_.communicator != nullptr
               ? gdn::forward(context_, case_.forward, forward_space_, saved)
               : drive(Call::forward(context_, case_.forward, forward_space_, saved));
  }
  Status backward() override {
    const Memory* saved = keep_saved_ ? &saved_ : nullptr;
    return case_.communicator != nullptr
               ? gdn::backward(context_, case_.backward, backward_space_, saved)
               : drive(Call::backward(context_, case_.backward, backward_space_, saved));
  }
  Status stage(Operation operation) override {
    const Backend& backend = context_.backend();
    const ForwardArgs& f = case_.forward;
    switch (operation) {
      case Operation::kPrepare:
        return backend.prepare(forward_stage_);
      case Operation::kSummarize:
        return backend.summarize(forward_stage_, f.initial_state);
      case Operation::kFold:
        return fold(forward_stage_, context_.plan().forward);
      case Operation::kRun:
        return backend.run(forward_stage_, f.initial_state, f.o, f.final_state);
      case Operation::kSummarizeBackward:
        return backend.summarize_backward(backward_stage_, case_.backward);
      case Operation::kFoldBackward:
        return fold(backward_stage_, context_.plan().backward);
      case Operation::kRunBackward:
        return backend.run_backward(backward_stage_, case_.backward,
                                    table(forward_stage_, Table::kBoundary));
      default:
        return {ErrorCode::kInternal, fmt::format("{} is not a stage", to_string(operation))};
    }
  }

 private:
  static void*& table(StageArgs& args, Table which) { return args.tables[static_cast<int>(which)]; }
  static std::array<const FoldProgram*, 4> programs(const ExchangePass& pass) {
    return {&pass.pack, &pass.pack_maps, &pass.fold, &pass.spread};
  }
  static bool all_empty(const ExchangePass& pass) {
    const auto list = programs(pass);
    return std::all_of(list.begin(), list.end(), [](const FoldProgram* p) { return p->empty(); });
  }
  Status fold(const StageArgs& args, const ExchangePass& pass) {
    for (const FoldProgram* program : programs(pass)) {
      if (!program->empty()) GDN_RETURN_IF_ERROR(context_.backend().fold(args, *program));
    }
    return Status::ok();
  }

  // As a call with a saved set places them (src/driver/call.cc), but for prepared data, which is
  // one for both directions.
  void place_stages() {
    for (StageArgs* stage : {&forward_stage_, &backward_stage_}) {
      stage->resident = context_.resident();
    }
    const auto place = [](StageArgs& stage, const PassMap& map, void* base) {
      stage.scratch = static_cast<std::byte*>(base) + map.scratch;
      place_tables(map, base, stage.tables);
    };
    const PassMap forward = forward_map(context_, true);
    place(forward_stage_, forward, forward_space_.data);
    forward_stage_.prepared = prepared_at(context_, forward, forward_space_.data, &saved_);
    backward_stage_.prepared = forward_stage_.prepared;
    place_tables(saved_map(context_), saved_.data, forward_stage_.tables);
    place(backward_stage_, backward_map(context_, true).pass, backward_space_.data);
    table(backward_stage_, Table::kMap) = table(forward_stage_, Table::kMap);
    table(backward_stage_, Table::kReceivedMap) = table(forward_stage_, Table::kReceived);
  }

  Context context_;
  ArmFacts facts_;
  std::vector<Storage> storage_;
  Memory saved_, forward_space_, backward_space_;
  StageArgs forward_stage_{context_.problem(), context_.plan(), case_.forward.in};
  StageArgs backward_stage_{context_.problem(), context_.plan(), case_.forward.in};
};

}  // namespace

Result<std::unique_ptr<Arm>> make_own_arm(Machine& machine, const Case& what,
                                          const ArmOptions& options) {
  Result<Context> context =
      what.communicator != nullptr
          ? Context::make(what.partition, *what.communicator, what.problem, options.context)
          : Context::make(what.partition, what.rank, what.problem, options.context);
  if (!context) return context.status();
  if (what.communicator != nullptr) {
    GDN_RETURN_IF_ERROR(agree_on_calls(*what.communicator, what.training, options.keep_saved));
  }
  auto arm = std::make_unique<OwnArm>(what, options.keep_saved, std::move(*context));
  GDN_RETURN_IF_ERROR(arm->set_up(machine));
  return std::unique_ptr<Arm>(std::move(arm));
}

}  // namespace gdn::bench
