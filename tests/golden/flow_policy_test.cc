// SmolVLA, pi0, pi0.5 and pi0-FAST against the tensors that lerobot's implementations produce,
// stage by stage, on every backend and precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "model/safetensors.h"
#include "recording_tap.h"
#include "tests/golden/support/flow_runner.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

#define ASSERT_OK(expr)                                              \
  do {                                                               \
    const absl::Status ok_status = (expr);                           \
    ASSERT_TRUE(ok_status.ok()) << std::string(ok_status.message()); \
  } while (false)

template <class T>
T ValueOf(absl::StatusOr<T> value) {
  EXPECT_TRUE(value.ok()) << std::string(value.status().message());
  return value.ok() ? *std::move(value) : T();
}

struct Policy {
  std::string name;
  std::vector<std::string> images;  // of the cameras that have a frame, in prompt order
  uint64_t missing = 0;             // bits of the others
  std::string task;
  std::string projected;  // the golden's name of what comes out of the projector
  uint32_t trunk_layers = 0;
};

const std::vector<Policy>& Policies() {
  static const std::vector<Policy> policies = {
      {"smolvla",
       {"image.top_u8", "image.wrist_u8"},
       0,
       "pick up the red block and put it in the bowl",
       "vision.connector.0",
       4},
      {"pi0",
       {"image.base_u8", "image.wrist_u8"},
       4,
       "Pick up the_red block",
       "vision.projected.0",
       3},
      {"pi05",
       {"image.base_u8", "image.wrist_u8"},
       4,
       "Pick up the_red block",
       "vision.projected.0",
       3},
  };
  return policies;
}

// golden.safetensors of a policy, as F32.
class Golden {
 public:
  explicit Golden(const std::string& name)
      : file_(SafetensorsFile::Open(DataDir() + "/" + name + "/golden.safetensors")) {
    EXPECT_TRUE(file_.ok()) << std::string(file_.status().message());
    meta_ = ValueOf(ReadJsonFile(DataDir() + "/" + name + "/golden.json"));
  }
  TensorView View(const std::string& name) const { return ValueOf(file_->Tensor(name)); }
  std::vector<float> Get(const std::string& name) const {
    const TensorView view = View(name);
    std::vector<float> out;
    for (int64_t i = 0; i < view.numel(); ++i) {
      switch (view.dtype) {
        case DType::kF32:
          out.push_back(view.As<const float>()[i]);
          break;
        case DType::kF64:
          out.push_back(static_cast<float>(view.As<const double>()[i]));
          break;
        case DType::kU8:
          out.push_back(view.As<const uint8_t>()[i]);
          break;
        case DType::kI64:
          out.push_back(static_cast<float>(view.As<const int64_t>()[i]));
          break;
        default:
          ADD_FAILURE() << name << ": dtype";
      }
    }
    return out;
  }
  // The rows of a tensor of `width` columns that the prefix's mask keeps.
  std::vector<float> Kept(const std::string& name, size_t width) const {
    const std::vector<float> mask = Get("prefix.pad_masks");
    const std::vector<float> all = Get(name);
    std::vector<float> out;
    EXPECT_EQ(all.size(), mask.size() * width) << name;
    for (size_t row = 0; row < mask.size(); ++row) {
      if (mask[row] != 0) {
        out.insert(out.end(), all.begin() + static_cast<std::ptrdiff_t>(row * width),
                   all.begin() + static_cast<std::ptrdiff_t>((row + 1) * width));
      }
    }
    return out;
  }
  double Meta(const std::string& key) const { return meta_.at(key).get<double>(); }

 private:
  absl::StatusOr<SafetensorsFile> file_;
  Json meta_;
};

double Largest(const std::vector<float>& values) {
  double largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(double{value}));
  return largest;
}

// A tolerance < 0: that of a stage, 2e-5 or 4e-6 of the largest value.
void ExpectNear(const std::string& what, const std::vector<float>& got,
                const std::vector<float>& want, double tolerance = -1) {
  ASSERT_EQ(got.size(), want.size()) << what;
  if (tolerance < 0) tolerance = std::max(2e-5, 4e-6 * Largest(want));
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double distance = std::abs(double{got[i]} - double{want[i]});
    worst = std::isnan(distance) ? distance : std::max(worst, distance);
    if (std::isnan(distance)) break;
  }
  EXPECT_LE(worst, tolerance) << what;
}

