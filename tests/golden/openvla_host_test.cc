// The host side of the OpenVLA family: prompts, actions, and what it refuses to serve.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "model/families/describe.h"
#include "model/families/lowercase.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

std::string Message(const absl::Status& status) { return std::string(status.message()); }

// One reference model for all tests of the file: loading is what costs.
const Model& Openvla() {
  static const absl::StatusOr<LoadedModel> loaded =
      LoadFrom(DataDir() + "/openvla/checkpoint", RefBackendConfig(false), DType::kF32);
  EXPECT_TRUE(loaded.ok()) << Message(loaded.status());
  return *loaded->model;
}

std::vector<int32_t> Ids(const Model& model, std::string_view instruction) {
  const absl::StatusOr<Prompt> prompt = model.BuildPrompt({instruction});
  EXPECT_TRUE(prompt.ok()) << Message(prompt.status());
  std::vector<int32_t> ids;
  if (!prompt.ok()) return ids;
  for (const PromptSegment& segment : prompt->segments) {
    ids.insert(ids.end(), segment.tokens.begin(), segment.tokens.end());
  }
  return ids;
}

// --- lower case ---

TEST(LowerCase, FollowsPython) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", ""},
      {"Pick UP the Red Block!", "pick up the red block!"},
      {"ÀÉÎÕÜ ÅØÆ Ÿ", "àéîõü åøæ ÿ"},
      {"СТОЛ Ёлка", "стол ёлка"},
      {"İstanbul IŞIK", "i̇stanbul işik"},
      {"ΣΊΣΥΦΟΣ ΣΑΣ", "σίσυφος σας"},
      {"ΟΔΟΣ. Σ", "οδος. σ"},
      {"ΑΣ'Α ΑΣ' Α", "ασ'α ας' α"},
      {"ẞ Ǆ ǅ Ω K", "ß ǆ ǆ ω k"},
      {"𐐀Ａ汉字🤖", "𐐨ａ汉字🤖"},
  };
  for (const auto& [text, expected] : cases) {
    const absl::StatusOr<std::string> lower = LowerCase(text);
    ASSERT_TRUE(lower.ok());
    EXPECT_EQ(*lower, expected);
  }
}

TEST(LowerCase, RefusesWhatIsNotUtf8) {
  for (const char* text : {"\xC3\x28", "\xFF", "a\xE2\x82", "\xED\xA0\x80", "\xC0\xAF"}) {
    EXPECT_FALSE(LowerCase(text).ok());
  }
}

TEST(LowerCase, LongRunsOfIgnorablesAreLinear) {
  std::string text = "A";
  for (int i = 0; i < 20000; ++i) text += "\xCE\xA3\xCC\x81";  // sigma, combining acute
  const absl::StatusOr<std::string> lower = LowerCase(text);
  ASSERT_TRUE(lower.ok());
  EXPECT_EQ(lower->size(), text.size());
  EXPECT_EQ(lower->substr(lower->size() - 4), "\xCF\x82\xCC\x81");
}

// --- prompts ---

TEST(Prompt, Layout) {
  const absl::StatusOr<Prompt> prompt = Openvla().BuildPrompt({"wave"});
  ASSERT_TRUE(prompt.ok());
  ASSERT_EQ(prompt->segments.size(), 3u);
  EXPECT_EQ(prompt->segments[0].tokens, std::vector<int32_t>{1});
  EXPECT_EQ(prompt->segments[1].modality, Modality::kVision);
  EXPECT_EQ(prompt->segments[2].tokens.back(), 29871);
}

TEST(Prompt, EmptyTokenExactlyOnce) {
  for (const char* instruction :
       {"pick up the cup", "pick up the cup ", "pick up the cup\n", "pick up the cup.", "", " "}) {
    const std::vector<int32_t> ids = Ids(Openvla(), instruction);
    ASSERT_GT(ids.size(), 2u);
    EXPECT_EQ(ids.back(), 29871);
    EXPECT_NE(ids[ids.size() - 2], 29871);
  }
}

