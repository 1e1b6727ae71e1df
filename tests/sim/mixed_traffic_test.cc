// The shipped classes under Poisson traffic, up to twice what the device can do.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/sim/sim.h"

namespace saccade::sim {
namespace {

struct Share {
  size_t offered = 0;
  size_t met = 0;  // answered, and not late
  double part() const { return static_cast<double>(met) / static_cast<double>(offered); }
};

// Arrivals per second of control, perception, planning and best effort, for `seconds`.
std::array<Share, 4> RunTraffic(std::array<double, 4> rates, int64_t seconds) {
  Options options;
  options.scheduler.classes = {
      Class("control", 0, 20'000, OnLate::kReject, 64, 8),
      Class("perception", 1, 50'000, OnLate::kReject, 64, 4, Modality::kVision),
      Class("planning", 1, 100'000, OnLate::kReject, 64, 2, Modality::kText),
      Class("best_effort", 2, 0, OnLate::kRunLate, 256, 1)};
  options.scheduler.step_ceiling = Micros(10'000);
  options.lanes = {Lane(0, 0, 2048)};
  options.costs = {200, 400, 300, 4, 25, 0.05};
  options.check_every = 64;
  options.keep_steps = false;
  Simulation sim(options);
  Random random(7);
  for (uint64_t i = 0; i < 6; ++i) {
    sim.Offer({.klass = 3,
               .timeline = sim.Prompt({1'000'000 + i}, 20 + 30 * static_cast<uint32_t>(i), i)});
    sim.RunToIdle();
  }
  const size_t first = sim.requests().size();
  const TimePoint until = sim.now() + Micros(seconds * 1'000'000);
  uint64_t frame = 0;
  std::array<std::function<void()>, 4> arrive;
  for (uint32_t klass = 0; klass < 4; ++klass) {
    arrive[klass] = [&, klass] {
      if (sim.now() >= until) return;
      Spec spec;
      spec.klass = klass;
      spec.session = 10 * klass + random.Below(8);
      switch (klass) {
        case 0:
        case 1:
          spec.timeline = sim.Prompt({++frame}, 20, random.Below(4));
          break;
        case 2:
          spec.timeline = sim.Prompt({++frame}, 100, random.Next());
          spec.action_tokens = 20;
          break;
        default:
          spec.timeline = sim.Prompt({}, 300, random.Next());
          spec.action_tokens = 40;
      }
      sim.Offer(spec);
      const double gap = -1e6 / rates[klass] * std::log(1 - random.Uniform());
      sim.After(Micros(static_cast<int64_t>(gap)), arrive[klass]);
    };
    sim.After(Micros(0), arrive[klass]);
  }
  sim.RunToIdle();
  std::array<Share, 4> shares;
  for (size_t i = first; i < sim.requests().size(); ++i) {
    const Tracked& r = sim.request(i);
    Share& share = shares[r.spec.klass];
    ++share.offered;
    share.met += r.ok() && !r.outcome->late ? 1 : 0;
  }
  sim.ExpectBaseline();
  return shares;
}

// About 90 % of what the device can do, half of it control.
TEST(MixedTraffic, EveryClassIsServedBelowCapacity) {
  const std::array<Share, 4> shares = RunTraffic({430, 140, 42, 38}, 10);
  EXPECT_GE(shares[0].part(), 0.999);
  EXPECT_GE(shares[1].part(), 0.99);
  EXPECT_GE(shares[2].part(), 0.95);
  EXPECT_GE(shares[3].part(), 0.999);
}

// Far above it, control alone within it.
TEST(MixedTraffic, OverloadFallsOnTheLowerTiers) {
  const std::array<Share, 4> shares = RunTraffic({390, 500, 150, 110}, 10);
  EXPECT_GE(shares[0].part(), 0.99);
  EXPECT_LT(shares[3].part(), 0.9);
  EXPECT_GT(shares[3].part(), 0.05);  // and yet not starved
}

}  // namespace
}  // namespace saccade::sim