ModelImage Preprocessed(const Model& model, uint32_t camera, const TensorView& image) {
  const auto height = static_cast<uint32_t>(image.dim(0));
  const auto width = static_cast<uint32_t>(image.dim(1));
  PixelRows rows(width, height, {image.As<const uint8_t>(), static_cast<size_t>(image.numel())});
  return ValueOf(model.Preprocess(camera, rows));
}

struct Input {
  Prompt prompt;
  std::vector<float> state;  // normalised
  std::vector<ModelImage> images;
};

Input InputOf(const Model& model, const Policy& policy, const Golden& golden) {
  Input out;
  out.state = ValueOf(model.NormalizeState(golden.Get("state_raw"), ""));
  PromptInput input;
  input.instruction = policy.task;
  input.state = out.state;
  input.missing_cameras = policy.missing;
  out.prompt = ValueOf(model.BuildPrompt(input));
  for (uint32_t camera = 0; camera < policy.images.size(); ++camera) {
    out.images.push_back(Preprocessed(model, camera, golden.View(policy.images[camera])));
  }
  return out;
}

std::vector<FlowRunner::Frame> FramesOf(uint32_t s, const Input& input) {
  std::vector<FlowRunner::Frame> frames;
  for (uint32_t camera = 0; camera < input.images.size(); ++camera) {
    frames.push_back({s, camera, &input.images[camera]});
  }
  return frames;
}

std::vector<float> AsF32(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

// The actions of one sequence, in robot units.
std::vector<float> Act(const LoadedModel& loaded, FlowRunner& runner, const Input& input,
                       std::vector<float> x) {
  const uint32_t s = 0;
  runner.Start(s, input.prompt, input.state);
  EXPECT_TRUE(runner.Encode(FramesOf(s, input)).ok());
  EXPECT_TRUE(runner.Prefill(std::span(&s, 1)).ok());
  EXPECT_TRUE(runner.DenoiseAll(s, x).ok());
  return AsF32(ValueOf(loaded.model->FinishActions(x, "", {})).values);
}

// ---- host side

class FlowHost : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    loaded_ = ValueOf(LoadFrom(DataDir() + "/" + policy().name + "/checkpoint",
                               RefBackendConfig(false), DType::kF32));
    ASSERT_NE(loaded_.model, nullptr);
  }
  static const Policy& policy() { return Policies()[GetParam()]; }
  const Model& model() const { return *loaded_.model; }

  LoadedModel loaded_;
};

TEST_P(FlowHost, InputsAreTheReferences) {
  const Golden golden(policy().name);
  const ModelSpec& spec = model().spec();
  const Input input = InputOf(model(), policy(), golden);
  const std::vector<float> normalized = golden.Get("state_normalized");
  ExpectNear("state", {input.state.begin(), input.state.begin() + 7}, normalized, 1e-6);
  for (size_t i = 7; i < input.state.size(); ++i) EXPECT_EQ(input.state[i], 0.0F);

  std::vector<float> text;
  uint32_t vision = 0;
  for (const PromptSegment& segment : input.prompt.segments) {
    text.insert(text.end(), segment.tokens.begin(), segment.tokens.end());
    if (segment.modality != Modality::kVision) continue;
    EXPECT_EQ(segment.camera, vision);
    ++vision;
  }
  EXPECT_EQ(vision, 2u);
  const std::vector<float> tokens = golden.Get("tokens");
  const std::vector<float> mask = golden.Get("tokens_mask");
  std::vector<float> want;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (mask[i] != 0) want.push_back(tokens[i]);
  }
  EXPECT_EQ(text, want);

  for (uint32_t camera = 0; camera < 2; ++camera) {
    const std::vector<float> pixels = golden.Get("pixels." + std::to_string(camera));
    const ModelImage& image = input.images[camera];
    ASSERT_EQ(image.rgb.size(), pixels.size() * sizeof(float));
    std::vector<float> got(pixels.size());
    const size_t plane = got.size() / 3;  // [3, H, W] there, [H, W, 3] here
    for (size_t i = 0; i < got.size(); ++i) {
      std::memcpy(&got[i % 3 * plane + i / 3], image.rgb.data() + i * sizeof(float), sizeof(float));
    }
    ExpectNear("pixels", got, pixels, 1e-6);
  }
  for (const std::string step : {"step0", "step9"}) {
    std::vector<float> embedded(spec.head.time_width);
    model().EmbedTime(golden.Get(step + ".time")[0], embedded);
    ExpectNear(step + ".time_emb", embedded, golden.Get(step + ".time_emb"), 1e-7);
  }
  const ActionChunk chunk = ValueOf(model().FinishActions(
      std::vector<float>(size_t{spec.head.horizon} * spec.head.width, 0.25F), "", {}));
  EXPECT_EQ(chunk.horizon, 10u);
  EXPECT_EQ(chunk.normalized, std::vector<float>(60, 0.25F));
  EXPECT_EQ(chunk.values.size(), 60u);
}