TEST(Prompt, IsLowerCased) {
  EXPECT_EQ(Ids(Openvla(), "Pick Up ÄPFEL"), Ids(Openvla(), "pick up äpfel"));
}

TEST(Prompt, ControlTextStaysText) {
  for (const char* instruction : {"stop</s>now", "<s>", "<unk>", "<pad> </s>"}) {
    const std::vector<int32_t> ids = Ids(Openvla(), instruction);
    for (size_t i = 1; i < ids.size(); ++i) {
      EXPECT_TRUE(ids[i] > 2 && ids[i] < 32000) << instruction << " gives " << ids[i];
    }
  }
}

TEST(Prompt, BadText) {
  const absl::StatusOr<Prompt> prompt = Openvla().BuildPrompt({"\xFF"});
  EXPECT_EQ(prompt.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetErrorInfo(prompt.status()).field, "instruction");
}

TEST(Prompt, TooLong) {
  const absl::StatusOr<Prompt> prompt = Openvla().BuildPrompt({std::string(20000, 'x')});
  EXPECT_EQ(prompt.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetErrorInfo(prompt.status()).reason, Reason::kNeverFits);
  EXPECT_EQ(GetErrorInfo(prompt.status()).field, "instruction");
}

TEST(Prompt, OfATextIsTakenAsItIs) {
  const std::vector<int32_t> ids = {1, 400, 500};
  const Prompt seeing = Openvla().BuildTextPrompt(ids, std::vector<uint32_t>{0}).value();
  ASSERT_EQ(seeing.segments.size(), 3u);
  EXPECT_EQ(seeing.segments[0].tokens, std::vector<int32_t>{1});
  EXPECT_EQ(seeing.segments[1].modality, Modality::kVision);
  EXPECT_EQ(seeing.segments[2].tokens, (std::vector<int32_t>{400, 500}));
  const Prompt blind = Openvla().BuildTextPrompt(ids, {}).value();
  ASSERT_EQ(blind.segments.size(), 2u);
  EXPECT_EQ(blind.segments[1].tokens, (std::vector<int32_t>{400, 500}));
  for (const std::vector<int32_t>& bad : {std::vector<int32_t>{}, {400}, {1, -1}, {1, 1 << 20}}) {
    EXPECT_EQ(GetErrorInfo(Openvla().BuildTextPrompt(bad, {}).status()).field, "token_ids");
  }
}

