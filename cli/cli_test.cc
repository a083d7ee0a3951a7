// The command as a user sees it: spawned, its exit status, output, errors and files examined.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "gdn/backend.h"
#include "io/safetensors.h"
#include "io/temporary_folder.h"

namespace gdn {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

struct Outcome {
  int code = -1;
  std::string out, err;
};

class CliTest : public TemporaryFolder {
 protected:
  CliTest() {
    ::unsetenv("GDN_BACKEND");
    ::unsetenv("GDN_NUM_THREADS");
  }

  // `gdn ARGS` in a shell, in the test's folder; `before` may set limits.
  Outcome gdn(const std::string& args, const std::string& before = "") const {
    const std::string errors =
        (fs::temp_directory_path() / (folder_.filename().string() + ".err")).string();
    const std::string line =
        fmt::format("cd {} && {} {} {} 2>{}", folder_.string(), before, GDN_PROGRAM, args, errors);
    Outcome outcome;
    FILE* pipe = ::popen(line.c_str(), "r");
    if (pipe == nullptr) return outcome;
    std::array<char, 4096> block;
    while (const size_t n = std::fread(block.data(), 1, block.size(), pipe)) {
      outcome.out.append(block.data(), n);
    }
    const int status = ::pclose(pipe);
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    std::ifstream in(errors);
    outcome.err.assign(std::istreambuf_iterator<char>(in), {});
    fs::remove(errors);
    return outcome;
  }
  Json json(const std::string& args) const {
    const Outcome outcome = gdn(args + " --json");
    EXPECT_EQ(outcome.code, 0) << args << ": " << outcome.err;
    EXPECT_EQ(outcome.err, "") << "no progress where standard error is no terminal";
    Json parsed = Json::parse(outcome.out, nullptr, false);
    EXPECT_FALSE(parsed.is_discarded()) << outcome.out;
    return parsed;
  }
  void expect_refusal(const std::string& args, const std::string& words,
                      const std::string& before = "") const {
    const Outcome outcome = gdn(args, before);
    EXPECT_EQ(outcome.code, 2) << args << "\n" << outcome.out << outcome.err;
    EXPECT_NE(outcome.err.find(words), std::string::npos)
        << args << "\n  expected: " << words << "\n  got: " << outcome.err;
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
};

const char* const kSmall = "--docs 130,0,1,70 --heads 1,2 --dim 16 --dtype fp32";

TEST_F(CliTest, HelpAndVersion) {
  EXPECT_EQ(gdn("--help").code, 0);
  EXPECT_EQ(gdn("--version").code, 0);
  for (const char* command : {"info", "plan", "make", "run", "check", "bench", "simulate"}) {
    const Outcome help = gdn(std::string(command) + " --help");
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_NE(help.out.find("Usage: gdn " + std::string(command)), std::string::npos) << help.out;
  }
  expect_refusal("", "A subcommand is required");
  expect_refusal("fly", "expected one of info, plan, make, run, check, bench, simulate, got 'fly'");
}

TEST_F(CliTest, Info) {
  const Json info = json("info");
  EXPECT_FALSE(info["version"].get<std::string>().empty());
  EXPECT_GE(info["threads"].get<int>(), 1);
  std::vector<std::string> names;
  for (const Json& backend : info["backends"]) names.push_back(backend["name"]);
  EXPECT_NE(std::find(names.begin(), names.end(), "reference"), names.end());
  EXPECT_EQ(json("info --backend reference")["picked"], "reference");
  for (const char* name : {"cuda-sm90a", "cuda-portable"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
  expect_refusal("info --backend none", "got 'none'");
  expect_refusal("info --heads 4,6", "expected HV to be a multiple of H, got H=4, HV=6");
  expect_refusal("info --dtype fp8", "expected bf16, fp32 or fp64, got 'fp8'");
  EXPECT_EQ(gdn("info > /dev/full").code, 2) << "a full disk under standard output";
}

TEST_F(CliTest, BackendsThatTheBuildLeavesOut) {
  ASSERT_EQ(gdn(fmt::format("make x.safetensors {}", kSmall)).code, 0);
  for (const AbsentBackend& absent : absent_backends()) {
    const std::string refusal =
        fmt::format("backend: {} is not in this build (configure with -DGDN_CUDA=ON)", absent.name);
    for (const char* command : {"info", "run x.safetensors -o y", "check --docs 3 --ranks 2",
                                "bench --docs 3 --calls 1"}) {
      expect_refusal(fmt::format("{} --backend {}", command, absent.name), refusal);
      const Outcome named = gdn(command, fmt::format("GDN_BACKEND={}", absent.name));
      EXPECT_EQ(named.code, 2) << command;
      EXPECT_NE(named.err.find(refusal), std::string::npos) << named.err;
    }
    const Outcome info = gdn("info");
    EXPECT_NE(info.out.find(fmt::format("  {:<14} {}\n", absent.name, absent.why)),
              std::string::npos)
        << info.out;
    const Json rows = json("info")["backends"];
    const auto row = std::find_if(rows.begin(), rows.end(),
                                  [&](const Json& one) { return one["name"] == absent.name; });
    ASSERT_NE(row, rows.end());
    EXPECT_EQ((*row)["in_build"], false);
    EXPECT_EQ((*row)["why_not"], absent.why);
  }
}

TEST_F(CliTest, Plan) {
  const Json plan = json("plan --docs 16,24 --ranks 2 --layout zigzag_per_document --rank 1");
  EXPECT_EQ(plan["world_size"], 2);
  EXPECT_EQ(plan["ranks"][0]["fragments"], Json::parse("[[0,0,4],[0,12,4],[1,0,6],[1,18,6]]"));
  EXPECT_EQ(plan["ranks"][1]["fragments"], Json::parse("[[0,4,8],[1,6,12]]"));
  EXPECT_TRUE(plan["ranks"][1].contains("segment_list"));
  EXPECT_FALSE(plan["ranks"][0].contains("segment_list"));

  const Json explicit_plan = json("plan --docs 10,20 --fragments 1:0:20//0:0:10");
  EXPECT_EQ(explicit_plan["world_size"], 3);
  EXPECT_EQ(explicit_plan["ranks"][1]["tokens"], 0);

  ASSERT_EQ(gdn(fmt::format("make x.safetensors {}", kSmall)).code, 0);
  const Json from_file = json("plan --cu-from x.safetensors --ranks 3");
  EXPECT_EQ(from_file["cu_seqlens"], Json::parse("[0,130,130,131,201]"));
  EXPECT_EQ(from_file["heads_v"], 2);
  const Outcome drawn = gdn("plan --workload M --ranks 4 --layout zigzag --rank 2");
  EXPECT_EQ(drawn.code, 0);
  EXPECT_NE(drawn.out.find("rank 2 of 4"), std::string::npos) << drawn.out;
  EXPECT_NE(drawn.out.find("\nletters: A all tokens of the column, a some"), std::string::npos);
  expect_refusal("plan", "--docs LENGTHS, --workload LETTER or --cu-from FILE");

  // The bytes of a plan are those of its row in the table over W.
  const Json exchange = json("plan --workload M --ranks 3 --layout zigzag");
  int64_t sent = 0;
  for (const Json& rank : exchange["ranks"]) {
    sent += rank["sent_bytes_forward"].get<int64_t>() + rank["sent_bytes_backward"].get<int64_t>();
  }
  ASSERT_EQ(exchange["exchange_by_ranks"].size(), 7u);
  EXPECT_EQ(exchange["exchange_by_ranks"][1]["ranks"], 3);
  EXPECT_EQ(exchange["exchange_by_ranks"][1]["picked"], exchange["exchange"]);
  EXPECT_EQ(exchange["exchange"], "all-to-all");
  EXPECT_EQ(exchange["exchange_by_ranks"][1]["all_to_all_bytes"], sent);
  EXPECT_LE(exchange["all_to_all_from_ranks"].get<int>(), 3);
  EXPECT_NE(drawn.out.find("the all-to-all moves fewer bytes from"), std::string::npos);

  expect_refusal("plan --docs 5 --ranks 2 --rank 2", "--rank: expected 0 to 1, got 2");
  for (const char* layout : {"spiral", "explicit"}) {
    expect_refusal(fmt::format("plan --docs 5 --layout {}", layout),
                   fmt::format("--layout: expected contiguous, zigzag or zigzag_per_document, got "
                               "'{}'",
                               layout));
  }
  expect_refusal("plan --docs 5 --tile 63", "63");
  expect_refusal("plan --docs 5 --fragments 0:0",
                 "expected doc:offset:length, got '0:0' on rank 0");
  expect_refusal("plan --docs 5 --fragments 0:0:4", "document 0");
  expect_refusal("plan --docs 5 --workload M", "excludes");
  expect_refusal("plan --docs -5", "expected integers of at least 0, apart by ',', got '-5'");
  expect_refusal("plan --docs 5,x", "expected integers of at least 0, apart by ',', got '5,x'");
  expect_refusal("plan --docs 5 --ranks 5000",
                 "--ranks: expected an integer from 1 to 4096, got '5000'");
  expect_refusal("plan --cu-from none", "none: cannot open");
}

TEST_F(CliTest, MakeRunCheck) {
  ASSERT_EQ(
      gdn(fmt::format("make in.safetensors {} --initial-state --dfinal-state --seed 5", kSmall))
          .code,
      0);
  ASSERT_EQ(gdn("run in.safetensors -o one.safetensors --tile 64").code, 0);
  // Cuts at multiples of the tile: the same bits from other ranks and layouts.
  const Outcome many = gdn(
      "run in.safetensors -o many.safetensors --tile 64 --fragments 0:64:64,3:64:6/3:0:64,0:0:64/"
      "0:128:2,2:0:1");
  ASSERT_EQ(many.code, 0) << many.err;
  const auto one = SafetensorsFile::open(path("one.safetensors"));
  const auto other = SafetensorsFile::open(path("many.safetensors"));
  ASSERT_TRUE(one) << one.status().message();
  ASSERT_TRUE(other) << other.status().message();
  for (const char* name : {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"}) {
    const auto a = one->load(name), b = other->load(name);
    ASSERT_TRUE(a) << a.status().message();
    ASSERT_TRUE(b) << b.status().message();
    ASSERT_EQ(a->buffer.bytes(), b->buffer.bytes());
    EXPECT_EQ(0, std::memcmp(a->view.data, b->view.data, a->buffer.bytes())) << name;
  }
  EXPECT_EQ(one->header().metadata.at("ranks"), "1");
  EXPECT_EQ(other->header().metadata.at("layout"), "explicit");

  ASSERT_EQ(gdn("run in.safetensors -o f.safetensors --forward-only --no-final-state").code, 0);
  const auto forward = SafetensorsFile::open(path("f.safetensors"));
  ASSERT_TRUE(forward);
  ASSERT_EQ(forward->header().entries.size(), 1u);
  EXPECT_EQ(forward->header().entries[0].name, "o");

  const Json check = json("check in.safetensors --ranks 3 --layout zigzag --against-one-rank");
  EXPECT_EQ(check["passed"], true);
  EXPECT_EQ(check["against_reference"].size(), 8u);
  EXPECT_EQ(check["against_one_rank"].size(), 8u);
  for (const Json& row : check["against_reference"]) {
    EXPECT_LE(row["rel_rms"].get<double>(), 1e-5) << row;
  }
  const Outcome failed = gdn("check in.safetensors --bar 0");
  EXPECT_EQ(failed.code, 1);
  EXPECT_NE(failed.out.find("FAILED"), std::string::npos);
}

TEST_F(CliTest, OptionsTravelWithTheFile) {
  ASSERT_EQ(
      gdn(fmt::format("make in.safetensors {} --norm --gate-in-kernel --beta-sigmoid", kSmall))
          .code,
      0);
  const Json check = json("check in.safetensors --ranks 2");
  EXPECT_EQ(check["passed"], true);
  EXPECT_NE(check["problem"].get<std::string>().find("norm inside, gate inside, sigmoid inside"),
            std::string::npos);
  const Outcome off = gdn("run in.safetensors -o o --no-gate-in-kernel");
  EXPECT_EQ(off.code, 0) << off.err;
  EXPECT_NE(off.err.find("ignored A_log, dt_bias"), std::string::npos) << off.err;
}

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

TEST_F(CliTest, Text) {
  std::ofstream(path("a.txt")) << "It was a dark night.\n\nIt was a stormy night.\n";
  std::ofstream(path("b.txt")) << "It was a night.\n";
  ASSERT_EQ(gdn("make t.safetensors --text a.txt b.txt --split --heads 1,2 --dim 16 --dtype fp32 "
                "--model-dim 16")
                .code,
            0);
  EXPECT_EQ(json("plan --cu-from t.safetensors")["cu_seqlens"], Json::parse("[0,20,43,59]"));
  EXPECT_EQ(json("check t.safetensors --ranks 2")["passed"], true);
  expect_refusal("make t.safetensors --text none.txt", "none.txt: cannot open");
  expect_refusal("make t.safetensors --text a.txt --gates slow", "excludes");
  expect_refusal("make t.safetensors --split --docs 4", "requires --text");
}

TEST_F(CliTest, Bench) {
  const Json bench = json(fmt::format("bench {} -n 2", kSmall));
  ASSERT_EQ(bench["rows"].size(), 3u);
  EXPECT_EQ(bench["reduced"], true);
  EXPECT_EQ(bench["accuracy"][0]["tensors"].size(), 7u);
  const Json& forward = bench["rows"][0];
  EXPECT_EQ(forward["operation"], "fwd");
  EXPECT_EQ(forward["tokens"], 201);
  ASSERT_EQ(forward["arms"].size(), 2u);
  EXPECT_EQ(forward["arms"][0]["name"], "cpu");
  EXPECT_EQ(forward["arms"][0]["groups"].size(), 2u);
  EXPECT_EQ(forward["arms"][0]["groups"][0].size(), 4u) << "two blocks of two calls";
  EXPECT_EQ(forward["arms"][1]["again"], true);
  EXPECT_GT(forward["arms"][0]["ms"].get<double>(), 0);
  EXPECT_GT(bench["rows"][2]["arms"][0]["flop"].get<double>(), 0);
  EXPECT_EQ(json(fmt::format("bench {} -n 1 --forward-only", kSmall))["rows"].size(), 1u);

  // Chunks 3 + 1 + 2, 2 heads, 4,288 fp32 each.
  const Json kept = json(fmt::format("bench {} -n 1 --keep-prepared --ops bwd", kSmall));
  EXPECT_EQ(kept["rows"][0]["arms"][0]["saved_bytes"].get<int64_t>(),
            forward["arms"][0]["saved_bytes"].get<int64_t>() + 6 * 2 * 4288 * 4);

  const Json arms = json(fmt::format(
      "bench {} -n 1 --backend cpu,reference --ops ckpt,run,fold --both-norms", kSmall));
  ASSERT_EQ(arms["rows"].size(), 6u) << "three operations, two norms";
  EXPECT_EQ(arms["rows"][0]["arms"].size(), 3u);
  EXPECT_EQ(arms["rows"][3]["norm"], true);
  const Json& fold = arms["rows"][2];
  ASSERT_EQ(fold["arms"].size(), 2u) << "no twin of what is not there";
  EXPECT_EQ(fold["arms"][0]["why_no_time"], "nothing to fold");

  const Json ranks =
      json("bench --proxy 'N CP4 D' --proxy 'M CP2 Z r1' --shrink 100 --dim 16 -n 1 --ops fwd N");
  ASSERT_EQ(ranks["rows"].size(), 6u);
  EXPECT_EQ(ranks["rows"][0]["shape"], "N / 100");
  EXPECT_EQ(ranks["rows"][4]["shape"], "N CP4 D r3 / 100");
  EXPECT_EQ(ranks["rows"][5]["shape"], "M CP2 Z r1 / 100");
  EXPECT_EQ(ranks["rows"][5]["tokens"], 164);
}

TEST_F(CliTest, BenchGivesNoTimeToWrongOutputs) {
  const Outcome outcome = gdn(fmt::format("bench {} -n 1 --ops fwd --bar 0 --json", kSmall));
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  const Json arms = Json::parse(outcome.out)["rows"][0]["arms"];
  ASSERT_EQ(arms.size(), 1u);
  EXPECT_FALSE(arms[0].contains("ms"));
  EXPECT_EQ(arms[0]["why_no_time"],
            "fails the accuracy check: o, final_state, dq, dk, dv, dg, dbeta");
}

TEST_F(CliTest, BenchOfAFile) {
  ASSERT_EQ(gdn(fmt::format("make in.safetensors {} --norm", kSmall)).code, 0);
  const Json bench = json("bench in.safetensors -n 1 --ops fwd -o out.json --no-check");
  ASSERT_EQ(bench["rows"].size(), 1u);
  EXPECT_EQ(bench["rows"][0]["norm"], true) << "as the file says";
  const std::string why_not = bench["rows"][0]["arms"][0]["why_not_claimed"];
  EXPECT_NE(why_not.find("accuracy not checked"), std::string::npos) << why_not;
  const Json again = json("bench --judge out.json");
  EXPECT_EQ(again["rows"], bench["rows"]);
  expect_refusal("bench in.safetensors --heads 1,2", "in.safetensors excludes --heads");
}

TEST_F(CliTest, BenchRefusals) {
  expect_refusal("bench", "expected workload letters, a file, --docs LENGTHS or --proxy NAME");
  expect_refusal("bench --docs 0", "no tokens");
  expect_refusal("bench Q", "Q: cannot open");
  expect_refusal("bench N --backend none", "got 'none'");
  expect_refusal("bench N --ops forward", "expected one of fwd, bwd");
  expect_refusal("bench N --quick --sustained", "excludes");
  expect_refusal("bench --proxy 'G CP4 S r0'", "expected layout C, Z or D, got 'S'");
  expect_refusal("bench N --shrink 100 --dim 16 -n 1 --against none.so", "none.so");
  expect_refusal("bench --judge none", "none: cannot open");
}

TEST_F(CliTest, BenchJudgesOnlyReports) {
  const auto expect_refused = [&](const std::string& text, const std::string& words) {
    std::ofstream(path("junk")) << text;
    expect_refusal("bench --judge junk", "junk: " + words);
    EXPECT_EQ(gdn("bench --judge junk").err.find("json.exception"), std::string::npos);
  };
  expect_refused("", "expected JSON as gdn bench --output writes it, got something else at byte 1");
  expect_refused("{\"rows\": [", "expected JSON as gdn bench --output writes it");
  expect_refused("[1]", "report: expected an object, got array");
  expect_refused("{}", "rows: expected a list, got nothing");
  expect_refused(R"({"rows": 1})", "rows: expected a list, got number");
  expect_refused(R"({"rows": [], "protocol": 1})", "protocol: expected a text, got number");
  const auto row = [](const std::string& arms) {
    return R"({"rows": [{"shape": "M", "norm": true, "operation": "fwd", "tokens": 1, "arms": )" +
           arms + "}]}";
  };
  expect_refused(R"({"rows": [{"shape": "M"}]})",
                 "rows[0].norm: expected true or false, got nothing");
  expect_refused(row("[{}]"), "rows[0].arms[0].name: expected a text, got nothing");
  expect_refused(row(R"([{"name": "a", "groups": 1}])"),
                 "rows[0].arms[0].groups: expected a list of lists of times in ms, got number");
  for (const auto& [groups, got] :
       {std::pair{"[]", "none"}, std::pair{"[[]]", "an empty one"}, std::pair{"[1]", "number"},
        std::pair{"[[1, \"2\"]]", "string"}}) {
    expect_refused(row(fmt::format(R"([{{"name": "a", "groups": {}}}])", groups)),
                   fmt::format("rows[0].arms[0].groups: expected at least one list of times in ms, "
                               "none of them empty, got {}",
                               got));
  }
}

TEST_F(CliTest, BenchJudgesTimesFromElsewhere) {
  std::ofstream(path("times.json"))
      << R"({"device": "a card", "protocol": "short", "rows": [{"shape": "M", "norm": true,
             "operation": "fwd", "tokens": 1000, "arms": [
             {"name": "ours", "groups": [[1, 1, 2], [1, 1, 1]]},
             {"name": "ours again", "again": true, "groups": [[1], [1]]},
             {"name": "steady", "groups": [[4], [4]]},
             {"name": "drifting", "groups": [[4], [5]]},
             {"name": "elsewhere", "process": 1, "groups": [[2], [2]]},
             {"name": "capped", "groups": [[2], [2]], "power_readings": 20, "capped": 1},
             {"name": "unchecked", "groups": [[2], [2]], "unchecked": true},
             {"name": "wrong", "why_no_time": "fails the accuracy check: dg"}]}]})";
  const Json judged = json("bench --judge times.json");
  const Json& arms = judged["rows"][0]["arms"];
  const char* reasons[] = {"",
                           "",
                           "",
                           "drift 25.0 %, group ratios up to 11.1 % apart from their median",
                           "measured in another process",
                           "5 % of the calls under the power cap",
                           "accuracy not checked"};
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(arms[i]["why_not_claimed"], reasons[i]) << arms[i]["name"];
    EXPECT_EQ(arms[i]["claimed"], std::string(reasons[i]).empty());
  }
  EXPECT_EQ(arms[2]["first_over_this"], 0.25);
  EXPECT_FALSE(arms[7].contains("ms"));
  std::ofstream(path("ranks.json"))
      << R"({"rows": [{"shape": "G CP2 Z r0", "of_ranks": "G CP2 Z", "norm": false, "tokens": 9,
                       "operation": "fwd", "arms": [{"name": "ours", "groups": [[2]]}]},
                      {"shape": "G CP2 Z r1", "of_ranks": "G CP2 Z", "norm": false, "tokens": 9,
                       "operation": "fwd", "arms": [{"name": "ours", "groups": [[3]]}]}]})";
  const Outcome ranks = gdn("bench --judge ranks.json");
  EXPECT_NE(ranks.out.find("G CP2 Z pre-norm fwd, ours: slowest 3.000 ms, G CP2 Z r1"),
            std::string::npos)
      << ranks.out;
  const Outcome table = gdn("bench --judge times.json");
  EXPECT_EQ(table.code, 0) << table.err;
  for (const char* words : {"M norm inside", "not claimed: measured in another process",
                            "fails the accuracy check: dg", "a card"}) {
    EXPECT_NE(table.out.find(words), std::string::npos) << table.out;
  }
}

