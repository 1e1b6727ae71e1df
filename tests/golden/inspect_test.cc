// `saccade-server inspect`: facts, and every reason why a folder cannot be served.
#include <gtest/gtest.h>

#include <string>

#include "cmd_inspect.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

struct Result {
  int code;
  std::string output;
};

Result Inspect(const std::string& dir, bool json) {
  InspectOptions options;
  options.model_dir = dir;
  options.json = json;
  testing::internal::CaptureStdout();
  const int code = RunInspect(options);
  return {code, testing::internal::GetCapturedStdout()};
}

TEST(Inspect, Table) {
  const Result result = Inspect(DemoCheckpoint(), false);
  EXPECT_EQ(result.code, 0) << result.output;
  for (const char* part :
       {"openvla", "224 x 224", "highway_demo, 10 action values", "4096 B per token",
        "2048 B per token", "1024 ids", "servable       yes"}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << " in\n" << result.output;
  }
}

TEST(Inspect, Json) {
  const Result result = Inspect(DataDir() + "/variants/gqa_crop/checkpoint", true);
  EXPECT_EQ(result.code, 0) << result.output;
  const Json json = Json::parse(result.output);
  EXPECT_EQ(json["family"], "openvla");
  EXPECT_EQ(json["servable"], true);
  EXPECT_EQ(json["trunk"]["kv_heads"], 2);
  EXPECT_EQ(json["trunk"]["head_dim"], 10);
  EXPECT_EQ(json["prompt"]["vision_tokens"], 36);
  EXPECT_EQ(json["statistics"].size(), 2u);
  EXPECT_EQ(json["memory"][0]["kv_bytes_per_token"], 2 * 2 * 2 * 10 * 4);
  EXPECT_EQ(json["memory"][1]["kv_bytes_per_token"], 2 * 2 * 2 * 10 * 2);
}

TEST(Inspect, FlowPolicies) {
  for (const std::string policy : {"smolvla", "pi0", "pi05"}) {
    const std::string dir = DataDir() + "/" + policy + "/checkpoint";
    const Result table = Inspect(dir, false);
    EXPECT_EQ(table.code, 0) << table.output;
    for (const std::string& part :
         {policy, std::string("flow, 10 actions in 10 steps"),
          std::string("default, 6 action values"), std::string("state          7 values"),
          std::string(" B per token"), std::string(", may be missing"),
          std::string("the folder does not say"), std::string("servable       yes")}) {
      EXPECT_NE(table.output.find(part), std::string::npos) << part << " in\n" << table.output;
    }
    const Json json = Json::parse(Inspect(dir, true).output);
    EXPECT_EQ(json["family"], policy);
    EXPECT_EQ(json["servable"], true);
    EXPECT_GT(json["prompt"]["text_tokens"], 3);
    EXPECT_EQ(json["cameras"][0]["required"], false);
    EXPECT_EQ(json["flow"]["steps"], 10);
    EXPECT_EQ(json["flow"]["width"], 32);
    EXPECT_EQ(json["actions_reference"], "unspecified");
    EXPECT_EQ(json["memory"][0]["kv_bytes_per_token"], policy == "smolvla" ? 1536 : 384);
  }
  const Result fast = Inspect(DataDir() + "/pi0_fast/checkpoint", false);
  EXPECT_EQ(fast.code, 0) << fast.output;
  EXPECT_NE(fast.output.find("2048 ids\n"), std::string::npos) << fast.output;
  EXPECT_NE(fast.output.find("FAST, 10 actions in at most 24 tokens"), std::string::npos)
      << fast.output;
}

TEST(Inspect, SaysEverythingThatIsMissing) {
  const FolderCopy demo(DemoCheckpoint());
  demo.Remove("tokenizer.json");
  demo.Remove("tokenizer.model");
  demo.Write("dataset_statistics.json", "{}");
  std::string weights = demo.Read("model.safetensors");
  const std::string lost = "language_model.model.layers.2.mlp.down_proj.weight";
  weights[weights.find(lost) + lost.size() - 1] = 'T';
  demo.Write("model.safetensors", weights);
  const Result result = Inspect(demo.path(), false);
  EXPECT_EQ(result.code, 1);
  for (const std::string& part : {std::string("tokenizer"), std::string("dataset_statistics.json"),
                                  lost + ": absent", std::string("servable       no")}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << " in\n" << result.output;
  }
}

TEST(Inspect, FolderThatIsNone) {
  EXPECT_EQ(Inspect(DataDir() + "/no_such_folder", false).code, 1);
  const Result result = Inspect(DataDir() + "/demo_frames", true);
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(Json::parse(result.output)["servable"], false);
}

}  // namespace
}  // namespace saccade
