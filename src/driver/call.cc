// The orchestration of docs/architecture.md: a forward or backward as a list of steps that pauses
// wherever ranks must talk.
#include <fmt/format.h>

#include <functional>
#include <utility>

#include "base/memory.h"
#include "driver/memory_map.h"

namespace gdn {
namespace {

void* at(const StageArgs& args, Table table) { return args.tables[static_cast<int>(table)]; }
void*& slot(StageArgs& args, Table table) { return args.tables[static_cast<int>(table)]; }

std::vector<int64_t> bytes_of(const std::vector<int64_t>& elements, int64_t element) {
  std::vector<int64_t> bytes(elements);
  for (int64_t& n : bytes) n *= element;
  return bytes;
}

Status check_saved(const Context& context, const Memory* saved) {
  return saved ? check_memory("saved", *saved, saved_map(context).bytes) : Status::ok();
}

Status check_resident(const Context& context) {
  if (context.resident_bytes() == 0 || context.resident() != nullptr) return Status::ok();
  return {ErrorCode::kInvalidArgument,
          fmt::format("context: expected its {} bytes of tables on the device before the first "
                      "call (and before a stream capture), got none: call upload()",
                      context.resident_bytes())};
}

Status check(const Context& context, const ForwardArgs& args, const Memory& workspace,
             const Memory* saved) {
  GDN_RETURN_IF_ERROR(validate(context, args));
  GDN_RETURN_IF_ERROR(check_resident(context));
  GDN_RETURN_IF_ERROR(
      check_memory("workspace", workspace, forward_map(context, saved != nullptr).bytes));
  return check_saved(context, saved);
}

Status check(const Context& context, const BackwardArgs& args, const Memory& workspace,
             const Memory* saved) {
  GDN_RETURN_IF_ERROR(validate(context, args));
  GDN_RETURN_IF_ERROR(check_resident(context));
  GDN_RETURN_IF_ERROR(
      check_memory("workspace", workspace, backward_map(context, saved != nullptr).bytes));
  return check_saved(context, saved);
}

}  // namespace

struct Call::State {
  using Step = std::function<Status(Message&)>;

  const Context& context;
  const Backend& backend;
  const Operands operands;  // the stages refer to these
  ForwardArgs forward_args;
  BackwardArgs backward_args;
  StageArgs forward_stage;  // also of the recomputed forward of a backward without a saved set
  StageArgs backward_stage;
  std::vector<Step> steps;
  size_t next = 0;

