// Runs each hot path of the core once it is warm, inside a function of its own name, so that
// callgrind counts its instructions: see core_counts.sh.
#include "tests/bench/core_load.h"

namespace saccade::bench {

constexpr uint32_t kWarmUp = 150;
constexpr uint32_t kCounted = 50;

}  // namespace saccade::bench

extern "C" {
// Scheduler of one step: plan and done.
[[gnu::noinline]] void CountedStepPlan(saccade::bench::SchedulerLoad& load) { load.Plan(); }
[[gnu::noinline]] void CountedStepDone(saccade::bench::SchedulerLoad& load) { load.Done(); }
// 64 blocks got and given back.
[[gnu::noinline]] void CountedBlocks(saccade::bench::KvLoad& load, uint32_t i) { load.Churn(i); }
// A prefix of 20 blocks found.
[[gnu::noinline]] void CountedLookup(saccade::bench::KvLoad& load) { load.Find(); }
}

int main() {
  using namespace saccade::bench;  // NOLINT(google-build-using-namespace)
  SchedulerLoad steps;
  for (uint32_t i = 0; i < kWarmUp + kCounted; ++i) {
    steps.Fill();
    if (i < kWarmUp) {
      steps.Plan();
    } else {
      CountedStepPlan(steps);
    }
    steps.Execute();
    if (i < kWarmUp) {
      steps.Done();
    } else {
      CountedStepDone(steps);
    }
  }
  KvLoad kv;
  for (uint32_t i = 0; i < kCounted; ++i) kv.Churn(i);
  for (uint32_t i = 0; i < kCounted; ++i) CountedBlocks(kv, i);
  for (uint32_t i = 0; i < kCounted; ++i) CountedLookup(kv);
  return 0;
}