TEST_P(FlowHost, SpecSaysWhatAStepNeeds) {
  const ModelSpec& spec = model().spec();
  EXPECT_EQ(spec.family, policy().name);
  EXPECT_EQ(spec.head.kind, HeadKind::kFlow);
  EXPECT_EQ(spec.head.horizon, 10u);
  EXPECT_EQ(spec.head.width, 32u);
  EXPECT_EQ(spec.head.steps, 10u);
  EXPECT_EQ(spec.head.state_row, policy().name == "pi0");
  EXPECT_EQ(spec.state_dim, 7u);
  EXPECT_EQ(spec.state_width, policy().name == "pi05" ? 7u : 32u);
  EXPECT_EQ(spec.trunk_layers.size(), policy().trunk_layers + 1);
  EXPECT_EQ(spec.head.layers.size(), policy().trunk_layers);
  EXPECT_EQ(spec.kv.layers, policy().name == "smolvla" ? 6u : 3u);
  EXPECT_EQ(spec.cameras.size(), policy().name == "smolvla" ? 2u : 3u);
  EXPECT_EQ(spec.cameras.front().name, policy().name == "smolvla" ? "top" : "base_0_rgb");
  EXPECT_EQ(spec.cameras.front().dtype, DType::kF32);
  ASSERT_EQ(spec.statistics.size(), 1u);
  EXPECT_EQ(spec.statistics.front().action_dim, 6u);
  EXPECT_GT(spec.max_positions, 60u);
}

TEST_P(FlowHost, RefusesWhatDoesNotFit) {
  const Golden golden(policy().name);
  const Input input = InputOf(model(), policy(), golden);
  const auto refused = [&](auto change, std::string_view field) {
    PromptInput bad;
    bad.instruction = policy().task;
    bad.state = input.state;
    change(bad);
    const absl::StatusOr<Prompt> prompt = model().BuildPrompt(bad);
    return prompt.status().code() == absl::StatusCode::kInvalidArgument &&
           GetErrorInfo(prompt.status()).field == field;
  };
  EXPECT_TRUE(refused([](PromptInput& i) { i.state = {}; }, "state"));
  EXPECT_TRUE(refused([](PromptInput& i) { i.missing_cameras = ~uint64_t{0}; }, "cameras"));
  EXPECT_TRUE(refused([](PromptInput& i) { i.instruction = "\xff"; }, "instruction"));
  const std::string endless(1000, 'x');
  EXPECT_TRUE(refused([&](PromptInput& i) { i.instruction = endless; }, "instruction"));
  EXPECT_FALSE(model().BuildPromptFromTokens(std::vector<int32_t>{}, 0).ok());
  EXPECT_FALSE(model().BuildPromptFromTokens(std::vector<int32_t>{1 << 20}, 0).ok());
  EXPECT_FALSE(model().BuildPromptFromTokens(std::vector<int32_t>(1000, 1), 0).ok());
  const absl::StatusOr<Prompt> fewer =
      model().BuildPromptFromTokens(std::vector<int32_t>{5, 6}, ~uint64_t{1});
  ASSERT_TRUE(fewer.ok()) << fewer.status();
  EXPECT_EQ(std::count_if(fewer->segments.begin(), fewer->segments.end(),
                          [](const PromptSegment& s) { return s.modality == Modality::kVision; }),
            1);
  EXPECT_FALSE(model().FinishActions(std::vector<float>(5), "", {}).ok());
  std::vector<float> sick(320, 0.0F);
  sick[3] = std::nanf("");
  EXPECT_EQ(model().FinishActions(sick, "", {}).status().code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(model().NormalizeState(std::vector<float>(6), "").ok());
  EXPECT_FALSE(model().NormalizeState(std::vector<float>(7), "nowhere").ok());
}

INSTANTIATE_TEST_SUITE_P(Policies, FlowHost, testing::Values(0, 1, 2),
                         [](const auto& info) { return Policies()[info.param].name; });

// ---- every backend

struct Param {
  size_t policy;
  BackendConfig backend;
  DType compute;
};

std::vector<Param> Params() {
  std::vector<Param> out;
  for (size_t policy = 0; policy < Policies().size(); ++policy) {
    for (const BackendConfig& backend : AllBackends()) {
      out.push_back({policy, backend, DType::kF32});
      out.push_back({policy, backend, DType::kBf16});
    }
  }
  return out;
}

class FlowStages : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    loaded_ = ValueOf(LoadFrom(DataDir() + "/" + policy().name + "/checkpoint", GetParam().backend,
                               GetParam().compute));
    ASSERT_NE(loaded_.model, nullptr);
  }
  static const Policy& policy() { return Policies()[GetParam().policy]; }
  static bool exact() { return GetParam().compute == DType::kF32; }
  const Model& model() const { return *loaded_.model; }
  std::unique_ptr<FlowRunner> Runner(const FlowLimits& limits) {
    return ValueOf(FlowRunner::Create(*loaded_.backend, model(), limits));
  }

  LoadedModel loaded_;
};

