// Passes that are cut into layer slices, and lanes that come and go while such a pass is parked or
// in flight.
#include <gtest/gtest.h>

#include "sched/lane.h"
#include "tests/sim/sim.h"

namespace saccade::sim {
namespace {

constexpr uint32_t kControl = 0;
constexpr uint32_t kBestEffort = 3;
constexpr uint32_t kSmall = 0;  // the models
constexpr uint32_t kLarge = 1;

// ------------------------------------------------------------------------------------------------
// slices

// Model 1 takes 180 ms for a row, in 22 layers of 8 ms and a head; model 0 is small.
Options LargeAndSmall() {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(20'000);
  options.lanes = {Lane(0, 0), Lane(0, 1)};
  options.lanes[1].trunk_layers = EvenLayers(22, 1);
  options.step_us = [](const StepPlan& plan) {
    return plan.model == ModelId(1) ? TrueCosts{0, 0, 178'000, 2'000, 2'000, 0, 50}.Of(plan)
                                    : TrueCosts{0, 3'000, 500, 5, 50, 0, 50}.Of(plan);
  };
  return options;
}

// A large request until its pass is cut: the cost model knows it then.
size_t StartLarge(Simulation& sim, uint32_t text, uint32_t klass = 3) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    sim.Offer({.klass = klass, .model = 1, .timeline = sim.Prompt({}, 40, seed)});
    sim.Offer({.klass = 0, .timeline = sim.Prompt({}, 40, seed), .deadline = Micros(900'000)});
    sim.RunToIdle();
  }
  const size_t large =
      sim.Offer({.klass = klass, .model = 1, .timeline = sim.Prompt({}, text, 77)});
  sim.RunFor(Micros(50'000));
  EXPECT_NE(sim.running(), nullptr);
  EXPECT_FALSE(sim.running()->slice.whole());
  EXPECT_FALSE(sim.running()->slice.last());
  return large;
}

TEST(Layers, ControlWaitsForOneSliceAndThePassGoesOn) {
  Simulation sim(LargeAndSmall());
  const size_t large = StartLarge(sim, 200);
  const StepId pass = sim.running()->slice.pass;
  const size_t control =
      sim.Offer({.klass = 0, .timeline = sim.Prompt({}, 40, 99), .deadline = Micros(100'000)});
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(control).ok());
  EXPECT_LE(ToMicros(*sim.request(control).first_start - sim.request(control).arrival).count(),
            20'000);
  ASSERT_TRUE(sim.request(large).ok());
  uint32_t layers = 0;
  for (const FinishedStep& step : sim.steps()) {
    if (step.plan.slice.pass != pass) continue;
    EXPECT_EQ(step.plan.slice.begin, layers);
    EXPECT_LE(ToMicros(step.finished - step.started).count(), 20'000);
    layers = step.plan.slice.end;
  }
  EXPECT_GE(layers, 22u);
  sim.ExpectBaseline();
}

// Large weights: one decode row takes nine ceilings, the others next to nothing.
TEST(Layers, RowsOfManyRequestsShareAPass) {
  Options options = DefaultOptions();
  options.scheduler.step_ceiling = Micros(20'000);
  options.lanes[0].trunk_layers = EvenLayers(22, 1);
  options.costs = {};
  options.costs.trunk_base = 173'000;
  options.costs.prefill_row = 2'400;
  options.costs.decode_row = 2'600;
  Simulation sim(options);
  WarmUp(sim);
  const size_t before = sim.steps().size();
  for (uint64_t i = 0; i < 8; ++i) {
    sim.Offer({.klass = 3, .timeline = sim.Prompt({}, 8, i), .action_tokens = 20});
  }
  sim.RunToIdle();
  // 8 x 20 tokens in not many more passes than one request takes alone.
  size_t passes = 0;
  for (size_t i = before; i < sim.steps().size(); ++i) {
    const FinishedStep& step = sim.steps()[i];
    EXPECT_FALSE(step.plan.slice.whole());
    EXPECT_LE(ToMicros(step.finished - step.started), Micros(20'000));
    passes += step.plan.slice.last() ? 1 : 0;
  }
  EXPECT_GE(passes, 20u);
  EXPECT_LT(passes, 40u);
}

TEST(Layers, APassNobodyWantsIsDroppedAtTheNextSlice) {
  Simulation sim(LargeAndSmall());
  const size_t large = StartLarge(sim, 200);
  EXPECT_GT(sim.HeldBlocks(1), 0u);
  const size_t steps = sim.steps().size();
  sim.Cancel(large);
  EXPECT_GT(sim.HeldBlocks(1), 0u);  // the running slice names them
  sim.RunToIdle();
  EXPECT_LE(sim.steps().size(), steps + 2);
  sim.ExpectBaseline();
}

TEST(Layers, ASliceThatFailsFailsItsPassOnce) {
  Simulation sim(LargeAndSmall());
  const size_t large = StartLarge(sim, 200);
  sim.FailRunningStep(0);
  sim.RunToIdle();
  EXPECT_EQ(sim.request(large).reason(), Reason::kWorkerFailed);
  const size_t again = sim.Offer({.klass = 3, .model = 1, .timeline = sim.Prompt({}, 200, 77)});
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(again).ok());
  sim.ExpectBaseline();
}

TEST(Layers, ATierAboveCutsInWithAPassOfItsOwn) {
  Simulation sim(LargeAndSmall());
  const size_t low = StartLarge(sim, 200);
  const size_t high = sim.Offer({.klass = 0,
                                 .model = 1,
                                 .timeline = sim.Prompt({}, 1, 99),
                                 .action_tokens = 1,
                                 .deadline = Micros(600'000)});
  sim.RunToIdle();
  ASSERT_TRUE(sim.request(high).ok());
  ASSERT_TRUE(sim.request(low).ok());
  EXPECT_LT(sim.request(high).outcome_at, sim.request(low).token_times.front());
  sim.ExpectBaseline();
}

// ------------------------------------------------------------------------------------------------
// arrivals that are announced

constexpr Micros kBeat{50'000};

// `sessions` ask for a token of control every kBeat, evenly apart, while large requests run.
struct Beat {
  Micros longest_wait{0};
  Micros waits{0};  // of all
  uint32_t asked = 0;
  double large_share = 0;  // of the time
};

Beat Drive(bool announced, uint32_t sessions, bool come = true) {
  Options options = LargeAndSmall();
  options.scheduler.max_wait = Micros(60'000'000);  // what has aged goes before control
  Simulation sim(options);
  StartLarge(sim, 200);
  std::vector<size_t> asked;
  const TimePoint begin = sim.now();
  constexpr int kBeats = 40;
  // There is always one that waits, of a session that announces: what it refreshes itself.
  const auto offer_large = [&](uint64_t seed) {
    sim.Offer({.klass = kBestEffort,
               .model = 1,
               .session = 100,
               .timeline = sim.Prompt({}, 40, 1'000 + seed)});
  };
  offer_large(kBeats);
  for (int beat = 0; beat < kBeats; ++beat) {
    for (uint32_t s = 0; s < sessions; ++s) {
      if (come || beat == 0) {
        Spec spec{.klass = kControl,
                  .session = 100 + s,
                  .timeline = sim.Prompt({}, 40, 99),
                  .action_tokens = 1,
                  .deadline = kBeat};
        if (announced) spec.next = kBeat;
        asked.push_back(sim.Offer(std::move(spec)));
      }
      sim.RunFor(kBeat / sessions - Micros(1'000));
      // Just before the next one.
      if (s + 1 == sessions) offer_large(static_cast<uint64_t>(beat));
      sim.RunFor(Micros(1'000));
    }
  }
  const double whole = static_cast<double>(ToMicros(sim.now() - begin).count());
  sim.RunToIdle();
  Beat found;
  for (const size_t i : asked) {
    const Tracked& r = sim.request(i);
    if (!r.ok()) {
      ADD_FAILURE() << "request " << i << " of " << asked.size() << ": " << r.offered;
      continue;
    }
    if (r.arrival == begin) continue;  // nobody had announced it
    const Micros wait = ToMicros(*r.first_start - r.arrival);
    found.longest_wait = std::max(found.longest_wait, wait);
    found.waits += wait;
    ++found.asked;
  }
  for (const FinishedStep& step : sim.steps()) {
    if (step.plan.model == ModelId(1) && step.started >= begin &&
        step.started < begin + kBeats * kBeat) {
      found.large_share += static_cast<double>(ToMicros(step.finished - step.started).count());
    }
  }
  found.large_share /= whole;
  return found;
}

TEST(Announced, ControlFindsTheWorkerFree) {
  const Beat surprising = Drive(false, 1);
  const Beat announced = Drive(true, 1);
  EXPECT_GT(surprising.longest_wait, Micros(8'000));  // up to a slice
  EXPECT_LE(announced.longest_wait, Micros(200));
  // What fits in between runs: less than a layer, 16 ms where a pass is two units long, is missing
  // in each 50 ms.
  EXPECT_GT(announced.large_share, surprising.large_share - 16.0 / 50);
}

TEST(Announced, WhoDoesNotComeHoldsNobodyUpForLong) {
  // One announcement that nothing follows: at most a layer and the patience are lost of 2 s.
  EXPECT_GT(Drive(true, 1, false).large_share, 0.99);
}

// Nobody is woken again and again for a step that is held back on it.
TEST(Announced, AWorkerMayBeLostWhileItHoldsBack) {
  Simulation sim(LargeAndSmall());
  StartLarge(sim, 200);
  sim.Offer({.klass = kControl,
             .session = 100,
             .timeline = sim.Prompt({}, 40, 99),
             .action_tokens = 1,
             .deadline = kBeat,
             .next = kBeat});
  sim.RunFor(kBeat - Micros(1'000));
  ASSERT_EQ(sim.running(), nullptr);  // nothing fits before the next one
  EXPECT_NE(sim.scheduler().NextWake(), kNever);
  sim.LoseWorker(0);
  EXPECT_EQ(sim.scheduler().NextWake(), kNever);
  sim.RunToIdle();
}

TEST(Announced, ManyDoNotStarveTheLowest) {
  // Between any two there is room for no layer.
  const Beat announced = Drive(true, 12);
  const Beat surprising = Drive(false, 12);
  EXPECT_GT(announced.large_share, 0.5 * surprising.large_share);
  EXPECT_LE(announced.waits.count(), surprising.waits.count());
}

// ------------------------------------------------------------------------------------------------
// lanes that come and go

// Where the slices of a pass are.
enum class Where : uint8_t {
  kParked,    // none is in flight: something more urgent runs
  kBoth,      // one runs, and others are not planned yet
  kInFlight,  // the last one runs, or is queued behind the one that runs
};

struct PassCase {
  const char* name;
  bool vision;  // a frame is encoded; else rows of the trunk
  Where where;
};
constexpr PassCase kPassCases[] = {
    {"parked trunk", false, Where::kParked},      {"parked vision", true, Where::kParked},
    {"trunk in both", false, Where::kBoth},       {"vision in both", true, Where::kBoth},
    {"trunk in flight", false, Where::kInFlight}, {"vision in flight", true, Where::kInFlight},
};

// As LargeAndSmall; a frame of model 1 may be what takes 180 ms, in 22 layers.
Options CutAndSmall(bool vision) {
  Options options = LargeAndSmall();
  if (!vision) return options;
  options.lanes[1].trunk_layers.clear();
  options.lanes[1].vision_layers = EvenLayers(22);
  options.step_us = [](const StepPlan& plan) {
    return plan.model == ModelId(1) ? TrueCosts{0, 180'000, 500, 5, 50, 0, 50}.Of(plan)
                                    : TrueCosts{0, 3'000, 500, 5, 50, 0, 50}.Of(plan);
  };
  return options;
}

// A request of the large model, number `i`: all ask for the same frame, if any.
Spec LargeSpec(Simulation& sim, bool vision, uint32_t i) {
  const std::vector<uint64_t> frames(vision ? 1 : 0, 70);
  return {.klass = kBestEffort,
          .model = kLarge,
          .session = 11 + i,
          .timeline = sim.Prompt(frames, 40, 700 + i)};
}

struct Scene {
  std::vector<size_t> large;   // requests of model 1 that wait for one pass
  std::vector<size_t> others;  // of model 0
  StepId pass;
};

bool OfPass(const StepPlan* plan, StepId pass) {
  return plan != nullptr && !plan->slice.whole() && plan->slice.pass == pass;
}
bool OfModel(const StepPlan* plan, uint32_t model) {
  return plan != nullptr && plan->model == ModelId(static_cast<int32_t>(model));
}

// `count` requests of the large model wait for a pass that is where the case says.
Scene SetTheScene(Simulation& sim, const PassCase& c, uint32_t count) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const std::vector<uint64_t> frames(c.vision ? 1 : 0, seed);
    sim.Offer({.klass = kBestEffort, .model = kLarge, .timeline = sim.Prompt(frames, 40, seed)});
    sim.Offer({.timeline = sim.Prompt({}, 40, seed), .deadline = Micros(900'000)});
    sim.RunToIdle();
  }
  Scene scene;
  for (uint32_t i = 0; i < count; ++i)
    scene.large.push_back(sim.Offer(LargeSpec(sim, c.vision, i)));
  sim.RunFor(Micros(50'000));
  EXPECT_TRUE(OfModel(sim.running(), kLarge));
  scene.pass = sim.running()->slice.pass;
  EXPECT_TRUE(OfPass(sim.running(), scene.pass));
  scene.others.push_back(
      sim.Offer({.klass = kBestEffort, .timeline = sim.Prompt({5}, 60, 500), .action_tokens = 20}));
  const auto last = [&](const StepPlan* plan) {
    return OfPass(plan, scene.pass) && plan->slice.last();
  };
  switch (c.where) {
    case Where::kParked:
      scene.others.push_back(sim.Offer({.klass = kControl,
                                        .timeline = sim.Prompt({}, 40, 501),
                                        .action_tokens = 40,
                                        .deadline = Micros(900'000)}));
      while (!OfModel(sim.running(), kSmall) || OfModel(sim.queued(), kLarge)) {
        if (!sim.Step()) break;
      }
      break;
    case Where::kBoth:
      EXPECT_FALSE(last(sim.running()) || last(sim.queued()));
      break;
    case Where::kInFlight:
      while (!last(sim.running()) && !last(sim.queued())) {
        if (!sim.Step()) break;
      }
      break;
  }
  for (const size_t r : scene.large) EXPECT_FALSE(sim.request(r).outcome.has_value());
  EXPECT_GT(sim.HeldBlocks(1), 0u);
  return scene;
}

bool LargeInFlight(const Simulation& sim) {
  return OfModel(sim.running(), kLarge) || OfModel(sim.queued(), kLarge);
}

void ExpectWhole(const saccade::Lane& lane) {
  const KvStats stats = lane.kv->stats();
  uint32_t idle = 0;
  for (const PartitionStats& p : stats.partitions) {
    EXPECT_EQ(p.held, 0u);
    idle += p.idle;
  }
  EXPECT_EQ(stats.free_blocks + idle, lane.options.kv.num_blocks);
  EXPECT_EQ(lane.embeddings.held(), 0u);
  EXPECT_EQ(lane.free_slots(), lane.options.sequence_slots);
  EXPECT_TRUE(lane.active.empty());
  EXPECT_TRUE(lane.CheckInvariants({}).ok()) << lane.CheckInvariants({});
}

// The first answer of a request.
std::vector<int32_t> Tokens(const Simulation& sim, size_t request) {
  EXPECT_TRUE(sim.request(request).ok());
  return sim.request(request).ok() ? sim.request(request).tokens()[0] : std::vector<int32_t>();
}

TEST(Lanes, AFailedModelIsGoneWithinTheStepsInFlightAndTheOtherIsUndisturbed) {
  for (const PassCase& c : kPassCases) {
    SCOPED_TRACE(c.name);
    Simulation calm(CutAndSmall(c.vision));
    const Scene as_is = SetTheScene(calm, c, 2);
    calm.RunToIdle();

    Simulation sim(CutAndSmall(c.vision));
    const Scene scene = SetTheScene(sim, c, 2);
    const size_t waits = sim.Offer(LargeSpec(sim, c.vision, 2));
    EXPECT_FALSE(sim.RemoveModel(kLarge).has_value());
    const size_t steps = sim.steps().size();
    sim.FailModel(kLarge);
    EXPECT_EQ(LargeInFlight(sim), c.where != Where::kParked);
    auto removed = sim.RemoveModel(kLarge);
    while (LargeInFlight(sim)) {
      EXPECT_FALSE(removed.has_value());
      ASSERT_TRUE(sim.Step());
      removed = sim.RemoveModel(kLarge);
    }
    ASSERT_TRUE(removed.has_value());
    ASSERT_EQ(removed->size(), 1u);
    EXPECT_EQ((*removed)[0]->options.model, ModelId(kLarge));
    ExpectWhole(*(*removed)[0]);
    EXPECT_EQ(sim.scheduler().stats().lanes.size(), 1u);
    uint32_t large_steps = 0;
    for (size_t i = steps; i < sim.steps().size(); ++i) {
      large_steps += OfModel(&sim.steps()[i].plan, kLarge) ? 1 : 0;
    }
    EXPECT_LE(large_steps, c.where == Where::kParked ? 0u : 2u);
    sim.RunToIdle();
    for (const size_t r : {scene.large[0], scene.large[1], waits}) {
      ASSERT_TRUE(sim.request(r).outcome.has_value());
      EXPECT_EQ(sim.request(r).outcome->status, absl::UnavailableError("unloaded"));
      EXPECT_TRUE(sim.request(r).streamed[0].empty());
    }
    for (size_t i = 0; i < scene.others.size(); ++i) {
      EXPECT_EQ(Tokens(sim, scene.others[i]), Tokens(calm, as_is.others[i]));
      EXPECT_LE(sim.request(scene.others[i]).outcome_at, calm.request(as_is.others[i]).outcome_at);
    }
    sim.ExpectBaseline();

    // It may come back, and knows nothing.
    const size_t refused = sim.Offer(LargeSpec(sim, c.vision, 0));
    EXPECT_EQ(sim.request(refused).offered.code(), absl::StatusCode::kInvalidArgument);
    ASSERT_TRUE(sim.AddLane(CutAndSmall(c.vision).lanes[1]).ok());
    const size_t again = sim.Offer(LargeSpec(sim, c.vision, 0));
    sim.RunToIdle();
    EXPECT_EQ(Tokens(sim, again), Tokens(calm, as_is.large[0]));
    EXPECT_EQ(sim.request(again).outcome->cached_tokens, (std::array<uint32_t, kModalities>{}));
    sim.ExpectBaseline();
  }
}

TEST(Lanes, WhoeverLeavesAPassAloneEndsIt) {
  for (const PassCase& c : kPassCases) {
    for (const bool whole_session : {false, true}) {
      SCOPED_TRACE(testing::Message() << c.name << (whole_session ? ", session" : ", request"));
      Simulation sim(CutAndSmall(c.vision));
      const Scene scene = SetTheScene(sim, c, 1);
      const size_t steps = sim.steps().size();
      whole_session ? sim.CancelSession(11) : sim.Cancel(scene.large[0]);
      while (LargeInFlight(sim)) {
        EXPECT_GT(sim.HeldBlocks(1), 0u);  // a slice names them
        EXPECT_EQ(sim.scheduler().stats().lanes[1].embeddings_held, c.vision ? 1u : 0u);
        ASSERT_TRUE(sim.Step());
      }
      EXPECT_EQ(sim.HeldBlocks(1), 0u);
      EXPECT_EQ(sim.scheduler().stats().lanes[1].embeddings_held, 0u);
      sim.RunToIdle();
      EXPECT_EQ(sim.request(scene.large[0]).outcome->status.code(), absl::StatusCode::kCancelled);
      for (const size_t r : scene.others) EXPECT_TRUE(sim.request(r).ok());
      uint32_t slices = 0;
      for (size_t i = steps; i < sim.steps().size(); ++i) {
        slices += OfPass(&sim.steps()[i].plan, scene.pass) ? 1 : 0;
      }
      EXPECT_LE(slices, c.where == Where::kParked ? 0u : 2u);
      sim.ExpectBaseline();
      // Only what was computed to the end is found again.
      const size_t again = sim.Offer(LargeSpec(sim, c.vision, 0));
      sim.RunToIdle();
      ASSERT_TRUE(sim.request(again).ok());
      EXPECT_EQ(sim.request(again).encodes, c.vision && c.where != Where::kInFlight ? 1u : 0u);
      sim.ExpectBaseline();
    }
  }
}

TEST(Lanes, WhoeverLeavesAPassToOthersTakesNothingFromThem) {
  for (const PassCase& c : kPassCases) {
    // The first one asked for the frame that both need.
    for (const size_t leaves : {0u, 1u}) {
      for (const bool whole_session : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << c.name << ", request " << leaves << (whole_session ? ", session" : ""));
        Simulation calm(CutAndSmall(c.vision));
        const Scene as_is = SetTheScene(calm, c, 2);
        calm.RunToIdle();

        Simulation sim(CutAndSmall(c.vision));
        const Scene scene = SetTheScene(sim, c, 2);
        const size_t gone = scene.large[leaves];
        const size_t stays = scene.large[1 - leaves];
        const uint32_t before = sim.HeldBlocks(1);
        whole_session ? sim.CancelSession(11 + leaves) : sim.Cancel(gone);
        ASSERT_TRUE(sim.Step());
        EXPECT_EQ(sim.request(gone).outcome->status.code(), absl::StatusCode::kCancelled);
        // The pass names whoever is in it: its rows are carried on.
        const bool named = !c.vision || leaves == 0;
        if (named && c.where != Where::kInFlight) {
          EXPECT_EQ(sim.HeldBlocks(1), before);
        }
        while (sim.request(stays).streamed[0].empty()) ASSERT_TRUE(sim.Step());
        // 41 tokens of the prompt (with a frame: 1 + 32 + 40, none in a block of another kind), and
        // 6 rows of the answer.
        const auto& blocks = sim.request(stays).spec.timeline->blocks();
        EXPECT_EQ(sim.HeldBlocks(1), blocks.size() + 1);
        sim.RunToIdle();
        EXPECT_EQ(Tokens(sim, stays), Tokens(calm, as_is.large[1 - leaves]));
        EXPECT_LE(sim.request(stays).outcome_at, calm.request(as_is.large[1 - leaves]).outcome_at);
        for (size_t i = 0; i < scene.others.size(); ++i) {
          EXPECT_EQ(Tokens(sim, scene.others[i]), Tokens(calm, as_is.others[i]));
        }
        // One pass, from its first layer to its last.
        uint32_t layers = 0;
        for (const FinishedStep& step : sim.steps()) {
          if (!OfPass(&step.plan, scene.pass)) continue;
          EXPECT_EQ(step.plan.slice.begin, layers);
          layers = step.plan.slice.end;
        }
        EXPECT_EQ(layers, c.vision ? 22u : 23u);
        EXPECT_EQ(sim.request(gone).encodes + sim.request(stays).encodes, c.vision ? 1u : 0u);
        sim.ExpectBaseline();
      }
    }
  }
}

// A parked pass goes with its worker; who only waits for it moves to another one.
TEST(Lanes, ALostWorkerTakesItsParkedPassWithIt) {
  for (const PassCase& c : kPassCases) {
    SCOPED_TRACE(c.name);
    Simulation sim(CutAndSmall(c.vision));
    const Scene scene = SetTheScene(sim, c, 1);
    const size_t waits = sim.Offer(LargeSpec(sim, c.vision, 1));
    sim.RunFor(Micros(1));
    LaneOptions beside = CutAndSmall(c.vision).lanes[1];
    beside.worker = WorkerId(1);
    ASSERT_TRUE(sim.AddLane(beside).ok());
    const bool took = sim.request(waits).first_start.has_value() || sim.InFlight(waits);
    std::vector<size_t> others = scene.others;
    std::erase_if(others, [&](size_t r) { return sim.request(r).outcome.has_value(); });
    sim.LoseWorker(0);
    sim.RunToIdle();
    EXPECT_EQ(sim.request(scene.large[0]).reason(), Reason::kWorkerFailed);
    for (const size_t r : others) {
      EXPECT_EQ(sim.request(r).reason(), Reason::kWorkerFailed);
      EXPECT_EQ(sim.request(r).outcome->status.code(), absl::StatusCode::kUnavailable);
    }
    ASSERT_FALSE(took);
    ASSERT_TRUE(sim.request(waits).ok()) << sim.request(waits).outcome->status;
    EXPECT_EQ(sim.request(waits).encodes, c.vision ? 1u : 0u);
    EXPECT_EQ(sim.steps().back().plan.worker, WorkerId(1));
    sim.ExpectBaseline();

    auto removed = sim.RemoveModel(kLarge);
    ASSERT_TRUE(removed.has_value());
    ASSERT_EQ(removed->size(), 2u);
    for (const auto& lane : *removed) ExpectWhole(*lane);
    // A lost worker's new lane takes nothing, a living one's does.
    LaneOptions on_lost = beside;
    on_lost.worker = WorkerId(0);
    ASSERT_TRUE(sim.AddLane(on_lost).ok());
    const size_t refused = sim.Offer(LargeSpec(sim, c.vision, 2));
    EXPECT_EQ(sim.request(refused).reason(), Reason::kWorkerFailed);
    ASSERT_TRUE(sim.AddLane(beside).ok());
    const size_t taken = sim.Offer(LargeSpec(sim, c.vision, 2));
    sim.RunToIdle();
    EXPECT_TRUE(sim.request(taken).ok());
    sim.ExpectBaseline();
  }
}

TEST(Lanes, OneIsAddedBesideABusyOne) {
  for (const PassCase& c : kPassCases) {
    if (c.where == Where::kParked) continue;  // by what the new lane runs
    SCOPED_TRACE(c.name);
    Options options = CutAndSmall(c.vision);
    Simulation calm(options);
    const Scene as_is = SetTheScene(calm, c, 2);
    calm.RunToIdle();

    Simulation sim(options);
    const Scene scene = SetTheScene(sim, c, 2);
    EXPECT_EQ(sim.AddLane(options.lanes[1]).code(), absl::StatusCode::kInvalidArgument);
    LaneOptions third = Lane(0, 2, 300);
    const Spec control = {.klass = kControl,
                          .model = 2,
                          .session = 3,
                          .timeline = sim.Prompt({}, 40, 600),
                          .deadline = Micros(300'000)};
    const size_t early = sim.Offer(control);
    EXPECT_EQ(sim.request(early).offered.code(), absl::StatusCode::kInvalidArgument);
    ASSERT_TRUE(sim.AddLane(third).ok());
    const SchedulerStats stats = sim.scheduler().stats();
    ASSERT_EQ(stats.lanes.size(), 3u);
    EXPECT_EQ(stats.lanes[2].model, ModelId(2));
    EXPECT_EQ(stats.lanes[2].kv.free_blocks, 300u);
    const size_t urgent = sim.Offer(control);
    sim.RunToIdle();
    ASSERT_TRUE(sim.request(urgent).ok());
    // It waits for the slice that runs.
    EXPECT_LE(ToMicros(*sim.request(urgent).first_start - sim.request(urgent).arrival).count(),
              20'000);
    for (size_t i = 0; i < scene.large.size(); ++i) {
      EXPECT_EQ(Tokens(sim, scene.large[i]), Tokens(calm, as_is.large[i]));
    }
    for (size_t i = 0; i < scene.others.size(); ++i) {
      EXPECT_EQ(Tokens(sim, scene.others[i]), Tokens(calm, as_is.others[i]));
    }
    sim.ExpectBaseline();
  }
}

// A worker that comes takes what waits for a full one.
TEST(Lanes, AWorkerThatComesTakesItsPart) {
  Options options = CutAndSmall(false);
  Simulation sim(options);
  const Scene scene = SetTheScene(sim, {"", false, Where::kBoth}, 6);
  std::vector<size_t> unplanned;
  for (const size_t r : scene.large) {
    if (!sim.InFlight(r)) unplanned.push_back(r);
  }
  ASSERT_FALSE(unplanned.empty());
  LaneOptions beside = options.lanes[1];
  beside.worker = WorkerId(1);
  ASSERT_TRUE(sim.AddLane(beside).ok());
  sim.RunToIdle();
  std::set<uint64_t> there;
  for (const FinishedStep& step : sim.steps()) {
    if (step.plan.worker != WorkerId(1)) continue;
    for (const TrunkItem& item : step.plan.trunk) there.insert(item.request.value());
  }
  EXPECT_FALSE(there.empty());
  for (const uint64_t id : there) {
    EXPECT_TRUE(std::any_of(unplanned.begin(), unplanned.end(),
                            [&](size_t r) { return sim.request(r).id.value() == id; }));
  }
  for (const size_t r : scene.large) EXPECT_TRUE(sim.request(r).ok());
  sim.ExpectBaseline();
}

TEST(Lanes, AModelIsKeptWhileAnythingOfItIsThere) {
  Simulation sim(CutAndSmall(false));
  const size_t busy = sim.Offer({.klass = kBestEffort,
                                 .session = 2,
                                 .timeline = sim.Prompt({}, 400, 1),
                                 .action_tokens = 60});
  ASSERT_TRUE(sim.Step());
  // One that waits.
  const size_t waits = sim.Offer(LargeSpec(sim, false, 0));
  EXPECT_FALSE(sim.RemoveModel(kLarge).has_value());
  // One that has ended, and that a step names.
  while (!sim.InFlight(waits)) ASSERT_TRUE(sim.Step());
  sim.Cancel(waits);
  while (sim.InFlight(waits)) {
    EXPECT_FALSE(sim.RemoveModel(kLarge).has_value());
    ASSERT_TRUE(sim.Step());
  }
  EXPECT_EQ(sim.request(waits).outcome->status.code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(sim.RemoveModel(kSmall).has_value());
  auto removed = sim.RemoveModel(kLarge);
  ASSERT_TRUE(removed.has_value());
  ASSERT_EQ(removed->size(), 1u);
  ExpectWhole(*removed->front());
  // It is not there any more, and a model that never was has no lanes either.
  for (const uint32_t model : {kLarge, 9u}) {
    removed = sim.RemoveModel(model);
    ASSERT_TRUE(removed.has_value());
    EXPECT_TRUE(removed->empty());
  }
  sim.FailModel(kLarge);
  sim.RunToIdle();
  EXPECT_TRUE(sim.request(busy).ok());
  sim.ExpectBaseline();
  removed = sim.RemoveModel(kSmall);
  ASSERT_TRUE(removed.has_value());
  ExpectWhole(*removed->front());
  EXPECT_TRUE(sim.scheduler().stats().lanes.empty());
  EXPECT_TRUE(sim.scheduler().idle());
}

// A lane beside it moves up.
TEST(Lanes, TheFirstModelOfAWorkerGoesFromBesideABusyOne) {
  for (const PassCase& c : kPassCases) {
    if (c.where == Where::kParked) continue;
    SCOPED_TRACE(c.name);
    Simulation calm(CutAndSmall(c.vision));
    const Scene as_is = SetTheScene(calm, c, 2);
    calm.RunToIdle();

    Simulation sim(CutAndSmall(c.vision));
    const Scene scene = SetTheScene(sim, c, 2);
    sim.Cancel(scene.others[0]);
    while (sim.InFlight(scene.others[0])) ASSERT_TRUE(sim.Step());
    ASSERT_TRUE(LargeInFlight(sim));
    const auto removed = sim.RemoveModel(kSmall);
    ASSERT_TRUE(removed.has_value());
    ExpectWhole(*removed->front());
    const size_t late = sim.Offer(LargeSpec(sim, c.vision, 2));
    sim.RunToIdle();
    for (size_t i = 0; i < scene.large.size(); ++i) {
      EXPECT_EQ(Tokens(sim, scene.large[i]), Tokens(calm, as_is.large[i]));
    }
    EXPECT_TRUE(sim.request(late).ok());
    sim.ExpectBaseline();
  }
}

// ------------------------------------------------------------------------------------------------
// limits that change

TEST(Lanes, ALoweredQueueLimitEndsNothingThatIsHeld) {
  Simulation sim(CutAndSmall(false));
  const Scene scene = SetTheScene(sim, {"", false, Where::kBoth}, 5);  // and one of model 0
  sim.scheduler().SetMaxQueued(ClassId(kBestEffort), 3);
  ASSERT_TRUE(sim.scheduler().CheckInvariants().ok());
  const auto held = [&] {
    const SchedulerStats::Class c = sim.scheduler().stats().classes[kBestEffort];
    return c.queued + c.running;
  };
  EXPECT_EQ(held(), 6u);
  // Each session has one: nobody gives way.
  const size_t refused = sim.Offer(LargeSpec(sim, false, 9));
  EXPECT_EQ(sim.request(refused).reason(), Reason::kQueueFull);
  EXPECT_EQ(sim.request(refused).offered.code(), absl::StatusCode::kResourceExhausted);
  while (held() > 3) {
    EXPECT_EQ(sim.request(sim.Offer(LargeSpec(sim, false, 9))).reason(), Reason::kQueueFull);
    sim.RunFor(Micros(10'000));
  }
  while (held() == 3) ASSERT_TRUE(sim.Step());
  while (held() < 3) ASSERT_TRUE(sim.request(sim.Offer(LargeSpec(sim, false, 9))).offered.ok());
  EXPECT_EQ(sim.request(sim.Offer(LargeSpec(sim, false, 9))).reason(), Reason::kQueueFull);
  sim.RunToIdle();
  for (const size_t r : scene.large) EXPECT_TRUE(sim.request(r).ok());
  for (const size_t r : scene.others) EXPECT_TRUE(sim.request(r).ok());
  sim.ExpectBaseline();
}

// Above the lowered limit a session that has more than others still gives way, and what the class
// holds does not grow.
TEST(Lanes, ALoweredQueueLimitIsFairToOtherSessions) {
  Simulation sim(CutAndSmall(false));
  const Scene scene = SetTheScene(sim, {"", false, Where::kBoth}, 1);
  std::vector<size_t> many;
  for (uint32_t i = 0; i < 6; ++i) {
    Spec spec = LargeSpec(sim, false, i);
    spec.session = 40;
    many.push_back(sim.Offer(spec));
  }
  sim.scheduler().SetMaxQueued(ClassId(kBestEffort), 2);
  const size_t other = sim.Offer(LargeSpec(sim, false, 8));
  ASSERT_TRUE(sim.scheduler().CheckInvariants().ok()) << sim.scheduler().CheckInvariants();
  EXPECT_TRUE(sim.request(other).offered.ok());
  ASSERT_TRUE(sim.Step());
  const SchedulerStats::Class c = sim.scheduler().stats().classes[kBestEffort];
  EXPECT_EQ(c.queued + c.running, 8u);
  ASSERT_TRUE(sim.request(many[5]).outcome.has_value());
  EXPECT_EQ(sim.request(many[5]).reason(), Reason::kQueueFull);
  sim.RunToIdle();
  for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(sim.request(many[i]).ok());
  EXPECT_TRUE(sim.request(other).ok());
  EXPECT_TRUE(sim.request(scene.large[0]).ok());
  sim.ExpectBaseline();
}

TEST(Lanes, QueueLimitsThatMeanNothingAreIgnored) {
  Simulation sim(CutAndSmall(false));
  sim.scheduler().SetMaxQueued(ClassId(kControl), 0);
  sim.scheduler().SetMaxQueued(ClassId(-1), 1);
  sim.scheduler().SetMaxQueued(ClassId(4), 1);
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(sim.request(sim.Offer({.timeline = sim.Prompt({}, 10, i)})).offered.ok());
  }
  sim.scheduler().SetMaxQueued(ClassId(kControl), 1);
  EXPECT_EQ(sim.request(sim.Offer({.timeline = sim.Prompt({}, 10, 3)})).reason(),
            Reason::kQueueFull);
  sim.scheduler().SetMaxQueued(ClassId(kControl), 3);
  EXPECT_TRUE(sim.request(sim.Offer({.timeline = sim.Prompt({}, 10, 3)})).offered.ok());
  sim.RunToIdle();
  sim.ExpectBaseline();
}

}  // namespace
}  // namespace saccade::sim
