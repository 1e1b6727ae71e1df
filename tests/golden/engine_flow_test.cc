// Flow policies through the engine: the reference's actions, the same bits in any company, one
// prefix pass whatever is asked of it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "model/checkpoint.h"
#include "model/safetensors.h"
#include "session/prompt_timeline.h"
#include "tests/golden/support/engine_serving.h"
#include "tests/golden/support/flow_runner.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

struct Policy {
  const char* name;
  std::vector<const char*> images;  // by camera; those after them are missing
  const char* task;
};
const std::vector<Policy> kPolicies = {
    {"smolvla", {"image.top_u8", "image.wrist_u8"}, "pick up the red block and put it in the bowl"},
    {"pi0", {"image.base_u8", "image.wrist_u8"}, "Pick up the_red block"},
    {"pi05", {"image.base_u8", "image.wrist_u8"}, "Pick up the_red block"},
};

struct ServerSetup {
  bool guarded_ref = false;
  int threads = 1;
  DType compute = DType::kF32;
  Micros step_ceiling{0};
};

// What a request is made of; what is not said is the golden's.
struct Ask {
  size_t policy = 0;
  std::string task{};
  int picture = 0;  // 0: the golden's frames
  float state = 0;  // added to every value of the golden's
  uint32_t steps = 0;
  uint32_t samples = 1;
  uint64_t seed = 0;
  bool golden_noise = false;
  bool prefix_only = false;
  uint32_t delay = 0;  // actions that are committed: of CommittedOf
  CommitMode mode = CommitMode::kInpaint;
};

// [delay, 32] normalised actions of a 6-dimensional robot.
std::vector<float> CommittedOf(uint32_t delay) {
  std::vector<float> committed(size_t{delay} * 32, 0.0F);
  for (uint32_t a = 0; a < delay; ++a) {
    for (uint32_t d = 0; d < 6; ++d) {
      committed[size_t{a} * 32 + d] = 0.25F * static_cast<float>(a) - 0.1F * static_cast<float>(d);
    }
  }
  return committed;
}

class Served {
 public:
  explicit Served(const ServerSetup& setup) {
    std::vector<ServedModel> models;
    std::unique_ptr<Backend> backend;
    if (setup.guarded_ref) {
      RefOptions options;
      options.guarded = true;
      backend = MakeRefBackend(options).value();
    } else {
      CpuOptions options;
      options.threads = setup.threads;
      backend = MakeCpuBackend(options).value();
    }
    for (const Policy& policy : kPolicies) {
      const std::string dir = DataDir() + "/" + policy.name;
      golden_.push_back(SafetensorsFile::Open(dir + "/golden.safetensors").value());
      const Checkpoint checkpoint = Checkpoint::Open(dir + "/checkpoint").value();
      ModelOptions options;
      options.compute = setup.compute;
      ServedModel model;
      model.name = policy.name;
      model.instances.push_back(LoadModel(checkpoint, *backend, options).value());
      model.workers.emplace_back(0);
      model.kv.num_blocks = 200;
      for (PartitionQuota& quota : model.kv.partitions) quota.cap = model.kv.num_blocks;
      model.embedding_slots = 16;
      model.max_sequences = 32;
      models.push_back(std::move(model));
    }
    engine_ = StartPatientEngine(std::move(backend), std::move(models), clock_, setup.step_ceiling);
  }

