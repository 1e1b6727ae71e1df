// The host side of OpenVLA-OFT: prompts, state, actions, what its options do, and what it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "model/families/describe.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

constexpr const char* kKey = "libero_spatial_no_noops";
constexpr const char* kHead = "action_head--1_checkpoint.pt";
constexpr const char* kProprio = "proprio_projector--1_checkpoint.pt";
const std::string kFolder = DataDir() + "/openvla_oft/checkpoint";
const std::string kThree = DataDir() + "/variants/oft_three/checkpoint";

std::string Message(const absl::Status& status) { return std::string(status.message()); }

absl::StatusOr<LoadedModel> Load(const std::string& dir,
                                 const std::optional<OftOptions>& oft = std::nullopt) {
  return LoadFrom(dir, RefBackendConfig(false), DType::kF32, oft);
}

const Model& Oft() {
  static const absl::StatusOr<LoadedModel> loaded = Load(kFolder);
  EXPECT_TRUE(loaded.ok()) << Message(loaded.status());
  return *loaded->model;
}

TEST(OftSpec, Facts) {
  const ModelSpec& spec = Oft().spec();
  EXPECT_EQ(spec.family, "openvla_oft");
  ASSERT_EQ(spec.cameras.size(), 2u);
  EXPECT_EQ(spec.cameras[0].name, "full_image");
  EXPECT_EQ(spec.cameras[1].name, "wrist_image");
  EXPECT_EQ(spec.cameras[1].width, 224u);
  EXPECT_EQ(spec.state_dim, 8u);
  EXPECT_EQ(spec.state_width, 8u);
  EXPECT_EQ(spec.head.kind, HeadKind::kOnePass);
  EXPECT_EQ(spec.head.horizon, 8u);
  EXPECT_EQ(spec.head.width, 7u);
  EXPECT_EQ(spec.head.read_rows, 56u);
  EXPECT_EQ(spec.head.read_before_end, 2u);
  // One has no proprio, one has actions of another width.
  ASSERT_EQ(spec.statistics.size(), 1u);
  EXPECT_EQ(spec.statistics[0].key, kKey);
  EXPECT_EQ(spec.statistics[0].action_dim, 7u);
  EXPECT_EQ(Oft().tokenizer(), nullptr);
}

TEST(OftPrompt, Layout) {
  const std::vector<float> state(8);
  const absl::StatusOr<Prompt> prompt = Oft().BuildPrompt({"Wave", state});
  ASSERT_TRUE(prompt.ok()) << Message(prompt.status());
  const std::vector<PromptSegment>& s = prompt->segments;
  ASSERT_EQ(s.size(), 7u);
  EXPECT_EQ(s[0].tokens, std::vector<int32_t>{1});
  EXPECT_EQ(s[1].modality, Modality::kVision);
  EXPECT_EQ(s[1].camera, 0u);
  EXPECT_EQ(s[2].modality, Modality::kVision);
  EXPECT_EQ(s[2].camera, 1u);
  EXPECT_EQ(s[3].modality, Modality::kState);
  EXPECT_EQ(s[4].tokens.back(), 29871);
  EXPECT_EQ(s[5].modality, Modality::kAction);
  EXPECT_EQ(s[5].rows, 56u);
  EXPECT_EQ(s[6].tokens, std::vector<int32_t>{2});
  EXPECT_EQ(prompt->bidirectional, 7u);  // all of it sees all of it
  // The same from ids, with or without the empty token at their end.
  std::vector<int32_t> ids = {1};
  ids.insert(ids.end(), s[4].tokens.begin(), s[4].tokens.end());
  for (int i = 0; i < 2; ++i, ids.pop_back()) {
    const absl::StatusOr<Prompt> again = Oft().BuildPromptFromTokens(ids, 0);
    ASSERT_TRUE(again.ok()) << Message(again.status());
    EXPECT_EQ(again->segments[4].tokens, s[4].tokens);
  }
}

TEST(OftPrompt, Refused) {
  const std::vector<float> state(8);
  const auto field = [&](const PromptInput& input) {
    const absl::Status status = Oft().BuildPrompt(input).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return GetErrorInfo(status).field;
  };
  EXPECT_EQ(field({"wave", state, 2}), "cameras");
  EXPECT_EQ(field({"wave", std::vector<float>(7)}), "state");
  EXPECT_EQ(field({"\xFF", state}), "instruction");
  const absl::Status status = Oft().BuildPrompt({std::string(3000, 'x'), state}).status();
  EXPECT_EQ(GetErrorInfo(status).reason, Reason::kNeverFits);
  EXPECT_EQ(GetErrorInfo(Oft().BuildPromptFromTokens(std::vector{5}, 0).status()).field,
            "token_ids");
}

