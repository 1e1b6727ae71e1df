#pragma once
// Random scenarios, and making one that fails small.
#include <cstdint>
#include <functional>

#include "tests/sim/scenario.h"

namespace saccade::sim {

// A scenario of a few seconds with any mix of load, limits, costs, faults and misbehaving clients.
// It expects what must hold of every scenario: work goes on (gap_us).
Scenario RandomScenario(uint64_t seed);

// The smallest scenario found that still fails: parts are taken out and numbers made small as long
// as `fails` says so, in at most `max_runs` tries. `scenario` fails.
Scenario Shrink(Scenario scenario, const std::function<bool(const Scenario&)>& fails,
                int max_runs = 400);

}  // namespace saccade::sim