  std::shared_ptr<CollectSink> Submit(const Ask& ask) {
    const ModelRef served = engine_->models()[ask.policy];
    const Model& model = *served->instances.front();
    const ModelSpec& spec = model.spec();
    ActRequest request;
    request.state = Floats(ask.policy, "state_raw");
    for (float& value : request.state) value += ask.state;
    const auto normalized =
        std::make_shared<const std::vector<float>>(model.NormalizeState(request.state, "").value());
    PromptInput input;
    const std::string task = ask.task.empty() ? kPolicies[ask.policy].task : ask.task;
    input.instruction = task;
    input.state = *normalized;
    for (size_t camera = kPolicies[ask.policy].images.size(); camera < spec.cameras.size();
         ++camera) {
      input.missing_cameras |= uint64_t{1} << camera;
    }
    const Prompt prompt = model.BuildPrompt(input).value();
    TimelineBuilder builder = served->NewTimeline();
    const absl::Status added = AddPrompt(
        prompt, spec, [&](uint32_t camera) { return FrameOf(ask, camera, model); }, normalized,
        builder, ask.prefix_only ? PromptPart::kPrefix : PromptPart::kAll);
    EXPECT_TRUE(added.ok()) << added;
    request.session = SessionId(1);
    request.model = served->id;
    request.klass = ClassId(0);
    request.arrival = clock_.Now();
    request.timeline = builder.Build();
    request.statistics_key = spec.statistics.front().key;
    request.samples = ask.samples;
    request.seed = ask.seed;
    request.flow_steps = ask.steps;
    request.prefix_only = ask.prefix_only;
    FlowInput flow;
    flow.state = *normalized;
    flow.committed = CommittedOf(ask.delay);
    flow.commit_mode = ask.mode;
    if (ask.golden_noise) flow.noise = Floats(ask.policy, "noise");
    request.flow = std::make_shared<const FlowInput>(std::move(flow));
    auto sink = std::make_shared<CollectSink>();
    request.sink = sink;
    EXPECT_TRUE(engine_->Submit(std::move(request)).ok());
    return sink;
  }
  std::vector<std::vector<double>> Values(const Ask& ask) { return ValuesOf(*Submit(ask)); }
  static ActResult ResultOf(CollectSink& sink) {
    absl::StatusOr<ActResult> result = sink.Take();
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(sink.tokens(), 0u) << "a flow has no tokens";
    return result.ok() ? *std::move(result) : ActResult();
  }
  static std::vector<std::vector<double>> ValuesOf(CollectSink& sink) {
    const ActResult result = ResultOf(sink);
    std::vector<std::vector<double>> all;
    for (const ActionChunk& chunk : result.chunks) all.push_back(chunk.values);
    return all;
  }

  std::vector<float> Floats(size_t policy, const std::string& name) const {
    const TensorView view = golden_[policy].Tensor(name).value();
    const auto* values = view.As<const float>();
    return {values, values + view.numel()};
  }
  ModelImage Picture(const Ask& ask, uint32_t camera, const Model& model) const {
    const TensorView image =
        golden_[ask.policy].Tensor(kPolicies[ask.policy].images[camera]).value();
    std::vector<uint8_t> bytes(image.As<const uint8_t>(),
                               image.As<const uint8_t>() + image.numel());
    for (size_t i = 0; i < bytes.size() && ask.picture != 0; ++i) {
      bytes[i] = static_cast<uint8_t>(bytes[i] + i * static_cast<size_t>(ask.picture) * 7);
    }
    PixelRows rows(static_cast<uint32_t>(image.dim(1)), static_cast<uint32_t>(image.dim(0)), bytes);
    return model.Preprocess(camera, rows).value();
  }
  Engine& engine() { return *engine_; }
  // Work of steps since the last call.
  StepShape Work() {
    const RecentWork recent = engine_->Recent().value();
    StepShape sum;
    for (const StepRecord& step : recent.steps) {
      if (step.id.value() <= seen_) continue;
      seen_ = step.id.value();
      sum.frames += step.shape.frames;
      sum.prefill_rows += step.shape.prefill_rows;
      sum.decode_rows += step.shape.decode_rows;
    }
    return sum;
  }

 private:
  ContentRef FrameOf(const Ask& ask, uint32_t camera, const Model& model) {
    const auto key = std::tuple(ask.policy, ask.picture, camera);
    if (const auto it = frames_.find(key); it != frames_.end()) return it->second;
    ModelImage pixels = Picture(ask, camera, model);
    auto content = std::make_shared<Content>();
    content->width = pixels.width;
    content->height = pixels.height;
    content->digest = DigestBytes("frame.v1", pixels.rgb);
    content->rgb = std::move(pixels.rgb);
    return frames_[key] = content;
  }

  SteadyClock clock_;
  std::vector<SafetensorsFile> golden_;
  std::map<std::tuple<size_t, int, uint32_t>, ContentRef> frames_;
  std::unique_ptr<Engine> engine_;
  uint64_t seen_ = 0;
};
double Farthest(const std::vector<double>& got, const std::vector<float>& want) {
  EXPECT_EQ(got.size(), want.size());
  double farthest = got.size() == want.size() ? 0 : HUGE_VAL;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    farthest = std::max(farthest, std::abs(got[i] - static_cast<double>(want[i])));
  }
  return farthest;
}

