// Scheduler: its public door, the lanes that come and go, and the planning of steps.
#include "sched/scheduler.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/strings.h"
#include "sched/scheduler_impl.h"

namespace saccade {

// ------------------------------------------------------------------------------------------- lanes

absl::Status Scheduler::Impl::AddLane(std::shared_ptr<Lane> lane) {
  const LaneOptions& options = lane->options;
  for (const auto& other : lanes_) {
    if (other->options.worker == options.worker && other->options.model == options.model) {
      return InvalidField("lanes", "a model is twice on one worker");
    }
  }
  WorkerState* worker = FindWorker(options.worker);
  if (worker == nullptr) {
    worker = &workers_.emplace_back();
    worker->id = options.worker;
    worker->class_pass.resize(classes_.size());
    worker->class_active.resize(classes_.size());
    worker->class_used.resize(classes_.size());
    worker->class_sessions.resize(classes_.size());
  }
  lane->lost = worker->lost;
  lane->index_on_worker = worker->lanes.size();
  worker->lanes.push_back(lane.get());
  lanes_.push_back(std::move(lane));
  return absl::OkStatus();
}

std::optional<std::vector<std::shared_ptr<Lane>>> Scheduler::Impl::RemoveModel(ModelId id) {
  for (const auto& [request_id, r] : requests_) {
    if (r->lane->options.model == id) return std::nullopt;
  }
  for (const WorkerState& worker : workers_) {
    for (const InFlightStep& step : worker.in_flight) {
      if (step.lane->options.model == id) return std::nullopt;
    }
  }
  for (WorkerState& worker : workers_) {
    std::erase_if(worker.lanes, [id](const Lane* lane) { return lane->options.model == id; });
    for (size_t i = 0; i < worker.lanes.size(); ++i) worker.lanes[i]->index_on_worker = i;
  }
  const auto rest = std::stable_partition(
      lanes_.begin(), lanes_.end(), [id](const auto& lane) { return lane->options.model != id; });
  std::vector<std::shared_ptr<Lane>> removed(std::make_move_iterator(rest),
                                             std::make_move_iterator(lanes_.end()));
  lanes_.erase(rest, lanes_.end());
  return removed;
}

void Scheduler::Impl::SetMaxQueued(ClassId id, uint32_t max_queued) {
  if (id.value() < 0 || Index(id) >= classes_.size() || max_queued == 0) return;
  options_.classes[Index(id)].max_queued = max_queued;
  allowed_[Index(id)] =
      std::max(max_queued, classes_[Index(id)].queued + classes_[Index(id)].running);
}

WorkerState* Scheduler::Impl::FindWorker(WorkerId id) {
  const auto it = std::find_if(workers_.begin(), workers_.end(),
                               [id](const WorkerState& worker) { return worker.id == id; });
  return it == workers_.end() ? nullptr : &*it;
}

const WorkerState* Scheduler::Impl::FindWorker(WorkerId id) const {
  return const_cast<Impl*>(this)->FindWorker(id);
}

// ---------------------------------------------------------------------------------------- planning

std::optional<StepPlan> Scheduler::Impl::Plan(WorkerId id, TimePoint now, TimePoint free_at) {
  WorkerState* worker = FindWorker(id);
  if (worker == nullptr || worker->lost || worker->in_flight.size() >= options_.pipeline_depth) {
    return std::nullopt;
  }
  const TimePoint start = std::max(now, free_at);
  InFlightStep record = planner_.TakeRecord();
  const auto make = [&] {
    for (Lane* lane : worker->lanes) DropUnwanted(*lane, now);
    return planner_.Plan(*worker, StepId(next_step_), now, start, record);
  };
  std::optional<StepPlan> plan = make();
  // Planning may have taken a parked pass from all that wanted it: what it held is free now.
  if (!plan && std::any_of(worker->lanes.begin(), worker->lanes.end(), [](const Lane* lane) {
        return std::any_of(lane->parked.begin(), lane->parked.end(), [lane](const auto& pass) {
          return pass != nullptr && Unwanted(*lane, *pass);
        });
      })) {
    plan = make();
  }
  if (!plan && worker->held_until == kNever && Steal(*worker)) plan = make();
  for (Lane* lane : worker->lanes) lane->planned_epoch = lane->epoch;
  if (!plan) {
    planner_.Recycle(std::move(record));
    return std::nullopt;
  }
  ++next_step_;
  for (ActiveRequest* r : record.named()) {
    if (r->planned) continue;
    r->planned = true;
    ClassCounts& counts = classes_[Index(r->request.klass)];
    --counts.queued;
    ++counts.running;
  }
  for (size_t i = 0; i < record.charges.size(); ++i) {
    worker->Take(options_.classes, record.charges[i], *record.named()[i], now);
  }
  worker->busy_until = start + record.p50;
  worker->in_flight.push_back(std::move(record));
  return plan;
}

// What the session announced, of `klass` or of all, is not expected any more.
void Scheduler::Impl::Forget(SessionId id, std::optional<ClassId> klass) {
  for (WorkerState& worker : workers_) {
    std::erase_if(worker.arrivals, [id, klass](const WorkerState::Arrival& a) {
      return a.session == id && (!klass || a.klass == *klass);
    });
  }
}

// A worker without work takes a request that waits at a full worker of the same model.
bool Scheduler::Impl::Steal(WorkerState& worker) {
  if (!worker.in_flight.empty()) return false;
  for (Lane* mine : worker.lanes) {
    ActiveRequest* best = nullptr;
    for (const auto& lane : lanes_) {
      if (lane->options.model != mine->options.model || lane->lost || lane.get() == mine) continue;
      if (FindWorker(lane->options.worker)->in_flight.size() < options_.pipeline_depth) continue;
      for (ActiveRequest* r : lane->active) {
        if (r->planned || r->started || (best != nullptr && best->order < r->order)) continue;
        if (mine->CheckFits(r->request).ok()) best = r;
      }
    }
    if (best == nullptr) continue;
    Unbind(*best);
    Bind(*best, *mine);
    best->blocked_epoch = 0;
    mine->Estimate(*best);
    return true;
  }
  return false;
}

// ------------------------------------------------------------------------------------- observation

bool Scheduler::Impl::idle() const {
  return requests_.empty() &&
         std::all_of(workers_.begin(), workers_.end(),
                     [](const WorkerState& worker) { return worker.in_flight.empty(); });
}

SchedulerStats Scheduler::Impl::stats() const {
  SchedulerStats stats;
  stats.classes = classes_;
  for (const auto& lane : lanes_) {
    SchedulerStats::Lane out;
    out.worker = lane->options.worker;
    out.model = lane->options.model;
    out.kv = lane->kv->stats();
    out.embeddings_held = lane->embeddings.held();
    out.embeddings_idle = lane->embeddings.idle();
    out.embedding_hits = lane->embeddings.hits();
    out.embedding_misses = lane->embeddings.misses();
    stats.lanes.push_back(out);
  }
  return stats;
}

const CostModel& Scheduler::Impl::cost_model(WorkerId worker, ModelId model) const {
  for (const auto& lane : lanes_) {
    if (lane->options.worker == worker && lane->options.model == model) return lane->cost;
  }
  return no_model_;
}

// ------------------------------------------------------------------------------------------ public

absl::StatusOr<std::unique_ptr<Scheduler>> Scheduler::Create(SchedulerOptions options,
                                                             std::span<const LaneOptions> lanes) {
  if (options.classes.empty()) return InvalidField("classes", "at least one is needed");
  for (const LatencyClass& c : options.classes) {
    if (c.shares == 0) return InvalidField(StrCat("classes.", c.name, ".shares"), "must be > 0");
    if (c.max_queued == 0) {
      return InvalidField(StrCat("classes.", c.name, ".max_queued"), "must be > 0");
    }
    if (c.deadline.count() < 0) {
      return InvalidField(StrCat("classes.", c.name, ".deadline"), "must not be negative");
    }
  }
  if (options.step_ceiling.count() < 0) return InvalidField("step_ceiling", "must not be negative");
  if (options.pipeline_depth == 0) return InvalidField("pipeline_depth", "must be > 0");
  if (options.min_prefill_chunk == 0) return InvalidField("min_prefill_chunk", "must be > 0");
  if (options.max_wait.count() < 0) return InvalidField("max_wait", "must not be negative");
  if (options.probe_after.count() < 0) return InvalidField("probe_after", "must not be negative");
  if (!(options.ageing_share > 0 && options.ageing_share <= 1)) {
    return InvalidField("ageing_share", "must be above 0 and at most 1");
  }
  const uint32_t places = ParkingPlaces(options.classes);
  auto impl = std::make_unique<Impl>(std::move(options));
  for (const LaneOptions& lane : lanes) {
    ASSIGN_OR_RETURN(std::shared_ptr<Lane> made, MakeLane(lane, places));
    RETURN_IF_ERROR(impl->AddLane(std::move(made)));
  }
  return std::unique_ptr<Scheduler>(new Scheduler(std::move(impl)));
}

Scheduler::Scheduler(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Scheduler::~Scheduler() = default;

absl::StatusOr<std::shared_ptr<Lane>> Scheduler::MakeLane(const LaneOptions& options,
                                                          uint32_t parking_places) {
  ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, Lane::Create(options, parking_places));
  return std::shared_ptr<Lane>(std::move(lane));
}
absl::Status Scheduler::AddLane(std::shared_ptr<Lane> lane) {
  return impl_->AddLane(std::move(lane));
}
void Scheduler::FailModel(ModelId id, const absl::Status& status, TimePoint now) {
  impl_->FailModel(id, status, now);
}
std::optional<std::vector<std::shared_ptr<Lane>>> Scheduler::RemoveModel(ModelId id) {
  return impl_->RemoveModel(id);
}
void Scheduler::FlushIdle() { impl_->FlushIdle(); }
void Scheduler::SetMaxQueued(ClassId id, uint32_t max_queued) {
  impl_->SetMaxQueued(id, max_queued);
}
absl::Status Scheduler::Offer(Request request, TimePoint now) {
  return impl_->Offer(std::move(request), now);
}
std::optional<StepPlan> Scheduler::Plan(WorkerId worker, TimePoint now, TimePoint free_at) {
  return impl_->Plan(worker, now, free_at);
}
bool Scheduler::ShouldRevoke(const StepPlan& queued, TimePoint now) const {
  return impl_->ShouldRevoke(queued, now);
}
void Scheduler::OnStepRevoked(const StepPlan& plan, TimePoint now) {
  impl_->OnStepRevoked(plan, now);
}
void Scheduler::Recycle(StepPlan plan) { impl_->Recycle(std::move(plan)); }
void Scheduler::OnStepDone(const StepPlan& plan, const StepResult& result, TimePoint now) {
  impl_->OnStepDone(plan, result, now);
}
void Scheduler::Fail(RequestId id, absl::Status status, TimePoint now) {
  impl_->Fail(id, std::move(status), now);
}
void Scheduler::FailSession(SessionId id, absl::Status status, TimePoint now) {
  impl_->FailSession(id, status, now);
}
void Scheduler::OnWorkerLost(WorkerId worker, TimePoint now) { impl_->OnWorkerLost(worker, now); }
void Scheduler::Sweep(TimePoint now) { impl_->Sweep(now); }
TimePoint Scheduler::NextWake() const { return impl_->NextWake(); }
std::vector<Outcome> Scheduler::TakeOutcomes() { return impl_->TakeOutcomes(); }
std::span<const SampledToken> Scheduler::emitted() const { return impl_->emitted(); }
bool Scheduler::idle() const { return impl_->idle(); }
SchedulerStats Scheduler::stats() const { return impl_->stats(); }
const CostModel& Scheduler::cost_model(WorkerId worker, ModelId model) const {
  return impl_->cost_model(worker, model);
}
absl::Status Scheduler::CheckInvariants() const { return impl_->CheckInvariants(); }

}  // namespace saccade
