// No token costs an allocation from the engine to the device: turns, plans, steps, the model's
// layers and the metrics included. (That of the scheduler alone: sched_allocations_test.)
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "metrics/metrics.h"
#include "model/checkpoint.h"
#include "session/prompt_timeline.h"
#include "tests/counted_new.h"

namespace saccade {
namespace {

// What had been allocated when each token came.
class CountingSink final : public ResponseSink {
 public:
  explicit CountingSink(uint32_t tokens) { seen_.reserve(tokens); }
  void OnToken(RequestId, uint32_t, uint32_t, int32_t) override { seen_.push_back(Allocations()); }
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    done_.set_value(result.status());
  }
  absl::Status Wait() { return done_.get_future().get(); }
  const std::vector<uint64_t>& seen() const { return seen_; }

 private:
  std::vector<uint64_t> seen_;
  std::promise<absl::Status> done_;
};

TEST(EngineAllocationsTest, NoneForTokensOfRunningRequests) {
  constexpr uint32_t kTokens = 150;
  constexpr uint32_t kFirst = 20;  // the prompts are done
  const SteadyClock clock;
  MetricsOptions names;
  names.classes = {"any"};
  names.models = {"demo"};
  names.backends = {"cpu"};
  Metrics metrics(names);
  CpuOptions cpu;
  cpu.threads = 2;
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(MakeCpuBackend(cpu).value());
  const auto checkpoint = Checkpoint::Open(SACCADE_SOURCE_DIR "/deploy/demo/checkpoint");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<ServedModel> models(1);
  models[0].name = "demo";
  models[0].instances.push_back(LoadModel(*checkpoint, *backends[0], {}).value());
  models[0].workers.emplace_back(0);
  models[0].kv.num_blocks = 400;
  for (PartitionQuota& quota : models[0].kv.partitions) quota.cap = models[0].kv.num_blocks;
  models[0].embedding_slots = 4;
  models[0].max_sequences = 8;
  EngineOptions options;
  LatencyClass klass;
  klass.name = "any";
  klass.on_late = OnLate::kRunLate;
  options.classes = {klass};
  options.max_new_tokens = kTokens;
  options.check_pages = false;  // it keeps the keys of pages, in memory of its own
  auto engine =
      Engine::Start(options, std::move(backends), std::move(models), clock, &metrics).value();

  const ModelRef served = engine->models().front();
  const Model& model = *served->instances.front();
  const ModelSpec& spec = model.spec();
  const auto submit = [&](uint32_t i) {
    TimelineBuilder builder = served->NewTimeline();
    const auto frame_of = [&](uint32_t camera) -> ContentRef {
      auto frame = std::make_shared<Content>();
      frame->width = spec.cameras[camera].width;
      frame->height = spec.cameras[camera].height;
      frame->rgb.assign(size_t{frame->width} * frame->height * 3, static_cast<uint8_t>(i));
      frame->digest = DigestBytes("frame.test", frame->rgb);
      return frame;
    };
    EXPECT_TRUE(AddPrompt(model.BuildPrompt({"overtake the slow car, speed 18"}).value(), spec,
                          frame_of, nullptr, builder)
                    .ok());
    ActRequest request;
    request.session = SessionId(i);
    request.model = served->id;
    request.klass = ClassId(0);
    request.arrival = clock.Now();
    request.timeline = builder.SetAnswer(Modality::kText).Build();
    request.text.emplace();
    request.text->max_new_tokens = kTokens;
    request.temperature = 1;
    request.seed = i;
    auto sink = std::make_shared<CountingSink>(kTokens);
    request.sink = sink;
    EXPECT_TRUE(engine->Submit(std::move(request)).ok());
    return sink;
  };
  // The first time also makes tables, and the parts that steps are made of.
  for (uint32_t round = 0; round < 2; ++round) {
    std::vector<std::shared_ptr<CountingSink>> sinks;
    for (uint32_t i = 0; i < 3; ++i) sinks.push_back(submit(3 * round + i));
    for (const auto& sink : sinks) ASSERT_TRUE(sink->Wait().ok());
    if (round == 0) continue;
    for (const auto& sink : sinks) {
      ASSERT_EQ(sink->seen().size(), kTokens);
      uint32_t free = 0;  // tokens before which nobody allocated since the one before
      for (uint32_t t = kFirst; t < kTokens - 1; ++t) {
        free += sink->seen()[t] == sink->seen()[t - 1] ? 1 : 0;
      }
      // Not all: gauges are read ten times a second, others begin and end, and a part of a step may
      // be used for the first time when two threads meet as they had not before.
      EXPECT_GT(free, (kTokens - kFirst) / 2) << "of " << kTokens - kFirst << " tokens";
    }
  }
}

}  // namespace
}  // namespace saccade
