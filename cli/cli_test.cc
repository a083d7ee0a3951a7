// The command as a whole, and the sub-commands that have no file of tests of their own.
#include <cstring>

#include "gdn/backend.h"
#include "io/safetensors.h"
#include "spawned_command.h"

namespace gdn {
namespace {

TEST_F(CliTest, HelpAndVersion) {
  EXPECT_EQ(gdn("--help").code, 0);
  EXPECT_EQ(gdn("--version").code, 0);
  for (const char* command : {"info", "plan", "make", "run", "check", "bench", "simulate"}) {
    const Outcome help = gdn(std::string(command) + " --help");
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_NE(help.out.find("Usage: gdn " + std::string(command)), std::string::npos) << help.out;
  }
  expect_refusal("", "A subcommand is required");
  expect_refusal("plan --docs 3 --rnaks 2", "plan: expected an option of --help, got '--rnaks'");
  expect_refusal("run a b -o c", "run: expected no more words, got 'b'");
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
