// What folders of SmolVLA and pi may say, and what is refused by its name.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "assembly.h"
#include "model/adapters.h"
#include "model/checkpoint.h"
#include "model/families/lerobot_policy.h"
#include "model/families/pi.h"
#include "model/families/smolvla.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

absl::StatusOr<PolicyConfig> Read(const std::string& dir) {
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(dir));
  return IsSmolVla(checkpoint) ? ReadSmolVla(checkpoint) : ReadPi(checkpoint);
}

absl::StatusOr<PolicyConfig> ReadWith(const std::string& policy, const std::string& file,
                                      const std::function<void(Json&)>& change) {
  const FolderCopy folder(DataDir() + "/" + policy + "/checkpoint");
  Json json = folder.ReadJson(file);
  change(json);
  folder.WriteJson(file, json);
  return Read(folder.path());
}

// Renames a tensor: the header keeps its length, so the new name must have the old one's.
void Rename(const FolderCopy& folder, const std::string& from, const std::string& to) {
  ASSERT_EQ(from.size(), to.size());
  std::string weights = folder.Read("model.safetensors");
  const size_t header = weights.find("}}") + 2;
  size_t at = weights.find("\"" + from);
  ASSERT_LT(at, header);
  for (; at < header; at = weights.find("\"" + from, at)) {
    weights.replace(at + 1, from.size(), to);
  }
  folder.Write("model.safetensors", weights);
}

struct Case {
  std::string file;
  std::function<void(Json&)> change;
  std::vector<std::string> message;  // parts of it
};

void ExpectRefused(const std::string& policy, const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    const absl::StatusOr<PolicyConfig> config = ReadWith(policy, c.file, c.change);
    ASSERT_FALSE(config.ok()) << c.message.front();
    EXPECT_TRUE(config.status().code() == absl::StatusCode::kInvalidArgument ||
                config.status().code() == absl::StatusCode::kUnimplemented)
        << std::string(config.status().message());
    const std::string message(config.status().message());
    for (const std::string& part : c.message) {
      EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
    }
  }
}

TEST(FlowConfig, SmolVlaRefusesByName) {
  const std::string config = "config.json";
  ExpectRefused(
      "smolvla",
      {
          {config, [](Json& j) { j["chunk_size"] = 0; }, {"config.json", "chunk_size"}},
          {config, [](Json& j) { j["n_action_steps"] = 11; }, {"n_action_steps"}},
          {config, [](Json& j) { j["num_steps"] = "ten"; }, {"num_steps"}},
          {config, [](Json& j) { j["max_state_dim"] = 6; }, {"max_state_dim"}},
          {config, [](Json& j) { j["max_action_dim"] = 5; }, {"max_action_dim"}},
          {config, [](Json& j) { j["min_period"] = 5.0; }, {"min_period"}},
          {config, [](Json& j) { j["num_vlm_layers"] = 5; }, {"num_vlm_layers", "4"}},
          {config, [](Json& j) { j["num_expert_layers"] = 2; }, {"num_expert_layers"}},
          {config, [](Json& j) { j["attention_mode"] = "sideways"; }, {"attention_mode"}},
          {config,
           [](Json& j) { j["adapt_to_pi_aloha"] = true; },
           {"adapt_to_pi_aloha", "a state of 7 and actions of 6"}},
          {config,
           [](Json& j) { j["use_delta_joint_actions_aloha"] = true; },
           {"use_delta_joint_actions_aloha"}},
          {config,
           [](Json& j) { j["use_delta_joint_actions_aloha"] = true; },
           {"use_delta_joint_actions_aloha"}},
          // One name, two places in the prompt: a frame would have to choose.
          {config,
           [](Json& j) {
             Json& features = j["input_features"];
             features["top"] = features["observation.images.top"];
           },
           {"two cameras \"top\""}},
          {config,
           [](Json& j) {
             Json& features = j["input_features"];
             features[std::string(201, 'c')] = features["observation.images.top"];
           },
           {"201 bytes"}},
          {config,
           [](Json& j) {
             j["resize_imgs_with_padding"] = {128, 64};
           },
           {"resize_imgs_with_padding"}},
          {config,
           [](Json& j) {
             j["resize_imgs_with_padding"] = {72, 72};
           },
           {"64 positions"}},
          {config,
           [](Json& j) {
             j["resize_imgs_with_padding"] = {8192, 8192};
           },
           {"frames of 8192 pixels", "64 positions"}},
          {config, [](Json& j) { j["normalization_mapping"]["VISUAL"] = "MEAN_STD"; }, {"VISUAL"}},
          {config, [](Json& j) { j["input_features"] = Json::array(); }, {"input_features"}},
          {config,
           [](Json& j) {
             for (const char* key : {"observation.images.top", "observation.images.wrist"}) {
               j["input_features"].erase(key);
             }
           },
           {"VISUAL"}},
          {"vlm/config.json",
           [](Json& j) { j["text_config"]["num_attention_heads"] = 5; },
           {"heads"}},
          {"vlm/config.json",
           [](Json& j) { j["text_config"]["num_key_value_heads"] = 4; },
           {"heads"}},
          {"vlm/config.json",
           [](Json& j) { j["text_config"].erase("num_attention_heads"); },
           {"text_config.num_attention_heads"}},
          {"vlm/config.json",
           [](Json& j) { j["text_config"]["hidden_act"] = "relu"; },
           {"hidden_act"}},
          {"vlm/config.json",
           [](Json& j) { j["vision_config"]["num_attention_heads"] = 7; },
           {"7 heads"}},
          {"vlm/config.json", [](Json& j) { j["scale_factor"] = 3; }, {"scale_factor"}},
      });
}

