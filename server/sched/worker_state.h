#pragma once
// WorkerState: the steps in flight on one worker and the fair shares of its time. Private to
// sched/.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "sched/active_request.h"
#include "sched/lane.h"
#include "sched/latency_class.h"

namespace saccade {

struct InFlightStep {
  StepId id;
  Lane* lane = nullptr;
  Micros p50{0};
  uint32_t best_tier = 0;                          // of the work in it
  TimePoint earliest_deadline = kNever;            // among its work of that tier
  std::vector<ActiveRequest*> requests;            // one entry per item
  std::vector<std::pair<size_t, double>> charges;  // (class, microseconds per share)
};

struct WorkerState {
  WorkerId id;
  std::vector<Lane*> lanes;
  std::deque<InFlightStep> in_flight;  // oldest first
  TimePoint busy_until{};              // predicted end of `in_flight`
  TimePoint next_aged{};               // ageing has used its share until then
  // Stride scheduling: predicted microseconds a class has got, divided by its shares. The lowest
  // goes first among classes of a tier.
  std::vector<double> class_pass;
  std::vector<uint32_t> class_active;
  // Predicted microseconds given to each class lately, fading with kUsageMemory.
  std::vector<double> class_used;
  TimePoint used_at{};
  bool lost = false;

  static constexpr Micros kUsageMemory{500'000};

  void Fade(TimePoint now) {
    if (now <= used_at) return;
    const double fade = std::exp(-static_cast<double>(ToMicros(now - used_at).count()) /
                                 static_cast<double>(kUsageMemory.count()));
    for (double& used : class_used) used *= fade;
    used_at = now;
  }
  // Part of the time that classes of tiers above `tier` have lately used.
  double UsedAbove(std::span<const LatencyClass> classes, uint32_t tier, TimePoint now) {
    Fade(now);
    double used = 0;
    for (size_t c = 0; c < classes.size(); ++c) used += classes[c].tier < tier ? class_used[c] : 0;
    return used / static_cast<double>(kUsageMemory.count());
  }

  // `us` more for `klass` at `now`. A class without work does not save up: it follows the lowest
  // running one of its tier.
  void Charge(std::span<const LatencyClass> classes, size_t klass, double us, TimePoint now) {
    Fade(now);
    class_used[klass] += us;
    const double before = class_pass[klass];
    class_pass[klass] += us / std::max<uint32_t>(classes[klass].shares, 1);
    for (size_t c = 0; c < classes.size(); ++c) {
      if (class_active[c] == 0 && classes[c].tier == classes[klass].tier) {
        class_pass[c] = std::max(class_pass[c], before);
      }
    }
  }
};

}  // namespace saccade
