// The promise of the engine as a client sees it: the same request gives the same bits alone, in a
// batch of mixed requests, with any number of threads, cached or not, and after a hundred others.
// Sampling at temperature 1 with a fixed seed makes the ids depend on every logit, so a difference
// anywhere shows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "model/checkpoint.h"
#include "session/prompt_timeline.h"
#include "tests/golden/support/engine_serving.h"

namespace saccade {
namespace {

constexpr int kRequests = 8;
constexpr const char* kInstructions[kRequests] = {"keep your lane, speed 21",
                                                  "change to the left lane, speed 16",
                                                  "overtake the slow car, speed 18",
                                                  "slow down and follow, speed 24",
                                                  "drive fast, speed 22",
                                                  "merge right, speed 21",
                                                  "hurry up, speed 15",
                                                  "keep your lane, speed 21"};

struct ServingSetup {
  bool guarded_ref = false;
  int threads = 1;
  DType compute = DType::kF32;
  Micros step_ceiling{0};
};

class Served {
 public:
  static std::unique_ptr<Served> Make(const ServingSetup& setup) {
    auto served = std::make_unique<Served>();
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
    auto checkpoint = Checkpoint::Open(SACCADE_SOURCE_DIR "/deploy/demo/checkpoint");
    if (!checkpoint.ok()) return nullptr;
    ModelOptions model_options;
    model_options.compute = setup.compute;
    ServedModel model;
    model.name = "demo";
    model.instances.push_back(LoadModel(*checkpoint, *backend, model_options).value());
    model.workers.emplace_back(0);
    model.kv.num_blocks = 400;
    for (PartitionQuota& quota : model.kv.partitions) quota.cap = model.kv.num_blocks;
    model.embedding_slots = 16;
    model.max_sequences = 64;
    std::vector<ServedModel> models;
    models.push_back(std::move(model));
    served->engine_ = StartPatientEngine(std::move(backend), std::move(models), served->clock_,
                                         setup.step_ceiling, 64);
    return served->engine_ == nullptr ? nullptr : std::move(served);
  }

  // Request `which` in [0, 8) is one of the mixed eight; others vary the frame and the words.
  std::shared_ptr<CollectSink> Submit(int which) {
    ActRequest request = RequestOf(which, Modality::kAction);
    auto sink = std::make_shared<CollectSink>();
    request.sink = sink;
    EXPECT_TRUE(engine_->Submit(std::move(request)).ok());
    return sink;
  }

  ActRequest RequestOf(int which, Modality answer) {
    const ModelRef served = engine_->models().front();
    const Model& model = *served->instances.front();
    const ModelSpec& spec = model.spec();
    const Prompt prompt =
        model
            .BuildPrompt({std::string(kInstructions[which % kRequests]) +
                          (which < kRequests ? "" : " and " + std::to_string(which))})
            .value();
    TimelineBuilder builder = served->NewTimeline();
    EXPECT_TRUE(AddPrompt(
                    prompt, spec, [&](uint32_t) { return FrameOf(which, spec); }, nullptr, builder)
                    .ok());
    ActRequest request;
    request.session = SessionId(static_cast<uint64_t>(which));
    request.model = ModelId(0);
    request.klass = ClassId(0);
    request.arrival = clock_.Now();
    request.timeline = builder.SetAnswer(answer).Build();
    request.statistics_key = spec.statistics.front().key;
    request.samples = which % 3 == 2 ? 3 : 1;
    request.temperature = which % 4 == 3 ? 0.0F : 1.0F;
    request.seed = static_cast<uint64_t>(which) * 7919;
    return request;
  }

  // A text for request `which`'s prompt: sampled, or by beam search.
  std::shared_ptr<CollectSink> SubmitText(int which) {
    const ModelRef served = engine_->models().front();
    const ModelSpec& spec = served->spec();
    TextRequest text;
    text.max_new_tokens = 20 + static_cast<uint32_t>(which) % 5;
    text.stop_tokens = spec.stop_tokens;
    text.stop_tokens.push_back(300 + which);
    ActRequest request = RequestOf(which, Modality::kText);
    if (which % 3 == 1) {
      request.samples = 4;
      request.temperature = 0;
      text.beams = BeamOptions{.length_penalty = 0.8F, .results = 3};
    } else {
      request.samples = which % 3 == 2 ? 2 : 1;
      request.temperature = 1.5F;
      text.top_p = 0.95F;
    }
    request.text = std::move(text);
    auto sink = std::make_shared<CollectSink>();
    request.sink = sink;
    EXPECT_TRUE(engine_->Submit(std::move(request)).ok());
    return sink;
  }