TEST_F(CliTest, NumbersAreNumbers) {
  for (const char* bad : {"''", "x", "1.5x", "nan", "inf", "1e999", "' 1'"}) {
    expect_refusal(fmt::format("check --docs 4 --scale {}", bad), "--scale: expected a finite");
    expect_refusal(fmt::format("check --docs 4 --bar {}", bad), "--bar: expected a number");
  }
  expect_refusal("check --docs 4 --bar -1", "--bar: expected a number of at least 0, got '-1'");
  for (const char* bad : {"''", "x", "-1", "1.5", "99999999999999999999", "0x10", "' 1'"}) {
    for (const char* option : {"--seed", "--ranks", "--slack", "--tile", "--reference-heads"}) {
      expect_refusal(fmt::format("check --docs 4 {} {}", option, bad), "expected an integer");
    }
    for (const char* option : {"--docs", "--heads", "--dim"}) {
      expect_refusal(fmt::format("check {} {}", option, bad), "expected integers");
      expect_refusal(fmt::format("check {} 4,{}", option, bad), "expected integers");
    }
    expect_refusal(fmt::format("bench --docs 4 -n {}", bad), "expected an integer");
    expect_refusal(fmt::format("plan --docs 4 --workers {}", bad), "expected an integer");
    expect_refusal(fmt::format("plan --docs 4 --rank {}", bad), "expected an integer");
  }
  for (const char* bad : {"3,,4", "3,", ",3", ","}) {
    expect_refusal(fmt::format("plan --docs {}", bad), fmt::format("got '{}'", bad));
  }
  expect_refusal("plan --docs 4 --heads 1,2,3", "--heads: expected at most 2 integers");
  for (const char* option : {"--fragments", "--backend", "--dtype", "--gate-dtype"}) {
    expect_refusal(fmt::format("check --docs 4 {} ''", option), "expected a text, got ''");
  }
  EXPECT_EQ(json("plan --docs 010,3")["cu_seqlens"], Json::parse("[0,10,13]")) << "not octal";
  EXPECT_EQ(gdn("make --docs 4 --heads 1 --dim 8 after").code, 0) << "a list ends with its word";
  EXPECT_EQ(json("check --docs 4 --heads 1 --dim 8 --scale -0.5")["passed"], true);
}

