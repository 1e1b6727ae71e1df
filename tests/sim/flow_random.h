#pragma once
// Flows, prefixes and tokens in random mixes, in little memory, with cancellations, steps that fail
// and chunks that are not finite: for tests and for the fuzzer of the scheduler.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/sim/sim.h"

namespace saccade::sim {

// Two lanes of flows beside one of tokens.
inline void RunFlowOperations(Random random) {
  Options options = DefaultOptions();
  options.seed = random.Below(1000);
  if (random.Below(2) == 0) options.scheduler.step_ceiling = Micros(8'000);
  options.lanes = {Lane(0, 0, 24), Lane(0, 1, 40), Lane(0, 2, 30)};
  for (const size_t flow : {0, 2}) {
    options.lanes[flow].denoises = true;
    options.lanes[flow].sequence_slots = 6;
    options.lanes[flow].max_logit_rows = 1 + static_cast<uint32_t>(random.Below(5));
  }
  if (random.Below(2) == 0) {
    options.lanes[0].trunk_layers = EvenLayers(6, 1);
    options.lanes[0].vision_layers = EvenLayers(4);
    options.costs = {500, 2'000, 1'000, 100, 300, 0.2, 50};
  }
  if (random.Below(2) == 0) options.scheduler.classes[0].on_late = OnLate::kDegrade;
  Simulation sim(options);
  for (int i = 0; i < 40 && !random.done(); ++i) {
    const auto model = static_cast<uint32_t>(random.Below(3));
    const uint64_t frame = 1 + random.Below(4);
    Spec spec;
    spec.klass = static_cast<uint32_t>(random.Below(4));
    spec.session = 1 + random.Below(4);
    spec.model = model;
    spec.seed = random.Below(3);
    spec.deadline = Micros(20'000 + static_cast<int64_t>(random.Below(400'000)));
    const auto text = static_cast<uint32_t>(1 + random.Below(30));
    if (model == 1) {
      spec.timeline = random.Below(2) == 0
                          ? sim.Prompt({frame}, text)
                          : sim.Prefix({frame}, text, 1, 0, PrefixReuse::kAllButLast);
    } else if (random.Below(4) == 0) {
      spec.kind = AnswerKind::kPrefix;
      spec.action_tokens = 0;
      spec.timeline = sim.Prefix({frame}, text, 1, 0, PrefixReuse::kAllButLast);
    } else {
      spec.kind = AnswerKind::kFlow;
      spec.action_tokens = static_cast<uint32_t>(1 + random.Below(12));
      spec.least_steps = static_cast<uint32_t>(random.Below(6));
      spec.samples = static_cast<uint32_t>(1 + random.Below(4));
      spec.timeline =
          sim.Prefix(random.Below(2) == 0 ? std::vector<uint64_t>{frame}
                                          : std::vector<uint64_t>{frame, 1 + random.Below(4)},
                     text, 1 + random.Below(2), random.Below(3));
    }
    const size_t request = sim.Offer(std::move(spec));
    if (random.Below(8) == 0) sim.MakeNonFinite(request, 0, 0);
    sim.RunFor(Micros(static_cast<int64_t>(random.Below(9'000))));
    if (random.Below(10) == 0) sim.Cancel(random.Below(sim.requests().size()));
    if (random.Below(25) == 0 && sim.running() != nullptr) sim.FailRunningStep(0);
  }
  sim.RunToIdle();
  sim.ExpectBaseline();
}

}  // namespace saccade::sim
