#pragma once
// Runs a scenario on the real scheduler and judges what it expects.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/sim/scenario.h"

namespace saccade::sim {

// What became of the requests of a class, or of the clients of one name. Requests of the warm-up
// and those that their own client took back are not judged.
struct Group {
  std::string name;
  double of_capacity = 0;  // what it offers, of classes in a scenario with a load
  uint64_t offered = 0;
  uint64_t met = 0;        // answered on time
  uint64_t answered = 0;   // on time or late
  uint64_t refused = 0;    // at the offer
  double share = 0;        // of all the workers' time
  double per_second = 0;   // answered
  double wait_p99_us = 0;  // from arrival to the start of its first step
  double wait_max_us = 0;
  uint32_t overtaken = 0;  // steps of lower tiers only that started while it had no step, at most
  double latency_p99_us = 0;
  double Part(uint64_t count) const {
    return offered == 0 ? 1 : static_cast<double>(count) / static_cast<double>(offered);
  }
};

struct Report {
  std::vector<Group> groups;  // classes, then clients
  double simulated_s = 0;
  double took_s = 0;
  double scale = 1;   // of the rates, when the scenario asks for a load
  double gap_us = 0;  // longest time with work and without the end of a step
  uint64_t requests = 0;
  uint64_t steps = 0;
  std::vector<std::string> failures;  // broken invariants and what was expected and is not so
  bool ok() const { return failures.empty(); }
  const Group* Find(const std::string& name) const;
  std::string Table() const;
};

struct RunFaults {
  bool lose_rows = false;  // see Options of sim.h
};

// A broken invariant of the simulation does not fail the calling test: it ends up in `failures`,
// and the run ends early.
Report RunScenario(const Scenario& scenario, const RunFaults& options = {});

// Parts of the capacity that each class of the mix takes, and by what its rates must be multiplied
// so that together they take all of it. Capacity is what the device gets done of the mix, with its
// repeated frames, one request after the other and without a pause. (With 48 requests at hand and
// no deadlines, large batches get about a quarter more done.)
struct Capacity {
  double scale = 1;
  std::vector<double> class_share;
};
Capacity MeasureCapacity(const Scenario& scenario, uint32_t at_hand = 1);

}  // namespace saccade::sim