TEST_F(CliTest, FactorTwoGoesWithTheSigmoid) {
  const std::string make = fmt::format("make in.safetensors {} ", kSmall);
  for (const std::string& command :
       {make, std::string("info "), fmt::format("check {} ", kSmall)}) {
    expect_refusal(command + "--neg-eigval", "expected --beta-sigmoid beside it");
  }
  ASSERT_EQ(gdn(make).code, 0);
  expect_refusal("run in.safetensors -o out --neg-eigval", "expected --beta-sigmoid beside it");
  EXPECT_EQ(gdn("run in.safetensors -o out --neg-eigval --beta-sigmoid").code, 0);
  ASSERT_EQ(gdn(make + "--beta-sigmoid --neg-eigval").code, 0);
  const Json check = json("check in.safetensors");
  EXPECT_EQ(check["passed"], true);
  EXPECT_NE(check["problem"].get<std::string>().find("2 sigmoid inside"), std::string::npos);
  EXPECT_EQ(gdn("run in.safetensors -o out --no-beta-sigmoid").code, 0)
      << "the file's factor 2 goes with its sigmoid";
  expect_refusal("run in.safetensors -o out --no-beta-sigmoid --neg-eigval",
                 "expected --beta-sigmoid beside it");
}

TEST_F(CliTest, BadThreadCountsAreErrors) {
  for (const char* bad : {"many", "0", "-3", "1000000", "2x", "1.5", "99999999999999999999"}) {
    expect_refusal("info",
                   fmt::format("GDN_NUM_THREADS: expected a number from 1 to 1024, got "
                               "'{}'",
                               bad),
                   fmt::format("GDN_NUM_THREADS={}", bad));
  }
  EXPECT_EQ(Json::parse(gdn("info --json", "GDN_NUM_THREADS=3").out)["threads"], 3);
  EXPECT_EQ(gdn("info", "GDN_NUM_THREADS=").code, 0) << "empty is not set";
  EXPECT_NE(gdn("info", "GDN_NUM_THREADS=1").out.find(" 1 thread ("), std::string::npos);
}

