#pragma once
// EngineMetrics: what the engine's events mean in metrics. Engine thread only. Does nothing without
// a Metrics, and nothing while the engine warms up, so that start-up work is not counted as
// service.
#include <map>

#include "engine/engine.h"
#include "metrics/metrics.h"
#include "sched/step.h"

namespace saccade {

class EngineMetrics {
 public:
  explicit EngineMetrics(Metrics* metrics) : metrics_(metrics) {}

  // `model` may be null when there is no Metrics.
  void AddModel(ModelId id, ModelMetrics* model) { models_[id].metrics = model; }
  // What its warm-up did is in `stats`, and in no counter.
  void StartCounting(ModelId id, const SchedulerStats& stats);
  // Its gauges fall to what other loads of its name have.
  void RemoveModel(ModelId id);
  void SetWorkerUp(WorkerId id, bool up);
  void Admitted(ClassId klass, bool counted);
  void Rejected(ClassId klass, Reason reason, bool counted);
  void StepDone(const StepPlan& plan, const StepResult& result, bool counted);
  void Finished(const ActRequest& request, const absl::Status& status, const ActResult& result,
                bool counted);
  // Gauges and counters of classes and caches, the latter summed over the workers of each name.
  void SetSchedulerStats(const SchedulerStats& stats);

 private:
  struct Seen {  // totals already exported, to turn running totals into increments
    std::array<uint64_t, kModalities> hit_tokens{};
    std::array<uint64_t, kModalities> miss_tokens{};
    std::array<std::array<uint64_t, kEvictionReasons>, kModalities> evictions{};
    uint64_t embedding_hits = 0;
    uint64_t embedding_misses = 0;
  };
  struct Model {
    ModelMetrics* metrics = nullptr;
    bool counting = false;
    Seen seen;
  };
  void SetCaches(ModelMetrics& metrics, const SchedulerStats& stats);

  Metrics* metrics_;
  std::map<ModelId, Model> models_;
};

}  // namespace saccade
