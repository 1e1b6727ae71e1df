// The core without a model: scheduler per step at 256 sessions, K/V blocks, prefix look-up, and
// what it allocates.
//   core_bench [--check]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iostream>

#include "CLI/CLI.hpp"
#include "nlohmann/json.hpp"
#include "tests/bench/core_load.h"
#include "tests/bench/timing.h"
#include "tests/counted_new.h"

namespace saccade::bench {
namespace {

constexpr double kStepBar = 50;   // microseconds of the scheduler per step
constexpr double kBlockBar = 1;   // to get and give back one block
constexpr double kLookupBar = 2;  // to find 20 cached blocks
constexpr uint32_t kSteps = 400;
constexpr uint32_t kRounds = 9;

struct StepCost {
  double plan_us = 0;
  double done_us = 0;
  double offer_us = 0;
  double items = 0;
  double allocations_per_request = 0;
};

StepCost MeasureSteps() {
  SchedulerLoad load;
  uint64_t items = 0;
  uint64_t offers = 0;
  double offer_s = 0;
  double plan_s = 0;
  double done_s = 0;
  const auto run = [&] {
    for (uint32_t i = 0; i < kSteps; ++i) {
      offer_s += CpuSeconds([&] { offers += load.Fill(); });
      plan_s += CpuSeconds([&] { load.Plan(); });
      items += load.items();
      load.Execute();
      done_s += CpuSeconds([&] { load.Done(); });
    }
  };
  run();  // until the cost model knows the steps and requests are at every stage of their life
  StepCost best;
  best.plan_us = best.done_us = best.offer_us = 1e9;
  for (uint32_t round = 0; round < kRounds; ++round) {
    offer_s = plan_s = done_s = 0;
    items = offers = 0;
    const uint64_t before = Allocations();
    run();
    const uint64_t made = Allocations() - before;
    best.plan_us = std::min(best.plan_us, 1e6 * plan_s / kSteps);
    best.done_us = std::min(best.done_us, 1e6 * done_s / kSteps);
    if (offers > 0) {
      best.offer_us = std::min(best.offer_us, 1e6 * offer_s / static_cast<double>(offers));
      best.allocations_per_request = static_cast<double>(made) / static_cast<double>(offers);
    }
    best.items = static_cast<double>(items) / kSteps;
  }
  return best;
}

// Of a token whose request neither begins nor ends, over all that the scheduler does for it.
double AllocationsPerToken() {
  uint64_t tokens = 0;
  uint64_t made = 0;
  VisitRunningSteps(Allocations, [&](uint64_t given, uint64_t planning, uint64_t ending) {
    tokens += given;
    made += planning + ending;
  });
  return static_cast<double>(made) / static_cast<double>(tokens);
}

struct KvCost {
  double block_us = 1e9;
  double lookup_us = 1e9;
};

KvCost MeasureKv() {
  constexpr uint32_t kFinds = 2'000;
  constexpr uint32_t kChurns = 64;
  KvCost cost;
  KvLoad load;
  for (uint32_t round = 0; round < kRounds; ++round) {
    const double find_s = CpuSeconds([&] {
      for (uint32_t i = 0; i < kFinds; ++i) load.Find();
    });
    cost.lookup_us = std::min(cost.lookup_us, 1e6 * find_s / kFinds);
    const double churn_s = CpuSeconds([&] {
      for (uint32_t i = 0; i < kChurns; ++i) load.Churn(i);
    });
    cost.block_us = std::min(cost.block_us, 1e6 * churn_s / (kChurns * KvLoad::kBlocks));
  }
  return cost;
}

int Run(bool check) {
  const StepCost step = MeasureSteps();
  const KvCost kv = MeasureKv();
  const double per_token = AllocationsPerToken();
  const double scheduler_us = step.plan_us + step.done_us;
  const bool holds = scheduler_us <= kStepBar && kv.block_us <= kBlockBar &&
                     kv.lookup_us <= kLookupBar && per_token == 0;
  std::printf(
      "scheduler at %u sessions, %.1f items a step: %.1f us a step (plan %.1f, done %.1f), "
      "bar %.0f; %.1f us an offer\n",
      kSessions, step.items, scheduler_us, step.plan_us, step.done_us, kStepBar, step.offer_us);
  std::printf(
      "K/V: %.3f us a block got and given back, bar %.0f; %.2f us to find 20 blocks, bar "
      "%.0f\n",
      kv.block_us, kBlockBar, kv.lookup_us, kLookupBar);
  std::printf("allocations: %.4f a token, bar 0; %.1f a request, of its beginning and its end\n",
              per_token, step.allocations_per_request);
  const nlohmann::json summary = {{"name", "core"},
                                  {"scheduler_us_per_step", scheduler_us},
                                  {"plan_us", step.plan_us},
                                  {"done_us", step.done_us},
                                  {"offer_us", step.offer_us},
                                  {"items_per_step", step.items},
                                  {"allocation_us_per_block", kv.block_us},
                                  {"prefix_lookup_us", kv.lookup_us},
                                  {"allocations_per_token", per_token},
                                  {"allocations_per_request", step.allocations_per_request},
                                  {"pass", holds}};
  std::cout << summary.dump() << std::endl;
  return check && !holds ? 1 : 0;
}

}  // namespace
}  // namespace saccade::bench

int main(int argc, char** argv) {
  CLI::App app("The core without a model");
  bool check = false;
  app.add_flag("--check", check, "exit 1 unless the bars hold");
  CLI11_PARSE(app, argc, argv);
  return saccade::bench::Run(check);
}