// What lerobot turns between ALOHA and pi depends on what else is in the folder; the numbers of the
// later releases are those of variants/smolvla_mixed.
TEST(FlowConfig, AlohaBeforeAndAfterProcessors) {
  const FolderCopy folder(DataDir() + "/variants/smolvla_mixed/checkpoint");
  absl::StatusOr<PolicyConfig> config = Read(folder.path());
  ASSERT_TRUE(config.ok()) << std::string(config.status().message());
  EXPECT_EQ(config->aloha, AlohaStage::kNormalised);
  folder.Remove("policy_preprocessor.json");
  folder.Remove("policy_postprocessor.json");
  Json json = folder.ReadJson("config.json");
  json["normalization_mapping"]["STATE"] = "IDENTITY";
  json["normalization_mapping"]["ACTION"] = "IDENTITY";
  folder.WriteJson("config.json", json);
  config = Read(folder.path());
  ASSERT_TRUE(config.ok()) << std::string(config.status().message());
  EXPECT_EQ(config->aloha, AlohaStage::kRobot);
  json["adapt_to_pi_aloha"] = false;
  folder.WriteJson("config.json", json);
  config = Read(folder.path());
  ASSERT_TRUE(config.ok()) << std::string(config.status().message());
  EXPECT_EQ(config->aloha, AlohaStage::kNever);
}

