// What a configuration says reaches the parts that act on it.
#include "assembly.h"

#include <gtest/gtest.h>

#include "base/clock.h"
#include "memory_plan.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

TEST(Assembly, SchedulerSettingsReachTheEngine) {
  Config config;
  config.scheduler = {.step_ceiling_ms = 7.5,
                      .max_batch_rows = 11,
                      .max_batch_sequences = 12,
                      .max_batch_frames = 13,
                      .pipeline_depth = 1,
                      .max_wait_ms = 150,
                      .ageing_share = 0.25,
                      .probe_after_ms = 2500,
                      .cost_file = {}};
  const EngineOptions options = ToEngineOptions(config);
  EXPECT_EQ(options.step_ceiling, Micros(7'500));
  EXPECT_EQ(options.max_rows, 11U);
  EXPECT_EQ(options.max_logit_rows, 12U);
  EXPECT_EQ(options.max_frames, 13U);
  EXPECT_EQ(options.pipeline_depth, 1U);
  EXPECT_EQ(options.max_wait, Micros(150'000));
  EXPECT_EQ(options.ageing_share, 0.25);
  EXPECT_EQ(options.probe_after, Micros(2'500'000));
  ASSERT_EQ(options.classes.size(), config.classes.size());
  EXPECT_EQ(options.classes[0].name, "control");
}

// The defaults of the three rooms are one.
TEST(Assembly, DefaultsAgree) {
  const EngineOptions options = ToEngineOptions(Config());
  const EngineOptions engine;
  const SchedulerOptions scheduler;
  EXPECT_EQ(options.max_wait, engine.max_wait);
  EXPECT_EQ(options.max_wait, scheduler.max_wait);
  EXPECT_EQ(options.ageing_share, engine.ageing_share);
  EXPECT_EQ(options.ageing_share, scheduler.ageing_share);
  EXPECT_EQ(options.probe_after, engine.probe_after);
  EXPECT_EQ(options.probe_after, scheduler.probe_after);
}

// What a folder's headers say beforehand is what the model then takes, also of one whose prompts
// must fit a step and whose head reads many rows; and what no file says reaches it.
TEST(Assembly, MemoryPlanOfAHeadThatReadsThePrompt) {
  Config config;
  config.backends = {RefBackendConfig(false)};
  config.scheduler.step_ceiling_ms = 5;
  ModelConfig& model = config.models.emplace_back();
  model.name = "oft";
  model.path = DataDir() + "/variants/oft_three/checkpoint";
  model.kv.blocks = 64;
  model.oft = OftConfig{OftPlatform::kAuto, 6, {}};
  const absl::StatusOr<ModelMemory> plan = PlanModel(config, model, 1);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const absl::StatusOr<LoadedModel> loaded =
      LoadFrom(model.path, config.backends[0], DType::kF32, OftOptions{OftPlatform::kAloha, 6, {}});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Model& m = *loaded->model;
  EXPECT_EQ(m.spec().cameras.size(), 3U);
  // 2048 rows, since a prompt of any length must run at once; each chunk takes 3 * 16 + 84 + 2.
  const uint32_t frames = config.scheduler.max_batch_frames;
  const uint32_t rows = m.spec().max_positions;
  const uint32_t read = rows / (3 * 16 + 84 + 2) * 84;
  EXPECT_EQ(plan->device.scratch,
            m.WorkspaceBytes(frames, rows, read) +
                ParkingPlaces(ToClasses(config)) * m.ParkingBytes(frames, rows, read));
  // Weights are told without the padding of a backend.
  EXPECT_LE(plan->weights, m.spec().weight_bytes);
  EXPECT_GE(plan->weights * 5 / 4, m.spec().weight_bytes);
}

// The scheduler refuses them by name: they came all the way.
TEST(Assembly, SchedulerSettingsReachTheScheduler) {
  const SteadyClock clock;
  const auto refused = [&](auto change) {
    Config config;
    config.backends = {RefBackendConfig(false)};
    config.models.resize(1);
    config.models[0].name = "demo";
    config.models[0].path = DemoCheckpoint();
    change(config.scheduler);
    return GetErrorInfo(BuildEngine(config, clock, nullptr).status()).field;
  };
  EXPECT_EQ(refused([](SchedulerConfig& s) { s.max_wait_ms = -1; }), "max_wait");
  EXPECT_EQ(refused([](SchedulerConfig& s) { s.ageing_share = 2; }), "ageing_share");
  EXPECT_EQ(refused([](SchedulerConfig& s) { s.probe_after_ms = -1; }), "probe_after");
}

}  // namespace
}  // namespace saccade
