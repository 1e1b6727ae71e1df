// Random mixes of requests on an engine whose cache is too small for them: sessions that repeat
// frames and words, samples, beams, texts and actions, two tiers (so that the lower one is
// preempted), cancelled requests. Every answer that is given has the bits of the same request alone
// on an engine where nothing of it is cached.
//
// SACCADE_MIXES: mixes in all (default 2,000; the full count is 10,000).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"
#include "session/prompt_timeline.h"
#include "tests/golden/support/engine_serving.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

constexpr uint32_t kDistinct = 48;
constexpr uint32_t kFrames = 5;
constexpr const char* kWords[] = {"pick up the block", "pick up the red block", "open the drawer",
                                  "push the button slowly"};

// What an answer is: ids of every sample, or the code of its failure.
using Answer = std::vector<std::vector<int32_t>>;

Answer Read(CollectSink& sink) {
  const absl::StatusOr<ActResult> result = sink.Take();
  if (!result.ok()) return {{-1, static_cast<int32_t>(result.status().code())}};
  Answer answer;
  for (const Outcome::Answer& text : result->answers) answer.push_back(text.tokens);
  for (const ActionChunk& chunk : result->chunks) answer.push_back(chunk.tokens);
  return answer;
}

bool Cancelled(const Answer& answer) {
  return answer == Answer{{-1, static_cast<int32_t>(absl::StatusCode::kCancelled)}};
}

struct Setup {
  const char* name;
  BackendKind kind;
  DType compute;
  Micros step_ceiling{0};
};

class Mixes : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override {
    BackendConfig config;
    config.name = "device";
    config.kind = GetParam().kind;
    config.threads = 1;
    absl::StatusOr<LoadedModel> loaded =
        LoadFrom(DataDir() + "/variants/gqa_crop/checkpoint", config, GetParam().compute);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    ServedModel model;
    model.name = "tiny";
    model.instances.push_back(std::move(loaded->model));
    model.workers.emplace_back(0);
    model.invalid_tokens = InvalidTokenPolicy::kClamp;
    // Two large requests, or some small ones.
    model.kv.num_blocks = 26;
    for (PartitionQuota& quota : model.kv.partitions) quota = {1, 26};
    model.kv.headroom = 3;
    model.embedding_slots = 3;
    model.max_sequences = 12;
    EngineOptions options;
    for (uint32_t tier = 0; tier < 2; ++tier) {
      LatencyClass klass;
      klass.name = std::string(1, static_cast<char>('a' + tier));
      klass.tier = tier;
      klass.on_late = OnLate::kRunLate;
      klass.max_queued = 1000;
      options.classes.push_back(klass);
    }
    options.step_ceiling = GetParam().step_ceiling;
    options.max_new_tokens = 12;
    options.check_pages = true;
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(std::move(loaded->backend));
    std::vector<ServedModel> models;
    models.push_back(std::move(model));
    auto engine = Engine::Start(options, std::move(backends), std::move(models), clock_, nullptr);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    for (uint32_t i = 0; i < kFrames; ++i) frames_.push_back(MakeFrame(i));
  }

  ContentRef MakeFrame(uint32_t picture) const {
    const ModelRef served = engine_->models().front();
    const ModelSpec& spec = served->spec();
    auto frame = std::make_shared<Content>();
    frame->width = spec.cameras.front().width;
    frame->height = spec.cameras.front().height;
    frame->rgb.resize(size_t{frame->width} * frame->height * 3);
    std::mt19937 rng(picture);
    for (uint8_t& byte : frame->rgb) byte = static_cast<uint8_t>(rng());
    frame->digest = DigestBytes("frame.v1", frame->rgb);
    return frame;
  }

  // Request `which` of the distinct ones; `builder` gives its timeline a salt.
  ActRequest RequestOf(uint32_t which, TimelineBuilder builder, const ContentRef& frame) const {
    std::mt19937 rng(1000 + which);
    const ModelRef served = engine_->models().front();
    const ModelSpec& spec = served->spec();
    const Model& model = *served->instances.front();
    const Prompt prompt = model.BuildPrompt({kWords[which % std::size(kWords)]}).value();
    EXPECT_TRUE(AddPrompt(
                    prompt, spec, [&](uint32_t) { return frame; }, nullptr, builder)
                    .ok());
    ActRequest request;
    request.model = ModelId(0);
    request.klass = ClassId(0);
    request.arrival = clock_.Now();
    request.statistics_key = spec.statistics.front().key;
    request.seed = rng();
    request.samples = 1 + rng() % 3;
    request.temperature = rng() % 3 == 0 ? 0.0F : 1.0F;
    if (which % 2 == 0) {
      request.timeline = builder.SetAnswer(Modality::kAction).Build();
      return request;
    }
    request.timeline = builder.SetAnswer(Modality::kText).Build();
    TextRequest text;
    text.max_new_tokens = 1 + rng() % 12;
    text.stop_tokens = spec.stop_tokens;
    if (rng() % 3 == 0) {
      request.samples = 2 + rng() % 3;
      request.temperature = 0;
      text.beams = BeamOptions{.length_penalty = 0.8F, .results = 2};
    } else {
      text.top_p = rng() % 2 == 0 ? 1.0F : 0.9F;
    }
    request.text = std::move(text);
    return request;
  }

  std::pair<RequestId, std::shared_ptr<CollectSink>> Submit(ActRequest request) {
    auto sink = std::make_shared<CollectSink>();
    request.sink = sink;
    const absl::StatusOr<RequestId> id = engine_->Submit(std::move(request));
    EXPECT_TRUE(id.ok()) << id.status();
    return {id.value_or(RequestId()), sink};
  }

  // Alone, with a salt and a frame that nobody else has: nothing of it is cached.
  const Answer& Alone(uint32_t which) {
    if (const auto it = alone_.find(which); it != alone_.end()) return it->second;
    const TimelineBuilder builder(DigestBuilder("alone").Field(uint64_t{which}).Finish(),
                                  engine_->models().front()->kv.block_tokens);
    const ContentRef frame = MakeFrame(which / 2 % kFrames);
    auto sink = Submit(RequestOf(which, builder, frame)).second;
    const absl::StatusOr<ActResult> result = sink->Take();
    Answer answer;
    EXPECT_TRUE(result.ok()) << result.status();
    if (result.ok()) {
      for (const uint32_t cached : result->cached_tokens) EXPECT_EQ(cached, 0u);
      EXPECT_FALSE(result->frame_cached);
      for (const Outcome::Answer& text : result->answers) answer.push_back(text.tokens);
      for (const ActionChunk& chunk : result->chunks) answer.push_back(chunk.tokens);
    }
    return alone_[which] = answer;
  }

  SteadyClock clock_;
  std::unique_ptr<Engine> engine_;
  std::vector<ContentRef> frames_;
  std::map<uint32_t, Answer> alone_;
};