  static std::vector<std::vector<int32_t>> TextIds(CollectSink& sink) {
    const absl::StatusOr<ActResult> result = sink.Take();
    EXPECT_TRUE(result.ok()) << result.status();
    std::vector<std::vector<int32_t>> ids;
    if (!result.ok()) return ids;
    for (const Outcome::Answer& answer : result->answers) ids.push_back(answer.tokens);
    return ids;
  }

  static std::vector<std::vector<int32_t>> Ids(CollectSink& sink) {
    std::vector<std::vector<int32_t>> ids;
    const absl::StatusOr<ActResult> result = sink.Take();
    // A sampled id may be no action; the request then fails, which is an answer too.
    if (!result.ok()) return {{-1}};
    for (const ActionChunk& chunk : result->chunks) ids.push_back(chunk.tokens);
    return ids;
  }

  Engine& engine() { return *engine_; }

 private:
  // Requests 0 and 7 share frame and words; 1 and 5 share a frame.
  ContentRef FrameOf(int which, const ModelSpec& spec) {
    const int picture = which == 7 ? 0 : which == 5 ? 1 : which;
    if (auto it = frames_.find(picture); it != frames_.end()) return it->second;
    auto frame = std::make_shared<Content>();
    frame->width = spec.cameras.front().width;
    frame->height = spec.cameras.front().height;
    frame->rgb.resize(size_t{frame->width} * frame->height * 3);
    uint32_t state = static_cast<uint32_t>(picture) * 2654435761U + 12345;
    for (uint8_t& byte : frame->rgb) {
      state = state * 1664525U + 1013904223U;
      byte = static_cast<uint8_t>(state >> 24);
    }
    frame->digest = DigestBytes("frame.v1", frame->rgb);
    frames_[picture] = frame;
    return frame;
  }

