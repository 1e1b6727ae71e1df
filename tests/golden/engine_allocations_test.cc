// No token costs an allocation from the engine to the device: turns, plans, steps, the model's
// layers and the metrics included. (That of the scheduler alone: sched_allocations_test.)
#include <gtest/gtest.h>

#include <algorithm>
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
  constexpr uint32_t kFirst = 20;  // the prompts are done, and every buffer has its size
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
    EXPECT_TRUE(AddPrompt(model.BuildPrompt("overtake the slow car, speed 18").value(),
                          spec.vision_tokens, frame_of, builder)
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
  ASSERT_TRUE(submit(0)->Wait().ok());  // tables that are made when a position is first met
  std::vector<std::shared_ptr<CountingSink>> sinks;
  for (uint32_t i = 1; i <= 3; ++i) sinks.push_back(submit(i));
  for (const auto& sink : sinks) EXPECT_TRUE(sink->Wait().ok());
  // Between the last of the first tokens and the first end.
  uint64_t begin = 0;
  uint64_t end = UINT64_MAX;
  for (const auto& sink : sinks) {
    ASSERT_EQ(sink->seen().size(), kTokens);
    begin = std::max(begin, sink->seen()[kFirst]);
    end = std::min(end, sink->seen()[kTokens - 2]);
  }
  // Not none: gauges are read ten times a second, and which of the spare parts of steps are used
  // for the first time depends on how two threads meet.
  constexpr uint64_t kFew = 3 * (kTokens - kFirst) / 10;
  EXPECT_LT(end - begin, kFew) << "allocations while 3 requests got " << kTokens - kFirst
                               << " tokens each";
}

}  // namespace
}  // namespace saccade
