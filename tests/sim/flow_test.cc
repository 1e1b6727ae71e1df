// Answers that are denoised over a prompt's K/V, and prompts whose rows see each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/sim/flow_random.h"
#include "tests/sim/sim.h"

namespace saccade::sim {
namespace {

constexpr uint32_t kControl = 0;
constexpr uint32_t kBestEffort = 3;

// One lane that denoises.
Options FlowOptions(uint32_t blocks = 512) {
  Options options = DefaultOptions();
  options.lanes = {Lane(0, 0, blocks)};
  options.lanes[0].denoises = true;
  options.lanes[0].max_logit_rows = 10;
  return options;
}

Spec Flow(std::shared_ptr<const Timeline> timeline, uint32_t steps = 10) {
  return {.klass = kBestEffort,
          .timeline = std::move(timeline),
          .action_tokens = steps,
          .kind = AnswerKind::kFlow};
}

struct Work {
  uint32_t frames = 0;
  uint32_t prompt_rows = 0;
  uint32_t prompt_items = 0;
  uint32_t denoise_steps = 0;
  uint32_t widest = 0;  // denoise steps in one step
};

Work WorkOf(const Simulation& sim) {
  Work work;
  for (const FinishedStep& step : sim.steps()) {
    if (!step.plan.slice.last()) continue;
    work.frames += static_cast<uint32_t>(step.plan.encodes.size());
    for (const TrunkItem& item : step.plan.trunk) work.prompt_rows += item.count;
    work.prompt_items += static_cast<uint32_t>(step.plan.trunk.size());
    work.denoise_steps += static_cast<uint32_t>(step.plan.flows.size());
    work.widest = std::max(work.widest, static_cast<uint32_t>(step.plan.flows.size()));
  }
  return work;
}

TEST(Flow, OnePrefixPassWhateverTheStepsSeedsAndCalls) {
  Simulation sim(FlowOptions());
  const std::shared_ptr<const Timeline> prefix = sim.Prefix({1, 2}, 20, 1, 7);
  const size_t first = sim.Offer(Flow(prefix, 10));
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(first).ok());
  EXPECT_EQ(sim.request(first).outcome->answers[0].chunk.size(), 2u);
  Work work = WorkOf(sim);
  EXPECT_EQ(work.frames, 2u);
  EXPECT_EQ(work.prompt_rows, prefix->num_tokens());
  EXPECT_EQ(work.prompt_items, 1u);
  EXPECT_EQ(work.denoise_steps, 10u);