TEST_F(CliTest, OutputIsNoInput) {
  ASSERT_EQ(gdn(fmt::format("make in.safetensors {}", kSmall)).code, 0);
  fs::create_symlink("in.safetensors", path("symlink"));
  fs::create_hard_link(path("in.safetensors"), path("hardlink"));
  const auto before = files();
  const auto written = fs::last_write_time(path("in.safetensors"));
  for (const char* name : {"in.safetensors", "./in.safetensors", "symlink", "hardlink"}) {
    expect_refusal(fmt::format("run in.safetensors -o {}", name),
                   fmt::format("{}: expected another file than the input", name));
    expect_refusal(fmt::format("run {} -o in.safetensors", name), "expected another file");
  }
  expect_refusal("bench in.safetensors -o symlink", "expected another file");
  std::ofstream(path("a.txt")) << "text";
  expect_refusal("make a.txt --text in.safetensors a.txt", "expected another file");
  fs::remove(path("a.txt"));
  EXPECT_EQ(files(), before);
  EXPECT_EQ(fs::last_write_time(path("in.safetensors")), written);
}

TEST_F(CliTest, OutputIsTriedFirst) {
  // The input is junk: that its own error does not come shows that it was not read yet.
  std::ofstream(path("junk")) << "this is no tensor file";
  fs::create_symlink("nothing", path("dangling"));
  fs::create_symlink("loop", path("loop"));
  const std::string longest(255, 'x');
  const auto before = files();
  expect_refusal("run junk -o no/such/out", "no/such/out: cannot create a file in no/such");
  expect_refusal("run junk -o junk/out", "junk/out: cannot write there: Not a directory");
  expect_refusal("run junk -o .", ".: exists and is not a regular file");
  expect_refusal("run junk -o ''", "expected the name of a file, got none");
  expect_refusal("run junk -o dangling", "dangling: is a symbolic link to nothing");
  expect_refusal("run junk -o loop", "loop: cannot write there");
  expect_refusal("run junk -o " + longest + "x", "cannot write there: File name too long");
  expect_refusal("bench junk -o no/such/out", "no/such/out: cannot create");
  expect_refusal("make no/such/out --docs 4", "no/such/out: cannot create");
  expect_refusal("run junk -o /proc/out", "/proc/out: cannot create a file in /proc");
  EXPECT_EQ(files(), before);
  EXPECT_EQ(gdn(fmt::format("make {} {}", longest, kSmall)).code, 0) << "the longest name";
  EXPECT_EQ(files().size(), before.size() + 1);
}