TEST(OftState, Normalised) {
  const std::vector<float> robot = {-0.1F, 0.05F, 1.1F, 3.0F, 0.2F, 0.4F, 0.03F, -0.03F};
  const absl::StatusOr<std::vector<float>> state = Oft().NormalizeState(robot, kKey);
  ASSERT_TRUE(state.ok()) << Message(state.status());
  ASSERT_EQ(state->size(), 8u);
  EXPECT_NEAR((*state)[0], 2 * 0.4 / 0.7 - 1, 1e-6);
  // Outside of the statistics is their edge.
  std::vector<float> far = robot;
  far[0] = 1e6F;
  far[1] = -1e6F;
  const absl::StatusOr<std::vector<float>> clipped = Oft().NormalizeState(far, kKey);
  ASSERT_TRUE(clipped.ok());
  EXPECT_EQ((*clipped)[0], 1);
  EXPECT_EQ((*clipped)[1], -1);
}

TEST(OftState, Refused) {
  std::vector<float> robot(8);
  const auto refused = [&](std::string_view key) {
    const absl::Status status = Oft().NormalizeState(robot, key).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::pair(GetErrorInfo(status).field, Message(status));
  };
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    robot[3] = bad;
    EXPECT_EQ(refused(kKey).first, "state");
  }
  robot[3] = 0;
  EXPECT_EQ(refused("nobody").first, "statistics_key");
  // What the file has and the model cannot use is told from what nobody knows.
  EXPECT_NE(refused("bridge_orig").second.find("has no proprio"), std::string::npos);
  EXPECT_NE(refused("no_mask_robot").second.find("actions of 8 values"), std::string::npos);
  robot.pop_back();
  EXPECT_EQ(refused(kKey).first, "state");
}

