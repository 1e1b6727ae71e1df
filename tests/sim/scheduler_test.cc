// Directed simulations: one promise of the scheduler each.
#include <gtest/gtest.h>

#include "model/model.h"
#include "tests/sim/sim.h"

namespace saccade::sim {
namespace {

constexpr uint32_t kControl = 0;
constexpr uint32_t kPerception = 1;
constexpr uint32_t kPlanning = 2;
constexpr uint32_t kBestEffort = 3;

size_t OfferMany(Simulation& sim, size_t count, Spec spec) {
  for (size_t i = 0; i < count; ++i) sim.Offer(spec);
  return sim.requests().size() - count;
}

// ------------------------------------------------------------------------------------ one request

TEST(Scheduler, ALoneRequestRunsAtOnce) {
  Simulation sim(DefaultOptions());
  const size_t r = sim.Offer({.timeline = sim.Prompt({1}, 20), .action_tokens = 7});
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(r).ok()) << sim.request(r).offered;
  EXPECT_EQ(sim.steps().size(), 7u);  // encode, prefill and token 0 together; six decodes
  EXPECT_EQ(sim.request(r).first_start, sim.request(r).arrival);
  const Outcome& outcome = *sim.request(r).outcome;
  EXPECT_EQ(outcome.answers.size(), 1u);
  EXPECT_EQ(outcome.answers[0].tokens.size(), 7u);
  EXPECT_EQ(outcome.prompt_tokens[static_cast<size_t>(Modality::kVision)], 32u);
  EXPECT_EQ(outcome.prompt_tokens[static_cast<size_t>(Modality::kText)], 21u);
  EXPECT_FALSE(outcome.frame_cached);
  EXPECT_FALSE(outcome.late);
  const auto first = static_cast<int64_t>(sim.MicrosOf({1, 53, 0}));
  const auto decode = static_cast<int64_t>(sim.MicrosOf({0, 0, 1}));
  EXPECT_EQ(outcome.timings.queue.count(), 0);
  EXPECT_EQ(outcome.timings.encode.count(), first);
  EXPECT_EQ(outcome.timings.prefill.count(), 0);
  EXPECT_EQ(outcome.timings.act.count(), 6 * decode);
  EXPECT_EQ(outcome.timings.total.count(), first + 6 * decode);
  sim.ExpectBaseline();
}

TEST(Scheduler, ASecondIdenticalRequestReusesPrefixAndFrame) {
  Simulation sim(DefaultOptions());
  sim.Offer({.timeline = sim.Prompt({1}, 20)});
  sim.RunToIdle();
  const size_t second = sim.Offer({.session = 2, .timeline = sim.Prompt({1}, 20)});
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(second).ok());
  const Outcome& outcome = *sim.request(second).outcome;
  EXPECT_TRUE(outcome.frame_cached);
  EXPECT_EQ(sim.request(second).encodes, 0u);
  EXPECT_EQ(outcome.cached_tokens[static_cast<size_t>(Modality::kVision)], 32u);
  EXPECT_EQ(outcome.cached_tokens[static_cast<size_t>(Modality::kText)],
            17u);  // not the last block
  EXPECT_EQ(outcome.timings.encode.count(), 0);
}

TEST(Scheduler, APrefixPublishedWhileARequestWaitsIsFound) {
  Options options = DefaultOptions();
  options.lanes[0].sequence_slots = 1;  // the second one waits
  Simulation sim(options);
  sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({1}, 40)});
  const size_t second = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({1}, 40)});
  sim.RunToIdle();
  const Outcome& outcome = *sim.request(second).outcome;
  EXPECT_EQ(outcome.cached_tokens[static_cast<size_t>(Modality::kVision)], 32u);
  EXPECT_TRUE(outcome.frame_cached);
}

TEST(Scheduler, OneActionTokenNeedsNoDecode) {
  Simulation sim(DefaultOptions());
  const size_t r = sim.Offer({.timeline = sim.Prompt({}, 5), .action_tokens = 1});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(r).ok());
  EXPECT_EQ(sim.steps().size(), 1u);
  sim.ExpectBaseline();
}