TEST_P(FlowStages, MatchTheReference) {
  const Golden golden(policy().name);
  const Input input = InputOf(model(), policy(), golden);
  const ModelSpec& spec = model().spec();
  const auto runner = Runner({});
  const uint32_t s = 0;
  runner->Start(s, input.prompt, input.state);

  RecordingTap seen(*loaded_.backend, {"vision.features", "vision.projected", "lm.embeds"});
  const std::vector<FlowRunner::Frame> frames = FramesOf(s, input);
  ASSERT_OK(runner->Encode(frames, &seen));
  ASSERT_OK(runner->Prefill(std::span(&s, 1), &seen));
  const std::vector<float> positions = golden.Kept("prefix.position_ids", 1);
  ASSERT_EQ(positions.size(), runner->prompt_tokens(s));
  for (size_t i = 0; i < positions.size(); ++i) ASSERT_EQ(positions[i], static_cast<float>(i));
  if (exact()) {
    const std::vector<float> features = golden.Get("vision.features.0");
    std::vector<float> first = ValueOf(seen.Rows("vision.features")).values;
    first.resize(features.size());  // of both frames
    ExpectNear("vision.features", first, features);
    const std::vector<float> projected = golden.Get(policy().projected);
    first = ValueOf(seen.Rows("vision.projected")).values;
    first.resize(projected.size());
    // The connector of SmolVLA, before the embeddings' scale.
    if (policy().name == "smolvla") {
      for (float& value : first) value /= std::sqrt(static_cast<float>(spec.hidden));
    }
    ExpectNear("vision.projected", first, projected);
    ExpectNear("prefix.embs", ValueOf(seen.Rows("lm.embeds")).values,
               golden.Kept("prefix.embs", spec.hidden));
    const size_t width = size_t{spec.kv.kv_heads} * spec.kv.head_dim;
    for (uint32_t layer = 0; layer < policy().trunk_layers; ++layer) {
      const FlowRunner::LayerCache cache = ValueOf(runner->ReadCache(s, layer));
      const std::string n = std::to_string(layer);
      ExpectNear("prefix.k." + n, cache.k, golden.Kept("prefix.k." + n, width));
      ExpectNear("prefix.v." + n, cache.v, golden.Kept("prefix.v." + n, width));
    }
  }

  std::vector<float> x = golden.Get("noise");
  for (uint32_t i = 0; i < spec.head.steps; ++i) {
    const std::string step = "step" + std::to_string(i);
    RecordingTap tap(*loaded_.backend, {"step.x_t", "step.v_t", "step.time_emb", "step.suffix_embs",
                                        "step.suffix_out", "step.adarms_cond"});
    const float t = golden.Get(step + ".time")[0];
    EXPECT_EQ(t, static_cast<float>(1.0 + i * (-1.0 / spec.head.steps)));
    const FlowRunner::Item item{s, &x, t, static_cast<float>(-1.0 / spec.head.steps)};
    ASSERT_OK(runner->Denoise(std::span(&item, 1), &tap));
    if (!exact()) continue;
    ExpectNear(step + ".x_t", ValueOf(tap.Rows("step.x_t")).values, golden.Get(step + ".x_t"));
    ExpectNear(step + ".v_t", ValueOf(tap.Rows("step.v_t")).values, golden.Get(step + ".v_t"));
    if (i != 0 && i != 9) continue;
    ExpectNear(step + ".time_emb", ValueOf(tap.Rows("step.time_emb")).values,
               golden.Get(step + ".time_emb"));
    ExpectNear(step + ".suffix_embs", ValueOf(tap.Rows("step.suffix_embs")).values,
               golden.Get(step + ".suffix_embs"));
    // Of the actions' rows alone: the state's goes nowhere.
    std::vector<float> out = golden.Get(step + ".suffix_out");
    const std::vector<float> got = ValueOf(tap.Rows("step.suffix_out")).values;
    out.erase(out.begin(), out.end() - static_cast<std::ptrdiff_t>(got.size()));
    ExpectNear(step + ".suffix_out", got, out);
    if (policy().name == "pi05") {
      ExpectNear(step + ".adarms_cond", ValueOf(tap.Rows("step.adarms_cond")).values,
                 golden.Get(step + ".adarms_cond"));
    }
  }
  const ActionChunk chunk = ValueOf(model().FinishActions(x, "", {}));
  const double tolerance = exact() ? 2e-6 : 3 * golden.Meta("bf16_vs_fp32_max_abs");
  ExpectNear("actions", AsF32(chunk.values), golden.Get("actions"), tolerance);
  if (exact()) ExpectNear("normalized", chunk.normalized, golden.Get("actions_normalized"), 2e-6);
}

