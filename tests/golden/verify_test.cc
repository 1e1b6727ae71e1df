// The recorded answers of the reference, through the serving path on every backend and precision.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cmd_verify.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

int Verify(const std::string& model, const std::string& golden, const BackendConfig& backend,
           bool f32 = true, bool bf16 = true) {
  VerifyOptions options;
  options.model_dir = model;
  options.golden_path = golden;
  options.backend = backend;
  options.f32 = f32;
  options.bf16 = bf16;
  return RunVerify(options);
}

class EveryBackend : public testing::TestWithParam<BackendConfig> {};

TEST_P(EveryBackend, Openvla) {
  const std::string dir = DataDir() + "/openvla";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.safetensors", GetParam()), 0);
}

TEST_P(EveryBackend, OpenvlaV01) {
  const std::string dir = DataDir() + "/openvla_v01";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.json", GetParam()), 0);
}

// Folders of other sizes, with answers computed by make_variant.py: grouped queries, a head size of
// its own and a centre crop; one DINOv2 tower, one layer, a tied head, F32 weights and letterbox.
TEST_P(EveryBackend, GroupedQueriesAndCrop) {
  const std::string dir = DataDir() + "/variants/gqa_crop";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.safetensors", GetParam()), 0);
}

TEST_P(EveryBackend, OneTowerTiedHead) {
  const std::string dir = DataDir() + "/variants/dino_tied";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.safetensors", GetParam()), 0);
}

TEST_P(EveryBackend, OpenvlaOft) {
  const std::string dir = DataDir() + "/openvla_oft";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.json", GetParam()), 0);
}

// Three images, other sizes and bounds, heads that were converted; and ids in place of a head.
TEST_P(EveryBackend, OftThreeImages) {
  const std::string dir = DataDir() + "/variants/oft_three";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.json", GetParam()), 0);
}

TEST_P(EveryBackend, OftTokens) {
  const std::string dir = DataDir() + "/variants/oft_tokens";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.json", GetParam()), 0);
}

TEST_P(EveryBackend, SmolVla) {
  const std::string dir = DataDir() + "/smolvla";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.safetensors", GetParam()), 0);
}

// The demo's flow policy: trained weights, three cameras, a state of two.
TEST_P(EveryBackend, DemoFlow) {
  const std::string golden = DataDir() + "/demo_flow/golden.safetensors";
  EXPECT_EQ(Verify(SACCADE_SOURCE_DIR "/deploy/demo/flow", golden, GetParam()), 0);
}

TEST_P(EveryBackend, Pi0) {
  const std::string dir = DataDir() + "/pi0";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.safetensors", GetParam()), 0);
}

TEST_P(EveryBackend, Pi05) {
  const std::string dir = DataDir() + "/pi05";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.safetensors", GetParam()), 0);
}

TEST_P(EveryBackend, Pi0Fast) {
  const std::string dir = DataDir() + "/pi0_fast";
  EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.safetensors", GetParam()), 0);
}

// Folders of the policies with other sizes, layouts and inputs: see reference/variants.py.
TEST_P(EveryBackend, MixedPolicies) {
  for (const char* policy : {"smolvla", "pi0", "pi05", "pi0_fast"}) {
    const std::string dir = DataDir() + "/variants/" + policy + "_mixed";
    EXPECT_EQ(Verify(dir + "/checkpoint", dir + "/golden.safetensors", GetParam()), 0) << policy;
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, EveryBackend, testing::ValuesIn(AllBackends()),
                         [](const auto& info) { return info.param.name; });

// Everything below: verify must notice.
class Damaged : public testing::Test {
 protected:
  explicit Damaged(const std::string& folder = "openvla_v01") : folder_(DataDir() + "/" + folder) {}
  int Run(bool f32 = true, bool bf16 = false) {
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    const int code = Verify(folder_.file("checkpoint"), folder_.file("golden.safetensors"),
                            RefBackendConfig(false), f32, bf16);
    output_ = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
    return code;
  }
  // Renames or changes bytes of the golden.
  void Replace(const std::string& from, const std::string& to) {
    ASSERT_EQ(from.size(), to.size());
    std::string bytes = folder_.Read("golden.safetensors");
    const size_t at = bytes.find(from);
    ASSERT_NE(at, std::string::npos);
    bytes.replace(at, from.size(), to);
    folder_.Write("golden.safetensors", bytes);
  }
  // Adds to the first value of an F32 tensor of the golden.
  void Add(const std::string& name, float amount) {
    std::string bytes = folder_.Read("golden.safetensors");
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof(header));
    const Json index = Json::parse(bytes.substr(8, header));
    const size_t at = 8 + header + index[name]["data_offsets"][0].get<size_t>();
    float value = 0;
    std::memcpy(&value, bytes.data() + at, sizeof(value));
    value += amount;
    std::memcpy(bytes.data() + at, &value, sizeof(value));
    folder_.Write("golden.safetensors", bytes);
  }
  void DropTensorList() {
    Json info = folder_.ReadJson("golden.json");
    info.erase("tensors");
    folder_.WriteJson("golden.json", info);
  }

  FolderCopy folder_;
  std::string output_;
};

