// The conformance suite of communicators over NCCL: every GPU of this host a rank, one thread each,
// every collective on that rank's stream without a wait of the host.
#include <cuda_runtime.h>

#include <cstdio>
#include <thread>

#include "comm/conformance.h"

namespace gdn {
namespace {

using conformance::Conformance;
using conformance::Kind;
using conformance::Rank;
using conformance::World;

int devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

class CudaRank final : public Rank {
 public:
  CudaRank(int device, Communicator& host) : device_(device) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    auto made = make_nccl_communicator(host);
    EXPECT_TRUE(made) << made.status().message();
    if (made) comm_ = std::move(*made);
  }
  ~CudaRank() override {
    static_cast<void>(cudaSetDevice(device_));
    free_all();
    comm_.reset();
    static_cast<void>(cudaStreamDestroy(stream_));
  }

  bool ready() const { return comm_ != nullptr; }
  int device() const { return device_; }
  Communicator& comm() override { return *comm_; }
  Stream stream() override { return {stream_}; }
  void* place(std::vector<int>& values) override {
    void* data = nullptr;
    const size_t bytes = values.size() * sizeof(int);
    EXPECT_EQ(cudaMalloc(&data, bytes + sizeof(int)), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(data, values.data(), bytes, cudaMemcpyHostToDevice, stream_),
              cudaSuccess);
    placed_.push_back(data);
    return data;
  }
  void take(std::vector<int>& values, void* placed) override {
    EXPECT_EQ(cudaMemcpyAsync(values.data(), placed, values.size() * sizeof(int),
                              cudaMemcpyDeviceToHost, stream_),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    free_all();
  }

 private:
  void free_all() {
    for (void* data : placed_) static_cast<void>(cudaFree(data));
    placed_.clear();
  }

  int device_;
  cudaStream_t stream_{};
  std::unique_ptr<Communicator> comm_;
  std::vector<void*> placed_;
};

class NcclWorld final : public World {
 public:
  explicit NcclWorld(int size) : host_(make_thread_communicators(size)), ranks_(size) {
    each([&](int r) { ranks_[r] = std::make_unique<CudaRank>(r, *host_[r]); });
  }
  ~NcclWorld() override {
    each([&](int r) { ranks_[r].reset(); });
  }
  bool ready() const {
    for (const auto& rank : ranks_) {
      if (!rank->ready()) return false;
    }
    return true;
  }
  int size() const override { return static_cast<int>(ranks_.size()); }
  void run(const std::function<void(Rank&)>& body) override {
    each([&](int r) {
      EXPECT_EQ(cudaSetDevice(r), cudaSuccess);
      body(*ranks_[r]);
    });
  }
  bool compares_counts() const override { return false; }

 private:
  void each(const std::function<void(int)>& body) const {
    std::vector<std::jthread> threads;
    for (int r = 0; r < size(); ++r) threads.emplace_back([&, r] { body(r); });
  }
  std::vector<std::unique_ptr<Communicator>> host_;
  std::vector<std::unique_ptr<CudaRank>> ranks_;
};

std::unique_ptr<World> make_nccl() {
  auto world = std::make_unique<NcclWorld>(devices());
  return world->ready() ? std::move(world) : nullptr;
}

INSTANTIATE_TEST_SUITE_P(Nccl, Conformance, testing::Values(Kind{"nccl", make_nccl}));

}  // namespace
}  // namespace gdn

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (gdn::devices() < 2) {
    std::printf("skipped: two GPUs wanted, %d found\n", gdn::devices());
    return 0;
  }
  return RUN_ALL_TESTS();
}