// What shares a step, and where passes are cut, never shows.
TEST_P(FlowStages, BatchesAndSlicesChangeNoBits) {
  const Golden golden(policy().name);
  const Input input = InputOf(model(), policy(), golden);
  const ModelSpec& spec = model().spec();
  constexpr uint32_t kSequences = 3;
  const std::vector<std::string> tasks = {policy().task, "open the drawer", "wave"};
  std::vector<Input> inputs;
  std::vector<std::vector<float>> noise;
  for (uint32_t s = 0; s < kSequences; ++s) {
    Input one = input;
    for (float& value : one.state) value *= 1.0F - 0.25F * static_cast<float>(s);
    if (s == 2) {  // without the last frame
      one.images.pop_back();
    }
    PromptInput prompt;
    prompt.instruction = tasks[s];
    prompt.state = one.state;
    prompt.missing_cameras = policy().missing | (s == 2 ? 2 : 0);
    one.prompt = ValueOf(model().BuildPrompt(prompt));
    inputs.push_back(std::move(one));
    std::vector<float> x = golden.Get("noise");
    std::rotate(x.begin(), x.begin() + std::ptrdiff_t{s} * 17, x.end());
    noise.push_back(std::move(x));
  }
  constexpr uint32_t kSteps = 3;
  const float dt = -0.1F;
  // Flow times of a sequence's steps: all its own, but for one that two share.
  const auto time = [](uint32_t s, uint32_t i) {
    return 1.0F - 0.1F * static_cast<float>(i) - (s == 2 ? 0.25F : 0.0F);
  };
  std::vector<std::vector<float>> expected;
  std::vector<FlowRunner::LayerCache> caches;
  for (uint32_t s = 0; s < kSequences; ++s) {
    const auto alone = Runner({});
    const uint32_t zero = 0;
    alone->Start(0, inputs[s].prompt, inputs[s].state);
    for (const FlowRunner::Frame& frame : FramesOf(0, inputs[s])) {
      ASSERT_OK(alone->Encode(std::span(&frame, 1)));
    }
    ASSERT_OK(alone->Prefill(std::span(&zero, 1)));
    std::vector<float> x = noise[s];
    for (uint32_t i = 0; i < kSteps; ++i) {
      const FlowRunner::Item item{0, &x, time(s, i), dt};
      ASSERT_OK(alone->Denoise(std::span(&item, 1)));
    }
    expected.push_back(x);
    caches.push_back(ValueOf(alone->ReadCache(0, spec.kv.layers - 1)));
  }
  for (const uint32_t layers : {0u, 1u, 2u}) {
    SCOPED_TRACE(testing::Message() << "slices of " << layers);
    FlowLimits limits;
    limits.sequences = kSequences;
    limits.layers = layers;
    const auto runner = Runner(limits);
    std::vector<FlowRunner::Frame> frames;
    for (uint32_t s = 0; s < kSequences; ++s) {
      runner->Start(s, inputs[s].prompt, inputs[s].state);
      for (const FlowRunner::Frame& frame : FramesOf(s, inputs[s])) frames.push_back(frame);
    }
    ASSERT_OK(runner->Encode(frames));
    const std::vector<uint32_t> all = {1, 2, 0};
    ASSERT_OK(runner->Prefill(all));
    std::vector<std::vector<float>> x = noise;
    for (uint32_t i = 0; i < kSteps; ++i) {
      const std::vector<FlowRunner::Item> items = {
          {2, &x[2], time(2, i), dt}, {0, &x[0], time(0, i), dt}, {1, &x[1], time(1, i), dt}};
      ASSERT_OK(runner->Denoise(items));
    }
    for (uint32_t s = 0; s < kSequences; ++s) {
      EXPECT_EQ(std::memcmp(x[s].data(), expected[s].data(), x[s].size() * sizeof(float)), 0)
          << "sequence " << s;
      const FlowRunner::LayerCache cache = ValueOf(runner->ReadCache(s, spec.kv.layers - 1));
      EXPECT_EQ(cache.k, caches[s].k) << "sequence " << s;
      EXPECT_EQ(cache.v, caches[s].v) << "sequence " << s;
    }
  }
}

