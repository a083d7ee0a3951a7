// Another build of the library as an arm, through its C ABI (gdn/gdn_c.h) in a shared object.
#include <dlfcn.h>
#include <fmt/format.h>

#include "bench/arm.h"
#include "gdn/gdn_c.h"

namespace gdn::bench {
namespace {

// The functions of the C ABI that an arm calls, by name.
#define GDN_BENCH_FUNCTIONS(F)                                                               \
  F(gdn_last_error)                                                                          \
  F(gdn_partition_create)                                                                    \
  F(gdn_partition_destroy) F(gdn_communicator_create_single) F(gdn_communicator_destroy)     \
      F(gdn_context_create) F(gdn_context_destroy) F(gdn_context_backend)                    \
          F(gdn_context_resident_bytes) F(gdn_context_upload)                                \
              F(gdn_context_forward_workspace_bytes) F(gdn_context_backward_workspace_bytes) \
                  F(gdn_context_saved_bytes) F(gdn_forward) F(gdn_backward)

class Library {
 public:
  static Result<std::shared_ptr<Library>> open(const std::string& path) {
    auto library = std::make_shared<Library>();
    library->handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library->handle_ == nullptr) return Status(ErrorCode::kIo, dlerror());
    const char* missing = nullptr;
#define GDN_BENCH_FIND(name)                                                                 \
  library->name = reinterpret_cast<decltype(library->name)>(dlsym(library->handle_, #name)); \
  if (library->name == nullptr) missing = #name;
    GDN_BENCH_FUNCTIONS(GDN_BENCH_FIND)
#undef GDN_BENCH_FIND
    if (missing != nullptr) {
      return Status(ErrorCode::kIo,
                    fmt::format("{}: expected the C ABI of gdn, {} is missing", path, missing));
    }
    return library;
  }
  ~Library() {
    if (handle_ != nullptr) dlclose(handle_);
  }

#define GDN_BENCH_MEMBER(name) decltype(&::name) name = nullptr;
  GDN_BENCH_FUNCTIONS(GDN_BENCH_MEMBER)
#undef GDN_BENCH_MEMBER

  Status check(gdn_status status) const {
    if (status == GDN_OK) return Status::ok();
    return {static_cast<ErrorCode>(status), gdn_last_error()};
  }

 private:
  void* handle_ = nullptr;
};

DLDataType to_dlpack(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return {kDLBfloat, 16, 1};
    case DType::kFloat32:
      return {kDLFloat, 32, 1};
    case DType::kFloat64:
      return {kDLFloat, 64, 1};
    case DType::kInt32:
      return {kDLInt, 32, 1};
    case DType::kInt64:
      return {kDLInt, 64, 1};
  }
  return {};
}

DLDevice to_dlpack(Device device) {
  return {device.kind == Device::Kind::kCuda ? kDLCUDA : kDLCPU, device.index};
}

// A view as the C ABI takes it; absent: null.
class Tensor {
 public:
  explicit Tensor(const TensorView& view) : view_(view) {
    tensor_.data = view.data;
    tensor_.device = to_dlpack(view.device);
    tensor_.ndim = view.rank;
    tensor_.dtype = to_dlpack(view.dtype);
    tensor_.shape = view_.shape.data();
    tensor_.strides = view_.stride.data();
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  DLTensor* get() { return view_.present() ? &tensor_ : nullptr; }

 private:
  TensorView view_;
  DLTensor tensor_{};
};

class LibraryArm final : public Arm {
 public:
  LibraryArm(const Case& what, bool keep_saved, std::shared_ptr<Library> library)
      : Arm(what, keep_saved), library_(std::move(library)) {}
  ~LibraryArm() override {
    if (context_ != nullptr) library_->gdn_context_destroy(context_);
    if (communicator_ != nullptr) library_->gdn_communicator_destroy(communicator_);
    if (partition_ != nullptr) library_->gdn_partition_destroy(partition_);
  }