TEST_F(Damaged, GoodBefore) { EXPECT_EQ(Run(), 0) << output_; }

TEST_F(Damaged, OneWrongValue) {
  Add("vision.projected", 1e-3F);
  EXPECT_EQ(Run(), 1);
  EXPECT_NE(output_.find("MISS"), std::string::npos) << output_;
}

// The recorded bf16 distance is the tolerance of the BF16 pass: a damaged one must not let anything
// pass.
TEST_F(Damaged, RecordOfBf16) {
  EXPECT_EQ(Run(false, true), 0) << output_;
  Add("bf16.logits.prefill_last", 1e6F);
  EXPECT_EQ(Run(false, true), 1) << output_;
  Add("bf16.logits.prefill_last", std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(Run(false, true), 1) << output_;
}

TEST_F(Damaged, UnknownTensor) {
  DropTensorList();
  Replace("\"lm.layer0.out\"", "\"lm.layer0.oux\"");
  EXPECT_EQ(Run(), 1);
  EXPECT_NE(output_.find("NOT COMPARED"), std::string::npos) << output_;
}

TEST_F(Damaged, TensorLostFromTheFile) {
  Replace("\"lm.layer0.out\"", "\"lm.layer0.oux\"");
  EXPECT_EQ(Run(), 1);
  EXPECT_NE(output_.find("lm.layer0.out"), std::string::npos) << output_;
}

TEST_F(Damaged, OtherInstruction) {
  Json info = folder_.ReadJson("golden.json");
  info["instruction"] = "close the top drawer";
  folder_.WriteJson("golden.json", info);
  EXPECT_EQ(Run(), 1);
}

// What golden.json repeats of the ids and the prompt counts as much as the tensors.
TEST_F(Damaged, OtherGeneratedIds) {
  const Json good = folder_.ReadJson("golden.json");
  const auto expect_bad = [&](const Json& ids, const char* verdict) {
    Json info = good;
    info["generated_ids"] = ids;
    folder_.WriteJson("golden.json", info);
    for (const bool bf16 : {false, true}) {
      EXPECT_EQ(Run(!bf16, bf16), 1) << output_;
      EXPECT_NE(output_.find("json.generated_ids"), std::string::npos) << output_;
      EXPECT_NE(output_.find(verdict), std::string::npos) << output_;
    }
  };
  Json ids = good["generated_ids"];
  ids[3] = ids[3].get<int>() + 1;
  expect_bad(ids, "MISS");
  ids = good["generated_ids"];
  ids.push_back(31788);
  expect_bad(ids, "has 8 ids, the tensor has 7");
  ids.erase(6);
  ids.erase(6);
  expect_bad(ids, "has 6 ids, the tensor has 7");
  expect_bad("none", "expected an array");
  expect_bad(Json::array(), "is empty");
}

TEST_F(Damaged, OtherPrompt) {
  const Json good = folder_.ReadJson("golden.json");
  const auto prompt = good["prompt"].get<std::string>();
  const auto expect_bad = [&](const Json& value) {
    Json info = good;
    info["prompt"] = value;
    folder_.WriteJson("golden.json", info);
    EXPECT_EQ(Run(), 1) << output_;
    EXPECT_NE(output_.find("json.prompt"), std::string::npos) << output_;
  };
  std::string other = prompt;
  other.replace(other.find("top"), 3, "low");
  expect_bad(other);
  expect_bad(prompt + "!");
  expect_bad("");
  expect_bad(7);
  // A record without the two is as good as its tensors.
  Json info = good;
  info.erase("prompt");
  info.erase("generated_ids");
  folder_.WriteJson("golden.json", info);
  EXPECT_EQ(Run(), 0) << output_;
}

class DamagedOft : public Damaged {
 protected:
  DamagedOft() : Damaged("variants/oft_three") {}
};

TEST_F(DamagedOft, OneWrongValue) {
  EXPECT_EQ(Run(true, true), 0) << output_;
  const std::string bytes = folder_.Read("golden.safetensors");
  for (const char* stage : {"vision.projected", "normalized_actions", "lm.final_norm"}) {
    Add(stage, 1e-3F);
    EXPECT_EQ(Run(), 1) << stage;
    EXPECT_NE(output_.find("MISS"), std::string::npos) << output_;
    folder_.Write("golden.safetensors", bytes);
  }
  Add("bf16.normalized_actions", 10);
  EXPECT_EQ(Run(), 0) << output_;
  EXPECT_EQ(Run(false, true), 1);
  EXPECT_NE(output_.find("no rounding to bf16 does that"), std::string::npos) << output_;
}

TEST_F(DamagedOft, OtherInputs) {
  const Json good = folder_.ReadJson("golden.json");
  const auto run = [&](const char* key, const Json& value) {
    Json info = good;
    info[key] = value;
    if (std::string_view(key) == "prompt") info.erase("instruction");
    folder_.WriteJson("golden.json", info);
    return Run();
  };
  EXPECT_EQ(run("instruction", "wave"), 1);
  EXPECT_EQ(run("num_images", 2), 1);
  EXPECT_EQ(run("num_images", 4), 1);
  EXPECT_EQ(run("chunk", 5), 1);
  EXPECT_EQ(run("platform", "libero"), 1);
  EXPECT_EQ(run("platform", "moon"), 1);
  EXPECT_EQ(run("statistics_key", "nobody"), 1);
  EXPECT_EQ(run("statistics_key", "aloha"), 0) << output_;
  // The reference records the prompt around the instruction.
  EXPECT_EQ(run("prompt", "In: What action should the robot take to fold the towel?\nOut:"), 0)
      << output_;
  EXPECT_EQ(run("prompt", "In: What action should the robot take to wave?\nOut:"), 1);
  EXPECT_EQ(run("prompt", "fold the towel"), 1);
}

// Of every lerobot policy: a value of each kind of tensor moved, a tensor renamed, one nobody
// knows.
class DamagedPolicy : public Damaged, public testing::WithParamInterface<const char*> {
 protected:
  DamagedPolicy() : Damaged(GetParam()) {}
};

TEST_P(DamagedPolicy, IsNoticed) {
  ASSERT_EQ(Run(), 0) << output_;
  DropTensorList();
  const std::string bytes = folder_.Read("golden.safetensors");
  const bool fast = std::string_view(GetParam()) == "pi0_fast";
  std::vector<std::string> moved = {"prefix.embs", "prefix.k.0", "prefix.v.2", "actions",
                                    "actions_normalized"};
  if (fast) {
    moved.insert(moved.end(), {"logits", "logit_margin", "fast2.decoded"});
  } else {
    moved.insert(moved.end(), {"state_raw", "state_normalized", "pixels.1", "pixels.2", "noise",
                               "vision.features.0", "prefix.final_norm_out", "step1.time",
                               "step3.x_t", "step9.v_t", "step9.suffix_embs", "step0.suffix_out"});
  }
  if (std::string_view(GetParam()) == "pi05") moved.emplace_back("step9.adarms_cond");
  if (std::string_view(GetParam()) == "smolvla") {
    moved.insert(moved.end(),
                 {"longest.actions", "image_special.actions", "image_special.prefix_embs"});
  }
  for (const std::string& name : moved) {
    // Of pi0's step the first row is the state's, which is not computed to its end.
    if (name == "step0.suffix_out" && std::string_view(GetParam()) == "pi0") continue;
    Add(name, name == "state_raw" ? 0.5F : 1e-3F);
    EXPECT_EQ(Run(), 1) << name;
    EXPECT_NE(output_.find("MISS"), std::string::npos) << output_;
    folder_.Write("golden.safetensors", bytes);
  }
  Replace("\"prefix.k.1\"", "\"prefix.k.9\"");
  EXPECT_EQ(Run(), 1);
  EXPECT_NE(output_.find("NOT COMPARED"), std::string::npos) << output_;
  folder_.Write("golden.safetensors", bytes);
  Replace("\"prefix.v.1\"", "\"prefax.v.1\"");
  EXPECT_EQ(Run(), 1);
  EXPECT_NE(output_.find("nothing is known of it"), std::string::npos) << output_;
  folder_.Write("golden.safetensors", bytes);
  Replace("\"image.wrist_u8\"", "\"image.shoes_u8\"");
  EXPECT_EQ(Run(), 1);
  EXPECT_NE(output_.find("image.shoes_u8: the model has no such camera"), std::string::npos)
      << output_;
}

INSTANTIATE_TEST_SUITE_P(Policies, DamagedPolicy,
                         testing::Values("smolvla", "pi0", "pi05", "pi0_fast"),
                         [](const auto& info) { return std::string(info.param); });

class DamagedMixed : public Damaged {
 protected:
  explicit DamagedMixed(const std::string& policy = "smolvla")
      : Damaged("variants/" + policy + "_mixed") {}
};

// A record sets the tolerance of BF16 itself, up to what rounding may do.
TEST_F(DamagedMixed, RecordOfBf16) {
  EXPECT_EQ(Run(false, true), 0) << output_;
  Json info = folder_.ReadJson("golden.json");
  info.erase("bf16_vs_fp32_max_abs");
  folder_.WriteJson("golden.json", info);
  const std::string bytes = folder_.Read("golden.safetensors");
  for (const float far : {10.0F, 1e6F, std::numeric_limits<float>::quiet_NaN()}) {
    Add("bf16.actions", far);
    EXPECT_EQ(Run(), 0) << output_;
    EXPECT_EQ(Run(false, true), 1) << far << "\n" << output_;
    folder_.Write("golden.safetensors", bytes);
    Add("actions", far);
    EXPECT_EQ(Run(false, true), 1) << far << "\n" << output_;
    folder_.Write("golden.safetensors", bytes);
  }
}

// Rows behind the state are padding up to a stated length; any other length is none.
TEST_F(DamagedMixed, OtherPrefixLength) {
  Json config = folder_.ReadJson("checkpoint/config.json");
  for (const int length : {-1, 0, 199, 201}) {
    config["prefix_length"] = length;
    folder_.WriteJson("checkpoint/config.json", config);
    EXPECT_EQ(Run(), 1) << length;
    EXPECT_NE(output_.find("prefix.embs"), std::string::npos) << output_;
  }
}

class DamagedFast : public DamagedMixed {
 protected:
  DamagedFast() : DamagedMixed("pi0_fast") {}
};

// An answer that ends early: what is recorded behind its end are zeros, or nothing.
TEST_F(DamagedFast, BehindTheEnd) {
  ASSERT_EQ(Run(true, true), 0) << output_;
  const Json good = folder_.ReadJson("golden.json");
  Json ids = good["generated"];
  const auto run = [&] {
    Json info = good;
    info["generated"] = ids;
    folder_.WriteJson("golden.json", info);
    return Run();
  };
  ids.back() = 7;
  EXPECT_EQ(run(), 1) << output_;
  while (ids.size() > 13) ids.erase(ids.size() - 1);
  EXPECT_EQ(run(), 0) << output_;
  ids.erase(12);
  EXPECT_EQ(run(), 1) << output_;
}

TEST_F(Damaged, TruncatedGolden) {
  const std::string bytes = folder_.Read("golden.safetensors");
  folder_.Write("golden.safetensors", bytes.substr(0, bytes.size() - 1));
  EXPECT_EQ(Run(), 1);
  folder_.Write("golden.safetensors", "");
  EXPECT_EQ(Run(), 1);
}

TEST_F(Damaged, MissingFiles) {
  folder_.Remove("golden.json");
  EXPECT_EQ(Run(), 1);
  EXPECT_NE(output_.find("golden.json"), std::string::npos) << output_;
}

TEST_F(Damaged, MissingShard) {
  folder_.Remove("checkpoint/model-00002-of-00003.safetensors");
  EXPECT_EQ(Run(), 1);
  EXPECT_NE(output_.find("model-00002-of-00003"), std::string::npos) << output_;
}

// A weight off by one bf16 step somewhere in the trunk.
TEST_F(Damaged, OneWrongWeight) {
  const std::string shard = "checkpoint/model-00001-of-00003.safetensors";
  std::string bytes = folder_.Read(shard);
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const Json index = Json::parse(bytes.substr(8, header));
  const std::string name = "vision_backbone.featurizer.blocks.1.mlp.fc1.weight";
  ASSERT_TRUE(index.contains(name));
  const size_t at = 8 + header + index[name]["data_offsets"][0].get<size_t>();
  bytes[at] = static_cast<char>(bytes[at] ^ 0x40);
  folder_.Write(shard, bytes);
  EXPECT_EQ(Run(), 1);
}

}  // namespace
}  // namespace saccade