// A latent that is not a number is its own item's.
TEST_P(FlowStages, ASickItemStaysAlone) {
  const Golden golden(policy().name);
  const Input input = InputOf(model(), policy(), golden);
  FlowLimits limits;
  limits.sequences = 2;
  const auto runner = Runner(limits);
  std::vector<FlowRunner::Frame> frames;
  const std::vector<uint32_t> both = {0, 1};
  for (const uint32_t s : both) {
    runner->Start(s, input.prompt, input.state);
    for (const FlowRunner::Frame& frame : FramesOf(s, input)) frames.push_back(frame);
  }
  ASSERT_OK(runner->Encode(frames));
  ASSERT_OK(runner->Prefill(both));
  std::vector<float> alone = golden.Get("noise");
  std::vector<float> beside = alone;
  std::vector<float> sick = alone;
  sick[40] = std::nanf("");
  const FlowRunner::Item one{0, &alone, 1.0F, -0.1F};
  ASSERT_OK(runner->Denoise(std::span(&one, 1)));
  const std::vector<FlowRunner::Item> items = {{1, &sick, 1.0F, -0.1F}, {0, &beside, 1.0F, -0.1F}};
  ASSERT_OK(runner->Denoise(items));
  EXPECT_EQ(std::memcmp(alone.data(), beside.data(), alone.size() * sizeof(float)), 0);
  EXPECT_TRUE(std::isnan(sick[40]));
  const absl::Status status = model().FinishActions(sick, "", {}).status();
  EXPECT_EQ(GetErrorInfo(status).reason, Reason::kNonFinite);
}

INSTANTIATE_TEST_SUITE_P(Policies, FlowStages, testing::ValuesIn(Params()), [](const auto& info) {
  return Policies()[info.param.policy].name + "_" + info.param.backend.name + "_" +
         std::string(DTypeName(info.param.compute));
});

// ---- variants of SmolVLA

TEST(SmolVla, PaddingOfTheTextChangesNothing) {
  const Golden golden("smolvla");
  const Policy& policy = Policies()[0];
  const LoadedModel loaded =
      ValueOf(LoadFrom(DataDir() + "/smolvla/checkpoint", RefBackendConfig(false), DType::kF32));
  const Input input = InputOf(*loaded.model, policy, golden);
  std::vector<float> text;
  for (const PromptSegment& segment : input.prompt.segments) {
    text.insert(text.end(), segment.tokens.begin(), segment.tokens.end());
  }
  EXPECT_EQ(text, golden.Get("longest.tokens"));
  const auto runner = ValueOf(FlowRunner::Create(*loaded.backend, *loaded.model, {}));
  ExpectNear("longest.actions", Act(loaded, *runner, input, golden.Get("noise")),
             golden.Get("longest.actions"), 2e-6);
}

