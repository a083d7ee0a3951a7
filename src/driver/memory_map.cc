#include "driver/memory_map.h"

#include <algorithm>

#include "base/memory.h"

namespace gdn {
namespace {

constexpr int64_t kNotHere = -1;

class Mapper {
 public:
  explicit Mapper(const Context& context)
      : context_(context), plan_(context.plan()), element_(size_of(context.problem().state())) {
    std::fill(std::begin(map_.table_offset), std::end(map_.table_offset), kNotHere);
  }

  void table(Table table, int64_t elements) {
    if (elements > 0)
      map_.table_offset[static_cast<int>(table)] = layout_.take(elements * element_);
  }

  void kept_tables() {
    table(Table::kMap, plan_.map_elements());
    table(Table::kBoundary, plan_.boundary_elements(false));
    table(Table::kReceived, plan_.forward.received_elements);
  }

  void passing_tables(bool backward_pass) {
    const ExchangePass& pass = backward_pass ? plan_.backward : plan_.forward;
    table(Table::kPart, plan_.part_elements(backward_pass));
    table(Table::kSend, pass.send_elements);
    table(Table::kReturnSend, pass.return_send_elements);
    table(Table::kReturned, pass.returned_elements);
    if (!backward_pass) return;
    table(Table::kBoundary, plan_.boundary_elements(true));
    table(Table::kReceived, pass.received_elements);
  }

  void prepared() {
    map_.prepared = layout_.take(context_.backend().prepared_bytes(context_.problem(), plan_));
  }
  void scratch(int64_t bytes) { map_.scratch = layout_.take(bytes); }

  void skip(int64_t bytes) { layout_.take(bytes); }

  PassMap done() {
    map_.bytes = layout_.bytes();
    return map_;
  }

 private:
  const Context& context_;
  const Plan& plan_;
  int64_t element_;
  BlockLayout layout_;
  PassMap map_;
};

bool is_saved_prepared(const Context& context, bool have_saved) {
  return have_saved && context.keeps_prepared();
}

}  // namespace

PassMap saved_map(const Context& context) {
  Mapper mapper(context);
  mapper.kept_tables();
  if (context.keeps_prepared()) mapper.prepared();
  return mapper.done();
}

PassMap forward_map(const Context& context, bool have_saved) {
  const Backend& backend = context.backend();
  Mapper mapper(context);
  if (!is_saved_prepared(context, have_saved)) mapper.prepared();
  mapper.scratch(backend.forward_scratch_bytes(context.problem(), context.plan()));
  mapper.passing_tables(false);
  if (!have_saved) mapper.kept_tables();
  return mapper.done();
}

BackwardMap backward_map(const Context& context, bool have_saved) {
  const Backend& backend = context.backend();
  int64_t scratch = backend.backward_scratch_bytes(context.problem(), context.plan());
  if (!have_saved) {
    scratch = std::max(scratch, backend.forward_scratch_bytes(context.problem(), context.plan()));
  }
  Mapper mapper(context);
  if (!is_saved_prepared(context, have_saved)) mapper.prepared();
  mapper.scratch(scratch);
  mapper.passing_tables(true);
  BackwardMap map;
  map.pass = mapper.done();
  map.bytes = map.pass.bytes;
  if (!have_saved) {
    Mapper again(context);
    again.skip(map.pass.bytes);
    again.passing_tables(false);
    again.kept_tables();
    map.forward = again.done();
    map.forward.prepared = map.pass.prepared;
    map.forward.scratch = map.pass.scratch;
    map.bytes = map.forward.bytes;
  }
  return map;
}

void* prepared_at(const Context& context, const PassMap& map, void* base, const Memory* saved) {
  if (!is_saved_prepared(context, saved != nullptr)) {
    return static_cast<std::byte*>(base) + map.prepared;
  }
  return static_cast<std::byte*>(saved->data) + saved_map(context).prepared;
}

void place_tables(const PassMap& map, void* base, TablePointers& tables) {
  for (int i = 0; i < kNumTables; ++i) {
    if (map.table_offset[i] != kNotHere) {
      tables[i] = static_cast<std::byte*>(base) + map.table_offset[i];
    }
  }
}

}  // namespace gdn