TEST_F(CliTest, ClaimsThatNothingBacksAreRefused) {
  // A header without data; its tensors have no elements, its shapes claim much.
  const auto write = [&](const std::string& qk, const std::string& v, const std::string& gates) {
    std::string json = "{";
    for (const auto& [names, shape] :
         {std::pair{std::string("qk"), qk}, std::pair{std::string("v"), v}}) {
      for (const char name : names) {
        json +=
            fmt::format(R"("{}":{{"dtype":"F32","shape":{},"data_offsets":[0,0]}},)", name, shape);
      }
    }
    for (const char* name : {"g", "beta"}) {
      json +=
          fmt::format(R"("{}":{{"dtype":"F32","shape":{},"data_offsets":[0,0]}},)", name, gates);
    }
    json.back() = '}';
    const uint64_t length = json.size();
    std::ofstream file(path("claims"), std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
    file << json;
  };
  const std::string limit = "ulimit -v 4000000;";  // 4 GB of address space
  write("[1000000000000,0,1,128]", "[1000000000000,0,1,128]", "[1000000000000,0,1]");
  expect_refusal("bench --docs 100000000000 --backend cpu", "operands and results of");
  for (const char* command : {"run claims -o out", "check claims", "bench claims"}) {
    expect_refusal(command, "expected tokens in 1000000000000 documents", limit);
  }
  write("[0,1,100000000]", "[0,100,100000000]", "[0,100]");
  for (const char* command : {"run claims -o out", "check claims"}) {
    expect_refusal(command, "claims: operands and results of 0 tokens in 1 document", limit);
  }
  expect_refusal("make out --docs 4,0,9 --initial-state --heads 1,1000000 --dim 100000,1000000",
                 "operands of 13 tokens in 3 documents", limit);
  expect_refusal("make out --text claims --heads 1,100000 --dim 100000,1000000",
                 "tokens in 1 document", limit);
  expect_refusal("check --docs 4 --heads 1,1000000 --dim 100000,1000000",
                 "operands and results of 4 tokens", limit);
}

TEST_F(CliTest, Simulate) {
  const Json all = json("simulate");
  ASSERT_EQ(all["workloads"].size(), 14u);
  for (const Json& workload : all["workloads"]) {
    ASSERT_EQ(workload["rows"].size(), 7u);
    for (const Json& row : workload["rows"]) {
      EXPECT_GT(row["zigzag"]["ms"].get<double>(), 0);
      EXPECT_GT(row["head_split"]["ms"].get<double>(), 0);
    }
  }
  const Json slow = json("simulate --workload H --ranks 2 --link-gbs 1 --link-us 0");
  const Json& row = slow["workloads"][0]["rows"][1];
  EXPECT_EQ(row["faster"], "kcp") << "tokens are many bytes, states few";
  EXPECT_NE(gdn("simulate --workload M --ranks 8").out.find("kkkk"), std::string::npos);
  expect_refusal("simulate --workload Q", "expected a letter from A to N, got 'Q'");
  expect_refusal("simulate --rates cpu", "expected one of cuda-portable, cuda-sm90a, got 'cpu'");
}

TEST_F(CliTest, BadInputLeavesNoOutput) {
  ASSERT_EQ(gdn(fmt::format("make in.safetensors {}", kSmall)).code, 0);
  std::ofstream(path("junk")) << "this is no tensor file, whatever its name says";
  fs::copy_file(path("in.safetensors"), path("cut"));
  fs::resize_file(path("cut"), fs::file_size(path("cut")) - 1);
  const auto before = files();
  expect_refusal("run junk -o out", "junk: not a safetensors file: header length");
  expect_refusal("run cut -o out", "cut: the header describes");
  expect_refusal("run none -o out", "none: cannot open");
  expect_refusal("run in.safetensors -o out --gate-in-kernel", "tensor 'A_log': not in the file");
  expect_refusal("run in.safetensors -o no/such/out", "no/such/out: cannot create");
  expect_refusal("run in.safetensors -o .", "not a regular file");
  expect_refusal("run in.safetensors", "--output is required");
  expect_refusal("run in.safetensors -o out --fragments 0:0:1", "document 0");
  expect_refusal("make out --docs 9000000000000000000,9000000000000000000", "this machine has");
  expect_refusal("make out --docs 4 --beta odd", "beta: expected one of");
  EXPECT_EQ(files(), before);
}

TEST_F(CliTest, FailedWriteLeavesNoOutput) {
  ASSERT_EQ(gdn(fmt::format("make in.safetensors {}", kSmall)).code, 0);
  const auto before = files();
  const auto size = fs::file_size(path("in.safetensors"));
  // No file may become longer than 20 blocks of at most 1024 bytes.
  for (const char* args :
       {"make big --docs 500", "run in.safetensors -o big", "make in.safetensors --docs 500"}) {
    const Outcome outcome = gdn(args, "ulimit -f 20;");
    EXPECT_EQ(outcome.code, 2) << args;
    EXPECT_NE(outcome.err.find("cannot write: File too large"), std::string::npos) << outcome.err;
    EXPECT_EQ(files(), before);
  }
  EXPECT_EQ(fs::file_size(path("in.safetensors")), size) << "the old file stays";
}

}  // namespace
}  // namespace gdn