TEST(SmolVla, SpecialTokensStandAroundFrames) {
  const Golden golden("smolvla");
  const FolderCopy folder(DataDir() + "/smolvla/checkpoint");
  Json config = folder.ReadJson("config.json");
  config["add_image_special_tokens"] = true;
  folder.WriteJson("config.json", config);
  for (const DType compute : {DType::kF32, DType::kBf16}) {
    for (const BackendConfig& backend : AllBackends()) {
      SCOPED_TRACE(backend.name);
      const LoadedModel loaded = ValueOf(LoadFrom(folder.path(), backend, compute));
      ASSERT_NE(loaded.model, nullptr);
      const Input input = InputOf(*loaded.model, Policies()[0], golden);
      const auto runner = ValueOf(FlowRunner::Create(*loaded.backend, *loaded.model, {}));
      const std::vector<float> actions = Act(loaded, *runner, input, golden.Get("noise"));
      ExpectNear("image_special.actions", actions, golden.Get("image_special.actions"),
                 compute == DType::kF32 ? 2e-6 : 3 * golden.Meta("bf16_vs_fp32_max_abs"));
      if (compute == DType::kBf16) continue;
      RecordingTap tap(*loaded.backend, {"lm.embeds"});
      const uint32_t s = 0;
      ASSERT_OK(runner->Prefill(std::span(&s, 1), &tap));
      // The reference's rows: three cameras of 3 + 4, then 48 of text and the state; those of the
      // empty camera's frame and of padding are masked.
      const std::vector<float> all = golden.Get("image_special.prefix_embs");
      const std::vector<float> mask = golden.Get("tokens_mask");
      const size_t width = loaded.model->spec().hidden;
      std::vector<float> want;
      for (size_t row = 0; row < 70; ++row) {
        if (row >= 16 && row < 20) continue;
        if (row >= 21 && row < 69 && mask[row - 21] == 0) continue;
        want.insert(want.end(), all.begin() + static_cast<std::ptrdiff_t>(row * width),
                    all.begin() + static_cast<std::ptrdiff_t>((row + 1) * width));
      }
      ExpectNear("image_special.prefix_embs", ValueOf(tap.Rows("lm.embeds")).values, want);
    }
  }
}

// ---- pi0-FAST: the same trunk, with a head

class PiFast : public testing::TestWithParam<Param> {};

std::vector<Param> FastParams() {
  std::vector<Param> out;
  for (const BackendConfig& backend : AllBackends()) {
    out.push_back({0, backend, DType::kF32});
    out.push_back({0, backend, DType::kBf16});
  }
  return out;
}

