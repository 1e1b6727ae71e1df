#pragma once
// The mix of tests/sim/scenarios/load_90.txt on the demo policy: robots, watchers, planners,
// writers.
#include <string>
#include <vector>

#include "tests/bench/load_client.h"

namespace saccade::bench {

// `robots_hz`: load_90 has 10, load_150 has 6, so that control alone stays below the capacity.
inline std::vector<ClientKind> LoadMix(double robots_hz) {
  return {{"control", 12, robots_hz, 0.2, 1, false, 20},
          {"perception", 6, 4, 1, 1, true, 50},
          {"planning", 4, 2, 1, 4, true, 100},
          {"best_effort", 4, 1.5, 1, 6, true, 0}};
}

// The scale at which the mix takes all of the device, its requests one after the other.
inline double CapacityScale(const std::vector<ClientKind>& kinds,
                            const std::vector<double>& solo_s) {
  double load = 0;
  for (size_t k = 0; k < kinds.size(); ++k) load += kinds[k].count * kinds[k].hz * solo_s[k];
  return 1 / load;
}

constexpr const char* kLoadConfig = "scheduler: {step_ceiling_ms: 3}\n";

}  // namespace saccade::bench
