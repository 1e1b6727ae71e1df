#pragma once
// EngineMetrics: what the engine's events mean in metrics. Engine thread only. Does nothing without
// a Metrics, and nothing while the engine warms up, so that start-up work is not counted as
// service.
#include <vector>

#include "engine/engine.h"
#include "metrics/metrics.h"
#include "sched/step.h"

namespace saccade {

class EngineMetrics {
 public:
  EngineMetrics(Metrics* metrics, size_t num_models) : metrics_(metrics), seen_(num_models) {}

  void SetWorkerUp(WorkerId id, bool up);
  void Admitted(ClassId klass, bool counted);
  void Rejected(ClassId klass, Reason reason, bool counted);
  void StepDone(const StepPlan& plan, const StepResult& result, bool counted);
  void Finished(const ActRequest& request, const absl::Status& status, const ActResult& result,
                bool counted);
  // Cache gauges and counters, summed over the workers of each model.
  void SetSchedulerStats(const SchedulerStats& stats);

 private:
  struct Seen {  // totals already exported, to turn running totals into increments
    std::array<uint64_t, kModalities> hit_tokens{};
    std::array<uint64_t, kModalities> miss_tokens{};
    std::array<std::array<uint64_t, kEvictionReasons>, kModalities> evictions{};
    uint64_t embedding_hits = 0;
    uint64_t embedding_misses = 0;
  };
  Metrics* metrics_;
  std::vector<Seen> seen_;
};

}  // namespace saccade
