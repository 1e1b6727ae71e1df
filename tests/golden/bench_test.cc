// `saccade-server bench`: every family's stages, and what a profile run leaves to a server.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "base/logging.h"
#include "cmd_bench.h"
#include "engine/cost_table.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

struct Result {
  int code;
  Json json;
  std::map<std::string, int> stages;  // how many shapes of each
};

Result Bench(const std::string& dir, ComputeType dtype, const std::string& profile = "") {
  BenchOptions options;
  options.model_dir = dir;
  options.dtype = dtype;
  options.repetitions = 1;
  options.backend.name = "cpu";
  options.backend.threads = 1;
  options.profile = profile;
  EXPECT_TRUE(InitLogging({}).ok());  // as the command does: standard output is JSON alone
  testing::internal::CaptureStdout();
  const int code = RunBench(options);
  Result result{code, Json::parse(testing::internal::GetCapturedStdout(), nullptr, false), {}};
  if (code != 0) return result;
  for (const Json& step : result.json["steps"]) {
    EXPECT_GT(step["min_ms"], 0.0);
    EXPECT_GE(step["median_ms"], step["min_ms"]);
    const std::string stage = step["stage"];
    const bool encodes = stage == "encode" || stage == "answer";
    EXPECT_EQ(step["frames"], stage == "answer" ? result.json["frames"] : Json(encodes ? 1 : 0));
    EXPECT_EQ(step["sequences"] == 0, stage == "encode");
    ++result.stages[step["stage"].get<std::string>()];
  }
  return result;
}

using Stages = std::map<std::string, int>;

TEST(Bench, EveryKindOfAnswer) {
  const Stages flow{{"encode", 1}, {"prefill", 1}, {"denoise", 3}, {"answer", 1}};
  const Stages tokens{{"encode", 1}, {"prefill", 1}, {"decode", 3}, {"answer", 1}};
  const Stages stop{{"encode", 1}, {"prefill", 1}, {"decode", 3}};
  const Stages one_pass{{"encode", 1}, {"prefill", 1}, {"answer", 1}};
  const std::map<std::string, Stages> families = {
      {"smolvla", flow},   {"pi0", flow},           {"pi05", flow},           {"pi0_fast", stop},
      {"openvla", tokens}, {"openvla_v01", tokens}, {"openvla_oft", one_pass}};
  for (const auto& [family, stages] : families) {
    for (const ComputeType dtype : {ComputeType::kF32, ComputeType::kBf16}) {
      const Result result = Bench(DataDir() + "/" + family + "/checkpoint", dtype);
      ASSERT_EQ(result.code, 0) << family;
      EXPECT_EQ(result.stages, stages) << family;
      EXPECT_EQ(result.json["denoise_steps"], stages == flow ? 10 : 0) << family;
    }
  }
}

TEST(Bench, AProfileIsAServersCostFile) {
  const FolderCopy folder(DataDir() + "/smolvla/checkpoint");
  const std::string file = folder.file("costs");
  ASSERT_EQ(Bench(DemoCheckpoint(), ComputeType::kF32, file).code, 0);
  ASSERT_EQ(Bench(folder.path(), ComputeType::kF32, file).code, 0);
  const absl::StatusOr<CostTable> table = LoadCostFile(file);
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->size(), 2u);
}

TEST(Bench, AFolderThatIsNone) {
  EXPECT_EQ(Bench(DataDir() + "/nowhere", ComputeType::kF32).code, 1);
}

}  // namespace
}  // namespace saccade