TEST_P(PiFast, WritesTheReferencesTokens) {
  const Golden golden("pi0_fast");
  const LoadedModel loaded =
      ValueOf(LoadFrom(DataDir() + "/pi0_fast/checkpoint", GetParam().backend, GetParam().compute));
  ASSERT_NE(loaded.model, nullptr);
  const ModelSpec& spec = loaded.model->spec();
  EXPECT_EQ(spec.head.kind, HeadKind::kTokens);
  EXPECT_EQ(spec.max_action_tokens, 24u);
  EXPECT_EQ(spec.stop_tokens.size(), 1u);
  const Policy policy = {
      "pi0_fast", {"image.base_u8", "image.wrist_u8"}, 4, "Pick up the_red block", "", 3};
  const Input input = InputOf(*loaded.model, policy, golden);
  const bool exact = GetParam().compute == DType::kF32;
  // In slices of a layer as in one piece.
  for (const uint32_t layers : {0u, 1u}) {
    FlowLimits limits;
    limits.layers = layers;
    const auto runner = ValueOf(FlowRunner::Create(*loaded.backend, *loaded.model, limits));
    const uint32_t s = 0;
    runner->Start(s, input.prompt, input.state);
    RecordingTap tap(*loaded.backend, {"lm.embeds", "lm.logits"});
    ASSERT_OK(runner->Encode(FramesOf(s, input)));
    const std::vector<int32_t> tokens = ValueOf(runner->Generate(s, 24, &tap));
    // BF16 may leave the reference's path, not by its first token.
    std::vector<int32_t> want;
    for (const float id : golden.Get("generated_ids")) want.push_back(static_cast<int32_t>(id));
    ASSERT_EQ(tokens.size(), want.size());
    if (!exact) {
      EXPECT_EQ(tokens.front(), want.front());
      continue;
    }
    EXPECT_EQ(tokens, want);
    ExpectNear("logits", ValueOf(tap.Rows("lm.logits")).values, golden.Get("logits"));
    // Masked: the third camera (16 tokens) and the padding between text and BOS.
    const std::vector<float> mask = golden.Get("tokens_mask");
    const auto kept = [&](const std::string& name, size_t width) {
      const std::vector<float> all = golden.Get(name);
      std::vector<float> out;
      for (size_t row = 0; row < 129; ++row) {
        if ((row >= 32 && row < 48) || (row >= 48 && row < 128 && mask[row - 48] == 0)) continue;
        out.insert(out.end(), all.begin() + static_cast<std::ptrdiff_t>(row * width),
                   all.begin() + static_cast<std::ptrdiff_t>((row + 1) * width));
      }
      return out;
    };
    const std::vector<float> embeds = kept("prefix.embs", spec.hidden);
    std::vector<float> got = ValueOf(tap.Rows("lm.embeds")).values;
    got.resize(embeds.size());  // of the prompt
    ExpectNear("prefix.embs", got, embeds);
    for (uint32_t layer = 0; layer < 3; ++layer) {
      const FlowRunner::LayerCache cache = ValueOf(runner->ReadCache(s, layer));
      const std::string n = std::to_string(layer);
      ExpectNear("prefix.k." + n, cache.k, kept("prefix.k." + n, 16));
      ExpectNear("prefix.v." + n, cache.v, kept("prefix.v." + n, 16));
    }
    const ActionChunk chunk =
        ValueOf(loaded.model->DecodeActions(tokens, "", InvalidTokenPolicy::kClamp));
    ExpectNear("actions", AsF32(chunk.values), golden.Get("actions"), 2e-6);
    ExpectNear("normalized", chunk.normalized, golden.Get("actions_normalized"), 2e-6);
    // 24 tokens are no whole chunk.
    EXPECT_FALSE(loaded.model->DecodeActions(tokens, "", InvalidTokenPolicy::kFail).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, PiFast, testing::ValuesIn(FastParams()), [](const auto& info) {
  return info.param.backend.name + "_" + std::string(DTypeName(info.param.compute));
});

TEST(PiFastHost, ReadsTheReferencesAnswers) {
  const Golden golden("pi0_fast");
  const LoadedModel loaded =
      ValueOf(LoadFrom(DataDir() + "/pi0_fast/checkpoint", RefBackendConfig(false), DType::kF32));
  ASSERT_NE(loaded.model, nullptr);
  const Model& model = *loaded.model;
  for (const std::string fast : {"fast0", "fast1", "fast2", "fast3"}) {
    std::vector<int32_t> ids;
    for (const float id : golden.Get(fast + ".sequence")) ids.push_back(static_cast<int32_t>(id));
    const ActionChunk chunk = ValueOf(model.DecodeActions(ids, "", InvalidTokenPolicy::kFail));
    EXPECT_EQ(chunk.horizon, 10u);
    EXPECT_EQ(chunk.tokens, ids);
    ExpectNear(fast, chunk.normalized, golden.Get(fast + ".decoded"), 1e-6);
    EXPECT_EQ(std::vector<int32_t>{ids.back()}, model.spec().stop_tokens);
    EXPECT_TRUE(model.IsActionToken(ids[ids.size() - 2]));
    EXPECT_FALSE(model.IsActionToken(ids.back()));
    EXPECT_FALSE(model.IsActionToken(ids.front()));
  }
  const std::vector<int32_t> sick = {1893, kInvalidSample};
  const absl::Status status = model.DecodeActions(sick, "", InvalidTokenPolicy::kClamp).status();
  EXPECT_EQ(GetErrorInfo(status).reason, Reason::kNonFinite);
  EXPECT_FALSE(model.FinishActions(std::vector<float>(320), "", {}).ok());
}

}  // namespace
}  // namespace saccade
