// What a step is made of never shows in its results: chunks, batches, neighbours, earlier traffic.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "recording_tap.h"
#include "tests/golden/support/setup.h"
#include "tests/golden/support/step_runner.h"

namespace saccade {
namespace {

constexpr uint32_t kActions = 7;

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

// Bits, not values: -0 and 0 differ, NaN equals itself.
bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

ModelImage Frame(const Model& model, uint32_t seed) {
  Rgb8Image image;
  image.width = 120 + seed * 13;
  image.height = 90 + seed * 7;
  for (uint32_t i = 0; i < image.width * image.height * 3; ++i) {
    image.rgb.push_back(static_cast<uint8_t>((i * (2 * seed + 3) + (i >> 7) * 11) & 0xff));
  }
  PixelRows rows(image);
  return ValueOf(model.Preprocess(0, rows));
}

struct Param {
  BackendConfig backend;
  DType compute;
};

std::vector<Param> Params() {
  std::vector<Param> out;
  for (const BackendConfig& backend : AllBackends()) {
    out.push_back({backend, DType::kF32});
    out.push_back({backend, DType::kBf16});
  }
  return out;
}

// Everything one request leaves behind.
struct Trace {
  std::vector<int32_t> tokens;
  std::vector<float> logits;
  std::vector<std::vector<float>> cache;  // k and v per layer
};

class Steps : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    loaded_ = ValueOf(
        LoadFrom(DataDir() + "/openvla/checkpoint", GetParam().backend, GetParam().compute));
    ASSERT_NE(loaded_.model, nullptr);
  }
  const Model& model() const { return *loaded_.model; }
  std::unique_ptr<StepRunner> Runner(const StepLimits& limits) {
    return ValueOf(StepRunner::Create(*loaded_.backend, model(), limits));
  }
  void ReadCache(StepRunner& runner, uint32_t s, Trace& trace) {
    for (uint32_t layer = 0; layer < model().spec().kv.layers; ++layer) {
      const StepRunner::LayerCache cache =
          ValueOf(runner.ReadCache(s, layer, runner.prompt_tokens(s) + kActions - 1));
      trace.cache.push_back(cache.k);
      trace.cache.push_back(cache.v);
    }
  }
  Trace Solo(StepRunner& runner, uint32_t s, const Prompt& prompt, const ModelImage& frame,
             uint32_t chunk) {
    RecordingTap tap(*loaded_.backend, {"lm.logits"});
    Trace trace;
    trace.tokens = ValueOf(runner.Act(s, prompt, frame, kActions, chunk, &tap));
    trace.logits = ValueOf(tap.Rows("lm.logits")).values;
    ReadCache(runner, s, trace);
    return trace;
  }
  // Eight requests in shared steps of slices of `layers` layers, against each alone in one piece.
  void MixedBatch(uint32_t layers);
  static void ExpectSame(const Trace& a, const Trace& b) {
    EXPECT_EQ(a.tokens, b.tokens);
    EXPECT_TRUE(SameBits(a.logits, b.logits));
    ASSERT_EQ(a.cache.size(), b.cache.size());
    for (size_t i = 0; i < a.cache.size(); ++i) {
      EXPECT_TRUE(SameBits(a.cache[i], b.cache[i])) << "layer " << i / 2;
    }
  }

  LoadedModel loaded_;
};

TEST_P(Steps, ChunkedPrefillIsOneShot) {
  const Prompt prompt = ValueOf(model().BuildPrompt({"put the red block into the bowl"}));
  const ModelImage frame = Frame(model(), 1);
  const auto whole = Runner({});
  const Trace expected = Solo(*whole, 0, prompt, frame, 512);
  for (const uint32_t chunk : {16u, 64u, 100u, 257u}) {
    StepLimits limits;
    limits.rows = 300;
    const auto runner = Runner(limits);
    ExpectSame(Solo(*runner, 0, prompt, frame, chunk), expected);
  }
}

// Cut between any two layers, with stage tensors as they are in one piece.
TEST_P(Steps, SlicesAreOnePass) {
  const Prompt prompt = ValueOf(model().BuildPrompt({"put the red block into the bowl"}));
  const ModelImage frame = Frame(model(), 1);
  const std::set<std::string, std::less<>> stages = {
      "lm.logits", "vision.features", "lm.layer0.out",   "lm.final_norm.in",
      "lm.embeds", "prefill.k.1",     "vision.projected"};
  const auto run = [&](const StepLimits& limits, uint32_t chunk, RecordingTap& tap) {
    const auto runner = Runner(limits);
    Trace trace;
    trace.tokens = ValueOf(runner->Act(0, prompt, frame, kActions, chunk, &tap));
    ReadCache(*runner, 0, trace);
    return trace;
  };
  RecordingTap whole_tap(*loaded_.backend, stages);
  const Trace whole = run({}, 512, whole_tap);
  for (const uint32_t layers : {1u, 2u, 3u}) {
    StepLimits limits;
    limits.layers = layers;
    RecordingTap tap(*loaded_.backend, stages);
    ExpectSame(run(limits, 512, tap), whole);
    for (const std::string& stage : stages) {
      const auto expected = whole_tap.Rows(stage);
      const auto actual = tap.Rows(stage);
      ASSERT_TRUE(expected.ok() && actual.ok()) << stage;
      EXPECT_TRUE(SameBits(actual->values, expected->values)) << stage << ", " << layers;
    }
    RecordingTap chunked(*loaded_.backend, {"lm.logits"});
    ExpectSame(run(limits, 57, chunked), whole);
  }
}