TEST(EngineFlow, AnswersAreTheReferences) {
  for (const bool guarded : {false, true}) {
    Served served({.guarded_ref = guarded, .threads = 2});
    for (size_t policy = 0; policy < kPolicies.size(); ++policy) {
      SCOPED_TRACE(kPolicies[policy].name);
      const auto values = served.Values({.policy = policy, .golden_noise = true});
      ASSERT_EQ(values.size(), 1u);
      EXPECT_LE(Farthest(values[0], served.Floats(policy, "actions")), 2e-6);
    }
    EXPECT_TRUE(served.engine().CheckInvariants().ok());
  }
}

TEST(EngineFlow, Bf16IsWithinThreeTimesTheReferences) {
  Served served({.compute = DType::kBf16});
  for (size_t policy = 0; policy < kPolicies.size(); ++policy) {
    SCOPED_TRACE(kPolicies[policy].name);
    const Json info =
        ReadJsonFile(DataDir() + "/" + kPolicies[policy].name + "/golden.json").value();
    const auto values = served.Values({.policy = policy, .golden_noise = true});
    ASSERT_EQ(values.size(), 1u);
    EXPECT_LE(Farthest(values[0], served.Floats(policy, "actions")),
              3 * info.at("bf16_vs_fp32_max_abs").get<double>());
  }
}

// Requests of all three policies, at different steps of different counts, over shared and own
// prefixes.
std::vector<Ask> Mix() {
  std::vector<Ask> asks;
  for (int i = 0; i < 24; ++i) {
    Ask ask;
    ask.policy = static_cast<size_t>(i) % 3;
    ask.picture = i % 4;
    ask.task = i % 5 == 0 ? "" : "do thing number " + std::to_string(i % 7);
    ask.state = static_cast<float>(i % 3) * 0.125F;
    ask.steps = i % 2 == 0 ? 0 : static_cast<uint32_t>(1 + i % 6);
    ask.samples = i % 6 == 5 ? 4 : 1;
    ask.delay = static_cast<uint32_t>(i % 4);
    ask.mode = i % 8 < 4 ? CommitMode::kInpaint : CommitMode::kPerActionTime;
    ask.seed = static_cast<uint64_t>(i) * 77;
    asks.push_back(ask);
  }
  return asks;
}

TEST(EngineFlow, AnyMixIsSolo) {
  for (const DType compute : {DType::kF32, DType::kBf16}) {
    const ServerSetup alone{.compute = compute};
    std::vector<std::vector<std::vector<double>>> expected;
    {
      // One after the other, each with nothing cached.
      Served served(alone);
      for (const Ask& ask : Mix()) {
        served.engine().ForgetIdle();
        expected.push_back(served.Values(ask));
      }
    }
    for (const ServerSetup& setup :
         {ServerSetup{.threads = 2, .compute = compute},
          ServerSetup{.threads = 3, .compute = compute, .step_ceiling = Micros(500)}}) {
      Served served(setup);
      for (int round = 0; round < 2; ++round) {  // cold, and all prefixes cached
        std::vector<std::shared_ptr<CollectSink>> sinks;
        for (const Ask& ask : Mix()) sinks.push_back(served.Submit(ask));
        for (size_t i = 0; i < sinks.size(); ++i) {
          EXPECT_EQ(Served::ValuesOf(*sinks[i]), expected[i]) << "request " << i;
        }
      }
      EXPECT_TRUE(served.engine().CheckInvariants().ok());
    }
  }
}

