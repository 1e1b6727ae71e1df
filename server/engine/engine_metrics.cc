#include "engine/engine_metrics.h"

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
  metrics_->model(plan.model)
      .RecordStep(KindOf(shape), plan.predicted_p50, ToMicros(result.finished - result.started),
                  plan.trunk.size(), uint64_t{shape.prefill_rows} + shape.decode_rows);
}

void EngineMetrics::Finished(const ActRequest& request, const absl::Status& status,
                             const ActResult& result, bool counted) {
  if (metrics_ == nullptr || !counted) return;
  ClassMetrics& klass = metrics_->klass(request.klass);
  ModelMetrics& model = metrics_->model(request.model);
  if (status.ok()) {
    (result.late ? klass.missed : klass.met)->Increment();
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

void EngineMetrics::SetSchedulerStats(const SchedulerStats& stats) {
  if (metrics_ == nullptr) return;
  for (size_t m = 0; m < seen_.size(); ++m) {
    const ModelId id(static_cast<int32_t>(m));
    ModelMetrics& model = metrics_->model(id);
    Seen& seen = seen_[m];
    uint64_t embedding_hits = 0;
    uint64_t embedding_misses = 0;
    for (size_t p = 0; p < kModalities; ++p) {
      uint64_t free = 0, held = 0, idle = 0, hits = 0, misses = 0;
      std::array<uint64_t, kEvictionReasons> evictions{};
      double ema = 0;
      int lanes = 0;
      for (const SchedulerStats::Lane& lane : stats.lanes) {
        if (lane.model != id) continue;
        const PartitionStats& partition = lane.kv.partitions[p];
        const uint32_t used = partition.held + partition.idle;
        free += std::min(lane.kv.free_blocks, partition.cap > used ? partition.cap - used : 0);
        held += partition.held;
        idle += partition.idle;
        hits += partition.hit_tokens;
        misses += partition.miss_tokens;
        ema += partition.hit_rate_ema;
        for (size_t r = 0; r < kEvictionReasons; ++r) evictions[r] += partition.evictions[r];
        ++lanes;
      }
      PartitionMetrics& out = model.partitions[p];
      out.SetBlocks(free, held, idle);
      AddSince(*out.hit_tokens, hits, seen.hit_tokens[p]);
      AddSince(*out.miss_tokens, misses, seen.miss_tokens[p]);
      if (lanes > 0) out.hit_rate->Set(ema / lanes);
      for (size_t r = 0; r < kEvictionReasons; ++r)
        AddSince(*out.evictions[r], evictions[r], seen.evictions[p][r]);
    }
    for (const SchedulerStats::Lane& lane : stats.lanes) {
      if (lane.model != id) continue;
      embedding_hits += lane.embedding_hits;
      embedding_misses += lane.embedding_misses;
    }
    AddSince(*model.vision_cache_hits, embedding_hits, seen.embedding_hits);
    AddSince(*model.vision_cache_misses, embedding_misses, seen.embedding_misses);
  }
}

}  // namespace saccade
