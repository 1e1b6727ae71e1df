// Random scenarios: any mix of load, limits, faults, cancellations and models that come and go. The
// simulation checks every plan, answer and invariant; here it is asserted that nothing is lost and
// everything is given back.
#include <gtest/gtest.h>

#include <cstdlib>

#include "sched/lane.h"
#include "tests/sim/sched_random.h"
#include "tests/sim/sim.h"

namespace saccade::sim {
namespace {

struct Totals {
  size_t offered = 0;
  size_t admitted = 0;
  size_t answered = 0;
  size_t steps = 0;
  uint64_t revoked = 0;
  uint64_t resumed = 0;
  size_t slices = 0;
  size_t removed = 0;    // models
  size_t overtaken = 0;  // slices after which another step ran before the next one of the pass
};

Options RandomOptions(Random& random) {
  Options options;
  options.seed = random.Next();
  SchedulerOptions& s = options.scheduler;
  const auto on_late = [&] { return random.Chance(0.5) ? OnLate::kReject : OnLate::kRunLate; };
  const auto preferred = [&] { return static_cast<Modality>(random.Below(4)); };
  s.classes = {
      Class("control", 0, 20'000 + random.Below(60'000), OnLate::kReject, 8 + random.Below(40)),
      Class("second", random.Below(2), random.Below(2) * 80'000, on_late(), 4 + random.Below(40),
            1 + random.Below(8), preferred()),
      Class("third", 1, random.Below(2) * 200'000, on_late(), 4 + random.Below(40),
            1 + random.Below(8), preferred()),
      Class("last", 2, 0, OnLate::kRunLate, 4 + random.Below(40))};
  s.step_ceiling = Micros(random.Chance(0.2) ? 0 : 1'500 + random.Below(12'000));
  s.pipeline_depth = random.Chance(0.2) ? 1 : 2;
  s.min_prefill_chunk = 1 + random.Below(32);
  s.max_wait = Micros(random.Below(300'000));
  s.ageing_share = 0.02 + 0.5 * random.Uniform();
  const bool cut = random.Chance(0.6);
  if (cut && s.step_ceiling.count() > 0 && random.Chance(0.7)) {
    s.step_ceiling = Micros(300 + random.Below(2'500));
  }
  const uint32_t workers = 1 + random.Below(2);
  const uint32_t models = 1 + random.Below(2);
  for (uint32_t w = 0; w < workers; ++w) {
    for (uint32_t m = 0; m < models; ++m) {
      const uint32_t blocks = 40 + random.Below(random.Chance(0.5) ? 40 : 300);
      LaneOptions lane = Lane(static_cast<int32_t>(w), static_cast<int32_t>(m), blocks);
      if (random.Chance(0.5)) {
        lane.kv.partitions = {{{blocks / 4, blocks},
                               {blocks / 10, blocks * 3 / 4},
                               {0, blocks / 4},
                               {blocks / 10, blocks * 2 / 3}}};
      }
      lane.embedding_slots = 3 + random.Below(20);
      lane.sequence_slots = 3 + random.Below(30);
      lane.max_action_tokens = 40;
      lane.max_rows = 24 + random.Below(400);
      lane.max_frames = 1 + random.Below(6);
      lane.max_logit_rows = 3 + random.Below(30);
      // Where the ceiling is short, passes are cut into up to as many slices.
      if (cut && random.Chance(0.8)) lane.vision_layers = EvenLayers(1 + random.Below(12));
      if (cut && random.Chance(0.8)) {
        lane.trunk_layers = EvenLayers(1 + random.Below(12), 0.2 + 2 * random.Uniform());
      }
      options.lanes.push_back(lane);
    }
  }
  options.costs.noise = random.Chance(0.5) ? 0 : 0.3 * random.Uniform();
  if (random.Chance(0.1)) options.costs = {0, 0, 0, 0, 0, 0};
  options.check_every = 1 + random.Below(8);
  return options;
}

void RunScenario(Random random, Totals& totals) {
  const Options options = RandomOptions(random);
  Simulation sim(options);
  const uint32_t models = static_cast<uint32_t>(options.lanes.back().model.value()) + 1;
  const size_t workers = options.lanes.back().worker.value() == 1 ? 2 : 1;
  const bool two_workers = options.lanes.back().worker.value() == 1;
  const double load = 0.3 + 2 * random.Uniform();
  const auto spec = [&] {
    Spec s;
    s.klass = random.Below(4);
    s.model = random.Below(models);
    s.session = random.Below(12);
    std::vector<uint64_t> frames(random.Below(4));
    for (uint64_t& frame : frames) frame = random.Below(10);
    s.timeline = sim.Prompt(frames, random.Below(random.Chance(0.1) ? 300 : 60), random.Below(4),
                            20 + random.Below(2) * 13);
    s.action_tokens = 1 + random.Below(random.Chance(0.2) ? 40 : 9);
    s.samples = random.Chance(0.15) ? 2 + random.Below(2) : 1;
    s.temperature = random.Chance(0.3) ? 0.7f : 0.0f;
    s.seed = random.Below(3);
    if (random.Chance(0.2)) {
      for (int32_t i = 0; i < 60; ++i) s.stop_tokens.push_back(i * 16);
    }
    if (random.Chance(0.12)) {
      s.samples = 2 + random.Below(2);
      s.stop_tokens.resize(std::min<size_t>(s.stop_tokens.size(), 3));
      s.beams = BeamOptions{.length_penalty = random.Chance(0.5) ? 1.0f : 0.0f,
                            .early_stopping = random.Chance(0.5),
                            .results = 1 + random.Below(2)};
    }
    if (random.Chance(0.3)) s.deadline = Micros(random.Below(400'000));
    return s;
  };
  uint32_t leaving = models;      // a model; `models`: none
  std::vector<LaneOptions> away;  // lanes of models that have left
  constexpr size_t kRequests = 90;
  while (sim.requests().size() < kRequests && !testing::Test::HasFailure() && !random.done()) {
    const uint32_t burst = random.Chance(0.1) ? 1 + random.Below(15) : 1;
    for (uint32_t i = 0; i < burst; ++i) sim.Offer(spec());
    const size_t some = random.Below(static_cast<uint32_t>(sim.requests().size()));
    switch (random.Below(40)) {
      case 0:
      case 1:
      case 2:
      case 3:
        sim.Cancel(some);
        break;
      case 4:
        sim.CancelSession(random.Below(12));
        break;
      case 5:
        sim.FailRunningStep(static_cast<int32_t>(random.Below(2)));
        break;
      case 6:
      case 7:
        sim.MakeNonFinite(sim.requests().size() - 1, 0, random.Below(6));
        break;
      case 8:
        if (two_workers && random.Chance(0.1))
          sim.LoseWorker(static_cast<int32_t>(random.Below(2)));
        break;
      case 9:
        sim.RunFor(Micros(100'000));
        break;
      case 10:
        if (random.Chance(0.5)) leaving = random.Below(models);
        break;
      case 11:
        for (const LaneOptions& lane : away) EXPECT_TRUE(sim.AddLane(lane).ok());
        away.clear();
        break;
      case 12:
        sim.scheduler().SetMaxQueued(ClassId(static_cast<int32_t>(random.Below(4))),
                                     4 + random.Below(40));
        break;
      default:
        break;
    }
    if (leaving < models) {
      sim.FailModel(leaving);
      if (const auto lanes = sim.RemoveModel(leaving)) {
        for (const auto& lane : *lanes) away.push_back(lane->options);
        totals.removed += lanes->empty() ? 0 : 1;
        leaving = models;
      }
    }
    sim.RunFor(Micros(static_cast<int64_t>(random.Below(16'000) / load)));
  }
  sim.RunToIdle();
  for (const Tracked& r : sim.requests()) {
    ++totals.offered;
    totals.admitted += r.offered.ok() ? 1 : 0;
    totals.answered += r.ok() ? 1 : 0;
    EXPECT_EQ(r.offered.ok(), r.outcome.has_value()) << "request " << r.id.value();
    EXPECT_TRUE(r.offered.ok() || r.reason() != Reason::kUnspecified) << r.offered;
  }
  std::map<std::pair<int32_t, uint64_t>, uint64_t> parked;  // worker and pass, to the step number
  uint64_t number = 0;
  for (const FinishedStep& step : sim.steps()) {
    ++number;
    if (!step.plan.slice.whole()) {
      ++totals.slices;
      const auto pass = std::pair(step.plan.worker.value(), step.plan.slice.pass.value());
      const auto before = parked.find(pass);
      if (before != parked.end() && workers == 1 && number != before->second + 1) {
        ++totals.overtaken;
      }
      parked[pass] = number;
    }
    for (const TrunkItem& item : step.plan.trunk) {
      totals.resumed += item.known_tokens.empty() ? 0 : 1;
    }
  }
  totals.steps += sim.steps().size();
  totals.revoked += sim.revocations();
  sim.ExpectBaseline();
}

TEST(RandomScenario, NothingIsLostAndEverythingIsGivenBack) {
  // SACCADE_SIM_SEEDS runs more of them by hand.
  const char* const more = std::getenv("SACCADE_SIM_SEEDS");
  const uint64_t seeds =
      std::max<uint64_t>(150, more == nullptr ? 0 : std::strtoull(more, nullptr, 10));
  Totals totals;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RunScenario(Random(seed), totals);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
  // The scenarios reach what they are meant to reach.
  EXPECT_GT(totals.offered, 5'000u);
  EXPECT_GT(totals.admitted, totals.offered / 2);
  EXPECT_GT(totals.answered, totals.offered / 3);
  EXPECT_GT(totals.revoked, 20u);
  EXPECT_GT(totals.resumed, 20u);
  EXPECT_GT(totals.removed, 20u);
  EXPECT_GT(totals.slices, 5'000u);
  EXPECT_GT(totals.overtaken, 500u);
  RecordProperty("admitted", static_cast<int>(totals.admitted));
  RecordProperty("removed", static_cast<int>(totals.removed));
  RecordProperty("slices", static_cast<int>(totals.slices));
  RecordProperty("overtaken", static_cast<int>(totals.overtaken));
  RecordProperty("steps", static_cast<int>(totals.steps));
}

}  // namespace

void RunSchedulerOperations(std::span<const uint8_t> bytes) {
  Totals totals;
  RunScenario(Random(bytes), totals);
}

}  // namespace saccade::sim
