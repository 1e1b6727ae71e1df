// Text in the scheduler: answers that end early, and beams that fork and drop.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/sim/sim.h"

namespace saccade::sim {
namespace {

constexpr uint32_t kControl = 0;
constexpr uint32_t kPlanning = 2;
constexpr uint32_t kBestEffort = 3;

uint64_t Resumed(const Simulation& sim, RequestId id) {
  uint64_t resumed = 0;
  for (const FinishedStep& step : sim.steps()) {
    for (const TrunkItem& item : step.plan.trunk) {
      resumed += item.request == id && item.known_tokens.size() > 1 ? 1 : 0;
    }
  }
  return resumed;
}

TEST(Generate, AStopTokenEndsTheAnswerAndOneRowIsWasted) {
  Simulation sim(DefaultOptions());
  const Spec whole{.klass = kPlanning, .timeline = sim.Prompt({1}, 20), .action_tokens = 30};
  const size_t first = sim.Offer(whole);
  sim.RunToIdle();
  const std::vector<int32_t> tokens = sim.request(first).tokens()[0];
  for (const size_t at : {0u, 1u, 7u, 29u}) {
    const auto place = std::find(tokens.begin(), tokens.end(), tokens[at]) - tokens.begin();
    Spec spec = whole;
    spec.stop_tokens = {-5, tokens[at]};
    const size_t before = sim.steps().size();
    const size_t r = sim.Offer(spec);
    sim.RunToIdle();
    ASSERT_TRUE(sim.request(r).ok());
    const Outcome::Answer& answer = sim.request(r).outcome->answers[0];
    EXPECT_EQ(answer.tokens, std::vector<int32_t>(tokens.begin(), tokens.begin() + place + 1));
    EXPECT_TRUE(answer.stopped);
    // The rows after the stop token that were planned before it was known.
    const auto steps = static_cast<int64_t>(sim.steps().size() - before);
    EXPECT_GE(steps, place + 1);
    EXPECT_LE(steps, place + 2);
    sim.ExpectBaseline();
  }
  EXPECT_FALSE(sim.request(first).outcome->answers[0].stopped);
}

TEST(Generate, SamplesEndOnTheirOwn) {
  Simulation sim(DefaultOptions());
  Spec spec{.klass = kPlanning,
            .timeline = sim.Prompt({}, 20),
            .action_tokens = 40,
            .samples = 4,
            .temperature = 1,
            .seed = 9};
  const size_t whole = sim.Offer(spec);
  sim.RunToIdle();
  const auto all = sim.request(whole).tokens();
  spec.stop_tokens = {all[2][3], all[1][20]};
  const size_t r = sim.Offer(spec);
  sim.RunToIdle();
  const auto& answers = sim.request(r).outcome->answers;
  ASSERT_EQ(answers.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const auto end = std::find_first_of(all[i].begin(), all[i].end(), spec.stop_tokens.begin(),
                                        spec.stop_tokens.end());
    EXPECT_EQ(answers[i].stopped, end != all[i].end());
    EXPECT_EQ(answers[i].tokens,
              std::vector<int32_t>(all[i].begin(), end == all[i].end() ? end : end + 1));
  }
  EXPECT_EQ(answers[2].tokens.size(), 4u);
  sim.ExpectBaseline();
}

TEST(Generate, BeamsShareThePromptAndWhatTheyHaveInCommon) {
  Options options = DefaultOptions();
  options.check_every = 1;
  Simulation sim(options);
  const size_t r = sim.Offer({.klass = kPlanning,
                              .timeline = sim.Prompt({1}, 20),
                              .action_tokens = 40,
                              .samples = 4,
                              .beams = BeamOptions{.results = 3}});
  sim.RunFor(Micros(12'000));
  // 1 + 2 + 2 prompt blocks (BOS, vision, text), and 3 for the answer of each beam.
  EXPECT_EQ(sim.HeldBlocks(), 5u + 4 * 3u);
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(r).ok());
  const auto& answers = sim.request(r).outcome->answers;
  ASSERT_EQ(answers.size(), 3u);
  EXPECT_GE(answers[0].score, answers[1].score);
  for (const auto& answer : answers) {
    EXPECT_EQ(answer.tokens.size(), 40u);
    EXPECT_LT(answer.log_prob, 0);
  }
  // One step for each token, all beams in it: a step waits for the choice after the one before.
  EXPECT_EQ(sim.steps().size(), 40u);
  size_t copies = 0;
  std::set<BlockId> prompt;
  for (const FinishedStep& step : sim.steps()) {
    copies += step.plan.copies.size();
    for (const TrunkItem& item : step.plan.trunk) {
      for (size_t page = 0; page < 5; ++page) prompt.insert(item.pages[page].block);
    }
  }
  EXPECT_GT(copies, 10u);
  EXPECT_EQ(prompt.size(), 5u);
  sim.ExpectBaseline();
}

TEST(Generate, BeamLimitsAreRefusedByField) {
  Simulation sim(DefaultOptions());
  const auto refuse = [&](Spec spec) {
    spec.timeline = sim.Prompt({}, 5);
    spec.action_tokens = 4;
    return GetErrorInfo(sim.request(sim.Offer(std::move(spec))).offered).field;
  };
  EXPECT_EQ(refuse({.samples = 64, .stop_tokens = {1, 2}, .beams = BeamOptions{}}), "beams");
  EXPECT_EQ(refuse({.samples = 2, .beams = BeamOptions{.results = 3}}), "results");
  EXPECT_EQ(refuse({.samples = 2, .beams = BeamOptions{.results = 0}}), "results");
  EXPECT_EQ(refuse({.samples = 2, .beams = BeamOptions{.length_penalty = NAN}}), "length_penalty");
  EXPECT_EQ(refuse({.samples = 4, .stop_tokens = {1}, .beams = BeamOptions{}}), "");
  sim.RunToIdle();
}

TEST(Generate, ABeamWithoutFiniteLogitsFailsItsRequestAlone) {
  Simulation sim(DefaultOptions());
  const Spec spec{.klass = kPlanning,
                  .timeline = sim.Prompt({1}, 20),
                  .action_tokens = 12,
                  .samples = 3,
                  .beams = BeamOptions{}};
  const size_t bad = sim.Offer(spec);
  const size_t good = sim.Offer(spec);
  sim.MakeNonFinite(bad, 2, 5);
  sim.RunToIdle();
  EXPECT_EQ(sim.request(bad).reason(), Reason::kNonFinite);
  EXPECT_TRUE(sim.request(good).ok());
  sim.ExpectBaseline();
}

// Wherever control comes between, the answer is the one it would have been; its own deadlines hold.
TEST(Generate, PreemptionInMidGenerationIsInvisible) {
  uint64_t resumed = 0;
  for (int64_t shift = 0; shift < 120; ++shift) {
    SCOPED_TRACE(shift);
    Options options = DefaultOptions();
    options.lanes[0] = Lane(0, 0, 28);
    options.scheduler.classes[kControl].max_queued = 16;
    options.scheduler.step_ceiling = Micros(6'000);
    options.check_every = 1;
    Simulation sim(options);
    const bool beams = shift % 2 == 0;
    const size_t a =
        sim.Offer({.klass = kBestEffort,
                   .timeline = sim.Prompt({1}, 40, 1),
                   .action_tokens = 50,
                   .samples = beams ? 3u : 2u,
                   .stop_tokens = {3},
                   .beams = beams ? std::optional(BeamOptions{.results = 3}) : std::nullopt});
    const size_t b =
        sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({2}, 40, 2), .action_tokens = 64});
    sim.RunFor(Micros(500 * shift));
    for (uint64_t i = 0; i < 10; ++i) {
      sim.Offer({.klass = kControl,
                 .session = 10 + i,
                 .timeline = sim.Prompt({3 + i}, 30, 3 + i),
                 .deadline = Micros(3'000'000)});
    }
    sim.RunToIdle();
    for (const Tracked& r : sim.requests()) {
      ASSERT_TRUE(r.ok()) << (r.outcome ? r.outcome->status : r.offered);
    }
    resumed += Resumed(sim, sim.request(a).id) + Resumed(sim, sim.request(b).id);
    sim.ExpectBaseline();
    if (HasFailure()) break;
  }
  EXPECT_GT(resumed, 30u);
}

TEST(Generate, CancellationInMidSearchFreesEverything) {
  for (int64_t at = 0; at < 60'000; at += 700) {
    Options options = DefaultOptions();
    options.check_every = 1;
    Simulation sim(options);
    const size_t r = sim.Offer({.klass = kPlanning,
                                .timeline = sim.Prompt({1}, 40),
                                .action_tokens = 30,
                                .samples = 4,
                                .beams = BeamOptions{}});
    const size_t other = sim.Offer({.klass = kPlanning,
                                    .timeline = sim.Prompt({1}, 40),
                                    .action_tokens = 30,
                                    .samples = 3,
                                    .beams = BeamOptions{}});
    sim.RunFor(Micros(at));
    sim.Cancel(r);
    sim.RunToIdle();
    EXPECT_TRUE(sim.request(other).ok());
    sim.ExpectBaseline();
  }
}

// Copies that a failed step should have made were other beams' too: no answer may rest on them.
TEST(Generate, AFailedStepLeavesNoWrongBeam) {
  for (int64_t at = 1'000; at < 60'000; at += 900) {
    Options options = DefaultOptions();
    options.check_every = 1;
    options.lanes[0].max_logit_rows = 5;  // not all beams fit a step
    Simulation sim(options);
    for (uint64_t i = 0; i < 2; ++i) {
      sim.Offer({.klass = kPlanning,
                 .timeline = sim.Prompt({i}, 40),
                 .action_tokens = 30,
                 .samples = 4,
                 .beams = BeamOptions{}});
    }
    sim.RunFor(Micros(at));
    sim.FailRunningStep(0);
    sim.RunToIdle();  // answers are compared with those of the request alone
    sim.ExpectBaseline();
  }
}

// Robots are served as if nobody wrote texts beside them.
TEST(Generate, AMixWithControlKeepsControlsMissesAtZero) {
  Options options;
  options.scheduler.classes = {
      Class("control", 0, 20'000, OnLate::kReject, 64, 8),
      Class("perception", 1, 50'000, OnLate::kReject, 64, 4, Modality::kVision),
      Class("planning", 1, 0, OnLate::kRunLate, 64, 2, Modality::kText),
      Class("best_effort", 2, 0, OnLate::kRunLate, 256, 1)};
  options.scheduler.step_ceiling = Micros(5'000);
  options.lanes = {Lane(0, 0, 2048)};
  options.lanes[0].max_action_tokens = 256;
  options.costs = {200, 400, 300, 4, 25, 0.05};
  options.check_every = 64;
  options.keep_steps = false;
  Simulation sim(options);
  Random random(11);
  for (uint64_t i = 0; i < 6; ++i) {
    sim.Offer({.klass = 3,
               .timeline = sim.Prompt({1'000'000 + i}, 20 + 30 * static_cast<uint32_t>(i), i)});
    sim.RunToIdle();
  }
  const size_t first = sim.requests().size();
  const TimePoint until = sim.now() + Micros(10'000'000);
  uint64_t frame = 0;
  const std::function<void()> act = [&] {
    if (sim.now() >= until) return;
    sim.Offer({.klass = 0,
               .session = 1 + random.Below(8),
               .timeline = sim.Prompt({++frame}, 20, random.Below(4))});
    sim.After(Micros(2'500 + random.Below(2'500)), act);
  };
  const std::function<void()> write = [&] {
    if (sim.now() >= until) return;
    const bool beams = random.Chance(0.3);
    sim.Offer({.klass = 2,
               .session = 100 + random.Below(8),
               .timeline = sim.Prompt({frame}, 60, random.Next()),
               .action_tokens = 20 + random.Below(200),
               .samples = beams ? 4u : 1u,
               .temperature = 0.5F,
               .stop_tokens = {1, 2, 3},
               .beams = beams ? std::optional(BeamOptions{}) : std::nullopt});
    sim.After(Micros(20'000 + random.Below(100'000)), write);
  };
  sim.After(Micros(0), act);
  sim.After(Micros(0), write);
  sim.RunToIdle();
  size_t control = 0;
  size_t texts = 0;
  for (size_t i = first; i < sim.requests().size(); ++i) {
    const Tracked& r = sim.request(i);
    EXPECT_TRUE(r.ok()) << (r.outcome ? r.outcome->status : r.offered);
    EXPECT_FALSE(r.outcome && r.outcome->late && r.spec.klass == 0);
    (r.spec.klass == 0 ? control : texts) += 1;
  }
  EXPECT_GT(control, 2'000u);
  EXPECT_GT(texts, 100u);
  sim.ExpectBaseline();
}

}  // namespace
}  // namespace saccade::sim
