#include "engine/engine_metrics.h"

#include <algorithm>
#include <utility>

namespace saccade {
namespace {

StepKind KindOf(const StepShape& shape) {
  const int kinds = (shape.frames > 0) + (shape.prefill_rows > 0) + (shape.decode_rows > 0);
  if (kinds > 1) return StepKind::kMixed;
  if (shape.frames > 0) return StepKind::kEncode;
  return shape.prefill_rows > 0 ? StepKind::kPrefill : StepKind::kDecode;
}

void AddSince(prometheus::Counter& counter, uint64_t total, uint64_t& seen) {
  if (total > seen) counter.Increment(static_cast<double>(total - seen));
  seen = total;
}

}  // namespace

void EngineMetrics::SetWorkerUp(WorkerId id, bool up) {
  if (metrics_ != nullptr) metrics_->backend(id).worker_up->Set(up ? 1 : 0);
}

void EngineMetrics::Admitted(ClassId klass, bool counted) {
  if (metrics_ != nullptr && counted) metrics_->klass(klass).admitted->Increment();
}

void EngineMetrics::Rejected(ClassId klass, Reason reason, bool counted) {
  if (metrics_ != nullptr && counted) metrics_->klass(klass).Reject(reason);
}

void EngineMetrics::StepDone(const StepPlan& plan, const StepResult& result, bool counted) {
  if (metrics_ == nullptr || !counted) return;
  const StepShape& shape = plan.shape;
  const auto it = models_.find(plan.model);
  if (it == models_.end()) return;
  it->second.metrics->RecordStep(
      KindOf(shape), plan.predicted_p50, ToMicros(result.finished - result.started),
      plan.trunk.size() + plan.flows.size(), uint64_t{shape.prefill_rows} + shape.decode_rows);
}

void EngineMetrics::Finished(const ActRequest& request, const absl::Status& status,
                             const ActResult& result, bool counted) {
  if (metrics_ == nullptr || !counted) return;
  ClassMetrics& klass = metrics_->klass(request.klass);
  const auto it = models_.find(request.model);
  if (it == models_.end()) return;
  ModelMetrics& model = *it->second.metrics;
  if (status.ok()) {
    (result.late ? klass.missed : klass.met)->Increment();
    if (result.degraded && !result.late) klass.degraded->Increment();
    klass.queue_seconds->Observe(ToSeconds(result.timings.queue));
    klass.end_to_end_seconds->Observe(ToSeconds(result.timings.total));
    for (const Outcome::Answer& answer : result.answers) {
      model.generated_tokens->Increment(static_cast<double>(answer.tokens.size()));
    }
    if (request.frame_captured != TimePoint{}) {
      model.frame_age_seconds->Observe(ToSeconds(result.finished - request.frame_captured));
    }
    return;
  }
  const Reason reason = GetErrorInfo(status).reason;
  if (reason == Reason::kExpired) {
    klass.missed->Increment();
  } else {
    klass.Fail(reason);
  }
  if (reason == Reason::kInvalidActionToken) model.invalid_action_tokens->Increment();
  if (reason == Reason::kNonFinite) model.non_finite->Increment();
}

void EngineMetrics::RemoveModel(ModelId id) {
  const auto it = models_.find(id);
  if (it == models_.end()) return;
  ModelMetrics* const metrics = it->second.metrics;
  models_.erase(it);
  if (metrics != nullptr) SetCaches(*metrics, {});  // the next stats set what others have
}

void EngineMetrics::StartCounting(ModelId id, const SchedulerStats& stats) {
  SetSchedulerStats(stats);
  if (const auto it = models_.find(id); it != models_.end()) it->second.counting = true;
}

void EngineMetrics::SetSchedulerStats(const SchedulerStats& stats) {
  if (metrics_ == nullptr) return;
  for (size_t c = 0; c < stats.classes.size(); ++c) {
    const ClassMetrics& klass = metrics_->klass(ClassId(static_cast<int32_t>(c)));
    klass.queued->Set(stats.classes[c].queued);
    klass.running->Set(stats.classes[c].running);
  }
  for (auto& [id, model] : models_) {
    Seen totals;
    for (const SchedulerStats::Lane& lane : stats.lanes) {
      if (lane.model != id) continue;
      for (size_t p = 0; p < kModalities; ++p) {
        totals.hit_tokens[p] += lane.kv.partitions[p].hit_tokens;
        totals.miss_tokens[p] += lane.kv.partitions[p].miss_tokens;
        for (size_t r = 0; r < kEvictionReasons; ++r)
          totals.evictions[p][r] += lane.kv.partitions[p].evictions[r];
      }
      totals.embedding_hits += lane.embedding_hits;
      totals.embedding_misses += lane.embedding_misses;
    }
    SetCaches(*model.metrics, stats);
    if (!model.counting) {
      model.seen = totals;
      continue;
    }
    for (size_t p = 0; p < kModalities; ++p) {
      const PartitionMetrics& out = model.metrics->partitions[p];
      AddSince(*out.hit_tokens, totals.hit_tokens[p], model.seen.hit_tokens[p]);
      AddSince(*out.miss_tokens, totals.miss_tokens[p], model.seen.miss_tokens[p]);
      for (size_t r = 0; r < kEvictionReasons; ++r)
        AddSince(*out.evictions[r], totals.evictions[p][r], model.seen.evictions[p][r]);
    }
    AddSince(*model.metrics->vision_cache_hits, totals.embedding_hits, model.seen.embedding_hits);
    AddSince(*model.metrics->vision_cache_misses, totals.embedding_misses,
             model.seen.embedding_misses);
  }
}

// Sums over every load of the name and every worker.
void EngineMetrics::SetCaches(ModelMetrics& metrics, const SchedulerStats& stats) {
  for (size_t p = 0; p < kModalities; ++p) {
    uint64_t free = 0, held = 0, idle = 0;
    double ema = 0;
    int lanes = 0;
    for (const SchedulerStats::Lane& lane : stats.lanes) {
      const auto it = models_.find(lane.model);
      if (it == models_.end() || it->second.metrics != &metrics) continue;
      const PartitionStats& partition = lane.kv.partitions[p];
      const uint32_t used = partition.held + partition.idle;
      free += std::min(lane.kv.free_blocks, partition.cap > used ? partition.cap - used : 0);
      held += partition.held;
      idle += partition.idle;
      ema += partition.hit_rate_ema;
      ++lanes;
    }
    const PartitionMetrics& out = metrics.partitions[p];
    out.SetBlocks(free, held, idle);
    if (lanes > 0) out.hit_rate->Set(ema / lanes);
  }
}

}  // namespace saccade