TEST(OftActions, Finished) {
  std::vector<float> chunk(56, 0);
  chunk[6] = 0.25F;  // a masked dimension passes through
  chunk[55] = -0.5F;
  const absl::StatusOr<ActionChunk> done = Oft().FinishActions(chunk, kKey, {});
  ASSERT_TRUE(done.ok()) << Message(done.status());
  EXPECT_EQ(done->horizon, 8u);
  EXPECT_TRUE(done->tokens.empty());
  ASSERT_EQ(done->values.size(), 56u);
  const double low = -0.02872725307941437;
  const double high = 0.028309678435325586;
  EXPECT_DOUBLE_EQ(done->values[0], 0.5 * (high - low + 1e-8) + low);
  EXPECT_EQ(done->values[6], 0.25);
  EXPECT_EQ(done->values[55], -0.5);
  chunk[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(GetErrorInfo(Oft().FinishActions(chunk, kKey, {}).status()).reason, Reason::kNonFinite);
  EXPECT_FALSE(Oft().FinishActions(std::vector<float>(55), kKey, {}).ok());
}

// --- without an L1 head ---

TEST(OftTokens, Decoded) {
  OftOptions options;
  options.use_heads = false;
  const absl::StatusOr<LoadedModel> loaded = Load(kFolder, options);
  ASSERT_TRUE(loaded.ok()) << Message(loaded.status());
  const Model& model = *loaded->model;
  EXPECT_EQ(model.spec().state_dim, 0u);
  EXPECT_EQ(model.spec().statistics.size(), 2u);  // neither needs proprio
  EXPECT_TRUE(model.IsActionToken(31999));
  std::vector<float> ids(56, 31999);
  ids[1] = 31744;
  ids[2] = 31745;
  const absl::StatusOr<ActionChunk> chunk = model.FinishActions(ids, kKey, {});
  ASSERT_TRUE(chunk.ok()) << Message(chunk.status());
  EXPECT_EQ(chunk->horizon, 8u);
  EXPECT_EQ(chunk->tokens[1], 31744);
  EXPECT_NEAR(chunk->normalized[0], -0.996, 1e-3);
  EXPECT_EQ(chunk->normalized[1], chunk->normalized[2]);
  ids[5] = 100;
  EXPECT_EQ(GetErrorInfo(model.FinishActions(ids, kKey, {}).status()).reason,
            Reason::kInvalidActionToken);
  ids[5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(GetErrorInfo(model.FinishActions(ids, kKey, {}).status()).reason, Reason::kNonFinite);
}

// A projector alone: ids, of a prompt with a state.
TEST(OftTokens, WithState) {
  const FolderCopy folder(kFolder);
  folder.Remove(kHead);
  folder.Remove("heads.safetensors");
  const absl::StatusOr<LoadedModel> loaded = Load(folder.path());
  ASSERT_TRUE(loaded.ok()) << Message(loaded.status());
  EXPECT_EQ(loaded->model->spec().state_dim, 8u);
  EXPECT_TRUE(loaded->model->IsActionToken(31999));
}

// --- what no file says ---

TEST(OftOptionsTest, Platforms) {
  const auto spec = [](const std::string& dir, const OftOptions& options) {
    const absl::StatusOr<LoadedModel> loaded = Load(dir, options);
    EXPECT_TRUE(loaded.ok()) << Message(loaded.status());
    return loaded.ok() ? loaded->model->spec() : ModelSpec();
  };
  OftOptions options;
  options.platform = OftPlatform::kBridge;
  const ModelSpec bridge = spec(kFolder, options);
  EXPECT_EQ(bridge.head.horizon, 5u);
  EXPECT_EQ(bridge.cameras.size(), 1u);
  options.chunk = 3;
  options.cameras = {"a", "b", "c"};
  const ModelSpec stated = spec(kFolder, options);
  EXPECT_EQ(stated.head.horizon, 3u);
  EXPECT_EQ(stated.head.read_rows, 21u);
  EXPECT_EQ(stated.cameras[2].name, "c");
  EXPECT_NE(stated.fingerprint, bridge.fingerprint);
  const ModelSpec aloha = spec(kThree, {});
  EXPECT_EQ(aloha.head.horizon, 25u);
  EXPECT_EQ(aloha.cameras[1].name, "left_wrist_image");
}

TEST(OftOptionsTest, Refused) {
  const auto refused = [](const OftOptions& options) {
    const absl::StatusOr<LoadedModel> loaded = Load(kFolder, options);
    EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
    return Message(loaded.status());
  };
  OftOptions options;
  options.cameras = {"a", "a"};
  EXPECT_NE(refused(options).find("oft.cameras"), std::string::npos);
  options.cameras = {"a", "b", "c", "d", "e", "f", "g", "h"};  // 8 x 256 rows
  EXPECT_NE(refused(options).find("max_position_embeddings"), std::string::npos);
  options.cameras.clear();
  options.chunk = 400;
  EXPECT_NE(refused(options).find("400 actions"), std::string::npos);
  // The bounds of ALOHA are there, and its proprio too: what is wrong would only show on the robot.
  options = {};
  options.platform = OftPlatform::kAloha;
  EXPECT_TRUE(Load(kFolder, options).ok());
  // Of another family.
  const FolderCopy other(DemoCheckpoint());
  Json config = other.ReadJson("config.json");
  config["model_type"] = "llama";
  other.WriteJson("config.json", config);
  EXPECT_EQ(Load(other.path(), OftOptions{}).status().code(), absl::StatusCode::kNotFound);
}

// --- folders ---

class OftFolder : public testing::Test {
 protected:
  // Loading fails and says why; inspect says the same.
  void ExpectRefused(const std::string& why) {
    const absl::StatusOr<LoadedModel> loaded = Load(folder_.path());
    ASSERT_FALSE(loaded.ok()) << why;
    EXPECT_NE(Message(loaded.status()).find(why), std::string::npos) << Message(loaded.status());
    const absl::StatusOr<FolderDescription> d = DescribeFolder(folder_.path(), {});
    ASSERT_TRUE(d.ok());
    std::string all;
    for (const std::string& problem : d->problems) all += problem + "\n";
    EXPECT_NE(all.find(why), std::string::npos) << all;
  }
  void CopyFile(const std::string& from, const std::string& to) {
    folder_.Write(to, folder_.Read(from));
  }
  void Replace(const std::string& file, const std::string& from, const std::string& to) {
    ASSERT_EQ(from.size(), to.size());
    std::string bytes = folder_.Read(file);
    size_t at = bytes.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    for (; at != std::string::npos; at = bytes.find(from, at)) bytes.replace(at, from.size(), to);
    folder_.Write(file, bytes);
  }
  void OnlyConverted() {
    folder_.Remove(kHead);
    folder_.Remove(kProprio);
  }
  FolderCopy folder_{kFolder};
};

TEST_F(OftFolder, EitherKindOfFile) {
  const Digest128 both = Oft().spec().fingerprint;
  folder_.Remove("heads.safetensors");
  absl::StatusOr<LoadedModel> loaded = Load(folder_.path());
  ASSERT_TRUE(loaded.ok()) << Message(loaded.status());
  EXPECT_EQ(loaded->model->spec().fingerprint, both);
  CopyFile("config.json", "config.json");
  const FolderCopy converted(kFolder);
  converted.Remove(kHead);
  converted.Remove(kProprio);
  loaded = Load(converted.path());
  ASSERT_TRUE(loaded.ok()) << Message(loaded.status());
  EXPECT_EQ(loaded->model->spec().fingerprint, both);
}

TEST_F(OftFolder, TwoHeads) {
  CopyFile(kHead, "action_head--2_checkpoint.pt");
  ExpectRefused("action_head--2_checkpoint.pt");
}

TEST_F(OftFolder, ConvertedFromAnother) {
  std::string bytes = folder_.Read("heads.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  folder_.Write("heads.safetensors", bytes);
  ExpectRefused("is not what");
}

TEST_F(OftFolder, FilmAndDiffusion) {
  CopyFile(kHead, "vision_backbone--1_checkpoint.pt");
  ExpectRefused("FiLM");
  folder_.Remove("vision_backbone--1_checkpoint.pt");
  CopyFile(kHead, "noisy_action_projector--1_checkpoint.pt");
  ExpectRefused("diffusion");
}

TEST_F(OftFolder, DiffusionHeadAlone) {
  OnlyConverted();
  Replace("heads.safetensors", "action_head.model.", "action_head.noise_");
  ExpectRefused("action_head.model.fc1.weight");
}

TEST_F(OftFolder, TensorsMustFit) {
  OnlyConverted();
  Replace("heads.safetensors", "proprio_projector.fc2.bias", "proprio_projector.fc2.bais");
  ExpectRefused("proprio_projector.fc2.bais: not part");
  ExpectRefused("proprio_projector.fc2.bias: absent");
}

TEST_F(OftFolder, ABlockBehindAGap) {
  OnlyConverted();
  Replace("heads.safetensors", "mlp_resnet_blocks.0.", "mlp_resnet_blocks.5.");
  ExpectRefused("mlp_resnet_blocks.1.ffn.1.weight: not part");
}

TEST_F(OftFolder, HeadOfAnotherTrunk) {
  OnlyConverted();
  folder_.Write("heads.safetensors", FolderCopy(kThree).Read("heads.safetensors"));
  ExpectRefused("the width of the trunk");
}

TEST_F(OftFolder, NoHeadFile) {
  // Looks like OpenVLA then, and is served as such: only the configuration can know better.
  OnlyConverted();
  folder_.Remove("heads.safetensors");
  const absl::StatusOr<LoadedModel> loaded = Load(folder_.path());
  ASSERT_TRUE(loaded.ok()) << Message(loaded.status());
  EXPECT_EQ(loaded->model->spec().family, "openvla");
  const absl::StatusOr<LoadedModel> told = Load(folder_.path(), OftOptions{});
  ASSERT_TRUE(told.ok()) << Message(told.status());
  EXPECT_EQ(told->model->spec().family, "openvla_oft");
  EXPECT_EQ(told->model->spec().head.horizon, 8u);
}

TEST_F(OftFolder, DamagedHead) {
  folder_.Remove("heads.safetensors");
  folder_.Write(kHead, folder_.Read(kHead).substr(0, 1000));
  ExpectRefused(kHead);
  folder_.Write(kHead, "x");
  ExpectRefused(kHead);
}

TEST_F(OftFolder, NoStatisticsFit) {
  Json statistics = folder_.ReadJson("dataset_statistics.json");
  statistics[kKey].erase("proprio");
  folder_.WriteJson("dataset_statistics.json", statistics);
  ExpectRefused("no dataset statistics fit");
}

TEST_F(OftFolder, TurnedBounds) {
  Json statistics = folder_.ReadJson("dataset_statistics.json");
  statistics[kKey]["proprio"]["q01"][2] = 9.0;
  folder_.WriteJson("dataset_statistics.json", statistics);
  ExpectRefused("proprio.q99[2]");
}

TEST_F(OftFolder, Described) {
  const absl::StatusOr<FolderDescription> d =
      DescribeFolder(folder_.path(), ModelOptions{}, [](const ModelSpec& spec) -> DescribeLimits {
        return {2, 700, 2 * spec.head.read_rows};
      });
  ASSERT_TRUE(d.ok());
  EXPECT_TRUE(d->problems.empty()) << d->problems.front();
  EXPECT_EQ(d->family, "openvla_oft");
  EXPECT_NE(d->head.find("8 actions of 7"), std::string::npos);
  EXPECT_EQ(d->limits.logit_rows, 112u);
  EXPECT_EQ(d->memory[0].workspace, Oft().WorkspaceBytes(2, 700, 112));
  EXPECT_EQ(d->spec.parameters, Oft().spec().parameters);
  EXPECT_LE(d->memory[0].weights, Oft().spec().weight_bytes);
  EXPECT_GE(d->memory[0].weights * 5 / 4, Oft().spec().weight_bytes);
}

}  // namespace
}  // namespace saccade
