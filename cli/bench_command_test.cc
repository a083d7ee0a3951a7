// `gdn bench`: what it measures, refuses, and judges.
#include "spawned_command.h"

namespace gdn {
namespace {

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
  expect_refusal("bench Q", "no workload has this letter: A to N");
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

}  // namespace
}  // namespace gdn