  SteadyClock clock_;
  std::map<int, ContentRef> frames_;
  std::unique_ptr<Engine> engine_;
};

using Answers = std::vector<std::vector<std::vector<int32_t>>>;

Answers Alone(const ServingSetup& setup) {
  Answers answers;
  for (int i = 0; i < kRequests; ++i) {
    // A server of its own for each: nothing cached, nothing before it.
    auto served = Served::Make(setup);
    if (served == nullptr) return {};
    answers.push_back(Served::Ids(*served->Submit(i)));
  }
  return answers;
}

Answers AllAtOnce(Served& served) {
  std::vector<std::shared_ptr<CollectSink>> sinks;
  for (int i = 0; i < kRequests; ++i) sinks.push_back(served.Submit(i));
  Answers answers;
  for (auto& sink : sinks) answers.push_back(Served::Ids(*sink));
  return answers;
}

// The newest steps were single layers of passes over frames and over rows.
void ExpectSliced(Engine& engine) {
  const absl::StatusOr<RecentWork> recent = engine.Recent();
  ASSERT_TRUE(recent.ok());
  size_t frames = 0;
  size_t rows = 0;
  for (const StepRecord& step : recent->steps) {
    if (step.slice.whole()) continue;
    EXPECT_EQ(step.slice.end - step.slice.begin, 1u);
    (step.shape.frames > 0 ? frames : rows) += 1;
  }
  EXPECT_GT(frames, 0u);
  EXPECT_GT(rows, 0u);
  EXPECT_FALSE(recent->steps.back().slice.whole());
  EXPECT_EQ(engine.CheckInvariants(), absl::OkStatus());
}

class EngineBits : public testing::TestWithParam<DType> {};

TEST_P(EngineBits, AloneBatchedThreadsCachedAndAfterOthers) {
  ServingSetup setup;
  setup.compute = GetParam();
  const Answers alone = Alone(setup);
  ASSERT_EQ(alone.size(), static_cast<size_t>(kRequests));
  int answered = 0;
  for (const auto& answer : alone) answered += answer.front().front() >= 0;
  EXPECT_GE(answered, kRequests / 2);

  for (int threads : {1, 2, 3}) {
    setup.threads = threads;
    auto served = Served::Make(setup);
    ASSERT_NE(served, nullptr);
    EXPECT_EQ(AllAtOnce(*served), alone) << threads << " threads, batched, cold";
    EXPECT_EQ(AllAtOnce(*served), alone) << threads << " threads, batched, cached";
    std::vector<std::shared_ptr<CollectSink>> others;
    for (int i = 0; i < 100; ++i) others.push_back(served->Submit(kRequests + i));
    EXPECT_EQ(AllAtOnce(*served), alone) << threads << " threads, among and after others";
    for (auto& other : others) (void)Served::Ids(*other);
    EXPECT_EQ(AllAtOnce(*served), alone) << threads << " threads, after others";
    EXPECT_EQ(served->engine().CheckInvariants(), absl::OkStatus());
  }
  // A tight ceiling cuts every prompt into small chunks.
  setup.threads = 2;
  setup.step_ceiling = Micros(500);
  auto served = Served::Make(setup);
  ASSERT_NE(served, nullptr);
  EXPECT_EQ(AllAtOnce(*served), alone) << "chunked";
  // A ceiling that nothing fits: every layer is a step of its own.
  setup.step_ceiling = Micros(1);
  served = Served::Make(setup);
  ASSERT_NE(served, nullptr);
  EXPECT_EQ(AllAtOnce(*served), alone) << "sliced, cold";
  EXPECT_EQ(AllAtOnce(*served), alone) << "sliced, cached";
  ExpectSliced(served->engine());
}

INSTANTIATE_TEST_SUITE_P(Precisions, EngineBits, testing::Values(DType::kF32, DType::kBf16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

// Texts and actions of the same frames and words in the same steps: each gets what it would alone.
TEST_P(EngineBits, TextAloneAmongActionsThreadsCachedAndChunked) {
  ServingSetup setup;
  setup.compute = GetParam();
  Answers alone;
  for (int i = 0; i < kRequests; ++i) {
    auto served = Served::Make(setup);
    ASSERT_NE(served, nullptr);
    alone.push_back(Served::TextIds(*served->SubmitText(i)));
    ASSERT_FALSE(alone.back().empty());
  }
  EXPECT_NE(alone[0], alone[3]);
  const auto all = [](Served& served) {
    std::vector<std::shared_ptr<CollectSink>> texts;
    std::vector<std::shared_ptr<CollectSink>> actions;
    for (int i = 0; i < kRequests; ++i) {
      texts.push_back(served.SubmitText(i));
      actions.push_back(served.Submit(i));
    }
    Answers answers;
    for (auto& text : texts) answers.push_back(Served::TextIds(*text));
    for (auto& action : actions) (void)Served::Ids(*action);
    return answers;
  };
  const Answers actions = Alone(setup);
  for (const int threads : {1, 2}) {
    setup.threads = threads;
    auto served = Served::Make(setup);
    ASSERT_NE(served, nullptr);
    EXPECT_EQ(all(*served), alone) << threads << " threads, cold";
    EXPECT_EQ(all(*served), alone) << threads << " threads, cached";
    EXPECT_EQ(AllAtOnce(*served), actions) << "actions after texts";
    EXPECT_EQ(served->engine().CheckInvariants(), absl::OkStatus());
    const SchedulerStats stats = served->engine().Stats().value();
    for (const PartitionStats& partition : stats.lanes[0].kv.partitions) {
      EXPECT_EQ(partition.held, 0u);
    }
  }
  setup.step_ceiling = Micros(500);
  auto served = Served::Make(setup);
  ASSERT_NE(served, nullptr);
  EXPECT_EQ(all(*served), alone) << "chunked";
}

TEST(EngineGuarded, TextsTouchNoDeviceMemory) {
  ServingSetup setup;
  setup.guarded_ref = true;
  auto served = Served::Make(setup);
  ASSERT_NE(served, nullptr);
  for (int which : {0, 1}) EXPECT_FALSE(Served::TextIds(*served->SubmitText(which)).empty());
}

TEST(EngineGuarded, ServesAMixedBatchWithoutTouchingDeviceMemory) {
  ServingSetup setup;
  setup.guarded_ref = true;
  auto served = Served::Make(setup);
  ASSERT_NE(served, nullptr);
  const Answers first = AllAtOnce(*served);
  EXPECT_EQ(AllAtOnce(*served), first);
  EXPECT_EQ(served->engine().CheckInvariants(), absl::OkStatus());
  setup.step_ceiling = Micros(1);
  served = Served::Make(setup);
  ASSERT_NE(served, nullptr);
  EXPECT_EQ(AllAtOnce(*served), first) << "sliced, cold";
  EXPECT_EQ(AllAtOnce(*served), first) << "sliced, cached";
  ExpectSliced(served->engine());
}

}  // namespace
}  // namespace saccade