TEST(Scheduler, BadRequestsAreRefusedByField) {
  Simulation sim(DefaultOptions());
  Request good;
  good.id = RequestId(1);
  good.session = SessionId(1);
  good.model = ModelId(0);
  good.klass = ClassId(0);
  good.arrival = sim.now();
  good.timeline = sim.Prompt({1}, 5);
  good.action_tokens = 7;
  const auto refuse = [&](auto&& change) {
    Request bad = good;
    change(bad);
    const absl::Status status = sim.scheduler().Offer(bad, sim.now());
    EXPECT_FALSE(status.ok());
    const ErrorInfo info = GetErrorInfo(status);
    return info.reason == Reason::kInvalidInput ? info.field : std::string(ReasonName(info.reason));
  };
  EXPECT_EQ(refuse([](Request& r) { r.klass = ClassId(4); }), "class");
  EXPECT_EQ(refuse([](Request& r) { r.klass = ClassId(); }), "class");
  EXPECT_EQ(refuse([](Request& r) { r.model = ModelId(3); }), "model");
  EXPECT_EQ(refuse([](Request& r) { r.timeline = nullptr; }), "timeline");
  EXPECT_EQ(refuse([](Request& r) { r.timeline = TimelineBuilder(Digest128(), 16).Build(); }),
            "timeline");
  EXPECT_EQ(refuse([](Request& r) {
              r.timeline = TimelineBuilder(Digest128(), 16).AddVision(0, nullptr, 8).Build();
            }),
            "timeline");
  EXPECT_EQ(refuse([](Request& r) { r.temperature = -1; }), "temperature");
  EXPECT_EQ(refuse([](Request& r) { r.temperature = NAN; }), "temperature");
  EXPECT_EQ(refuse([](Request& r) { r.action_tokens = 0; }), "action_tokens");
  EXPECT_EQ(refuse([](Request& r) { r.samples = 0; }), "samples");
  EXPECT_EQ(refuse([](Request& r) { r.samples = UINT32_MAX; }), "never_fits");
  EXPECT_EQ(refuse([](Request& r) { r.action_tokens = 65; }), "never_fits");
  EXPECT_EQ(refuse([&](Request& r) { r.timeline = sim.Prompt({}, 20'000); }), "never_fits");
  EXPECT_TRUE(sim.scheduler().Offer(good, sim.now()).ok());
  EXPECT_EQ(refuse([](Request&) {}), "id");
}

TEST(Scheduler, CreateNamesTheBadOption) {
  const auto field = [](auto&& change) {
    Options options = DefaultOptions();
    change(options);
    const auto scheduler = Scheduler::Create(options.scheduler, options.lanes);
    EXPECT_FALSE(scheduler.ok());
    return GetErrorInfo(scheduler.status()).field;
  };
  EXPECT_EQ(field([](Options& o) { o.scheduler.classes.clear(); }), "classes");
  EXPECT_EQ(field([](Options& o) { o.scheduler.classes[1].shares = 0; }),
            "classes.perception.shares");
  EXPECT_EQ(field([](Options& o) { o.scheduler.pipeline_depth = 0; }), "pipeline_depth");
  EXPECT_EQ(field([](Options& o) { o.scheduler.ageing_share = 0; }), "ageing_share");
  EXPECT_EQ(field([](Options& o) { o.scheduler.probe_after = Micros(-1); }), "probe_after");
  EXPECT_EQ(field([](Options& o) { o.scheduler.ageing_share = NAN; }), "ageing_share");
  EXPECT_EQ(field([](Options& o) { o.lanes.push_back(o.lanes[0]); }), "lanes");
  field([](Options& o) { o.lanes[0].max_rows = 0; });
  field([](Options& o) { o.lanes[0].kv.num_blocks = 0; });
}

// --------------------------------------------------------------------------------------- batching

TEST(Scheduler, WaitingWorkRunsTogether) {
  Options options = DefaultOptions();
  Simulation sim(options);
  for (uint64_t i = 0; i < 5; ++i) {
    sim.Offer({.session = i, .timeline = sim.Prompt({i}, 20, i)});
  }
  sim.RunToIdle();
  for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
  EXPECT_EQ(sim.steps().size(), 7u);
  for (const FinishedStep& step : sim.steps()) EXPECT_EQ(step.plan.trunk.size(), 5u);
}

TEST(Scheduler, FiveOnAStepOfFourRunFourAndOne) {
  Options options = DefaultOptions();
  options.lanes[0].max_rows = 4 * 53;
  Simulation sim(options);
  for (uint64_t i = 0; i < 5; ++i) {
    sim.Offer({.session = i, .timeline = sim.Prompt({i}, 20, i)});
  }
  sim.RunToIdle();
  EXPECT_EQ(sim.steps()[0].plan.trunk.size(), 4u);
  EXPECT_EQ(sim.steps()[1].plan.shape.prefill_rows, 53u);
  EXPECT_EQ(sim.steps()[1].plan.shape.decode_rows, 4u);  // the four go on meanwhile
}

TEST(Scheduler, AnIdenticalFrameOfTwoSessionsIsEncodedOnce) {
  Simulation sim(DefaultOptions());
  const size_t a = sim.Offer({.session = 1, .timeline = sim.Prompt({7}, 20, 1)});
  const size_t b = sim.Offer({.session = 2, .timeline = sim.Prompt({7}, 20, 2)});
  // A third one comes while the encode runs, and finds the K/V of its rows.
  size_t c = 0;
  sim.After(Micros(500),
            [&] { c = sim.Offer({.session = 3, .timeline = sim.Prompt({7}, 20, 3)}); });
  sim.RunToIdle();
  uint32_t encodes = 0;
  for (const Tracked& r : sim.requests()) {
    EXPECT_TRUE(r.ok());
    encodes += r.encodes;
  }
  EXPECT_FALSE(sim.request(a).outcome->frame_cached);
  EXPECT_FALSE(sim.request(b).outcome->frame_cached);
  EXPECT_TRUE(sim.request(c).outcome->frame_cached);
  EXPECT_EQ(encodes, 1u);
  EXPECT_EQ(sim.request(a).outcome->timings.total, sim.request(b).outcome->timings.total);
  EXPECT_EQ(sim.scheduler().stats().lanes[0].embedding_hits, 1u);
}

TEST(Scheduler, SamplesShareThePrefix) {
  Simulation sim(DefaultOptions());
  const size_t r = sim.Offer({.timeline = sim.Prompt({1}, 20),
                              .action_tokens = 20,
                              .samples = 5,
                              .temperature = 1,
                              .seed = 42});
  // 1 + 2 + 2 prompt blocks (BOS, vision, text), 2 action blocks per sample.
  sim.RunFor(Micros(1000));
  EXPECT_EQ(sim.HeldBlocks(), 5u + 5 * 2u);
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(r).ok());
  const auto tokens = sim.request(r).tokens();
  ASSERT_EQ(tokens.size(), 5u);
  for (size_t i = 1; i < 5; ++i) EXPECT_NE(tokens[0], tokens[i]);
  EXPECT_EQ(sim.steps().size(), 20u);  // all samples in every step
  for (const FinishedStep& step : sim.steps()) EXPECT_TRUE(step.plan.copies.empty());
  sim.ExpectBaseline();

  // The same seed gives the same samples again.
  const size_t again = sim.Offer({.timeline = sim.Prompt({1}, 20),
                                  .action_tokens = 20,
                                  .samples = 5,
                                  .temperature = 1,
                                  .seed = 42});
  sim.RunToIdle();
  EXPECT_EQ(sim.request(again).tokens(), tokens);
}

// A verified request's taps are the tensors of its steps: nothing else may be in them.
TEST(Scheduler, ATappedRequestRunsAlone) {
  class Sink final : public TapSink {
   public:
    bool Wants(std::string_view) const override { return false; }
    absl::Status Record(Stream&, std::string_view, TensorView) override { return absl::OkStatus(); }
  };
  Simulation sim(DefaultOptions());
  OfferMany(sim, 3, {.klass = kPlanning, .timeline = sim.Prompt({1}, 30), .action_tokens = 12});
  const size_t tapped = sim.Offer(
      {.klass = kPlanning, .timeline = sim.Prompt({2}, 30), .tap = std::make_shared<Sink>()});
  OfferMany(sim, 3, {.klass = kBestEffort, .timeline = sim.Prompt({3}, 30), .action_tokens = 12});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(tapped).ok());
  for (const FinishedStep& step : sim.steps()) {
    if (!Names(step.plan, sim.request(tapped).id)) continue;
    for (const TrunkItem& item : step.plan.trunk) EXPECT_NE(item.tap, nullptr);
    for (const EncodeItem& item : step.plan.encodes) EXPECT_NE(item.tap, nullptr);
  }
}

// ---------------------------------------------------------------------------------------- urgency

TEST(Scheduler, AnUrgentArrivalWaitsForTheRunningStepOnly) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(6'000);
  Simulation sim(options);
  WarmUp(sim);
  // A long prefill in the background keeps a step running and one queued.
  const size_t background =
      sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({}, 2000), .action_tokens = 8});
  sim.RunFor(Micros(20'500));
  ASSERT_NE(sim.running(), nullptr);
  ASSERT_NE(sim.queued(), nullptr);
  const StepId running = sim.running()->id;
  const size_t urgent = sim.Offer({.klass = kControl, .timeline = sim.Prompt({}, 20, 5)});
  sim.RunToIdle();
  EXPECT_EQ(sim.revocations(), 1u);
  ASSERT_TRUE(sim.request(urgent).ok());
  const auto step = std::find_if(sim.steps().begin(), sim.steps().end(), [&](const auto& s) {
    return Names(s.plan, sim.request(urgent).id);
  });
  ASSERT_NE(step, sim.steps().begin());
  EXPECT_EQ((step - 1)->plan.id, running);
  EXPECT_LE(step->started - sim.request(urgent).arrival, Micros(7'000));
  EXPECT_TRUE(sim.request(background).ok());
}

TEST(Scheduler, TheEarliestDeadlineGoesFirst) {
  Options options = DefaultOptions();
  options.lanes[0].sequence_slots = 1;  // strictly one after another
  Simulation sim(options);
  const size_t running = sim.Offer({.timeline = sim.Prompt({}, 30), .deadline = Micros(5'000'000)});
  sim.RunFor(Micros(100));
  std::vector<size_t> order;
  for (const int64_t ms : {900, 300, 700, 100, 500}) {
    order.push_back(sim.Offer({.timeline = sim.Prompt({}, 30, static_cast<uint64_t>(ms)),
                               .deadline = Micros(ms * 1000)}));
  }
  sim.RunToIdle();
  // It held the only slot, all others have earlier deadlines: it is preempted, and finishes last.
  std::vector<size_t> by_deadline = {order[3], order[1], order[4], order[2], order[0], running};
  for (size_t i = 1; i < by_deadline.size(); ++i) {
    EXPECT_LT(sim.request(by_deadline[i - 1]).outcome_at, sim.request(by_deadline[i]).outcome_at);
  }
}

// BR-13: thirty long background requests hold every slot; one control request comes.
TEST(Scheduler, ThirtyBackgroundRequestsDoNotDelayControl) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(10'000);
  options.lanes[0].sequence_slots = 30;
  options.lanes[0].max_logit_rows = 30;
  Simulation sim(options);
  WarmUp(sim);
  for (uint64_t i = 0; i < 30; ++i) {
    sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({}, 40, i), .action_tokens = 64});
  }
  sim.RunFor(Micros(90'000));  // well into their decodes
  EXPECT_EQ(sim.scheduler().stats().classes[kBestEffort].running, 30u);
  const size_t control = sim.Offer(
      {.klass = kControl, .timeline = sim.Prompt({1}, 20, 999), .deadline = Micros(60'000)});
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(control).ok()) << sim.request(control).outcome->status;
  const auto solo = static_cast<int64_t>(sim.MicrosOf({1, 53, 0}) + 6 * sim.MicrosOf({0, 0, 1}));
  // One running step, its own steps (chunked by the ceiling), and what it lets others add: its
  // deadline is generous, so the bound that matters is the deadline, of which it used a part.
  EXPECT_LE(sim.request(control).latency().count(), 60'000);
  EXPECT_LE(*sim.request(control).first_start - sim.request(control).arrival, Micros(11'000));
  EXPECT_GE(sim.request(control).latency().count(), solo);
  for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
  sim.ExpectBaseline();
}

// The same with a deadline that leaves nothing to spare: one step plus its own time.
TEST(Scheduler, ATightControlRequestSharesItsStepsWithNobody) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(10'000);
  Simulation sim(options);
  WarmUp(sim);
  for (uint64_t i = 0; i < 20; ++i) {
    sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({}, 300, i), .action_tokens = 64});
  }
  sim.RunFor(Micros(50'000));
  const auto solo =
      static_cast<int64_t>(sim.MicrosOf({1, 53, 0}) + 7 * sim.MicrosOf({0, 0, 1}) + 1000);
  const size_t control = sim.Offer(
      {.klass = kControl, .timeline = sim.Prompt({1}, 20, 999), .deadline = Micros(solo + 10'500)});
  ASSERT_TRUE(sim.request(control).offered.ok()) << sim.request(control).offered;
  sim.RunFor(Micros(60'000));
  EXPECT_TRUE(sim.request(control).ok()) << sim.request(control).outcome->status;
  sim.RunToIdle();
}

// BR-34: a stream decodes at a steady rate while long prompts and images arrive.
TEST(Scheduler, LongPrefillsDoNotStopAStream) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(8'000);
  Simulation sim(options);
  WarmUp(sim);
  const size_t stream = sim.Offer({.klass = kControl,
                                   .timeline = sim.Prompt({}, 20),
                                   .action_tokens = 64,
                                   .deadline = Micros(3'000'000)});
  sim.RunFor(Micros(15'000));
  for (uint64_t i = 0; i < 4; ++i) {
    sim.Offer({.klass = i % 2 == 0 ? kControl : kPlanning,
               .timeline = sim.Prompt({10 + i, 20 + i, 30 + i}, 1200, i),
               .deadline = Micros(2'000'000)});
  }
  sim.RunToIdle();
  const std::vector<TimePoint>& times = sim.request(stream).token_times;
  ASSERT_EQ(times.size(), 64u);
  for (size_t i = 1; i < times.size(); ++i) {
    EXPECT_LE(times[i] - times[i - 1], Micros(8'000 + 1'000)) << i;  // one step
  }
  for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
}

// New short prompts are not starved by an old long one of the same class.
TEST(Scheduler, AShortPromptPassesALongOneWithALaterDeadline) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(8'000);
  Simulation sim(options);
  WarmUp(sim);
  const size_t longer = sim.Offer(
      {.klass = kControl, .timeline = sim.Prompt({}, 4000), .deadline = Micros(2'000'000)});
  sim.RunFor(Micros(30'000));
  const size_t shorter = sim.Offer(
      {.klass = kControl, .timeline = sim.Prompt({}, 20, 3), .deadline = Micros(100'000)});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(shorter).ok());
  EXPECT_LT(sim.request(shorter).outcome_at, sim.request(longer).outcome_at);
  EXPECT_TRUE(sim.request(longer).ok());
}

// Decodes of many running streams fill a step; the most urgent request still gets its prefill.
TEST(Scheduler, DecodesLeaveRoomForTheMostUrgentPrefill) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(3'000);
  Simulation sim(options);
  WarmUp(sim);
  for (uint64_t i = 0; i < 30; ++i) {
    sim.Offer(
        {.timeline = sim.Prompt({}, 5, i), .action_tokens = 64, .deadline = Micros(5'000'000)});
  }
  sim.RunFor(Micros(80'000));
  const size_t urgent =
      sim.Offer({.timeline = sim.Prompt({}, 60, 99), .deadline = Micros(200'000)});
  ASSERT_TRUE(sim.request(urgent).offered.ok()) << sim.request(urgent).offered;
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(urgent).ok());
  EXPECT_LE(sim.request(urgent).latency(), Micros(60'000));
  for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
}

// What cannot meet its deadline any more does not drag others with it.
TEST(Scheduler, AHopelessRequestGivesWay) {
  Simulation sim(DefaultOptions());
  // Nothing is known yet, so both are admitted; the first needs 200 ms.
  const size_t hopeless =
      sim.Offer({.timeline = sim.Prompt({}, 4'000, 1), .deadline = Micros(150'000)});
  const size_t small = sim.Offer({.timeline = sim.Prompt({}, 60, 2), .deadline = Micros(155'000)});
  sim.RunToIdle();
  EXPECT_EQ(sim.request(hopeless).reason(), Reason::kExpired);
  EXPECT_TRUE(sim.request(small).ok());
}

TEST(Scheduler, StepsKeepTheCeiling) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(7'000);
  options.costs.noise = 0.05;
  Simulation sim(options);
  WarmUp(sim);
  const size_t before = sim.steps().size();
  Random random(4);
  for (uint64_t i = 0; i < 40; ++i) {
    sim.Offer({.klass = 1 + random.Below(3),
               .timeline = sim.Prompt({100 + i}, 20 + random.Below(300), i),
               .action_tokens = 1 + random.Below(20)});
  }
  sim.RunToIdle();
  size_t above = 0;
  for (size_t i = before; i < sim.steps().size(); ++i) {
    above += sim.steps()[i].finished - sim.steps()[i].started > Micros(7'400) ? 1 : 0;
  }
  EXPECT_EQ(above, 0u) << "of " << sim.steps().size() - before;
}

// An encode that alone passes the ceiling still runs, by itself.
TEST(Scheduler, AUnitAboveTheCeilingStillRuns) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(2'000);
  Simulation sim(options);
  WarmUp(sim);
  const size_t r = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({1, 2}, 200)});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(r).ok());
}

TEST(Scheduler, ThePreferredModalityGoesFirstInsideEqualUrgency) {
  for (const Modality preferred : {Modality::kVision, Modality::kText}) {
    Options options = DefaultOptions();
    options.scheduler.classes = {Class("only", 0, 10'000'000)};
    options.scheduler.classes[0].preferred = preferred;
    options.scheduler.step_ceiling = Micros(6'000);
    Simulation sim(options);
    for (uint64_t i = 0; i < 8; ++i) {
      sim.Offer({.timeline = sim.Prompt({500 + i}, 20 + 20 * static_cast<uint32_t>(i), i)});
      sim.RunToIdle();
    }
    const size_t before = sim.steps().size();
    // Equal deadlines: one needs an encode, the other prefill only.
    sim.Offer({.timeline = sim.Prompt({}, 90, 1000), .deadline = Micros(5'000'000)});
    sim.Offer({.timeline = sim.Prompt({3}, 90, 1001), .deadline = Micros(5'000'000)});
    sim.RunToIdle();
    const StepPlan& first = sim.steps()[before].plan;
    EXPECT_EQ(first.encodes.empty(), preferred == Modality::kText);
  }
}

// --------------------------------------------------------------------------------- fairness, ages

TEST(Scheduler, ClassesOfATierShareByTheirShares) {
  Options options = DefaultOptions();
  options.scheduler.classes = {
      Class("a", 1, 0, OnLate::kRunLate, 64, 6), Class("b", 1, 0, OnLate::kRunLate, 64, 3),
      Class("c", 1, 0, OnLate::kRunLate, 64, 1), Class("warm", 2, 0, OnLate::kRunLate)};
  options.scheduler.step_ceiling = Micros(4'000);
  options.scheduler.ageing_share = 0.0001;  // out of the picture
  Simulation sim(options);
  WarmUp(sim);
  const size_t before = sim.requests().size();
  const size_t first_step = sim.steps().size();
  // Every class always has work: each finished request is followed by another.
  uint64_t seed = 0;
  for (uint32_t klass = 0; klass < 3; ++klass) {
    for (int i = 0; i < 12; ++i) {
      sim.Offer({.klass = klass, .timeline = sim.Prompt({}, 250, ++seed), .action_tokens = 1});
    }
  }
  std::array<double, 3> rows{};
  size_t answered = before;
  size_t counted = first_step;
  const TimePoint until = sim.now() + Micros(4'000'000);
  while (sim.now() < until && sim.Step()) {
    for (; answered < sim.requests().size() && sim.request(answered).outcome; ++answered) {
    }
    for (uint32_t klass = 0; klass < 3; ++klass) {
      const SchedulerStats stats = sim.scheduler().stats();
      if (stats.classes[klass].queued + stats.classes[klass].running < 8) {
        sim.Offer({.klass = klass, .timeline = sim.Prompt({}, 250, ++seed), .action_tokens = 1});
      }
    }
    for (; counted < sim.steps().size(); ++counted) {
      for (const TrunkItem& item : sim.steps()[counted].plan.trunk) {
        rows[sim.request(item.request.value() - 1).spec.klass] += item.count;
      }
    }
  }
  const double all = rows[0] + rows[1] + rows[2];
  EXPECT_NEAR(rows[0] / all, 0.6, 0.03);
  EXPECT_NEAR(rows[1] / all, 0.3, 0.03);
  EXPECT_NEAR(rows[2] / all, 0.1, 0.03);
  sim.RunToIdle();
}

// BR-55: the top tier offers 110 % of what the device can do, for 20 s; one request of the lowest
// tier comes. It must finish, and the top tier must not notice more than one of its units.
TEST(Scheduler, TheLowestTierIsNotStarved) {
  const auto run = [](bool with_background, Micros* worst, Micros* background_took) {
    Options options = DefaultOptions();
    options.scheduler.step_ceiling = Micros(6'000);
    options.check_every = 16;
    options.keep_steps = false;
    Simulation sim(options);
    WarmUp(sim);
    const size_t first = sim.requests().size();
    // Solo: 1 + 40 * 0.05 + 6 * 1.1 ms; batching makes it cheaper, so the load is above what fits.
    std::function<void(uint64_t)> arrive = [&](uint64_t i) {
      sim.Offer({.klass = kControl,
                 .session = i,
                 .timeline = sim.Prompt({}, 60, 10'000 + i),
                 .deadline = Micros(30'000)});
      if (i < 8'000) sim.After(Micros(2'500), [&arrive, i] { arrive(i + 1); });
    };
    arrive(0);
    size_t background = 0;
    if (with_background) {
      sim.After(Micros(1'000'000), [&] {
        background = sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({1}, 200, 5)});
      });
    }
    sim.RunToIdle(Micros(60'000'000));
    std::vector<Micros> latencies;
    size_t refused = 0;
    for (size_t i = first; i < sim.requests().size(); ++i) {
      const Tracked& r = sim.request(i);
      if (r.spec.klass != kControl) continue;
      if (!r.ok()) ++refused;
      if (r.ok()) latencies.push_back(r.latency());
    }
    std::sort(latencies.begin(), latencies.end());
    *worst = latencies[latencies.size() * 99 / 100];
    EXPECT_GT(refused, 400u) << "the load does not saturate";
    if (with_background) {
      EXPECT_TRUE(sim.request(background).ok());
      *background_took = sim.request(background).latency();
    }
  };
  Micros alone{};
  Micros shared{};
  Micros took{};
  run(false, &alone, &took);
  run(true, &shared, &took);
  // 200 ms until it ages, then a tenth of the time: 3.5 + 12.6 + 6.6 ms of work.
  EXPECT_LE(took, Micros(1'000'000));
  EXPECT_LE(shared, alone + Micros(3'500));
}

// A tier in the middle does not starve the one below either, and an aged request does not become
// a class of its own: the one above keeps at least what ageing leaves.
TEST(Scheduler, AgeingTakesItsShareAndNoMore) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(4'000);
  options.scheduler.ageing_share = 0.1;
  Simulation sim(options);
  WarmUp(sim);
  uint64_t seed = 0;
  std::array<double, 4> rows{};
  size_t counted = sim.steps().size();
  const TimePoint until = sim.now() + Micros(5'000'000);
  sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({}, 250, ++seed), .action_tokens = 1});
  while (sim.now() < until && sim.Step()) {
    for (const uint32_t klass : {kPlanning, kBestEffort}) {
      const SchedulerStats stats = sim.scheduler().stats();
      if (stats.classes[klass].queued + stats.classes[klass].running < 6) {
        sim.Offer({.klass = klass, .timeline = sim.Prompt({}, 250, ++seed), .action_tokens = 1});
      }
    }
    for (; counted < sim.steps().size(); ++counted) {
      for (const TrunkItem& item : sim.steps()[counted].plan.trunk) {
        rows[sim.request(item.request.value() - 1).spec.klass] += item.count;
      }
    }
  }
  const double lower = rows[kBestEffort] / (rows[kBestEffort] + rows[kPlanning]);
  EXPECT_GT(lower, 0.03);
  EXPECT_LT(lower, 0.15);
  sim.RunToIdle();
}

// -------------------------------------------------------------------------------------- admission

TEST(Scheduler, NothingIsRefusedForLackOfData) {
  Simulation sim(DefaultOptions());
  for (int i = 0; i < 10; ++i) {
    const size_t r = sim.Offer({.timeline = sim.Prompt({}, 300), .deadline = Micros(1)});
    EXPECT_TRUE(sim.request(r).offered.ok());
  }
  sim.RunToIdle();
}

TEST(Scheduler, APassedDeadlineIsRefused) {
  Simulation sim(DefaultOptions());
  const size_t r = sim.Offer({.timeline = sim.Prompt({}, 30), .deadline = Micros(0)});
  EXPECT_EQ(sim.request(r).offered.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(sim.request(r).reason(), Reason::kExpired);
  sim.RunToIdle();
  EXPECT_TRUE(sim.steps().empty());
}

TEST(Scheduler, LateIsRefusedAtOnceWithThePredictedFinish) {
  Simulation sim(DefaultOptions());
  WarmUp(sim);
  const auto solo = static_cast<int64_t>(sim.MicrosOf({0, 101, 0}) + 6 * sim.MicrosOf({0, 0, 1}));
  // Alone: 12.7 ms. Behind a queue of others with earlier deadlines it cannot make 40 ms.
  for (uint64_t i = 0; i < 8; ++i) {
    const size_t r = sim.Offer({.timeline = sim.Prompt({}, 100, 50 + i),
                                .action_tokens = 7,
                                .deadline = Micros(50'000 + 10'000 * static_cast<int64_t>(i))});
    EXPECT_TRUE(sim.request(r).offered.ok()) << sim.request(r).offered;
  }
  sim.RunFor(Micros(100));
  const size_t tight =
      sim.Offer({.timeline = sim.Prompt({}, 100, 99), .deadline = Micros(solo * 8 / 10)});
  const Tracked& refused = sim.request(tight);
  EXPECT_EQ(refused.offered.code(), absl::StatusCode::kDeadlineExceeded);
  const ErrorInfo info = GetErrorInfo(refused.offered);
  EXPECT_EQ(info.reason, Reason::kLate);
  ASSERT_TRUE(info.predicted_finish.has_value());
  EXPECT_GT(info.predicted_finish->count(), solo * 9 / 10);
  ASSERT_TRUE(info.deadline.has_value());
  EXPECT_EQ(info.deadline->count(), solo * 8 / 10);
  ASSERT_TRUE(info.retry_after.has_value());
  EXPECT_GE(info.retry_after->count(), 1'000);
  // The same in a class that runs late is admitted, and says so when it is.
  Spec late = refused.spec;
  late.klass = kPlanning;
  const size_t runs = sim.Offer(late);
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(runs).ok());
  EXPECT_TRUE(sim.request(runs).outcome->late);
}

TEST(Scheduler, RefusedWorkWouldHaveMissedAndAdmittedWorkMeets) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(6'000);
  options.costs.noise = 0.05;
  options.check_every = 8;
  Simulation sim(options);
  WarmUp(sim);
  const size_t first = sim.requests().size();
  Random random(12);
  std::function<void(int)> arrive = [&](int left) {
    sim.Offer({.klass = kControl,
               .timeline = sim.Prompt({}, 40 + random.Below(100), random.Next()),
               .deadline = Micros(40'000)});
    if (left > 0) {
      sim.After(Micros(1'000 + random.Below(9'000)), [&arrive, left] { arrive(left - 1); });
    }
  };
  arrive(2'000);
  sim.RunToIdle();
  size_t admitted = 0;
  size_t met = 0;
  for (size_t i = first; i < sim.requests().size(); ++i) {
    admitted += sim.request(i).offered.ok() ? 1 : 0;
    met += sim.request(i).ok() ? 1 : 0;
  }
  EXPECT_GT(admitted, 1'400u);
  EXPECT_GE(static_cast<double>(met), 0.99 * static_cast<double>(admitted));
}

// A model that believes everything is late must find out that it is wrong.
TEST(Scheduler, AStalePredictionIsProbed) {
  Options options = DefaultOptions();
  Simulation sim(options);
  const size_t warm = sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({}, 100)});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(warm).ok());
  const Micros impossible(2'000);
  const size_t refused = sim.Offer({.timeline = sim.Prompt({}, 100, 2), .deadline = impossible});
  EXPECT_EQ(sim.request(refused).reason(), Reason::kLate);
  EXPECT_EQ(*GetErrorInfo(sim.request(refused).offered).retry_after, options.scheduler.probe_after);
  sim.RunFor(Micros(1'100'000));
  const size_t probe = sim.Offer({.timeline = sim.Prompt({}, 100, 3), .deadline = impossible});
  EXPECT_TRUE(sim.request(probe).offered.ok());
  sim.RunToIdle();
  EXPECT_EQ(sim.request(probe).reason(), Reason::kExpired);
}

// BR-56.
TEST(Scheduler, ABurstIsCutAtTheQueueLimit) {
  Options options = DefaultOptions();
  options.scheduler.classes[kPlanning].max_queued = 8;
  Simulation sim(options);
  WarmUp(sim);
  const size_t first = OfferMany(sim, 100, {.klass = kPlanning, .timeline = sim.Prompt({1}, 300)});
  size_t accepted = 0;
  for (size_t i = first; i < first + 100; ++i) {
    const Tracked& r = sim.request(i);
    accepted += r.offered.ok() ? 1 : 0;
    if (r.offered.ok()) continue;
    EXPECT_EQ(r.offered.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(r.reason(), Reason::kQueueFull);
    EXPECT_GE(GetErrorInfo(r.offered).retry_after->count(), 1'000);
  }
  EXPECT_EQ(accepted, 8u);
  // Another class is not affected, and the limit counts running ones too.
  EXPECT_TRUE(
      sim.request(sim.Offer({.klass = kPerception, .timeline = sim.Prompt({}, 9)})).offered.ok());
  sim.RunFor(Micros(20'000));
  EXPECT_FALSE(
      sim.request(sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({}, 9)})).offered.ok());
  sim.RunToIdle();
  EXPECT_TRUE(
      sim.request(sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({}, 9)})).offered.ok());
  sim.RunToIdle();
  sim.ExpectBaseline();
}

// --------------------------------------------------------------------------------------- sessions

// What it used has faded by then, and with it the memory of the session. Nothing is planned between
// its requests: the offer is the first to find out.
TEST(Scheduler, ASessionThatComesBackAfterAPauseStartsAnew) {
  Simulation sim(DefaultOptions());
  WarmUp(sim);
  std::vector<size_t> requests;
  for (uint64_t i = 0; i < 3; ++i) {
    sim.After(Micros(4'000'000), [&sim, &requests, i] {
      requests.push_back(sim.Offer(
          {.klass = kPlanning, .session = 5, .timeline = sim.Prompt({i}, 20), .action_tokens = 7}));
    });
    sim.RunToIdle();
  }
  ASSERT_EQ(requests.size(), 3u);
  for (const size_t r : requests) EXPECT_TRUE(sim.request(r).ok());
  sim.ExpectBaseline();
}

TEST(Scheduler, ASessionThatFillsItsClassGivesWay) {
  Options options = DefaultOptions();
  options.scheduler.classes[kPlanning].max_queued = 10;
  Simulation sim(options);
  const size_t flood =
      OfferMany(sim, 12, {.klass = kPlanning, .session = 1, .timeline = sim.Prompt({}, 30)});
  EXPECT_EQ(sim.request(flood + 10).reason(), Reason::kQueueFull);
  const size_t polite =
      sim.Offer({.klass = kPlanning, .session = 2, .timeline = sim.Prompt({}, 31)});
  EXPECT_TRUE(sim.request(polite).offered.ok()) << sim.request(polite).offered;
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(polite).ok());
  // Its newest that nothing was done for.
  EXPECT_EQ(sim.request(flood + 9).reason(), Reason::kQueueFull);
  for (size_t i = flood; i < flood + 9; ++i) EXPECT_TRUE(sim.request(i).ok());
  sim.ExpectBaseline();
}

// ----------------------------------------------------------------------------------------- expiry

TEST(Scheduler, ExpiredWorkNeverRuns) {
  Options options = DefaultOptions();
  options.lanes[0].sequence_slots = 1;
  Simulation sim(options);
  // No observation yet, so all are admitted; the first keeps the only slot for 100 ms.
  sim.Offer({.timeline = sim.Prompt({}, 2000), .action_tokens = 2, .deadline = Micros(500'000)});
  sim.RunFor(Micros(10));
  std::vector<size_t> waiting;
  for (uint64_t i = 0; i < 5; ++i) {
    waiting.push_back(sim.Offer({.timeline = sim.Prompt({}, 30, i), .deadline = Micros(600'000)}));
  }
  const size_t doomed = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({}, 30, 77)});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(doomed).ok());  // runs late
  for (const size_t i : waiting) EXPECT_TRUE(sim.request(i).ok());
}

TEST(Scheduler, QueuedAndRunningWorkExpires) {
  Options options = DefaultOptions();
  options.lanes[0].sequence_slots = 1;
  Simulation sim(options);
  const size_t running =
      sim.Offer({.timeline = sim.Prompt({}, 400), .action_tokens = 60, .deadline = Micros(50'000)});
  sim.RunFor(Micros(10));
  const size_t queued = sim.Offer({.timeline = sim.Prompt({}, 30, 2), .deadline = Micros(50'000)});
  EXPECT_EQ(sim.scheduler().NextWake(), sim.request(running).deadline);
  sim.RunToIdle();
  for (const size_t i : {running, queued}) {
    const Tracked& r = sim.request(i);
    EXPECT_EQ(r.outcome->status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(r.reason(), Reason::kExpired);
    EXPECT_EQ(r.outcome_at, r.deadline);
    EXPECT_EQ(GetErrorInfo(r.outcome->status).deadline->count(),
              (r.deadline - r.arrival) / Micros(1));
  }
  EXPECT_EQ(sim.request(queued).steps, 0u);
  EXPECT_EQ(sim.scheduler().NextWake(), kNever);
  sim.ExpectBaseline();
}

// ----------------------------------------------------------------------------- cancellation, BR-35

struct CancelCase {
  const char* name;
  // True when the request is in the phase.
  std::function<bool(Simulation&, size_t)> reached;
};

TEST(Scheduler, CancellationFreesEverythingInEveryPhase) {
  const std::vector<CancelCase> cases = {
      {"queued", [](Simulation&, size_t) { return true; }},
      {"encode in flight",
       [](Simulation& s, size_t r) {
         return s.running() != nullptr && !s.running()->encodes.empty() && s.InFlight(r);
       }},
      {"first chunk",
       [](Simulation& s, size_t r) {
         return s.request(r).steps >= 1 && s.request(r).streamed[0].empty();
       }},
      {"later chunk",
       [](Simulation& s, size_t r) {
         return s.request(r).steps >= 4 && s.request(r).streamed[0].empty();
       }},
      {"first token", [](Simulation& s, size_t r) { return s.request(r).streamed[0].size() == 1; }},
      {"mid decode", [](Simulation& s, size_t r) { return s.request(r).streamed[0].size() == 4; }},
      {"before the last token",
       [](Simulation& s, size_t r) { return s.request(r).streamed[0].size() == 7; }},
  };
  for (const CancelCase& c : cases) {
    for (const bool whole_session : {false, true}) {
      for (const uint32_t samples : {1u, 3u}) {
        SCOPED_TRACE(c.name);
        Options options = DefaultOptions();
        options.scheduler.step_ceiling = Micros(5'000);
        Simulation sim(options);
        WarmUp(sim);
        const size_t other = sim.Offer({.klass = kPlanning,
                                        .session = 9,
                                        .timeline = sim.Prompt({8}, 100, 1),
                                        .action_tokens = 40});
        const size_t r = sim.Offer({.klass = kPlanning,
                                    .session = 5,
                                    .timeline = sim.Prompt({3}, 400, 2),
                                    .action_tokens = 8,
                                    .samples = samples,
                                    .temperature = 1});
        while (!c.reached(sim, r)) ASSERT_TRUE(sim.Step());
        ASSERT_FALSE(sim.request(r).outcome.has_value());
        whole_session ? sim.CancelSession(5) : sim.Cancel(r);
        const uint32_t steps = sim.request(r).steps;
        ASSERT_TRUE(sim.Step());
        ASSERT_TRUE(sim.request(r).outcome.has_value());
        EXPECT_EQ(sim.request(r).outcome->status.code(), absl::StatusCode::kCancelled);
        // What was in flight ends, nothing new begins; then only the other one holds anything.
        while (sim.InFlight(r)) ASSERT_TRUE(sim.Step());
        EXPECT_LE(sim.request(r).steps, steps + 2);
        EXPECT_LE(sim.HeldBlocks(), 1u + 2 + 7 + 3);
        sim.RunToIdle();
        EXPECT_TRUE(sim.request(other).ok());
        sim.ExpectBaseline();
      }
    }
  }
}

TEST(Scheduler, TwentyCancelledInTheQueueNeverRun) {
  Options options = DefaultOptions();
  options.lanes[0].sequence_slots = 2;
  Simulation sim(options);
  OfferMany(sim, 2, {.klass = kPlanning, .timeline = sim.Prompt({}, 300), .action_tokens = 30});
  sim.RunFor(Micros(10));
  const size_t first =
      OfferMany(sim, 20, {.klass = kPlanning, .session = 4, .timeline = sim.Prompt({}, 30)});
  sim.RunFor(Micros(20'000));
  sim.CancelSession(4);
  sim.RunToIdle();
  for (size_t i = first; i < first + 20; ++i) {
    EXPECT_EQ(sim.request(i).steps, 0u);
    EXPECT_FALSE(sim.request(i).ok());
  }
  sim.ExpectBaseline();
}

TEST(Scheduler, CancellingTheEncoderLeavesTheFrameToOthers) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(4'000);
  Simulation sim(options);
  WarmUp(sim);
  const size_t a = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({7}, 100, 1)});
  const size_t b = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({7}, 100, 2)});
  while (sim.running() == nullptr || sim.running()->encodes.empty()) ASSERT_TRUE(sim.Step());
  ASSERT_EQ(sim.running()->encodes[0].request, sim.request(a).id);
  sim.Cancel(a);
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(b).ok());
  EXPECT_EQ(sim.request(b).encodes, 0u);  // it was made all the same
  sim.ExpectBaseline();
}

TEST(Scheduler, UnknownRequestsAndStepsAreIgnored) {
  Simulation sim(DefaultOptions());
  sim.scheduler().Fail(RequestId(17), absl::CancelledError("x"), sim.now());
  sim.scheduler().FailSession(SessionId(17), absl::CancelledError("x"), sim.now());
  sim.scheduler().OnWorkerLost(WorkerId(17), sim.now());
  StepPlan plan;
  plan.id = StepId(5);
  plan.worker = WorkerId(0);
  StepResult result;
  result.id = plan.id;
  sim.scheduler().OnStepDone(plan, result, sim.now());
  sim.scheduler().OnStepRevoked(plan, sim.now());
  EXPECT_FALSE(sim.scheduler().ShouldRevoke(plan, sim.now()));
  EXPECT_FALSE(sim.scheduler().Plan(WorkerId(17), sim.now(), sim.now()).has_value());
  EXPECT_EQ(sim.scheduler().cost_model(WorkerId(17), ModelId(3)).observations(), 0u);
  EXPECT_TRUE(sim.scheduler().idle());
  EXPECT_TRUE(sim.scheduler().CheckInvariants().ok());
}

// ----------------------------------------------------------------------------------------- faults

TEST(Scheduler, ANonFiniteSampleFailsItsRequestAlone) {
  for (const uint32_t index : {0u, 3u, 6u}) {
    Simulation sim(DefaultOptions());
    const size_t bad = sim.Offer({.session = 1, .timeline = sim.Prompt({1}, 20, 1)});
    const size_t good = sim.Offer({.session = 2, .timeline = sim.Prompt({2}, 20, 2)});
    sim.MakeNonFinite(bad, 0, index);
    sim.RunToIdle();
    EXPECT_EQ(sim.request(bad).outcome->status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(sim.request(bad).reason(), Reason::kNonFinite);
    EXPECT_TRUE(sim.request(good).ok());
    sim.ExpectBaseline();
    // BR-46: nothing that it computed is found again.
    const size_t retry = sim.Offer({.session = 1, .timeline = sim.Prompt({1}, 20, 1)});
    sim.RunToIdle();
    ASSERT_TRUE(sim.request(retry).ok());
    const Outcome& outcome = *sim.request(retry).outcome;
    EXPECT_EQ(outcome.cached_tokens[static_cast<size_t>(Modality::kVision)], 0u);
    // At most what the other one computed: the block of the first token.
    EXPECT_LE(outcome.cached_tokens[static_cast<size_t>(Modality::kText)], 1u);
    EXPECT_EQ(outcome.frame_cached, index > 0);  // the frame gave finite logits by then
  }
}

TEST(Scheduler, AFailedStepFailsWhatItNamesAndWhatReadItsFrames) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(5'000);
  Simulation sim(options);
  WarmUp(sim);
  const size_t a = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({7}, 100, 1)});
  const size_t waits = sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({}, 100, 3)});
  while (sim.running() == nullptr || sim.running()->encodes.empty()) ASSERT_TRUE(sim.Step());
  sim.FailRunningStep(0);
  sim.RunToIdle();
  EXPECT_EQ(sim.request(a).outcome->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(sim.request(a).reason(), Reason::kWorkerFailed);
  EXPECT_TRUE(sim.request(waits).ok());
  sim.ExpectBaseline();
  const size_t retry = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({7}, 100, 1)});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(retry).ok());
  EXPECT_EQ(sim.request(retry).encodes, 1u);
}

// A later step, already running, read an embedding that was never made.
TEST(Scheduler, AFailedEncodeFailsItsReadersInFlightOnly) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(5'000);
  Simulation sim(options);
  WarmUp(sim);
  const size_t a = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({7}, 1, 1)});
  const size_t b = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({7}, 200, 2)});
  const size_t waits = sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({7}, 200, 3)});
  while (sim.running() == nullptr || sim.running()->encodes.empty()) ASSERT_TRUE(sim.Step());
  ASSERT_FALSE(Names(*sim.running(), sim.request(b).id));
  ASSERT_TRUE(sim.queued() != nullptr && Names(*sim.queued(), sim.request(b).id));
  ASSERT_FALSE(sim.InFlight(waits));
  sim.FailRunningStep(0);
  sim.RunToIdle();
  for (const size_t i : {a, b}) EXPECT_EQ(sim.request(i).reason(), Reason::kWorkerFailed);
  ASSERT_TRUE(sim.request(waits).ok()) << sim.request(waits).outcome->status;
  EXPECT_EQ(sim.request(waits).encodes, 1u);
  sim.ExpectBaseline();
}

TEST(Scheduler, AMissingTokenFailsTheRequest) {
  Options options = DefaultOptions();
  auto scheduler = *Scheduler::Create(options.scheduler, options.lanes);
  Simulation helper(options);  // for its prompts
  Request request;
  request.id = RequestId(1);
  request.model = ModelId(0);
  request.klass = ClassId(0);
  request.arrival = helper.now();
  request.timeline = helper.Prompt({}, 10);
  request.action_tokens = 3;
  const TimePoint now = helper.now();
  const auto fresh = [&](uint64_t id) {
    Request r = request;
    r.id = RequestId(id);
    EXPECT_TRUE(scheduler->Offer(r, now).ok());
    return *scheduler->Plan(WorkerId(0), now, now);
  };
  const auto expect_internal = [&] {
    const std::vector<Outcome> outcomes = scheduler->TakeOutcomes();
    ASSERT_EQ(outcomes.size(), 1u);
    EXPECT_EQ(outcomes[0].status.code(), absl::StatusCode::kInternal);
    EXPECT_TRUE(scheduler->idle());
    EXPECT_TRUE(scheduler->CheckInvariants().ok());
  };
  StepPlan plan = fresh(1);
  scheduler->OnStepDone(plan, {plan.id, absl::OkStatus(), now, now, {}}, now);
  expect_internal();
  plan = fresh(2);
  scheduler->OnStepDone(plan, {plan.id, absl::OkStatus(), now, now, {{RequestId(2), 0, 1, 5}}},
                        now);
  expect_internal();
  plan = fresh(3);
  scheduler->OnStepDone(plan, {plan.id, absl::OkStatus(), now, now, {{RequestId(3), 9, 0, 5}}},
                        now);
  expect_internal();
}

TEST(Scheduler, ALostWorkerFailsWhatItHeldAndPassesOnWhatWaited) {
  Options options = DefaultOptions();
  options.lanes = {Lane(0, 0), Lane(1, 0)};
  for (LaneOptions& lane : options.lanes) lane.sequence_slots = 2;
  Simulation sim(options);
  const size_t first = OfferMany(
      sim, 12, {.klass = kPlanning, .timeline = sim.Prompt({1}, 100), .action_tokens = 20});
  sim.RunFor(Micros(15'000));
  std::set<size_t> held;
  for (size_t i = first; i < first + 12; ++i) {
    if (Names(*sim.running(0), sim.request(i).id)) held.insert(i);
  }
  ASSERT_FALSE(held.empty());
  sim.LoseWorker(0);
  sim.RunToIdle();
  for (size_t i = first; i < first + 12; ++i) {
    if (held.contains(i)) {
      EXPECT_EQ(sim.request(i).outcome->status.code(), absl::StatusCode::kUnavailable);
      EXPECT_EQ(sim.request(i).reason(), Reason::kWorkerFailed);
    } else {
      EXPECT_TRUE(sim.request(i).ok()) << sim.request(i).outcome->status;
    }
  }
  sim.ExpectBaseline();
  sim.LoseWorker(1);
  const size_t refused = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({1}, 10)});
  EXPECT_EQ(sim.request(refused).reason(), Reason::kWorkerFailed);
  EXPECT_EQ(sim.request(refused).offered.code(), absl::StatusCode::kUnavailable);
}

TEST(Scheduler, WorkersOfAModelShareTheLoad) {
  Options options = DefaultOptions();
  options.lanes = {Lane(0, 0), Lane(1, 0)};
  Simulation sim(options);
  WarmUp(sim);
  EXPECT_GT(sim.scheduler().cost_model(WorkerId(0), ModelId(0)).observations(), 0u);
  EXPECT_GT(sim.scheduler().cost_model(WorkerId(1), ModelId(0)).observations(), 0u);
  for (uint64_t i = 0; i < 20; ++i) {
    sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({}, 200, i), .action_tokens = 8});
  }
  const TimePoint begin = sim.now();
  sim.RunToIdle();
  double busy = 0;
  for (const FinishedStep& step : sim.steps()) {
    if (step.started < begin) continue;
    busy += static_cast<double>((step.finished - step.started) / Micros(1));
  }
  EXPECT_GT(busy, 1.6 * static_cast<double>((sim.now() - begin) / Micros(1)));
}

TEST(Scheduler, TwoModelsOnAWorkerTakeTurns) {
  Options options = DefaultOptions();
  options.lanes = {Lane(0, 0), Lane(0, 1)};
  options.scheduler.step_ceiling = Micros(5'000);
  Simulation sim(options);
  WarmUp(sim, 0);
  WarmUp(sim, 1);
  const size_t first_step = sim.steps().size();
  for (uint64_t i = 0; i < 10; ++i) {
    for (const uint32_t model : {0u, 1u}) {
      sim.Offer({.klass = kPlanning, .model = model, .timeline = sim.Prompt({}, 300, i)});
    }
  }
  std::array<double, 2> got{};
  sim.RunFor(Micros(60'000));
  for (size_t i = first_step; i < sim.steps().size(); ++i) {
    const FinishedStep& step = sim.steps()[i];
    got[static_cast<size_t>(step.plan.model.value())] +=
        static_cast<double>((step.finished - step.started) / Micros(1));
  }
  EXPECT_NEAR(got[0] / (got[0] + got[1]), 0.5, 0.15);
  sim.RunToIdle();
  for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
}

// ------------------------------------------------------------------------------------- preemption

// BR-54: a pool that holds two of three; two background streams, then bursts of control requests.
TEST(Scheduler, PreemptionIsInvisibleExceptForLatency) {
  uint64_t resumed = 0;
  for (int64_t shift = 0; shift < 200; ++shift) {
    Options options = DefaultOptions();
    options.lanes[0] = Lane(0, 0, 22);  // blocks: a background stream needs 1 + 2 + 3 + 4
    options.scheduler.classes[kControl].max_queued = 16;
    options.scheduler.step_ceiling = Micros(6'000);
    Simulation sim(options);
    const size_t a = sim.Offer({.klass = kBestEffort,
                                .timeline = sim.Prompt({1}, 40, 1),
                                .action_tokens = 64,
                                .samples = shift % 4 == 3 ? 2u : 1u});
    const size_t b =
        sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({2}, 40, 2), .action_tokens = 64});
    sim.RunFor(Micros(300 * shift));
    for (uint64_t i = 0; i < 10; ++i) {
      sim.Offer({.klass = kControl,
                 .session = 10 + i,
                 .timeline = sim.Prompt({3 + i}, 30, 3 + i),
                 .deadline = Micros(3'000'000)});
    }
    sim.RunToIdle();
    for (const Tracked& r : sim.requests()) {
      ASSERT_TRUE(r.ok()) << "shift " << shift << ": "
                          << (r.outcome ? r.outcome->status : r.offered);
    }
    // Streams ended after the control requests that took their place.
    for (const FinishedStep& step : sim.steps()) {
      for (const TrunkItem& item : step.plan.trunk) resumed += item.known_tokens.empty() ? 0 : 1;
    }
    EXPECT_TRUE(sim.request(a).ok() && sim.request(b).ok());
    sim.ExpectBaseline();
    if (HasFailure()) break;
  }
  EXPECT_GT(resumed, 50u);  // tokens that had been emitted were computed again, not sampled again
}

TEST(Scheduler, AControlRequestTakesTheOnlySlot) {
  Options options = DefaultOptions();
  options.lanes[0].sequence_slots = 1;
  Simulation sim(options);
  WarmUp(sim);
  const size_t background =
      sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({1}, 40, 1), .action_tokens = 64});
  sim.RunFor(Micros(30'000));
  ASSERT_GT(sim.request(background).streamed[0].size(), 3u);
  const size_t control = sim.Offer({.klass = kControl, .timeline = sim.Prompt({}, 30, 2)});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(control).ok());
  EXPECT_TRUE(sim.request(background).ok());
  EXPECT_LT(sim.request(control).outcome_at, sim.request(background).outcome_at);
  // One step that was running, then its own.
  EXPECT_LE(*sim.request(control).first_start - sim.request(control).arrival, Micros(1'200));
}

// Lower tiers leave a fifth of the blocks, so that a control request starts with the next step and
// nobody has to be preempted for it. Without headroom they take all, and lose some again.
TEST(Scheduler, LowerTiersLeaveHeadroom) {
  for (const uint32_t headroom : {0U, 20U}) {
    Options options = DefaultOptions();
    options.lanes[0] = Lane(0, 0, 100);
    options.lanes[0].kv.headroom = headroom;
    options.scheduler.max_wait = Micros(100'000'000);
    Simulation sim(options);
    uint32_t most = 0;
    for (uint64_t i = 0; i < 20; ++i) {  // 1 + 4 + 4 blocks each
      sim.Offer({.klass = i % 2 == 0 ? kPlanning : kBestEffort,
                 .timeline = sim.Prompt({}, 64, 10 + i),
                 .action_tokens = 60});
    }
    const TimePoint busy = sim.now() + Micros(60'000);
    while (sim.now() < busy && sim.Step()) most = std::max(most, sim.HeldBlocks());
    EXPECT_GT(most, 60u);
    EXPECT_EQ(most <= 80, headroom == 20) << most;
    const size_t control = sim.Offer({.klass = kControl,
                                      .timeline = sim.Prompt({}, 64, 1),
                                      .action_tokens = 60,
                                      .deadline = Micros(900'000)});
    while (!sim.request(control).outcome && sim.Step()) most = std::max(most, sim.HeldBlocks());
    EXPECT_TRUE(sim.request(control).ok());
    sim.RunToIdle();
    size_t resumed = 0;
    for (const FinishedStep& step : sim.steps()) {
      for (const TrunkItem& item : step.plan.trunk) resumed += item.known_tokens.empty() ? 0 : 1;
    }
    EXPECT_EQ(resumed == 0, headroom == 20);
    for (const Tracked& r : sim.requests()) EXPECT_TRUE(r.ok());
  }
}

// What is larger than the headroom leaves runs alone; behind a busy top tier it ages, and uses the
// headroom then.
TEST(Scheduler, HeadroomKeepsNobodyFromRunning) {
  Options options = DefaultOptions();
  options.lanes[0] = Lane(0, 0, 40);
  options.lanes[0].kv.headroom = 30;
  Simulation sim(options);
  const size_t alone =
      sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({}, 400, 1), .action_tokens = 60});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(alone).ok());
  const TimePoint until = sim.now() + Micros(2'000'000);
  std::function<void(uint64_t)> arrive = [&](uint64_t i) {
    sim.Offer({.klass = kControl, .timeline = sim.Prompt({}, 16, 100 + i), .action_tokens = 16});
    if (sim.now() < until) sim.After(Micros(3'000), [&arrive, i] { arrive(i + 1); });
  };
  arrive(0);
  sim.RunFor(Micros(20'000));
  const size_t behind =
      sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({}, 200, 2), .action_tokens = 2});
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(behind).ok());
  EXPECT_LT(sim.request(behind).outcome_at, until);
}

TEST(Scheduler, NoPreemptionWhenItWouldNotHelp) {
  Options options = DefaultOptions();
  options.lanes[0] = Lane(0, 0, 40);
  Simulation sim(options);
  const size_t control = sim.Offer({.klass = kControl,
                                    .timeline = sim.Prompt({}, 400, 1),  // 1 + 25 + 4 blocks
                                    .action_tokens = 64,
                                    .deadline = Micros(1'000'000)});
  const size_t background =
      sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({}, 40, 2), .action_tokens = 30});
  sim.RunFor(Micros(10));
  // Needs more than the background holds.
  const size_t second = sim.Offer(
      {.klass = kControl, .timeline = sim.Prompt({}, 400, 3), .deadline = Micros(2'000'000)});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(control).ok());
  EXPECT_TRUE(sim.request(second).ok());
  EXPECT_TRUE(sim.request(background).ok());
  EXPECT_LT(sim.request(background).outcome_at, sim.request(second).outcome_at);
  for (const FinishedStep& step : sim.steps()) {
    for (const TrunkItem& item : step.plan.trunk) EXPECT_TRUE(item.known_tokens.empty());
  }
}

// Small requests that come later do not take the blocks that a big one waits for.
TEST(Scheduler, ABigRequestIsNotPassedByLaterSmallOnes) {
  Options options = DefaultOptions();
  options.lanes[0] = Lane(0, 0, 40);
  options.scheduler.max_wait = Micros(100'000'000);
  Simulation sim(options);
  size_t big = 0;
  std::function<void(uint64_t)> arrive = [&](uint64_t i) {
    sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({}, 60, i), .action_tokens = 20});
    if (i == 20) {
      big = sim.Offer({.klass = kPlanning, .timeline = sim.Prompt({}, 500, 1'000)});
    }
    if (i < 200) sim.After(Micros(4'000), [&arrive, i] { arrive(i + 1); });
  };
  arrive(0);
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(big).ok());
  EXPECT_LT(*sim.request(big).first_start - sim.request(big).arrival, Micros(200'000));
  for (const Tracked& r : sim.requests()) {
    if (!r.ok() || r.id <= sim.request(big).id) continue;
    EXPECT_GE(*r.first_start, *sim.request(big).first_start);
  }
}

TEST(Scheduler, WhateverFitsAloneRunsInTheEnd) {
  Options options = DefaultOptions();
  options.lanes[0] = Lane(0, 0, 34);
  options.lanes[0].embedding_slots = 3;
  options.lanes[0].sequence_slots = 3;
  options.lanes[0].max_rows = 8;  // below a chunk
  options.lanes[0].max_logit_rows = 3;
  options.lanes[0].max_frames = 1;
  Simulation sim(options);
  Random random(8);
  for (uint64_t i = 0; i < 60; ++i) {
    const uint32_t frames = random.Below(4);
    std::vector<uint64_t> numbers;
    for (uint32_t k = 0; k < frames; ++k) numbers.push_back(random.Below(6));
    sim.Offer({.klass = 1 + random.Below(3),
               .timeline = sim.Prompt(numbers, 1 + random.Below(250), i),
               .action_tokens = 1 + random.Below(20),
               .samples = 1 + random.Below(3)});
  }
  sim.RunToIdle();
  size_t admitted = 0;
  for (const Tracked& r : sim.requests()) {
    if (!r.offered.ok()) {
      EXPECT_EQ(r.reason(), Reason::kNeverFits);
      continue;
    }
    ++admitted;
    EXPECT_TRUE(r.ok()) << r.outcome->status;
  }
  EXPECT_GT(admitted, 30u);
  sim.ExpectBaseline();
}

// ------------------------------------------------------------------------------------------ speed

// The same calls give the same plans.
TEST(Scheduler, IsDeterministic) {
  const auto run = [] {
    Options options = DefaultOptions();
    options.costs.noise = 0.1;
    options.scheduler.step_ceiling = Micros(5'000);
    Simulation sim(options);
    Random random(3);
    for (uint64_t i = 0; i < 60; ++i) {
      sim.Offer({.klass = random.Below(4),
                 .timeline = sim.Prompt({i % 7}, random.Below(100), i % 5),
                 .deadline = Micros(20'000 + random.Below(500'000))});
      sim.RunFor(Micros(random.Below(4'000)));
    }
    sim.RunToIdle();
    uint64_t digest = 0;
    for (const FinishedStep& step : sim.steps()) {
      digest = Mix(digest, static_cast<uint64_t>(step.finished.time_since_epoch().count()));
      for (const TrunkItem& item : step.plan.trunk) {
        digest = Mix(digest, Mix(item.request.value(), item.begin));
        for (const PageRef& page : item.pages) {
          digest = Mix(digest, static_cast<uint64_t>(page.block.value()));
        }
      }
    }
    return digest;
  };
  EXPECT_EQ(run(), run());
}

}  // namespace
}  // namespace saccade::sim