  Status set_up(Machine& machine, const ContextOptions& options) {
    if (case_.partition.world_size() != 1) {
      return {ErrorCode::kUnsupported, "the C ABI has no single rank of many"};
    }
    if (options.exchange != ExchangePolicy::kAuto) {
      return {ErrorCode::kUnsupported, "the C ABI has no exchange policy"};
    }
    const Library& c = *library_;
    GDN_RETURN_IF_ERROR(c.check(c.gdn_partition_create(case_.partition.cu_seqlens().data(),
                                                       case_.partition.num_documents(), 1,
                                                       "contiguous", &partition_)));
    GDN_RETURN_IF_ERROR(c.check(c.gdn_communicator_create_single(&communicator_)));
    const Problem& p = case_.problem;
    gdn_problem problem{};
    problem.tokens = p.tokens;
    problem.heads_qk = p.heads_qk;
    problem.heads_v = p.heads_v;
    problem.dim_k = p.dim_k;
    problem.dim_v = p.dim_v;
    problem.operand = to_dlpack(p.operand);
    problem.device = to_dlpack(p.device);
    problem.scale = p.options.scale.value_or(0);
    problem.qk_l2norm = p.options.qk_l2norm;
    problem.gate_in_kernel = p.options.gate_in_kernel;
    problem.beta_sigmoid = p.options.beta_sigmoid;
    problem.allow_neg_eigval = p.options.allow_neg_eigval;
    problem.keep_prepared = options.keep_prepared;
    GDN_RETURN_IF_ERROR(c.check(c.gdn_context_create(
        partition_, communicator_, &problem,
        options.backend.empty() ? nullptr : options.backend.c_str(), options.tile, &context_)));
    facts_ = {c.gdn_context_backend(context_), -1, c.gdn_context_saved_bytes(context_),
              c.gdn_context_forward_workspace_bytes(context_),
              c.gdn_context_backward_workspace_bytes(context_, keep_saved_)};
    const int64_t sizes[] = {c.gdn_context_resident_bytes(context_), facts_.saved_bytes,
                             facts_.forward_workspace_bytes, facts_.backward_workspace_bytes};
    Storage* blocks[] = {&resident_, &saved_, &forward_space_, &backward_space_};
    for (int i = 0; i < 4; ++i) {
      Result<Storage> made = machine.allocate(sizes[i]);
      if (!made) return made.status();
      *blocks[i] = std::move(*made);
    }
    return c.check(c.gdn_context_upload(context_, resident_.owner.get(), resident_.bytes, nullptr));
  }

  const ArmFacts& facts() const override { return facts_; }
  Status offers(Operation operation) const override {
    if (is_stage(operation)) return {ErrorCode::kUnsupported, "the C ABI has no stages"};
    if (needs_backward(operation) && !case_.training) {
      return {ErrorCode::kUnsupported, "the operands have no do"};
    }
    return Status::ok();
  }

 protected:
  Status forward(bool keep) override {
    return library_->check(library_->gdn_forward(
        context_, &operands_, initial_.get(), o_.get(), final_.get(), forward_space_.owner.get(),
        forward_space_.bytes, keep ? saved_.owner.get() : nullptr, keep ? saved_.bytes : 0,
        nullptr));
  }
  Status backward() override {
    return library_->check(library_->gdn_backward(
        context_, &operands_, initial_.get(), d_o_.get(), dfinal_.get(), &gradients_,
        backward_space_.owner.get(), backward_space_.bytes,
        keep_saved_ ? saved_.owner.get() : nullptr, keep_saved_ ? saved_.bytes : 0, nullptr));
  }
  Status stage(Operation operation) override { return offers(operation); }

 private:
  std::shared_ptr<Library> library_;
  gdn_partition* partition_ = nullptr;
  gdn_communicator* communicator_ = nullptr;
  gdn_context* context_ = nullptr;
  ArmFacts facts_;
  Storage resident_, saved_, forward_space_, backward_space_;

  Tensor q_{case_.forward.in.q}, k_{case_.forward.in.k}, v_{case_.forward.in.v};
  Tensor g_{case_.forward.in.g}, beta_{case_.forward.in.beta};
  Tensor A_log_{case_.forward.in.A_log}, dt_bias_{case_.forward.in.dt_bias};
  Tensor initial_{case_.forward.initial_state}, o_{case_.forward.o};
  Tensor final_{case_.forward.final_state};
  Tensor d_o_{case_.backward.d_o}, dfinal_{case_.backward.dfinal_state};
  Tensor dq_{case_.backward.dq}, dk_{case_.backward.dk}, dv_{case_.backward.dv};
  Tensor dg_{case_.backward.dg}, dbeta_{case_.backward.dbeta};
  Tensor dA_log_{case_.backward.dA_log}, ddt_bias_{case_.backward.ddt_bias};
  Tensor dinitial_{case_.backward.dinitial_state};
  gdn_operands operands_{q_.get(),    k_.get(),     v_.get(),      g_.get(),
                         beta_.get(), A_log_.get(), dt_bias_.get()};
  gdn_gradients gradients_{dq_.get(),    dk_.get(),     dv_.get(),       dg_.get(),
                           dbeta_.get(), dA_log_.get(), ddt_bias_.get(), dinitial_.get()};
};

}  // namespace

Result<std::unique_ptr<Arm>> make_library_arm(Machine& machine, const Case& what,
                                              const ArmOptions& options) {
  auto library = Library::open(options.library);
  if (!library) return library.status();
  auto arm = std::make_unique<LibraryArm>(what, options.keep_saved, std::move(*library));
  GDN_RETURN_IF_ERROR(arm->set_up(machine, options.context));
  return std::unique_ptr<Arm>(std::move(arm));
}

}  // namespace gdn::bench