TEST(Prompt, FromTokens) {
  const Model& model = Openvla();
  std::vector<int32_t> ids = Ids(model, "wave");
  const absl::StatusOr<Prompt> text = model.BuildPrompt({"wave"});
  const auto expect_same = [&] {
    const absl::StatusOr<Prompt> prompt = model.BuildPromptFromTokens(ids, 0);
    ASSERT_TRUE(prompt.ok()) << Message(prompt.status());
    ASSERT_EQ(prompt->segments.size(), 3u);
    EXPECT_EQ(prompt->segments[2].tokens, text->segments[2].tokens);
  };
  expect_same();
  ids.pop_back();  // without the empty token: it is appended
  expect_same();

  for (const std::vector<int32_t>& bad :
       {std::vector<int32_t>{}, {2, 5}, {1, -1}, {1, 32064}, std::vector<int32_t>(3000, 1)}) {
    const absl::StatusOr<Prompt> prompt = model.BuildPromptFromTokens(bad, 0);
    EXPECT_EQ(prompt.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(GetErrorInfo(prompt.status()).field, "token_ids");
    EXPECT_EQ(GetErrorInfo(prompt.status()).reason,
              bad.size() == 3000 ? Reason::kNeverFits : Reason::kInvalidInput);
  }
}

// --- actions ---

TEST(Actions, Membership) {
  const Model& model = Openvla();
  for (const int32_t id : {31744, 31745, 31872, 31999}) EXPECT_TRUE(model.IsActionToken(id));
  for (const int32_t id : {-1, 0, 2, 31743, 32000, 32063, 32064}) {
    EXPECT_FALSE(model.IsActionToken(id));
  }
}

TEST(Actions, Bins) {
  const std::vector<int32_t> tokens = {31999, 31998, 31872, 31871, 31745, 31744, 31999};
  const absl::StatusOr<ActionChunk> chunk =
      Openvla().DecodeActions(tokens, "bridge_orig", InvalidTokenPolicy::kFail);
  ASSERT_TRUE(chunk.ok()) << Message(chunk.status());
  const std::vector<double> centres = {-254 / 255., -252 / 255., 0,          2 / 255.,
                                       254 / 255.,  254 / 255.,  -254 / 255.};
  const std::vector<double> low = {-0.02872725307941437,
                                   -0.04170349963009357,
                                   -0.026093858778476715,
                                   -0.08092105075716972,
                                   -0.09288699507713317,
                                   -0.20718276381492615,
                                   0};
  const std::vector<double> high = {0.028309678435325586,
                                    0.040855254605412394,
                                    0.040161586627364146,
                                    0.08192047759890528,
                                    0.07792850524187081,
                                    0.20382574498653397,
                                    1};
  for (size_t i = 0; i < tokens.size(); ++i) {
    EXPECT_NEAR(chunk->normalized[i], centres[i], 1e-7);
    // The gripper is masked: the centre itself.
    const double value = i == 6 ? centres[i] : 0.5 * (centres[i] + 1) * (high[i] - low[i]) + low[i];
    EXPECT_NEAR(chunk->values[i], value, 1e-15);
  }
  EXPECT_EQ(chunk->tokens, tokens);
}

TEST(Actions, MissingMaskIsAllTrue) {
  const absl::StatusOr<ActionChunk> chunk = Openvla().DecodeActions(
      std::vector<int32_t>(8, 31872), "no_mask_robot", InvalidTokenPolicy::kFail);
  ASSERT_TRUE(chunk.ok());
  EXPECT_NEAR(chunk->values[0], -0.125, 1e-15);
  EXPECT_NEAR(chunk->values[7], 0.0, 1e-15);
}

TEST(Actions, InvalidTokens) {
  for (const int32_t id : {0, 2, 31743, 32000, 32063}) {
    std::vector<int32_t> tokens(7, 31872);
    tokens[3] = id;
    const absl::StatusOr<ActionChunk> failed =
        Openvla().DecodeActions(tokens, "bridge_orig", InvalidTokenPolicy::kFail);
    EXPECT_EQ(failed.status().code(), absl::StatusCode::kInternal);
    EXPECT_EQ(GetErrorInfo(failed.status()).reason, Reason::kInvalidActionToken);
    const absl::StatusOr<ActionChunk> clamped =
        Openvla().DecodeActions(tokens, "bridge_orig", InvalidTokenPolicy::kClamp);
    ASSERT_TRUE(clamped.ok());
    EXPECT_NEAR(clamped->normalized[3], id < 31872 ? 254 / 255. : -254 / 255., 1e-7);
  }
  std::vector<int32_t> tokens(7, 31872);
  tokens[6] = kInvalidSample;
  for (const InvalidTokenPolicy policy : {InvalidTokenPolicy::kFail, InvalidTokenPolicy::kClamp}) {
    const absl::StatusOr<ActionChunk> chunk =
        Openvla().DecodeActions(tokens, "bridge_orig", policy);
    EXPECT_EQ(GetErrorInfo(chunk.status()).reason, Reason::kNonFinite);
  }
}

TEST(Actions, WrongKeyOrCount) {
  const std::vector<int32_t> tokens(7, 31872);
  const absl::StatusOr<ActionChunk> key =
      Openvla().DecodeActions(tokens, "Bridge_orig", InvalidTokenPolicy::kFail);
  EXPECT_EQ(key.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(Message(key.status()).find("bridge_orig, no_mask_robot"), std::string::npos);
  EXPECT_FALSE(Openvla().DecodeActions(tokens, "no_mask_robot", InvalidTokenPolicy::kFail).ok());
}

TEST(Spec, Facts) {
  const ModelSpec& spec = Openvla().spec();
  EXPECT_EQ(spec.family, "openvla");
  ASSERT_EQ(spec.cameras.size(), 1u);
  EXPECT_EQ(spec.cameras[0].width, 224u);
  EXPECT_EQ(spec.vision_tokens, 256u);
  EXPECT_EQ(spec.vocab_size, 32064u);
  EXPECT_EQ(spec.max_action_tokens, 8u);
  ASSERT_EQ(spec.statistics.size(), 2u);
  EXPECT_EQ(spec.statistics[0].key, "bridge_orig");
  EXPECT_EQ(spec.kv.BytesPerToken(), 2u * 3 * 4 * 8 * 4);
}

TEST(Spec, FingerprintTellsModelsApart) {
  const auto fingerprint = [](const std::string& dir, DType compute) {
    const absl::StatusOr<LoadedModel> loaded = LoadFrom(dir, RefBackendConfig(false), compute);
    EXPECT_TRUE(loaded.ok()) << Message(loaded.status());
    return loaded.ok() ? loaded->model->spec().fingerprint : Digest128();
  };
  const FolderCopy demo(DemoCheckpoint());
  const Digest128 base = fingerprint(demo.path(), DType::kF32);
  EXPECT_EQ(base, fingerprint(DemoCheckpoint(), DType::kF32));
  EXPECT_NE(base, fingerprint(demo.path(), DType::kBf16));
  const std::string bytes = demo.Read("model.safetensors");
  std::string changed = bytes;
  changed[changed.size() / 2] = static_cast<char>(changed[changed.size() / 2] ^ 1);
  demo.Write("model.safetensors", changed);
  EXPECT_NE(base, fingerprint(demo.path(), DType::kF32));
  demo.Write("model.safetensors", bytes);
  Json processor = demo.ReadJson("preprocessor_config.json");
  processor["tvf_normalize_params"][0]["mean"][0] = 0.485;
  demo.WriteJson("preprocessor_config.json", processor);
  EXPECT_NE(base, fingerprint(demo.path(), DType::kF32));
}

// --- folders ---

struct Refusal {
  std::string name;
  std::string file;
  void (*change)(Json&);
  std::string named;  // in the error
};

class Refuses : public testing::TestWithParam<Refusal> {};

// Loading fails and says which setting; inspect lists the same.
TEST_P(Refuses, Names) {
  const FolderCopy demo(DemoCheckpoint());
  Json json = demo.ReadJson(GetParam().file);
  GetParam().change(json);
  demo.WriteJson(GetParam().file, json);
  const absl::StatusOr<LoadedModel> loaded =
      LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
  ASSERT_FALSE(loaded.ok());
  EXPECT_NE(Message(loaded.status()).find(GetParam().named), std::string::npos)
      << Message(loaded.status());
  const absl::StatusOr<FolderDescription> description = DescribeFolder(demo.path(), {});
  if (!description.ok()) return;  // refused before any family looked at it
  EXPECT_FALSE(description->problems.empty());
}

constexpr const char* kDino = "vit_large_patch14_reg4_dinov2.lvd142m";

INSTANTIATE_TEST_SUITE_P(
    Config, Refuses,
    testing::Values(
        Refusal{"arch", "config.json", [](Json& c) { c["arch_specifier"] = "no-align+film-mlp"; },
                "arch_specifier"},
        Refusal{"model_type", "config.json", [](Json& c) { c["model_type"] = "prismatic"; },
                "no known family"},
        Refusal{"eos_range", "generation_config.json", [](Json& c) { c["eos_token_id"] = 1 << 20; },
                "eos_token_id"},
        Refusal{"eos_type", "generation_config.json",
                [](Json& c) {
                  c["eos_token_id"] = {1, "two"};
                },
                "eos_token_id"},
        Refusal{"rope_scaling", "config.json",
                [](Json& c) {
                  c["text_config"]["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};
                },
                "rope_scaling"},
        Refusal{"rope_parameters", "config.json",
                [](Json& c) {
                  c["text_config"]["rope_parameters"] = {{"rope_type", "llama3"}};
                },
                "rope_parameters"},
        Refusal{"attention_bias", "config.json",
                [](Json& c) { c["text_config"]["attention_bias"] = true; }, "attention_bias"},
        Refusal{"mlp_bias", "config.json", [](Json& c) { c["text_config"]["mlp_bias"] = true; },
                "mlp_bias"},
        Refusal{"hidden_act", "config.json",
                [](Json& c) { c["text_config"]["hidden_act"] = "gelu"; }, "hidden_act"},
        Refusal{"llm", "config.json", [](Json& c) { c["text_config"]["model_type"] = "phi"; },
                "text_config.model_type"},
        Refusal{"heads", "config.json",
                [](Json& c) { c["text_config"]["num_attention_heads"] = 3; },
                "num_attention_heads"},
        Refusal{"kv_heads", "config.json",
                [](Json& c) { c["text_config"]["num_key_value_heads"] = 3; },
                "num_key_value_heads"},
        Refusal{"hidden", "config.json", [](Json& c) { c["text_config"]["hidden_size"] = 64; },
                "expected"},
        Refusal{"negative_layers", "config.json",
                [](Json& c) { c["text_config"]["num_hidden_layers"] = -1; },
                "text_config.num_hidden_layers"},
        Refusal{"more_layers", "config.json",
                [](Json& c) { c["text_config"]["num_hidden_layers"] = 5; }, "layers.4"},
        Refusal{"fewer_layers", "config.json",
                [](Json& c) { c["text_config"]["num_hidden_layers"] = 3; }, "layers.3"},
        Refusal{"quantised", "config.json",
                [](Json& c) {
                  c["quantization_config"] = {{"load_in_8bit", true}};
                },
                "quantization_config"},
        Refusal{"timm_id", "config.json",
                [](Json& c) { c["timm_model_ids"][0] = "vit_huge_patch14_clip_224"; },
                "vit_huge_patch14_clip_224"},
        Refusal{"other_towers", "config.json",
                [](Json& c) { c["vision_backbone_id"] = "siglip-vit-so400m"; },
                "are not the towers of vision_backbone_id siglip-vit-so400m"},
        Refusal{"backbone", "config.json",
                [](Json& c) { c["vision_backbone_id"] = "dinosiglip-vit-so-225px"; },
                "config.json: vision_backbone_id: unknown \"dinosiglip-vit-so-225px\"; known: "
                "dinov2-vit-l, siglip-vit-so400m, siglip-vit-so400m-384px, "
                "dinosiglip-vit-so-224px, dinosiglip-vit-so-384px"},
        Refusal{"backbone_without_timm_ids", "config.json",
                [](Json& c) {
                  c.erase("timm_model_ids");
                  c["vision_backbone_id"] = "dinosiglip-vit-so-225px";
                },
                "unknown \"dinosiglip-vit-so-225px\""},
        Refusal{"backbone_number", "config.json", [](Json& c) { c["vision_backbone_id"] = 7; },
                "vision_backbone_id: expected a string"},
        Refusal{"no_towers", "config.json",
                [](Json& c) {
                  c.erase("timm_model_ids");
                  c.erase("vision_backbone_id");
                },
                "neither timm_model_ids nor a vision_backbone_id"},
        Refusal{"strategy", "config.json",
                [](Json& c) { c["image_resize_strategy"] = "resize-naif"; },
                "config.json: image_resize_strategy: unknown \"resize-naif\"; known: resize-naive, "
                "resize-crop, letterbox"},
        Refusal{"other_strategy", "config.json",
                [](Json& c) { c["image_resize_strategy"] = "letterbox"; },
                "is letterbox, but preprocessor_config.json says resize-naive"},
        Refusal{"act_layer", "config.json",
                [](Json& c) { c["timm_override_act_layers"][1] = "quick_gelu"; },
                "timm_override_act_layers"},
        Refusal{"depth", "config.json",
                [](Json& c) { c["tiny_timm_overrides"][kDino]["depth"] = 4; }, "depth"},
        Refusal{"width", "config.json",
                [](Json& c) { c["tiny_timm_overrides"][kDino]["embed_dim"] = 64; }, "embed_dim"},
        Refusal{"override", "config.json",
                [](Json& c) { c["tiny_timm_overrides"][kDino]["qk_norm"] = true; }, "qk_norm"},
        Refusal{"tower_heads", "config.json",
                [](Json& c) { c["tiny_timm_overrides"][kDino]["num_heads"] = 5; }, "heads"},
        Refusal{"fused", "config.json", [](Json& c) { c["use_fused_vision_backbone"] = false; },
                "use_fused_vision_backbone"},
        Refusal{"image_sizes", "config.json",
                [](Json& c) {
                  c["image_sizes"] = {224, 384};
                },
                "image_sizes"},
        Refusal{"bins", "config.json", [](Json& c) { c["n_action_bins"] = 2000; }, "n_action_bins"},
        Refusal{"positions", "config.json", [](Json& c) { c["llm_max_length"] = 260; },
                "llm_max_length"},
        Refusal{"vocab", "config.json", [](Json& c) { c["text_config"]["vocab_size"] = 960; },
                "embed_tokens"},
        Refusal{"input_sizes", "preprocessor_config.json",
                [](Json& p) {
                  p["input_sizes"] = {{3, 112, 112}, {3, 112, 112}};
                  for (Json& r : p["tvf_resize_params"]) r["size"] = {112, 112};
                  for (Json& r : p["tvf_crop_params"]) r["output_size"] = {112, 112};
                },
                "112"},
        Refusal{"q99", "dataset_statistics.json",
                [](Json& s) { s.begin().value()["action"]["q99"].erase(0); }, "q99"},
        Refusal{"turned", "dataset_statistics.json",
                [](Json& s) {
                  Json& action = s.begin().value()["action"];
                  action["q01"][1] = 0.5;
                  action["q99"][1] = 0.25;
                },
                "dataset_statistics.json: highway_demo.action.q99[1]: 0.25 is below "
                "highway_demo.action.q01[1] = 0.5"},
        Refusal{"too_wide", "dataset_statistics.json",
                [](Json& s) {
                  Json& action = s.begin().value()["action"];
                  action["q01"][2] = -1.5e308;
                  action["q99"][2] = 1.5e308;
                },
                "highway_demo.action.q99[2]: 1.5e+308 is too far from"},
        Refusal{"not_finite", "dataset_statistics.json",
                [](Json& s) { s.begin().value()["action"]["q99"][0] = nullptr; }, "q99[0]"},
        Refusal{"mask", "dataset_statistics.json",
                [](Json& s) { s.begin().value()["action"]["mask"] = {true}; }, "mask"},
        Refusal{"q01_text", "dataset_statistics.json",
                [](Json& s) { s.begin().value()["action"]["q01"][0] = "0"; }, "q01"},
        Refusal{"no_action", "dataset_statistics.json",
                [](Json& s) { s.begin().value().erase("action"); }, "action"},
        Refusal{"no_keys", "dataset_statistics.json", [](Json& s) { s = Json::object(); },
                "at least one"}),
    [](const auto& info) { return info.param.name; });

TEST(Folder, StatisticsFileReplacesTheConfig) {
  const FolderCopy demo(DemoCheckpoint());
  Json statistics = demo.ReadJson("dataset_statistics.json");
  const Json entry = statistics.begin().value();
  demo.WriteJson("dataset_statistics.json", {{"fine_tune", entry}});
  absl::StatusOr<LoadedModel> loaded = LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
  ASSERT_TRUE(loaded.ok()) << Message(loaded.status());
  ASSERT_EQ(loaded->model->spec().statistics.size(), 1u);
  EXPECT_EQ(loaded->model->spec().statistics[0].key, "fine_tune");

  demo.Remove("dataset_statistics.json");
  loaded = LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
  ASSERT_TRUE(loaded.ok()) << Message(loaded.status());
  EXPECT_EQ(loaded->model->spec().statistics[0].key, "highway_demo");

  Json config = demo.ReadJson("config.json");
  config.erase("norm_stats");
  demo.WriteJson("config.json", config);
  loaded = LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
  EXPECT_NE(Message(loaded.status()).find("norm_stats"), std::string::npos);
}

// What the two names imply is used when the config leaves the rest out.
TEST(Folder, TheBackboneTellsItsTowersAndImageSize) {
  const FolderCopy demo(DemoCheckpoint());
  Json config = demo.ReadJson("config.json");
  config.erase("timm_model_ids");
  config.erase("image_sizes");
  demo.WriteJson("config.json", config);
  absl::StatusOr<LoadedModel> loaded = LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
  EXPECT_TRUE(loaded.ok()) << Message(loaded.status());

  config["vision_backbone_id"] = "dinosiglip-vit-so-384px";
  demo.WriteJson("config.json", config);
  loaded = LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
  EXPECT_NE(Message(loaded.status()).find("takes images of 384 pixels"), std::string::npos)
      << Message(loaded.status());
}

TEST(Folder, StopTokensComeFromTheGenerationConfig) {
  const FolderCopy demo(DemoCheckpoint());
  const auto stops = [&] {
    absl::StatusOr<LoadedModel> loaded =
        LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
    EXPECT_TRUE(loaded.ok()) << Message(loaded.status());
    return loaded.ok() ? loaded->model->spec().stop_tokens : std::vector<int32_t>();
  };
  EXPECT_EQ(stops(), std::vector<int32_t>{2});
  demo.WriteJson("generation_config.json", {{"eos_token_id", {2, 7}}});
  EXPECT_EQ(stops(), (std::vector<int32_t>{2, 7}));
  demo.Remove("generation_config.json");
  EXPECT_EQ(stops(), std::vector<int32_t>{2});  // LlamaConfig's default
  Json config = demo.ReadJson("config.json");
  config["text_config"]["eos_token_id"] = 5;
  demo.WriteJson("config.json", config);
  EXPECT_EQ(stops(), std::vector<int32_t>{5});
}

// q01 == q99: the value itself, whatever the token.
TEST(Folder, AConstantDimensionNeverMoves) {
  const FolderCopy demo(DemoCheckpoint());
  Json statistics = demo.ReadJson("dataset_statistics.json");
  Json& action = statistics.begin().value()["action"];
  const std::string key = statistics.begin().key();
  action["q01"][0] = 0.3;
  action["q99"][0] = 0.3;
  action["q01"][1] = 0.0;
  action["q99"][1] = 0.0;
  demo.WriteJson("dataset_statistics.json", statistics);
  const absl::StatusOr<LoadedModel> loaded =
      LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
  ASSERT_TRUE(loaded.ok()) << Message(loaded.status());
  const Model& model = *loaded->model;
  for (int32_t id = 0; id < static_cast<int32_t>(model.spec().vocab_size); ++id) {
    if (!model.IsActionToken(id)) continue;
    const std::vector<int32_t> tokens(model.spec().statistics[0].action_dim, id);
    const absl::StatusOr<ActionChunk> chunk =
        model.DecodeActions(tokens, key, InvalidTokenPolicy::kFail);
    ASSERT_TRUE(chunk.ok()) << Message(chunk.status());
    EXPECT_EQ(chunk->values[0], 0.3);
    EXPECT_EQ(chunk->values[1], 0.0);
  }
}

// JSON has no NaN; some writers put it there all the same.
TEST(Folder, StatisticsThatAreNoNumbers) {
  const FolderCopy demo(DemoCheckpoint());
  const std::string good = demo.Read("dataset_statistics.json");
  for (const char* bad : {"NaN", "Infinity", "-Infinity", "1e999"}) {
    std::string text = good;
    const size_t list = text.find('[', text.find("\"q99\""));
    text.insert(list + 1, std::string(bad) + ",");
    demo.Write("dataset_statistics.json", text);
    const absl::StatusOr<LoadedModel> loaded =
        LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
    EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_NE(Message(loaded.status()).find("dataset_statistics.json"), std::string::npos) << bad;
  }
}

TEST(Folder, NoTokenizer) {
  const FolderCopy demo(DemoCheckpoint());
  demo.Remove("tokenizer.json");
  demo.Remove("tokenizer.model");
  EXPECT_FALSE(LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32).ok());
  const absl::StatusOr<FolderDescription> description = DescribeFolder(demo.path(), {});
  ASSERT_TRUE(description.ok());
  EXPECT_TRUE(description->known_sizes);
  EXPECT_EQ(description->problems.size(), 1u);
}

// The header of a safetensors file, with the data behind it.
void EditTensors(const FolderCopy& folder, const std::string& from, const std::string& to) {
  std::string bytes = folder.Read("model.safetensors");
  const size_t at = bytes.find("\"" + from + "\"");
  ASSERT_NE(at, std::string::npos) << from;
  ASSERT_EQ(from.size(), to.size());
  bytes.replace(at + 1, from.size(), to);
  folder.Write("model.safetensors", bytes);
}

TEST(Folder, TensorsMustFit) {
  const std::vector<std::pair<std::string, std::string>> renamed = {
      // lost, so something else is there that nobody asked for
      {"language_model.model.layers.1.mlp.up_proj.weight",
       "language_model.model.layers.1.mlp.up_proj.weighx"},
      {"vision_backbone.featurizer.blocks.1.norm1.bias",
       "vision_backbone.featurizer.blocks.1.normX.bias"},
      {"language_model.lm_head.weight", "language_model.lm_haed.weight"},
  };
  for (const auto& [from, to] : renamed) {
    const FolderCopy demo(DemoCheckpoint());
    EditTensors(demo, from, to);
    const absl::StatusOr<LoadedModel> loaded =
        LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
    EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(Message(loaded.status()).find(from), std::string::npos) << Message(loaded.status());
    EXPECT_NE(Message(loaded.status()).find(to), std::string::npos) << Message(loaded.status());
    const absl::StatusOr<FolderDescription> description = DescribeFolder(demo.path(), {});
    ASSERT_TRUE(description.ok());
    EXPECT_EQ(description->problems.size(), 2u);
  }
}

TEST(Folder, TiedHead) {
  const FolderCopy demo(DemoCheckpoint());
  Json config = demo.ReadJson("config.json");
  config["text_config"]["tie_word_embeddings"] = true;
  demo.WriteJson("config.json", config);
  const absl::StatusOr<LoadedModel> loaded =
      LoadFrom(demo.path(), RefBackendConfig(false), DType::kF32);
  EXPECT_TRUE(loaded.ok()) << Message(loaded.status());
}

TEST(Describe, Demo) {
  DescribeLimits limits;
  limits.rows = 64;
  const absl::StatusOr<FolderDescription> d = DescribeFolder(DemoCheckpoint(), limits);
  ASSERT_TRUE(d.ok());
  EXPECT_TRUE(d->problems.empty()) << d->problems.front();
  EXPECT_EQ(d->family, "openvla");
  EXPECT_EQ(d->towers.size(), 2u);
  EXPECT_EQ(d->layers, 4u);
  ASSERT_EQ(d->memory.size(), 2u);
  const absl::StatusOr<LoadedModel> loaded =
      LoadFrom(DemoCheckpoint(), RefBackendConfig(false), DType::kF32);
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(d->memory[0].workspace, loaded->model->WorkspaceBytes(1, 64, 1));
  EXPECT_EQ(d->spec.parameters, loaded->model->spec().parameters);
  EXPECT_LE(d->memory[0].weights, loaded->model->spec().weight_bytes);
  EXPECT_GE(d->memory[0].weights * 5 / 4, loaded->model->spec().weight_bytes);
}

}  // namespace
}  // namespace saccade