TEST(FlowConfig, AlohaTurnsWhatTheRobotHas) {
  const std::string dir = DataDir() + "/variants/smolvla_mixed/checkpoint";
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(checkpoint.ok());
  absl::StatusOr<PolicyConfig> config = ReadSmolVla(*checkpoint);
  ASSERT_TRUE(config.ok());
  const absl::StatusOr<std::unique_ptr<Backend>> backend = MakeBackend(RefBackendConfig(false));
  ASSERT_TRUE(backend.ok());
  const auto load = [&](AlohaStage stage) {
    config->aloha = stage;
    return LoadLerobotPolicy(*checkpoint, **backend, {}, *config).value();
  };
  const std::unique_ptr<Model> turning = load(AlohaStage::kRobot);
  const std::unique_ptr<Model> plain = load(AlohaStage::kNever);
  std::vector<float> state;
  std::vector<float> chunk;
  for (size_t i = 0; i < 16; ++i) state.push_back(0.05F * static_cast<float>(i) - 0.3F);
  for (size_t i = 0; i < size_t{5} * 16; ++i) chunk.push_back(std::sin(static_cast<float>(i)));
  std::vector<float> turned = state;
  ASSERT_TRUE(AlohaStateToPi(AlohaVersion::kLerobot, turned).ok());
  EXPECT_NE(turned, state);
  EXPECT_EQ(turning->NormalizeState(state, "").value(), plain->NormalizeState(turned, "").value());
  const ActionChunk a = turning->FinishActions(chunk, "", state).value();
  ActionChunk b = plain->FinishActions(chunk, "", state).value();
  EXPECT_EQ(a.normalized, b.normalized);
  EXPECT_NE(a.values, b.values);
  ASSERT_TRUE(AlohaActionsFromPi(AlohaVersion::kLerobot, 15, b.values).ok());
  EXPECT_EQ(a.values, b.values);
  EXPECT_EQ(turning->NormalizeState(std::span(state).first(13), "").status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(FlowConfig, PiRefusesByName) {
  for (const std::string policy : {"pi0", "pi05"}) {
    ExpectRefused(
        policy,
        {
            {"tiny_dims.json", [](Json& j) { j["text"]["num_heads"] = 3; }, {"3 heads"}},
            {"tiny_dims.json", [](Json& j) { j["text"].erase("num_heads"); }, {"text.num_heads"}},
            {"tiny_dims.json",
             [](Json& j) { j["expert"]["num_kv_heads"] = 3; },
             {"expert", "num_kv_heads"}},
            {"tiny_dims.json", [](Json& j) { j["expert"]["num_heads"] = 4; }, {"expert"}},
            {"tiny_dims.json",
             [](Json& j) { j["vision"]["num_attention_heads"] = 5; },
             {"5 heads"}},
            {"config.json",
             [](Json& j) {
               j["image_resolution"] = {56, 28};
             },
             {"image_resolution"}},
            {"config.json", [](Json& j) { j["num_inference_steps"] = 0; }, {"num_inference_steps"}},
            {"config.json", [](Json& j) { j["adapt_to_pi_aloha"] = true; }, {"adapt_to_pi_aloha"}},
        });
  }
}

TEST(FlowConfig, PiFastRefusesByName) {
  const std::string config = "config.json";
  ExpectRefused("pi0_fast",
                {
                    {config, [](Json& j) { j["max_decoding_steps"] = 0; }, {"max_decoding_steps"}},
                    {config, [](Json& j) { j["fast_skip_tokens"] = -1; }, {"fast_skip_tokens"}},
                    {"policy_preprocessor.json",
                     [](Json& j) {
                       for (Json& step : j["steps"]) {
                         if (step["registry_name"] == "relative_actions_processor") {
                           step["config"]["enabled"] = true;
                         }
                       }
                     },
                     {"relative"}},
                });
  const FolderCopy folder(DataDir() + "/pi0_fast/checkpoint");
  std::filesystem::remove_all(folder.file("fast_tokenizer"));
  EXPECT_EQ(Read(folder.path()).status().code(), absl::StatusCode::kNotFound);
}

// Without the file of test checkpoints the variants say how many heads there are.
TEST(FlowConfig, PiVariantsAreKnownByName) {
  const FolderCopy folder(DataDir() + "/pi0/checkpoint");
  folder.Remove("tiny_dims.json");
  const absl::StatusOr<PolicyConfig> config = Read(folder.path());
  ASSERT_TRUE(config.ok()) << std::string(config.status().message());
  EXPECT_EQ(config->trunk.heads, 8u);
  EXPECT_EQ(config->trunk.kv_heads, 1u);
  EXPECT_EQ(config->trunk.head_dim, 16u);
  EXPECT_EQ(config->tower.heads, 16u);
  Json json = folder.ReadJson("config.json");
  json["action_expert_variant"] = "gemma_9b";
  folder.WriteJson("config.json", json);
  const absl::StatusOr<PolicyConfig> other = Read(folder.path());
  ASSERT_FALSE(other.ok());
  EXPECT_NE(other.status().message().find("gemma_9b"), absl::string_view::npos);
}

// Cameras stand in the prompt in the order of the file, whatever their names.
TEST(FlowConfig, CamerasKeepTheOrderOfTheFile) {
  const FolderCopy folder(DataDir() + "/smolvla/checkpoint");
  std::string text = folder.Read("config.json");
  const auto swap = [&](const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos);
    text.replace(at, from.size(), to);
  };
  swap("observation.images.top", "observation.images.zenith");
  folder.Write("config.json", text);
  const absl::StatusOr<PolicyConfig> config = Read(folder.path());
  ASSERT_TRUE(config.ok()) << std::string(config.status().message());
  ASSERT_EQ(config->cameras.size(), 2u);
  EXPECT_EQ(config->cameras[0].name, "zenith");
  EXPECT_EQ(config->cameras[1].name, "wrist");
}

TEST(FlowConfig, LeftOutKeysHaveTheReferencesValues) {
  const FolderCopy folder(DataDir() + "/pi05/checkpoint");
  Json json = folder.ReadJson("config.json");
  for (const char* key :
       {"chunk_size", "n_action_steps", "max_action_dim", "max_state_dim", "num_inference_steps",
        "tokenizer_max_length", "min_period", "max_period", "empty_cameras"}) {
    json.erase(key);
  }
  folder.WriteJson("config.json", json);
  const absl::StatusOr<PolicyConfig> config = Read(folder.path());
  ASSERT_TRUE(config.ok()) << std::string(config.status().message());
  EXPECT_EQ(config->horizon, 50u);
  EXPECT_EQ(config->served_actions, 50u);
  EXPECT_EQ(config->action_width, 32u);
  EXPECT_EQ(config->steps, 10u);
  EXPECT_EQ(config->max_text, 200u);
  EXPECT_EQ(config->min_period, 4e-3);
  EXPECT_EQ(config->max_period, 4.0);
}

TEST(FlowConfig, AMissingTokenizerIsNamed) {
  for (const auto& [policy, folder_name] :
       {std::pair<std::string, std::string>{"smolvla", "vlm"}, {"pi0", "tokenizer"}}) {
    const FolderCopy folder(DataDir() + "/" + policy + "/checkpoint");
    folder.Remove(folder_name + "/tokenizer.json");
    if (policy == "pi0") folder.Remove(folder_name + "/tokenizer.model");
    const absl::StatusOr<PolicyConfig> config = Read(folder.path());
    ASSERT_EQ(config.status().code(), absl::StatusCode::kNotFound);
    EXPECT_NE(config.status().message().find(folder_name), absl::string_view::npos);
  }
  // A hub id is no path: the files are looked for in the checkpoint's own folder.
  for (const std::string name : {"../../vlm", "HuggingFaceTB/SmolVLM2-500M", "/etc", ""}) {
    const absl::StatusOr<PolicyConfig> config =
        ReadWith("smolvla", "config.json", [&](Json& j) { j["vlm_model_name"] = name; });
    ASSERT_TRUE(config.ok()) << std::string(config.status().message());
    EXPECT_EQ(config->tokenizer_dir.substr(config->tokenizer_dir.size() - 4), "/vlm");
  }
}

TEST(FlowConfig, TensorsThatNoSuchModelHasAreRefused) {
  const std::vector<std::pair<std::string, std::string>> renames = {
      {"smolvla", "model.vlm_with_expert.vlm.model.text_model.layers.0.self_attn.o_proj.weight"},
      {"pi0", "model.paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"},
      {"pi05", "model.time_mlp_in.bias"},
  };
  for (const auto& [policy, name] : renames) {
    const FolderCopy folder(DataDir() + "/" + policy + "/checkpoint");
    std::string other = name;
    other.back() = 'X';
    Rename(folder, name, other);
    const absl::StatusOr<PolicyConfig> config = Read(folder.path());
    ASSERT_TRUE(config.ok()) << std::string(config.status().message());
    const Checkpoint checkpoint = *Checkpoint::Open(folder.path());
    const std::vector<std::string> problems = PolicyTensorProblems(checkpoint, *config);
    ASSERT_EQ(problems.size(), 2u) << policy;
    EXPECT_EQ(problems[0].substr(0, name.size() + 8), name + ": absent");
    EXPECT_EQ(problems[1].substr(0, other.size()), other);
  }
}

}  // namespace
}  // namespace saccade