// Real-time chunking against the published formulas, step by step on the host.
TEST(EngineFlow, ChunksGoOnFromCommittedActions) {
  Served served({});
  for (size_t policy = 0; policy < kPolicies.size(); ++policy) {
    SCOPED_TRACE(kPolicies[policy].name);
    const std::string dir = DataDir() + "/" + kPolicies[policy].name;
    const LoadedModel loaded =
        LoadFrom(dir + "/checkpoint", RefBackendConfig(false), DType::kF32).value();
    const Model& model = *loaded.model;
    const ActionHeadSpec& head = model.spec().head;
    const auto runner = FlowRunner::Create(*loaded.backend, model, {}).value();
    const std::vector<float> state =
        model.NormalizeState(served.Floats(policy, "state_raw"), "").value();
    PromptInput input;
    input.instruction = kPolicies[policy].task;
    input.state = state;
    if (policy > 0) input.missing_cameras = 4;
    runner->Start(0, model.BuildPrompt(input).value(), state);
    std::vector<ModelImage> images;
    for (uint32_t camera = 0; camera < 2; ++camera) {
      images.push_back(served.Picture({.policy = policy}, camera, model));
    }
    const std::vector<FlowRunner::Frame> frames = {{0, 0, &images[0]}, {0, 1, &images[1]}};
    ASSERT_TRUE(runner->Encode(frames).ok());
    const uint32_t sequence = 0;
    ASSERT_TRUE(runner->Prefill(std::span(&sequence, 1)).ok());
    for (const CommitMode mode : {CommitMode::kInpaint, CommitMode::kPerActionTime}) {
      for (const uint32_t delay : {1u, 4u, 9u}) {
        const std::vector<float> committed = CommittedOf(delay);
        const std::vector<float> noise = served.Floats(policy, "noise");
        std::vector<float> x = noise;
        const auto put = [&](float t) {  // x_t = t * noise + (1 - t) * action
          for (size_t k = 0; k < committed.size(); ++k) {
            x[k] = t * noise[k] + (1 - t) * committed[k];
          }
        };
        const uint32_t steps = head.steps;
        for (uint32_t i = 0; i < steps; ++i) {
          const auto t = static_cast<float>(1.0 + i * (-1.0 / steps));
          put(mode == CommitMode::kInpaint ? t : 0);
          FlowRunner::Item item{0, &x, t, static_cast<float>(-1.0 / steps)};
          if (mode == CommitMode::kPerActionTime) item.frozen = delay;
          ASSERT_TRUE(runner->Denoise(std::span(&item, 1)).ok());
        }
        put(0);
        const std::vector<double> expected = model.FinishActions(x, "", {}).value().values;
        const auto values =
            served.Values({.policy = policy, .golden_noise = true, .delay = delay, .mode = mode});
        ASSERT_EQ(values.size(), 1u);
        EXPECT_LE(Farthest(values[0], {expected.begin(), expected.end()}), 1e-5) << delay;
      }
    }
    // Each says something of its own.
    const auto alone = served.Values({.policy = policy, .golden_noise = true});
    const auto inpainted = served.Values({.policy = policy, .golden_noise = true, .delay = 4});
    const auto timed = served.Values(
        {.policy = policy, .golden_noise = true, .delay = 4, .mode = CommitMode::kPerActionTime});
    EXPECT_NE(alone, inpainted);
    EXPECT_NE(inpainted, timed);
  }
}

TEST(EngineFlow, OnePrefixPassPerObservation) {
  Served served({});
  for (size_t policy = 0; policy < kPolicies.size(); ++policy) {
    SCOPED_TRACE(kPolicies[policy].name);
    (void)served.Work();
    (void)served.Values({.policy = policy});
    StepShape work = served.Work();
    EXPECT_EQ(work.frames, 2u);
    EXPECT_EQ(work.decode_rows, 10u);
    EXPECT_GT(work.prefill_rows, 20u);
    // Other seeds, more steps, many samples: nothing of the prefix runs again.
    (void)served.Values({.policy = policy, .steps = 25, .seed = 5});
    (void)served.Values({.policy = policy, .steps = 3, .samples = 8, .seed = 6});
    work = served.Work();
    EXPECT_EQ(work.frames, 0u);
    EXPECT_EQ(work.prefill_rows, 0u);
    EXPECT_EQ(work.decode_rows, 25u + 24);
    // A new state is a row of SmolVLA's prompt, a row of each denoise step of pi0, text of pi0.5.
    (void)served.Values({.policy = policy, .state = 0.5F});
    work = served.Work();
    EXPECT_EQ(work.frames, 0u);
    if (policy == 2) {
      EXPECT_GT(work.prefill_rows, 20u);
    } else {
      EXPECT_EQ(work.prefill_rows, policy == 0 ? 1u : 0u);
    }
  }
}

TEST(EngineFlow, APrefixIsMadeForThoseWhoAskLater) {
  Served served({});
  for (const size_t policy : {0, 1}) {
    SCOPED_TRACE(kPolicies[policy].name);
    const auto expected = served.Values({.policy = policy, .picture = 2});
    (void)served.Work();
    const auto refresh = served.Submit({.policy = policy, .picture = 3, .prefix_only = true});
    EXPECT_TRUE(Served::ResultOf(*refresh).chunks.empty());
    StepShape work = served.Work();
    EXPECT_EQ(work.frames, 2u);
    EXPECT_EQ(work.decode_rows, 0u);
    const auto values = served.Values({.policy = policy, .picture = 3});
    work = served.Work();
    EXPECT_EQ(work.frames, 0u);
    EXPECT_EQ(work.prefill_rows, policy == 0 ? 1u : 0u);
    EXPECT_EQ(work.decode_rows, 10u);
    EXPECT_NE(values, expected);
  }
}

}  // namespace
}  // namespace saccade
