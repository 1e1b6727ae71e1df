#include "model/adapters.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace saccade {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kData = std::string(SACCADE_SOURCE_DIR) + "/tests/data/adapters/";
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<double> Golden(const SafetensorsFile& file, const std::string& name) {
  const TensorView view = file.Tensor(name).value();
  std::vector<double> out;
  for (int64_t i = 0; i < view.numel(); ++i) {
    out.push_back(view.dtype == DType::kF64 ? view.As<const double>()[i]
                                            : static_cast<double>(view.As<const float>()[i]));
  }
  return out;
}

std::vector<float> Floats(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

template <class A, class B>
void ExpectNear(const A& got, const B& want, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << what << i;
}

Json ReadDoc(const fs::path& path) { return ReadJsonFile(path.string()).value(); }

// A private copy of a folder of tests/data/adapters, with changes.
class Folder {
 public:
  explicit Folder(const std::string& from) {
    path_ = fs::temp_directory_path() /
            ("adapters_" +
             std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(path_);
    fs::copy(kData + from, path_);
    fs::permissions(path_, fs::perms::owner_all);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  void Edit(const std::string& name, const std::function<void(Json&)>& change) const {
    Json json = ReadDoc(path_ / name);
    change(json);
    Write(name, json.dump());
  }
  void Write(const std::string& name, const std::string& bytes) const {
    fs::remove(path_ / name);
    std::ofstream(path_ / name, std::ios::binary) << bytes;
  }
  void Remove(const std::string& name) const { fs::remove(path_ / name); }
  absl::StatusOr<std::vector<PolicyAdapters>> Read() const {
    const auto checkpoint = Checkpoint::Open(path_.string());
    if (!checkpoint.ok()) return checkpoint.status();
    return ReadPolicyAdapters(*checkpoint);
  }

 private:
  fs::path path_;
};

std::string Safetensors(const std::vector<std::pair<std::string, std::vector<float>>>& tensors) {
  Json header = Json::object();
  std::string data;
  for (const auto& [name, values] : tensors) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    header[name] = {
        {"dtype", "F32"}, {"shape", {values.size()}}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  std::string out(8, '\0');
  const uint64_t size = text.size();
  std::memcpy(out.data(), &size, 8);
  return out + text + data;
}

struct ModeCase {
  const char* name;
  Normalizer normalizer;
  std::vector<float> state;
  std::vector<float> normalized;
  std::vector<double> action;
  std::vector<double> command;
};

std::vector<ModeCase> ModeCases() {
  // As a field fault has it: x = 5, mean 1, std 2, q01 -3, q99 2 is 2.0 or 2.2, never clamped to 1.
  return {
      {"identity", Normalizer::Identity(2).value(), {5, -7}, {5, -7}, {5, -7}, {5, -7}},
      {"mean_std",
       Normalizer::MeanStd({1, 0}, {2, 0.5}, kLerobotNorm).value(),
       {5, 1},
       {2, 2},
       {2, -3},
       {5, -1.5}},
      {"mean_std of openpi",
       Normalizer::MeanStd({1}, {1}, kOpenPiNorm).value(),
       {5},
       {static_cast<float>(4 / (1 + 1e-6))},
       {2},
       {3 + 2e-6}},
      {"range",
       Normalizer::Range({-3, 0}, {2, 4}, {}, kLerobotNorm).value(),
       {5, 1},
       {2.2F, -0.5F},
       {2.2, -0.5},
       {5, 1}},
      {"range of openpi",
       Normalizer::Range({0}, {1}, {}, kOpenPiNorm).value(),
       {1},
       {static_cast<float>(2 / (1 + 1e-6) - 1)},
       {1},
       {1 + 1e-6}},
      {"range of OpenVLA, masked",
       Normalizer::Range({-3, 0}, {2, 1}, {true, false}, kOpenVlaNorm).value(),
       {2, 0.25F},
       {1, 0.25F},
       {0.5, 0.25},
       {0.75, 0.25}},
      {"range of OFT clips, masked too",
       Normalizer::Range({-3, 0}, {2, 1}, {true, false}, kOftNorm).value(),
       {5, 3},
       {1, 1},
       {1, 3},
       {2 + 1e-8, 3}},
      {"constant, mean_std",
       Normalizer::MeanStd({1}, {0}, kLerobotNorm).value(),
       {1},
       {0},
       {7},
       {1}},
      {"constant, range",
       Normalizer::Range({1}, {1}, {}, kLerobotNorm).value(),
       {1},
       {-1},
       {0.5},
       {1 + 0.75e-8}},
      {"constant, range of OFT",
       Normalizer::Range({1}, {1}, {}, kOftNorm).value(),
       {2},
       {1},
       {0.5},
       {1 + 0.75e-8}},
  };
}

TEST(NormalizerTest, GivesTheValuesOfEachMode) {
  for (const ModeCase& c : ModeCases()) {
    const auto normalized = c.normalizer.Normalize(c.state);
    ASSERT_TRUE(normalized.ok()) << c.name << normalized.status();
    ExpectNear(*normalized, c.normalized, 2e-7, c.name);
    const auto command = c.normalizer.Unnormalize(c.action, c.action.size());
    ASSERT_TRUE(command.ok()) << c.name << command.status();
    // F32 has no 1 + 1e-8.
    ExpectNear(*command, c.command, std::string(c.name).ends_with("OFT") ? 1e-12 : 2e-7, c.name);
  }
}

TEST(NormalizerTest, PadsWithZerosAndCutsActions) {
  const Normalizer n = Normalizer::MeanStd({1, 0}, {2, 1}, kLerobotNorm).value();
  EXPECT_THAT(*n.Normalize(std::vector<float>{5, 1}, 4), ElementsAre(2, 1, 0, 0));
  const std::vector<double> chunk = {1, 2, 9, 9, 3, 4, 9, 9};
  EXPECT_THAT(*n.Unnormalize(chunk, 4), ElementsAre(3, 2, 7, 4));
}

TEST(NormalizerTest, RefusesWhatIsNotFiniteAndSaysWhere) {
  const Normalizer n = Normalizer::MeanStd({1, 0}, {2, 0}, kLerobotNorm).value();
  for (const float bad : {kNan, kInf, -kInf}) {
    const absl::Status status = n.Normalize(std::vector<float>{0, bad}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(GetErrorInfo(status).field, "state");
    EXPECT_THAT(std::string(status.message()), HasSubstr("[1] is not finite"));
    const absl::Status action =
        n.Unnormalize(std::vector<double>{0, 0, 0, static_cast<double>(bad)}, 2).status();
    EXPECT_EQ(action.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(GetErrorInfo(action).reason, Reason::kNonFinite);
    EXPECT_THAT(std::string(action.message()), HasSubstr("action value 1 of step 1"));
  }
  // Of a dimension that never moved; the quotient leaves F32.
  EXPECT_THAT(std::string(n.Normalize(std::vector<float>{0, 1e35F}).status().message()),
              HasSubstr("[1]"));
  EXPECT_EQ(GetErrorInfo(n.Normalize(std::vector<float>{1}).status()).field, "state");
  EXPECT_EQ(n.Unnormalize(std::vector<double>{1, 2, 3}, 2).status().code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(n.Unnormalize(std::vector<double>{1}, 1).status().code(), absl::StatusCode::kInternal);
}

TEST(NormalizerTest, RefusesImpossibleStatistics) {
  const auto text = [](const absl::StatusOr<Normalizer>& made) {
    EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(made.status().message());
  };
  const auto& c = kLerobotNorm;
  EXPECT_THAT(text(Normalizer::MeanStd({}, {}, c)), HasSubstr("0 values"));
  EXPECT_THAT(text(Normalizer::MeanStd({1, 2}, {1}, c)), HasSubstr("std has 1 values"));
  EXPECT_THAT(text(Normalizer::MeanStd({1, 2}, {1, -1}, c)), HasSubstr("dimension 1"));
  EXPECT_THAT(text(Normalizer::MeanStd({kInf}, {1}, c)), HasSubstr("not finite"));
  EXPECT_THAT(text(Normalizer::MeanStd({1e300}, {1}, c)), HasSubstr("not finite"));
  EXPECT_THAT(text(Normalizer::Range({2}, {1}, {}, c)), HasSubstr("above"));
  EXPECT_THAT(text(Normalizer::Range({kNan}, {1}, {}, c)), HasSubstr("not finite"));
  EXPECT_THAT(text(Normalizer::Range({-3e38}, {3e38}, {}, c)), HasSubstr("too far apart"));
  EXPECT_THAT(text(Normalizer::Range({1}, {1}, {true, false}, c)), HasSubstr("mask has 2"));
  EXPECT_THAT(text(Normalizer::Identity(0)), HasSubstr("0 values"));
  EXPECT_THAT(text(Normalizer::Identity(1 << 30)), HasSubstr("expected 1 to 4096"));
}

// Against one state, not step by step.
TEST(RelativeActionsTest, AddTheStateOfTheObservationToEveryStep) {
  std::vector<double> actions = {0.1, 5, 0.1, 6, 0.1, 7};
  ASSERT_TRUE(AddState({true, false}, std::vector<float>{1, 100}, 2, actions).ok());
  ExpectNear(actions, std::vector<double>{1.1, 5, 1.1, 6, 1.1, 7}, 1e-12, "");
  EXPECT_EQ(GetErrorInfo(AddState({false, true}, std::vector<float>{1}, 2, actions)).field,
            "state");
  EXPECT_EQ(AddState({true}, std::vector<float>{1}, 4, actions).code(),
            absl::StatusCode::kInternal);
}

TEST(AlohaTest, TurnsJointsAndConvertsGrippers) {
  std::vector<float> state(15);
  for (size_t i = 0; i < state.size(); ++i) state[i] = static_cast<float>(i + 1);
  state[6] = 0;      // closed: asin((h^2 + s^2 - a^2) / 2hs) at s = 0.01844
  state[13] = 0.5F;  // s = 0.03822
  ASSERT_TRUE(AlohaStateToPi(AlohaVersion::kLerobot, state).ok());
  EXPECT_THAT(std::vector<float>(state.begin(), state.begin() + 6),
              ElementsAre(1, -2, -3, 4, 5, 6));
  EXPECT_THAT(std::vector<float>(state.begin() + 7, state.begin() + 13),
              ElementsAre(8, -9, -10, 11, 12, 13));
  EXPECT_EQ(state[14], 15);
  const double closed =
      std::asin((0.022 * 0.022 + 0.01844 * 0.01844 - 0.036 * 0.036) / (2 * 0.022 * 0.01844));
  const double half =
      std::asin((0.022 * 0.022 + 0.03822 * 0.03822 - 0.036 * 0.036) / (2 * 0.022 * 0.03822));
  EXPECT_NEAR(state[6], (closed - 0.4) / 1.1, 1e-6);
  EXPECT_NEAR(state[13], (half - 0.4) / 1.1, 1e-6);

  std::vector<float> openpi(14, 0.5F);
  ASSERT_TRUE(AlohaStateToPi(AlohaVersion::kOpenPi, openpi).ok());
  EXPECT_NEAR(openpi[13], (half - 0.5476) / (1.6296 - 0.5476), 1e-6);

  // Whatever the stroke, an angle.
  std::vector<float> zero(14, static_cast<float>(-0.01844 / (0.058 - 0.01844)));
  ASSERT_TRUE(AlohaStateToPi(AlohaVersion::kLerobot, zero).ok());
  EXPECT_TRUE(std::isfinite(zero[6]));

  std::vector<double> actions(28, 0.5);
  ASSERT_TRUE(AlohaActionsFromPi(AlohaVersion::kLerobot, 14, actions).ok());
  for (const size_t row : {0, 14}) {
    EXPECT_EQ(actions[row], 0.5);
    EXPECT_EQ(actions[row + 9], -0.5);
    EXPECT_NEAR(actions[row + 6], (0.5 * 1.1 + 0.4 + 0.6213) / 2.1123, 1e-12);
  }
  std::vector<double> radians(14, 0.5);
  ASSERT_TRUE(AlohaActionsFromPi(AlohaVersion::kOpenPi, 14, radians).ok());
  EXPECT_NEAR(radians[13], (0.5 + 0.5476 + 0.6213) / 2.1123, 1e-12);

  EXPECT_EQ(GetErrorInfo(AlohaStateToPi(AlohaVersion::kOpenPi, std::span(state).first(13))).field,
            "state");
  EXPECT_EQ(AlohaActionsFromPi(AlohaVersion::kOpenPi, 7, actions).code(),
            absl::StatusCode::kInternal);
}

TEST(PolicyAdaptersTest, ReproduceTheReferencesStateAndActions) {
  const auto golden = SafetensorsFile::Open(kData + "golden.safetensors");
  ASSERT_TRUE(golden.ok()) << golden.status();
  for (const std::string model : {"smolvla", "pi0", "pi05", "pi0_fast"}) {
    const auto checkpoint = Checkpoint::Open(kData + model);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const auto sets = ReadPolicyAdapters(*checkpoint);
    ASSERT_TRUE(sets.ok()) << sets.status();
    const auto set = FindAdapters(*sets, "");
    ASSERT_TRUE(set.ok()) << set.status();
    EXPECT_EQ((*set)->state.mode(), model == "pi05" ? NormMode::kRange : NormMode::kMeanStd);
    EXPECT_TRUE((*set)->relative.empty());
    const auto state = (*set)->state.Normalize(Floats(Golden(*golden, model + ".state_raw")));
    ASSERT_TRUE(state.ok()) << state.status();
    if (golden->Has(model + ".state_normalized")) {
      ExpectNear(*state, Golden(*golden, model + ".state_normalized"), 0, model + " state ");
    }
    const std::vector<double> normalized = Golden(*golden, model + ".actions_normalized");
    const auto actions = (*set)->action.Unnormalize(normalized, 6);
    ASSERT_TRUE(actions.ok()) << actions.status();
    ExpectNear(*actions, Golden(*golden, model + ".actions"), 1e-7, model + " action ");
  }
}

TEST(PolicyAdaptersTest, ReproduceOpenVlaOft) {
  const auto golden = SafetensorsFile::Open(kData + "golden.safetensors");
  ASSERT_TRUE(golden.ok()) << golden.status();
  const Json file = ReadDoc(kData + "openvla_oft/dataset_statistics.json");
  const JsonView entry =
      JsonView(file, "dataset_statistics.json").Get("libero_spatial_no_noops").value();
  const auto normalizer = [&](const char* group, const char* low, const char* high) {
    StatisticsRange range = ReadStatisticsRange(entry.Get(group).value(), low, high).value();
    return Normalizer::Range(range.low, range.high, range.mask, kOftNorm).value();
  };
  const Normalizer proprio = normalizer("proprio", "q01", "q99");
  const auto state = proprio.Normalize(Floats(Golden(*golden, "openvla_oft.proprio_raw")));
  ASSERT_TRUE(state.ok()) << state.status();
  ExpectNear(*state, Golden(*golden, "openvla_oft.proprio_normalized"), 1e-6, "proprio ");
  const auto actions = normalizer("action", "q01", "q99")
                           .Unnormalize(Golden(*golden, "openvla_oft.normalized_actions"), 7);
  ASSERT_TRUE(actions.ok()) << actions.status();
  // The reference adds 1 in F32 before the range widens it to F64.
  ExpectNear(*actions, Golden(*golden, "openvla_oft.actions"), 2e-8, "action ");
  // ALOHA's bounds.
  EXPECT_THAT(*normalizer("proprio", "min", "max").Normalize(std::vector<float>(8, 1.5F)),
              testing::Each(testing::FloatNear(0, 1e-6)));
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(PolicyAdaptersTest, ReadBuffersOfFoldersWithoutProcessors) {
  Folder folder("smolvla");
  folder.Remove("policy_preprocessor.json");
  folder.Remove("policy_postprocessor.json");
  const std::vector<float> mean7(7, 1), std7(7, 2), mean6(6, 3), std6(6, 4);
  folder.Write("model.safetensors",
               Safetensors({{"normalize_inputs.buffer_observation_state.mean", mean7},
                            {"normalize_inputs.buffer_observation_state.std", std7},
                            {"unnormalize_outputs.buffer_action.mean", mean6},
                            {"unnormalize_outputs.buffer_action.std", std6}}));
  const auto sets = folder.Read();
  ASSERT_TRUE(sets.ok()) << sets.status();
  ASSERT_EQ(sets->size(), 1U);
  EXPECT_EQ(sets->front().key, "default");
  EXPECT_THAT(*sets->front().state.Normalize(std::vector<float>(7, 5)), testing::Each(2.0F));
  EXPECT_THAT(*sets->front().action.Unnormalize(std::vector<double>(6, 1), 6), testing::Each(7.0));

  // One set per robot: one must be named.
  std::vector<std::pair<std::string, std::vector<float>>> tensors;
  for (const std::string variant : {"so100-red", "so100"}) {
    const float shift = variant == "so100" ? 10 : 0;
    tensors.emplace_back("normalize_inputs." + variant + "_buffer_observation_state.mean",
                         std::vector<float>(7, 1 + shift));
    tensors.emplace_back("normalize_inputs." + variant + "_buffer_observation_state.std", std7);
    tensors.emplace_back("unnormalize_outputs." + variant + "_buffer_action.mean", mean6);
    tensors.emplace_back("unnormalize_outputs." + variant + "_buffer_action.std", std6);
  }
  folder.Write("model.safetensors", Safetensors(tensors));
  const auto several = folder.Read();
  ASSERT_TRUE(several.ok()) << several.status();
  const auto so100 = FindAdapters(*several, "so100");
  ASSERT_TRUE(so100.ok());
  EXPECT_THAT(*(*so100)->state.Normalize(std::vector<float>(7, 15)), testing::Each(2.0F));
  for (const char* key : {"", "so101"}) {
    const absl::Status status = FindAdapters(*several, key).status();
    EXPECT_EQ(GetErrorInfo(status).field, "statistics_key");
    EXPECT_THAT(Message(status), HasSubstr("known: so100, so100-red"));
  }

  // The set without a name is called default: another of that name could not be told from it.
  auto twice = tensors;
  for (const auto& [name, values] : tensors) {
    if (name.find("so100_") == std::string::npos) continue;
    for (const std::string key : {"", "default_"}) {
      std::string renamed = name;
      twice.emplace_back(renamed.replace(renamed.find("so100_"), 6, key), values);
    }
  }
  folder.Write("model.safetensors", Safetensors(twice));
  EXPECT_THAT(Message(folder.Read().status()), HasSubstr("two sets of statistics are \"default\""));

  // Freshly made policies hold infinities until statistics are loaded.
  tensors[0].second[3] = kInf;
  folder.Write("model.safetensors", Safetensors(tensors));
  EXPECT_THAT(Message(folder.Read().status()), HasSubstr("dimension 3"));
  tensors.erase(tensors.begin() + 3);
  tensors[0].second[3] = 0;
  folder.Write("model.safetensors", Safetensors(tensors));
  EXPECT_THAT(Message(folder.Read().status()),
              HasSubstr("there is no unnormalize_outputs.so100-red_buffer_action.std"));
}

// Those releases added 1e-8 to every range, not only to one of zero.
TEST(PolicyAdaptersTest, BuffersOfRanges) {
  Folder folder("smolvla");
  folder.Remove("policy_preprocessor.json");
  folder.Remove("policy_postprocessor.json");
  folder.Edit("config.json", [](Json& config) {
    config["normalization_mapping"] = {{"STATE", "MIN_MAX"}, {"ACTION", "MIN_MAX"}};
  });
  const std::vector<float> low7(7, 0), high7 = {1e-6F, 0, 1, 2, 2, 2, 2}, low6(6, -1), high6(6, 3);
  folder.Write("model.safetensors",
               Safetensors({{"normalize_inputs.buffer_observation_state.min", low7},
                            {"normalize_inputs.buffer_observation_state.max", high7},
                            {"unnormalize_outputs.buffer_action.min", low6},
                            {"unnormalize_outputs.buffer_action.max", high6}}));
  const auto sets = folder.Read();
  ASSERT_TRUE(sets.ok()) << sets.status();
  const auto state = sets->front().state.Normalize(std::vector<float>{5e-7F, 0, 0.25F, 0, 1, 2, 3});
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_NEAR((*state)[0], -0.00990099, 1e-6);  // 2 * 5e-7 / 1.01e-6 - 1
  EXPECT_THAT(std::span(*state).subspan(1), testing::ElementsAre(-1, -0.5F, -1, 0, 1, 2));
  EXPECT_THAT(*sets->front().action.Unnormalize(std::vector<double>(6, 0.5), 6),
              testing::Each(2.0));
}

// Steps are found by name, wherever a release puts them.
Json& Step(Json& pipeline, const std::string& name) {
  for (Json& step : pipeline["steps"]) {
    if (step["registry_name"] == name) return step;
  }
  ADD_FAILURE() << "no step " << name;
  return pipeline;
}

TEST(PolicyAdaptersTest, RelativeActionsLeaveNamedJointsAbsolute) {
  Folder folder("pi0");
  folder.Edit("policy_preprocessor.json", [](Json& p) {
    Json& config = Step(p, "relative_actions_processor")["config"];
    config["enabled"] = true;
    config["exclude_joints"] = {"Gripper"};
    config["action_names"] = {"j0", "j1", "left_GRIPPER.pos", "j3"};
  });
  EXPECT_THAT(Message(folder.Read().status()), HasSubstr("one side only"));
  folder.Edit("policy_postprocessor.json",
              [](Json& p) { Step(p, "absolute_actions_processor")["config"]["enabled"] = true; });
  const auto sets = folder.Read();
  ASSERT_TRUE(sets.ok()) << sets.status();
  EXPECT_EQ(sets->front().relative, (std::vector<bool>{true, true, false, true, true, true}));
}

TEST(PolicyAdaptersTest, RefusalsNameFileAndKey) {
  struct Case {
    const char* file;
    std::function<void(Json&)> change;
    const char* message;
  };
  const char* const kPre = "policy_preprocessor.json";
  const char* const kPost = "policy_postprocessor.json";
  const auto config = [](Json& p) -> Json& { return Step(p, "normalizer_processor")["config"]; };
  for (const Case& c : std::vector<Case>{
           {kPre,
            [](Json& p) {
              p["steps"].push_back({{"registry_name", "invert"}});
            },
            "step \"invert\" is not supported"},
           {kPre, [](Json& p) { p["steps"].push_back(Step(p, "normalizer_processor")); },
            "a second normalizer_processor"},
           {kPre, [](Json& p) { p["steps"].clear(); }, "there is no normalizer_processor"},
           {kPre, [&](Json& p) { config(p)["norm_map"]["STATE"] = "LOG"; },
            "norm_map.STATE: normalisation \"LOG\" is not supported"},
           {kPre, [&](Json& p) { config(p)["norm_map"]["STATE"] = nullptr; },
            "norm_map.STATE: expected a value, got null"},
           {kPre, [&](Json& p) { config(p)["norm_map"] = {"STATE"}; },
            "norm_map: expected an object"},
           {kPre, [&](Json& p) { config(p)["norm_map"]["STATE"] = "QUANTILE10"; },
            "there is no observation.state.q10; there are: action.max, action.mean"},
           {kPre, [&](Json& p) { config(p)["eps"] = 0; }, "eps must be in (0, 1)"},
           {kPre, [&](Json& p) { config(p)["features"]["observation.state"]["shape"] = {8}; },
            "expected 8 values"},
           {kPre,
            [&](Json& p) {
              config(p)["features"]["arm"] = {{"type", "STATE"}, {"shape", {2}}};
            },
            "two features of type STATE: arm, observation.state"},
           {kPre, [](Json& p) { Step(p, "normalizer_processor")["state_file"] = "../a"; },
            "not a plain file name"},
           {kPost, [](Json& p) { Step(p, "unnormalizer_processor")["config"]["features"].clear(); },
            "there is no feature of type ACTION"},
       }) {
    Folder folder("smolvla");
    folder.Edit(c.file, c.change);
    const absl::Status status = folder.Read().status();
    EXPECT_FALSE(status.ok()) << c.message;
    EXPECT_THAT(Message(status), HasSubstr(c.message));
  }
  Folder folder("smolvla");
  folder.Remove(kPost);
  EXPECT_THAT(Message(folder.Read().status()), HasSubstr("but no policy_postprocessor.json"));
}

TEST(PolicyAdaptersTest, AModeIsReadAndNotGuessed) {
  Folder folder("smolvla");
  folder.Edit("policy_preprocessor.json", [](Json& p) {
    Step(p, "normalizer_processor")["config"]["norm_map"]["STATE"] = "MIN_MAX";
  });
  folder.Edit("policy_postprocessor.json", [](Json& p) {
    Step(p, "unnormalizer_processor")["config"]["norm_map"].erase("ACTION");
  });
  const auto sets = folder.Read();
  ASSERT_TRUE(sets.ok()) << sets.status();
  EXPECT_EQ(sets->front().state.mode(), NormMode::kRange);
  EXPECT_EQ(sets->front().action.mode(), NormMode::kIdentity);
}

}  // namespace
}  // namespace saccade