  Spec seeds = Flow(prefix, 4);
  seeds.samples = 8;
  sim.Offer(seeds);
  sim.Offer(Flow(prefix, 25));
  sim.RunToIdle();
  for (const Tracked& r : sim.requests()) {
    EXPECT_TRUE(r.ok());
    if (r.id.value() > 1) {
      EXPECT_EQ(r.outcome->cached_tokens[static_cast<size_t>(Modality::kVision)], 64u);
      EXPECT_TRUE(r.outcome->frame_cached);
    }
  }
  work = WorkOf(sim);
  EXPECT_EQ(work.frames, 2u);
  EXPECT_EQ(work.prompt_rows, prefix->num_tokens());
  EXPECT_EQ(work.denoise_steps, 10u + 8 * 4 + 25);
  EXPECT_GE(work.widest, 9u);  // both requests, at different steps of different counts
}

// A class that degrades gives a request as many denoise steps as are on time.
TEST(Flow, FewerStepsRatherThanLate) {
  Options options = FlowOptions();
  options.scheduler.classes[kControl].on_late = OnLate::kDegrade;
  Simulation sim(options);
  const std::shared_ptr<const Timeline> prefix = sim.Prefix({1, 2}, 20, 1, 7);
  for (int i = 0; i < 10; ++i) {  // its step times are learned
    sim.Offer(Flow(prefix, 10));
    sim.RunToIdle();
  }
  const Micros whole = sim.request(sim.requests().size() - 1).outcome->timings.total;
  // `share` of what ten steps take, over a prompt that is known.
  const auto offer = [&](uint32_t klass, double share, uint32_t least) -> const Tracked& {
    Spec spec = Flow(prefix, 10);
    spec.klass = klass;
    spec.least_steps = least;
    spec.deadline = Micros(static_cast<int64_t>(share * static_cast<double>(whole.count())));
    const size_t request = sim.Offer(spec);
    sim.RunToIdle();
    return sim.request(request);
  };
  uint32_t before = 0;
  for (const double share : {0.4, 0.6, 0.8}) {
    const Tracked& cut = offer(kControl, share, 2);
    ASSERT_TRUE(cut.ok()) << share << cut.offered;
    EXPECT_TRUE(cut.outcome->degraded);
    EXPECT_GT(cut.outcome->denoise_steps, before);
    EXPECT_LT(cut.outcome->denoise_steps, 10u);
    before = cut.outcome->denoise_steps;
    // As many as fit: two more would not have.
    EXPECT_GE(before + 2, static_cast<uint32_t>(share * 10)) << share;
  }
  const Tracked& in_time = offer(kControl, 2, 2);
  ASSERT_TRUE(in_time.ok());
  EXPECT_FALSE(in_time.outcome->degraded);
  EXPECT_EQ(in_time.outcome->denoise_steps, 10u);
  // Not below what it allows, nor when it allows nothing.
  for (const uint32_t least : {8u, 0u}) {
    const Tracked& refused = offer(kControl, 0.5, least);
    EXPECT_EQ(GetErrorInfo(refused.offered).reason, Reason::kLate) << least;
  }
  sim.ExpectBaseline();
}

TEST(Flow, HitsOfAWholePromptCountOnce) {
  Simulation sim(FlowOptions());
  const std::shared_ptr<const Timeline> prefix = sim.Prefix({1, 2}, 20, 1, 7);
  const auto tokens = [&](uint64_t PartitionStats::*which) {
    uint64_t sum = 0;
    const SchedulerStats stats = sim.scheduler().stats();
    for (const PartitionStats& p : stats.lanes[0].kv.partitions) sum += p.*which;
    return sum;
  };
  Spec seeds = Flow(prefix, 4);
  seeds.samples = 8;
  for (uint64_t call = 0; call < 3; ++call) {
    sim.Offer(seeds);
    sim.RunToIdle();
    EXPECT_EQ(tokens(&PartitionStats::miss_tokens), prefix->num_tokens());
    EXPECT_EQ(tokens(&PartitionStats::hit_tokens), call * prefix->num_tokens());
  }
}

TEST(Flow, SeedsShareThePagesOfTheirPrefix) {
  Simulation sim(FlowOptions());
  Spec spec = Flow(sim.Prefix({1, 2}, 20), 6);
  spec.samples = 8;
  sim.Offer(spec);
  uint32_t most = 0;
  while (sim.Step()) most = std::max(most, sim.HeldBlocks());
  EXPECT_EQ(most, spec.timeline->blocks().size());
  ASSERT_TRUE(sim.request(0).ok());
  std::set<std::vector<float>> different;
  for (const Outcome::Answer& answer : sim.request(0).outcome->answers) {
    different.insert(answer.chunk);
  }
  EXPECT_EQ(different.size(), 8u);
  sim.ExpectBaseline();
}

TEST(Flow, ANewStateIsOneRowOnTheSameGroup) {
  Simulation sim(FlowOptions());
  for (const uint64_t state : {3, 4, 5}) {
    sim.Offer(Flow(sim.Prefix({1, 2}, 20, 1, state)));
    sim.RunToIdle();
  }
  for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
  EXPECT_EQ(WorkOf(sim).prompt_rows, 84u + 3);
  // Another word in it, and all of the group is another.
  sim.Offer(Flow(sim.Prefix({1, 2}, 20, 2, 5)));
  sim.RunToIdle();
  EXPECT_EQ(WorkOf(sim).prompt_rows, 2 * 84u + 4);
  EXPECT_EQ(WorkOf(sim).frames, 2u);  // the embeddings are the same
}

TEST(Flow, StepsOfManyRequestsRunTogether) {
  Simulation sim(FlowOptions());
  for (uint64_t i = 1; i <= 10; ++i) {
    sim.Offer(Flow(sim.Prefix({i}, 8, i), 3 + static_cast<uint32_t>(i)));
    sim.RunFor(Micros(500));
  }
  sim.RunToIdle();
  bool mixed = false;
  for (const FinishedStep& step : sim.steps()) {
    std::set<uint32_t> indices;
    for (const FlowItem& item : step.plan.flows) indices.insert(item.index);
    mixed |= indices.size() > 2;
  }
  EXPECT_TRUE(mixed) << "no step had denoise steps of different indices";
  for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
  sim.ExpectBaseline();
}

TEST(Flow, UrgentWorkRunsBetweenDenoiseSteps) {
  Options options = FlowOptions();
  options.lanes.push_back(Lane(0, 1));
  options.step_us = [](const StepPlan& plan) { return plan.flows.empty() ? 1000.0 : 5000.0; };
  Simulation sim(options);
  const size_t slow = sim.Offer(Flow(sim.Prefix({1}, 8), 50));
  sim.RunFor(Micros(60'000));
  ASSERT_FALSE(sim.request(slow).outcome.has_value());
  const size_t control = sim.Offer(
      {.klass = kControl, .model = 1, .timeline = sim.Prompt({}, 16), .action_tokens = 1});
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(control).ok());
  EXPECT_LE(ToMicros(*sim.request(control).first_start - sim.request(control).arrival).count(),
            5'000);
  EXPECT_LT(sim.request(control).outcome_at, sim.request(slow).outcome_at);
  ASSERT_TRUE(sim.request(slow).ok());
}

// Control acts every `gap`, each of which a refresh of its frame comes in the middle of. How many
// steps hold both.
size_t StepsSharedWithRefreshes(Micros gap) {
  Options options = FlowOptions();
  options.scheduler.step_ceiling = Micros(20'000);
  Simulation sim(options);
  constexpr uint64_t kActs = 200;
  for (uint64_t i = 0; i < kActs; ++i) {
    Spec act = Flow(sim.Prefix({1}, 8, 1, i + 1), 4);
    act.klass = kControl;
    act.session = i % 2;
    act.deadline = Micros(300'000);  // it could spare the time
    sim.After(static_cast<int64_t>(i) * gap, [&sim, act] { sim.Offer(act); });
    sim.After(static_cast<int64_t>(i) * gap + Micros(2'000), [&sim, i] {
      sim.Offer({.klass = kBestEffort,
                 .timeline = sim.Prefix({100 + i}, 8, 1, 0, PrefixReuse::kAllButLast),
                 .action_tokens = 0,
                 .kind = AnswerKind::kPrefix});
    });
  }
  sim.RunToIdle();
  for (const Tracked& r : sim.requests()) {
    EXPECT_TRUE(r.ok());
    if (r.spec.klass == kBestEffort) {
      EXPECT_LE(r.latency().count(), 100'000);
    }
  }
  size_t shared = 0;
  const TimePoint settled = sim.request(200).arrival;
  for (const FinishedStep& step : sim.steps()) {
    if (step.started < settled) continue;
    shared += !step.plan.flows.empty() && step.plan.shape.frames > 0 ? 1 : 0;
  }
  sim.ExpectBaseline();
  return shared;
}

// An act takes 5.5 ms, a refresh 6.5 ms: between acts every 40 ms there is room for it; acts every
// 14 ms leave so little that they share their steps.
TEST(Flow, RefreshesWaitForTheGapsThatControlLeaves) {
  EXPECT_EQ(StepsSharedWithRefreshes(Micros(40'000)), 0u);
  EXPECT_GT(StepsSharedWithRefreshes(Micros(14'000)), 0u);
}

TEST(Flow, WhoLosesItsPlaceBeginsAgainAndAnswersTheSame) {
  Options options = FlowOptions(8);  // blocks for one prompt
  Simulation sim(options);
  Spec low = Flow(sim.Prefix({1, 2}, 20), 40);
  const size_t first = sim.Offer(low);
  sim.RunFor(Micros(20'000));
  ASSERT_FALSE(sim.request(first).outcome.has_value());
  Spec urgent = Flow(sim.Prefix({3, 4}, 20), 2);
  urgent.klass = kControl;
  urgent.deadline = Micros(500'000);
  const size_t second = sim.Offer(urgent);
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(second).ok());
  ASSERT_TRUE(sim.request(first).ok());
  EXPECT_LT(sim.request(second).outcome_at, sim.request(first).outcome_at);
  uint32_t begun = 0;
  for (const FinishedStep& step : sim.steps()) {
    for (const FlowItem& item : step.plan.flows) {
      begun += item.request == sim.request(first).id && item.index == 0 ? 1 : 0;
    }
  }
  EXPECT_EQ(begun, 2u);
  sim.ExpectBaseline();
}

// A group that is longer than a step is cut by layers, never by rows.
TEST(Flow, ALongGroupIsCutByLayers) {
  Options options = FlowOptions();
  options.scheduler.step_ceiling = Micros(20'000);
  options.lanes[0].trunk_layers = EvenLayers(18, 1);
  options.step_us = [](const StepPlan& plan) {
    return TrueCosts{0, 3'000, 2'000, 1'000, 4'000, 0, 50}.Of(plan);
  };
  Simulation sim(options);
  for (uint64_t i = 1; i <= 6; ++i) {
    sim.Offer(Flow(sim.Prefix({i}, 40, i), 3));
    sim.RunToIdle();
  }
  uint32_t slices = 0;
  for (const FinishedStep& step : sim.steps()) slices += step.plan.slice.whole() ? 0 : 1;
  EXPECT_GT(slices, 10u);
  for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
}

TEST(Flow, ANonFiniteChunkFailsItsRequestAlone) {
  Simulation sim(FlowOptions());
  const std::shared_ptr<const Timeline> prefix = sim.Prefix({1}, 20);
  const size_t bad = sim.Offer(Flow(prefix, 5));
  const size_t good = sim.Offer(Flow(prefix, 5));
  sim.MakeNonFinite(bad, 0, 4);
  sim.RunToIdle();
  EXPECT_EQ(sim.request(bad).reason(), Reason::kNonFinite);
  EXPECT_TRUE(sim.request(good).ok());
  sim.ExpectBaseline();
}

TEST(Flow, WrongKindsAndGroupsThatNeverFitAreRefused) {
  Simulation sim(FlowOptions());
  EXPECT_EQ(GetErrorInfo(sim.request(sim.Offer({.timeline = sim.Prompt({}, 20)})).offered).field,
            "kind");
  Spec large = Flow(sim.Prefix({}, 600));
  EXPECT_EQ(GetErrorInfo(sim.request(sim.Offer(large)).offered).reason, Reason::kNeverFits);
  sim.RunToIdle();
}

TEST(OnePass, ReadsThePromptAndIsFoundByNobody) {
  Simulation sim(DefaultOptions());
  const std::shared_ptr<const Timeline> prompt = sim.Prefix({1, 2}, 20, 1, 0, PrefixReuse::kNone);
  for (int i = 0; i < 3; ++i) {
    sim.Offer({.klass = kBestEffort,
               .timeline = prompt,
               .action_tokens = 1,
               .kind = AnswerKind::kOnePass});
    sim.RunToIdle();
  }
  for (const Tracked& r : sim.requests()) {
    ASSERT_TRUE(r.ok());
    EXPECT_EQ(r.outcome->cached_tokens, (std::array<uint32_t, kModalities>{}));
  }
  EXPECT_EQ(WorkOf(sim).prompt_rows, 3 * prompt->num_tokens());
  EXPECT_EQ(WorkOf(sim).frames, 2u);
  sim.ExpectBaseline();
}

// Tokens after a group, as pi0-FAST has them: the last rows of the group run again, the rest is
// found.
TEST(Group, TokensFollowIt) {
  Simulation sim(DefaultOptions());
  const std::shared_ptr<const Timeline> prompt =
      sim.Prefix({1, 2}, 20, 1, 0, PrefixReuse::kAllButLast);
  for (int i = 0; i < 2; ++i) {
    sim.Offer({.klass = kBestEffort, .timeline = prompt, .action_tokens = 12});
    sim.RunToIdle();
  }
  for (const Tracked& r : sim.requests()) ASSERT_TRUE(r.ok());
  EXPECT_EQ(sim.request(0).tokens(), sim.request(1).tokens());
  EXPECT_GT(sim.request(1).outcome->cached_tokens[static_cast<size_t>(Modality::kVision)], 0u);
}

// A prefix is made for others: a flow and tokens find it, and it answers nothing.
TEST(Prefix, IsFoundByThoseWhoAskLater) {
  for (const bool flow : {true, false}) {
    SCOPED_TRACE(flow);
    Simulation sim(flow ? FlowOptions() : DefaultOptions());
    for (uint64_t version = 1; version <= 3; ++version) {
      const size_t refresh =
          sim.Offer({.klass = kBestEffort,
                     .timeline = sim.Prefix({version, 9}, 20, 1, 0, PrefixReuse::kAllButLast),
                     .action_tokens = 0,
                     .kind = AnswerKind::kPrefix});
      sim.RunToIdle();
      ASSERT_TRUE(sim.request(refresh).ok());
      const Work before = WorkOf(sim);
      for (const uint64_t state : {1, 2}) {
        Spec spec = Flow(sim.Prefix({version, 9}, 20, 1, state), 4);
        if (!flow) spec.kind = AnswerKind::kTokens;
        sim.Offer(spec);
        sim.RunToIdle();
      }
      EXPECT_EQ(WorkOf(sim).prompt_rows - before.prompt_rows, flow ? 2u : 2u + 2 * 3);
      EXPECT_EQ(WorkOf(sim).frames, before.frames);
    }
    for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
    sim.ExpectBaseline();
  }
}

TEST(Prefix, TheSameAgainComputesItsLastBlockAlone) {
  Simulation sim(FlowOptions());
  for (int i = 0; i < 2; ++i) {
    sim.Offer({.klass = kBestEffort,
               .timeline = sim.Prefix({1, 2}, 20, 1, 0, PrefixReuse::kAllButLast),
               .action_tokens = 0,
               .kind = AnswerKind::kPrefix});
  }
  sim.RunToIdle();
  for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
  sim.ExpectBaseline();
}

TEST(Flow, RandomMixes) {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE(seed);
    RunFlowOperations(Random(seed));
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace saccade::sim