TEST_P(Mixes, CachedIsUncachedBitForBit) {
  for (uint32_t which = 0; which < kDistinct; ++which) Alone(which);
  std::map<Answer, int> different;
  for (const auto& [which, answer] : alone_) ++different[answer];
  EXPECT_GT(different.size(), kDistinct / 2);

  const char* const wanted = std::getenv("SACCADE_MIXES");
  const size_t mixes = (wanted == nullptr ? 2'000 : std::strtoul(wanted, nullptr, 10)) / 4;
  std::mt19937 rng(7);
  size_t answered = 0;
  size_t cancelled = 0;
  for (size_t mix = 0; mix < mixes && !HasFailure(); ++mix) {
    std::vector<std::pair<uint32_t, std::shared_ptr<CollectSink>>> sinks;
    std::vector<RequestId> ids;
    for (uint32_t n = 1 + rng() % 6; n > 0; --n) {
      const uint32_t which = rng() % kDistinct;
      ActRequest request =
          RequestOf(which, engine_->models().front()->NewTimeline(), frames_[which / 2 % kFrames]);
      request.session = SessionId(rng() % 4);
      request.klass = ClassId(static_cast<int32_t>(rng() % 2));
      auto [id, sink] = Submit(std::move(request));
      ids.push_back(id);
      sinks.emplace_back(which, std::move(sink));
    }
    if (rng() % 4 == 0) engine_->Cancel(ids[rng() % ids.size()]);
    if (rng() % 32 == 0) engine_->CancelSession(SessionId(rng() % 4));
    for (auto& [which, sink] : sinks) {
      const Answer answer = Read(*sink);
      if (Cancelled(answer)) {
        ++cancelled;
        continue;
      }
      ++answered;
      ASSERT_EQ(answer, alone_[which]) << "request " << which << " in mix " << mix;
    }
    if (mix % 64 == 0) {
      ASSERT_EQ(engine_->CheckInvariants(), absl::OkStatus());
    }
  }
  ASSERT_EQ(engine_->CheckInvariants(), absl::OkStatus());
  const SchedulerStats stats = engine_->Stats().value();
  uint64_t hits = 0;
  uint64_t evictions = 0;
  for (const PartitionStats& partition : stats.lanes[0].kv.partitions) {
    EXPECT_EQ(partition.held, 0u);
    hits += partition.hit_tokens;
    for (const uint64_t count : partition.evictions) evictions += count;
  }
  EXPECT_GT(answered, mixes);
  EXPECT_GT(cancelled, 0u);
  EXPECT_GT(hits, mixes * 20);
  EXPECT_GT(evictions, mixes);
  EXPECT_GT(stats.lanes[0].embedding_hits, mixes / 4);
}

INSTANTIATE_TEST_SUITE_P(
    Engines, Mixes,
    testing::Values(Setup{"cpu_f32", BackendKind::kCpu, DType::kF32, Micros(0)},
                    Setup{"cpu_bf16", BackendKind::kCpu, DType::kBf16, Micros(0)},
                    Setup{"cpu_chunked", BackendKind::kCpu, DType::kF32, Micros(1'000)},
                    Setup{"ref_f32", BackendKind::kRef, DType::kF32, Micros(0)}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace saccade
