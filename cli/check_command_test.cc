// `gdn check` against the fp64 recurrence.
#include <cmath>

#include "gdn/backend.h"
#include "io/safetensors.h"
#include "spawned_command.h"

namespace gdn {
namespace {

TEST_F(CliTest, CheckWithoutAFile) {
  EXPECT_EQ(json("check --docs 65,3 --heads 2,2 --dim 16 --dtype fp64 --ranks 2 --norm "
                 "--layout zigzag_per_document --exchange allgather")["passed"],
            true);
  EXPECT_EQ(json("check --workload N --shrink 60 --dim 16 --backend reference")["backend"],
            "reference");
  expect_refusal("check", "expected a file, --docs LENGTHS or --workload LETTER");
  EXPECT_EQ(json("check --docs 65,3 --heads 2,2 --dim 16 --keep-prepared")["passed"], true);
  expect_refusal("check --docs 3 --keep-prepared --recompute", "excludes");
  expect_refusal("check x --docs 3", "excludes");
  if (!absent_backends().empty()) {
    expect_refusal("check --docs 3 --ranks 2 --comm nccl",
                   "device: no CUDA backends in this build");
  }
  expect_refusal("check --docs 3 --comm pigeon", "--comm: expected auto, threads, mpi or nccl");
  expect_refusal("check --docs 3 --gates odd", "gates: expected one of model");
  expect_refusal("check --docs 3 --backend odd", "got 'odd'");
}

TEST_F(CliTest, CheckOfNumbersThatAreNotFinite) {
  const std::string check = "check --docs 40 --dim 16 --dtype fp64 --scale 1.7e308";
  const Outcome text = gdn(check);
  EXPECT_EQ(text.code, 1) << text.err;
  EXPECT_NE(text.out.find("  FAIL: reference not finite\n"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("  1e-11    pass\n"), std::string::npos) << text.out;
  const Outcome json = gdn(check + " --json");
  EXPECT_EQ(Json::parse(json.out)["against_reference"][0]["reference_finite"], false) << json.out;
}

TEST_F(CliTest, CheckOfTheFirstHeads) {
  const std::string make = "in.safetensors --docs 130,0,1,70 --heads 2,6 --dim 16 --dtype fp32";
  ASSERT_EQ(gdn("make " + make + " --gate-in-kernel --initial-state --dfinal-state").code, 0);
  const Json all = json("check in.safetensors --ranks 2");
  EXPECT_EQ(all["reference_heads"], 2);
  EXPECT_EQ(json("check in.safetensors --ranks 2 --reference-heads 2"), all);

  const Json first = json("check in.safetensors --ranks 2 --reference-heads 1 --against-one-rank");
  EXPECT_EQ(first["passed"], true);
  EXPECT_EQ(first["reference_heads"], 1);
  EXPECT_EQ(first["problem"], all["problem"]) << "the run has all heads";
  ASSERT_EQ(first["against_reference"].size(), 10u);
  for (size_t i = 0; i < 10; ++i) {
    const Json& row = first["against_reference"][i];
    const Json& whole = all["against_reference"][i];
    EXPECT_EQ(row["tensor"], whole["tensor"]);
    const bool of_keys = row["tensor"] == "dq" || row["tensor"] == "dk";
    EXPECT_LT(row["worst_head"], of_keys ? 1 : 3) << row;
  }
  const Outcome text = gdn("check in.safetensors --ranks 2 --reference-heads 1");
  EXPECT_NE(text.out.find("2 ranks, contiguous, first 1 of 2 key heads against the fp64 reference"),
            std::string::npos)
      << text.out;
  EXPECT_EQ(gdn("check in.safetensors --reference-heads 1 --bar 0").code, 1);

  const Json chunks = json("check in.safetensors --reference cpu --reference-heads 1");
  EXPECT_EQ(chunks["passed"], true);
  EXPECT_EQ(chunks["reference"], "cpu");
  expect_refusal("check in.safetensors --reference gpu",
                 "--reference: expected reference or cpu, got 'gpu'");
  expect_refusal("check in.safetensors --reference-heads 3",
                 "--reference-heads: expected at most 2, the key heads there are, got 3");
  expect_refusal("check in.safetensors --reference-heads 0",
                 "--reference-heads: expected an integer of at least 1, got '0'");
}

// Not a number in v's last head: only a check that looks there finds it.
TEST_F(CliTest, CheckOfTheFirstHeadsLooksAtNoOther) {
  ASSERT_EQ(gdn("make good --docs 70 --heads 2,4 --dim 16 --dtype fp32").code, 0);
  const auto file = SafetensorsFile::open(path("good"));
  ASSERT_TRUE(file) << file.status().message();
  std::vector<HostTensor> tensors;
  std::vector<NamedTensor> named;
  for (const SafetensorsEntry& entry : file->header().entries) {
    auto tensor = file->load(entry.name);
    ASSERT_TRUE(tensor) << tensor.status().message();
    if (entry.name == "v") tensor->as<float>()[3 * 16] = std::nanf("");
    named.push_back({entry.name, tensor->view});
    tensors.push_back(std::move(*tensor));
  }
  ASSERT_TRUE(write_safetensors(path("bad"), named, file->header().metadata));
  EXPECT_EQ(gdn("check bad").code, 1);
  EXPECT_EQ(json("check bad --reference-heads 1")["passed"], true);
  EXPECT_EQ(gdn("check bad --reference-heads 2").code, 1);
}

}  // namespace
}  // namespace gdn