void Steps::MixedBatch(uint32_t layers) {
  constexpr uint32_t kSequences = 8;
  StepLimits limits;
  limits.layers = layers;
  limits.sequences = kSequences;
  limits.frames = 3;
  limits.rows = 400;
  limits.logit_rows = kSequences;
  const auto runner = Runner(limits);
  std::vector<Prompt> prompts;
  std::vector<ModelImage> frames;
  std::vector<Trace> expected;
  for (uint32_t s = 0; s < kSequences; ++s) {
    prompts.push_back(ValueOf(model().BuildPrompt({"do thing number " + std::string(s + 1, 'x')})));
    frames.push_back(Frame(model(), s));
    const auto solo = Runner({});
    expected.push_back(Solo(*solo, 0, prompts[s], frames[s], 512));
  }

  // Frames in batches of three, then chunks of many sizes and single decode rows in one step.
  for (uint32_t s = 0; s < kSequences; ++s) runner->Start(s, prompts[s]);
  for (uint32_t begin = 0; begin < kSequences; begin += limits.frames) {
    std::vector<uint32_t> ids;
    for (uint32_t s = begin; s < std::min(kSequences, begin + limits.frames); ++s) ids.push_back(s);
    ASSERT_OK(runner->Encode(ids, std::span(frames).subspan(begin, ids.size())));
  }
  std::vector<uint32_t> done(kSequences, 0);
  std::vector<std::vector<float>> logits(kSequences);
  for (uint32_t step = 0; step < 200; ++step) {
    std::vector<StepRunner::Part> parts;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < kSequences; ++i) {
      const uint32_t s = (i + step) % kSequences;
      const uint32_t prompt = runner->prompt_tokens(s);
      if (done[s] == prompt + kActions - 1) continue;
      StepRunner::Part part{s, done[s], 1, true};
      if (done[s] < prompt) {
        part.count = std::min(prompt - done[s], 5 + 37 * s % 120);
        part.sample = part.begin + part.count == prompt;
      }
      if (rows + part.count > limits.rows) continue;
      rows += part.count;
      done[s] += part.count;
      parts.push_back(part);
    }
    if (parts.empty()) break;
    RecordingTap tap(*loaded_.backend, {"lm.logits"});
    ASSERT_OK(runner->Forward(parts, &tap));
    const absl::StatusOr<RecordingTap::Stage> stage = tap.Rows("lm.logits");
    int64_t row = 0;
    for (const StepRunner::Part& part : parts) {
      if (!part.sample) continue;
      ASSERT_TRUE(stage.ok());
      const float* from = stage->values.data() + row++ * stage->columns;
      logits[part.sequence].insert(logits[part.sequence].end(), from, from + stage->columns);
    }
  }
  for (uint32_t s = 0; s < kSequences; ++s) {
    Trace trace;
    trace.tokens = ValueOf(runner->Tokens(s));
    trace.logits = logits[s];
    ReadCache(*runner, s, trace);
    ExpectSame(trace, expected[s]);
  }
}

TEST_P(Steps, MixedBatchIsSolo) { MixedBatch(0); }

TEST_P(Steps, SlicedMixedBatchIsSolo) { MixedBatch(1); }

// The same request after other traffic on the same blocks, slots and scratch.
TEST_P(Steps, EarlierTrafficLeavesNothing) {
  const Prompt prompt = ValueOf(model().BuildPrompt({"open the drawer"}));
  const Prompt other = ValueOf(model().BuildPrompt({"wave, and then push all of the blue cups"}));
  const ModelImage frame = Frame(model(), 2);
  const auto runner = Runner({});
  const Trace first = Solo(*runner, 0, prompt, frame, 512);
  (void)Solo(*runner, 0, other, Frame(model(), 5), 96);
  ExpectSame(Solo(*runner, 0, prompt, frame, 512), first);
}

// StepRunner's arena has exactly the stated bytes; a step at every limit must fit.
TEST_P(Steps, WorkspaceBoundHolds) {
  const Prompt prompt = ValueOf(model().BuildPrompt({"go"}));
  for (const auto& [sequences, rows] : {std::pair{1u, 1u}, {3u, 7u}, {2u, 33u}}) {
    StepLimits limits;
    limits.sequences = sequences;
    limits.frames = sequences;
    limits.rows = rows;
    limits.logit_rows = sequences;
    const auto runner = Runner(limits);
    std::vector<uint32_t> ids;
    std::vector<ModelImage> frames;
    std::vector<StepRunner::Part> parts;
    for (uint32_t s = 0; s < sequences; ++s) {
      runner->Start(s, prompt);
      ids.push_back(s);
      frames.push_back(Frame(model(), s));
      parts.push_back({s, 0, rows / sequences + (s < rows % sequences ? 1 : 0), true});
    }
    ASSERT_OK(runner->Encode(ids, frames));
    ASSERT_OK(runner->Forward(parts));
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, Steps, testing::ValuesIn(Params()), [](const auto& info) {
  return info.param.backend.name + "_" + std::string(DTypeName(info.param.compute));
});

}  // namespace
}  // namespace saccade