  State(const Context& c, const Operands& in, Stream stream)
      : context(c),
        backend(c.backend()),
        operands(in),
        forward_stage{c.problem(), c.plan(), operands},
        backward_stage{c.problem(), c.plan(), operands} {
    for (StageArgs* stage : {&forward_stage, &backward_stage}) {
      stage->resident = c.resident();
      stage->stream = stream;
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void then(Step step) { steps.push_back(std::move(step)); }

  void add_prepare(const StageArgs& stage) {
    then([this, &stage](Message&) { return backend.prepare(stage); });
  }

  // prepare .. exchange of a forward: afterwards kBoundary holds every segment's entry state.
  void add_forward_boundaries(const TensorView& initial_state) {
    then([this, initial_state](Message&) -> Status {
      GDN_RETURN_IF_ERROR(backend.prepare(forward_stage));
      return backend.summarize(forward_stage, initial_state);
    });
    add_exchange(forward_stage, context.plan().forward);
  }

  void add_run() {
    then([this](Message&) {
      const ForwardArgs& a = forward_args;
      return backend.run(forward_stage, a.initial_state, a.o, a.final_state);
    });
  }

  // Summaries (kPart, kMap) to boundary states (kBoundary): pack, collective, fold, return, spread.
  void add_exchange(const StageArgs& stage, const ExchangePass& pass) {
    const ExchangeKind kind = context.plan().exchange;
    if (kind != ExchangeKind::kNone) {
      then([this, &stage, &pass, kind](Message& message) -> Status {
        GDN_RETURN_IF_ERROR(backend.fold(stage, pass.pack));
        GDN_RETURN_IF_ERROR(backend.fold(stage, pass.pack_maps));
        const int64_t element = size_of(context.problem().state());
        message.kind =
            kind == ExchangeKind::kAllGather ? Message::Kind::kAllGather : Message::Kind::kAllToAll;
        message.send = at(stage, Table::kSend);
        message.receive = at(stage, Table::kReceived);
        message.send_bytes = bytes_of(pass.send, element);
        message.receive_bytes = bytes_of(pass.receive, element);
        return Status::ok();
      });
      then([this, &stage, &pass, kind](Message& message) -> Status {
        GDN_RETURN_IF_ERROR(backend.fold(stage, pass.fold));
        if (kind == ExchangeKind::kAllGather) return Status::ok();
        const int64_t element = size_of(context.problem().state());
        message.kind = Message::Kind::kAllToAll;
        message.send = at(stage, Table::kReturnSend);
        message.receive = at(stage, Table::kReturned);
        message.send_bytes = bytes_of(pass.return_send, element);
        message.receive_bytes = bytes_of(pass.return_receive, element);
        return Status::ok();
      });
    }
    then([this, &stage, &pass](Message&) { return backend.fold(stage, pass.spread); });
  }
};

Call::Call(std::unique_ptr<State> state) : state_(std::move(state)) {}
Call::Call(Call&&) noexcept = default;
Call& Call::operator=(Call&&) noexcept = default;
Call::~Call() = default;

Result<Call> Call::forward(const Context& context, const ForwardArgs& args, Memory workspace,
                           const Memory* saved, Stream stream) {
  GDN_RETURN_IF_ERROR(check(context, args, workspace, saved));
  auto state = std::make_unique<State>(context, args.in, stream);
  State& s = *state;
  s.forward_args = args;

  const PassMap map = forward_map(context, saved != nullptr);
  std::byte* base = static_cast<std::byte*>(workspace.data);
  s.forward_stage.prepared = prepared_at(context, map, base, saved);
  s.forward_stage.scratch = base + map.scratch;
  place_tables(map, base, s.forward_stage.tables);
  if (saved) place_tables(saved_map(context), saved->data, s.forward_stage.tables);

  s.add_forward_boundaries(args.initial_state);
  s.add_run();
  return Call(std::move(state));
}

Result<Call> Call::forward_again(const Context& context, const ForwardArgs& args, Memory workspace,
                                 Memory saved, Stream stream) {
  GDN_RETURN_IF_ERROR(check(context, args, workspace, &saved));
  auto state = std::make_unique<State>(context, args.in, stream);
  State& s = *state;
  s.forward_args = args;
  const PassMap map = forward_map(context, true);
  std::byte* base = static_cast<std::byte*>(workspace.data);
  s.forward_stage.prepared = prepared_at(context, map, base, &saved);
  s.forward_stage.scratch = base + map.scratch;
  place_tables(saved_map(context), saved.data, s.forward_stage.tables);
  if (!context.keeps_prepared()) s.add_prepare(s.forward_stage);
  s.add_run();
  return Call(std::move(state));
}

Result<Call> Call::backward(const Context& context, const BackwardArgs& args, Memory workspace,
                            const Memory* saved, Stream stream) {
  GDN_RETURN_IF_ERROR(check(context, args, workspace, saved));
  auto state = std::make_unique<State>(context, args.in, stream);
  State& s = *state;
  s.backward_args = args;

  const BackwardMap map = backward_map(context, saved != nullptr);
  std::byte* base = static_cast<std::byte*>(workspace.data);
  for (StageArgs* stage : {&s.forward_stage, &s.backward_stage}) {
    stage->prepared = prepared_at(context, map.pass, base, saved);
    stage->scratch = base + map.pass.scratch;
  }
  // Of the forward: entry states, maps, received maps, and prepared data where the context keeps
  // it; kept by it, or made again here.
  if (saved) {
    place_tables(saved_map(context), saved->data, s.forward_stage.tables);
    if (!context.keeps_prepared()) s.add_prepare(s.backward_stage);
  } else {
    place_tables(map.forward, base, s.forward_stage.tables);
    s.add_forward_boundaries(args.initial_state);
  }
  place_tables(map.pass, base, s.backward_stage.tables);
  slot(s.backward_stage, Table::kMap) = at(s.forward_stage, Table::kMap);
  slot(s.backward_stage, Table::kReceivedMap) = at(s.forward_stage, Table::kReceived);

  s.then(
      [&s](Message&) { return s.backend.summarize_backward(s.backward_stage, s.backward_args); });
  s.add_exchange(s.backward_stage, context.plan().backward);
  s.then([&s](Message&) {
    return s.backend.run_backward(s.backward_stage, s.backward_args,
                                  at(s.forward_stage, Table::kBoundary));
  });
  return Call(std::move(state));
}

Status Call::advance(Message& message) {
  message = {};
  while (state_->next < state_->steps.size() && message.kind == Message::Kind::kNone) {
    const Status status = state_->steps[state_->next++](message);
    if (!status) {
      state_->next = state_->steps.size();  // a failed call does not go on
      return status;
    }
  }
  return Status::ok();
}

Status Call::complete(Communicator& comm, Stream stream, Message m) {
  do {
    switch (m.kind) {
      case Message::Kind::kNone:
        break;
      case Message::Kind::kAllGather:
        GDN_RETURN_IF_ERROR(comm.all_gather(m.send, m.receive, m.receive_bytes, stream));
        break;
      case Message::Kind::kAllToAll:
        GDN_RETURN_IF_ERROR(
            comm.all_to_all(m.send, m.send_bytes, m.receive, m.receive_bytes, stream));
        break;
    }
    GDN_RETURN_IF_ERROR(advance(m));
  } while (m.kind != Message::Kind::kNone);
  return Status::ok();
}

namespace {

// Runs a call to its end over the context's communicator. A call that could not begin on one rank
// begins on none.
Status complete(const Context& context, Result<Call> call, Stream stream) {
  Communicator* comm = context.communicator();
  if (!comm) {
    return {ErrorCode::kInvalidArgument,
            "context: made without a communicator; drive a Call with your own collectives"};
  }
  GDN_RETURN_IF_ERROR(comm->agree(call.status()));
  return call->complete(*comm, stream);
}

}  // namespace

Status forward(const Context& context, const ForwardArgs& args, Memory workspace,
               const Memory* saved, Stream stream) {
  return complete(context, Call::forward(context, args, workspace, saved, stream), stream);
}

Status backward(const Context& context, const BackwardArgs& args, Memory workspace,
                const Memory* saved, Stream stream) {
  return complete(context, Call::backward(context, args, workspace, saved, stream), stream);
}

}  // namespace gdn
