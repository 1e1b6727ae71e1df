#include "sched/scheduler.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/strings.h"
#include "sched/active_request.h"
#include "sched/estimate.h"
#include "sched/lane.h"
#include "sched/planner.h"
#include "sched/worker_state.h"

namespace saccade {
namespace {

constexpr Micros kLeastRetry{1'000};  // a retry sooner than this changes nothing
// Time spent behind others counts this much more at admission. A request admitted on the brink has
// no slack to share a step with the next one, so steps shrink and everybody's throughput falls:
// in simulation a saturated lane answers a quarter more with this reserve than without. In tier 0
// it grows with the square of the time that tier has lately used: while there is room, the reserve
// would refuse what is on time without it.
constexpr double kQueueingReserve = 1.0;
constexpr double kMostUsedAbove = 0.95;

absl::Status WorkerFailed(std::string_view message) {
  ErrorInfo info;
  info.reason = Reason::kWorkerFailed;
  return MakeError(absl::StatusCode::kUnavailable, message, info);
}

absl::Status StepFailure(const absl::Status& status) {
  return GetErrorInfo(status).reason != Reason::kUnspecified
             ? status
             : WorkerFailed(StrCat("a step failed: ", FromAbsl(status.message())));
}

absl::Status Internal(Reason reason, std::string_view message) {
  ErrorInfo info;
  info.reason = reason;
  return MakeError(absl::StatusCode::kInternal, message, info);
}

absl::Status NonFinite(uint32_t index, uint32_t sample) {
  return Internal(Reason::kNonFinite,
                  StrCat("the logits of token ", index, " of sample ", sample, " are not finite"));
}

absl::Status Expired(TimePoint arrival, TimePoint deadline) {
  ErrorInfo info;
  info.reason = Reason::kExpired;
  info.deadline = ToMicros(deadline - arrival);
  return MakeError(absl::StatusCode::kDeadlineExceeded, "the deadline has passed", info);
}

}  // namespace

class Scheduler::Impl {
 public:
  explicit Impl(SchedulerOptions options)
      : options_(std::move(options)), planner_(options_), classes_(options_.classes.size()) {
    for (const LatencyClass& c : options_.classes) allowed_.push_back(c.max_queued);
  }

  absl::Status AddLane(std::shared_ptr<Lane> lane);
  void FailModel(ModelId id, const absl::Status& status, TimePoint now);
  std::optional<std::vector<std::shared_ptr<Lane>>> RemoveModel(ModelId id);
  void SetMaxQueued(ClassId id, uint32_t max_queued);
  void FlushIdle() {
    for (const auto& lane : lanes_) lane->kv->FlushIdle();
  }

  absl::Status Offer(Request request, TimePoint now);
  std::optional<StepPlan> Plan(WorkerId id, TimePoint now, TimePoint free_at);
  bool ShouldRevoke(const StepPlan& queued, TimePoint now) const;
  void OnStepRevoked(const StepPlan& plan, TimePoint now);
  void OnStepDone(const StepPlan& plan, const StepResult& result, TimePoint now);
  void Recycle(StepPlan plan) { planner_.Recycle(std::move(plan)); }
  void Fail(RequestId id, absl::Status status, TimePoint now);
  void FailSession(SessionId id, const absl::Status& status, TimePoint now);
  void OnWorkerLost(WorkerId id, TimePoint now);
  void Sweep(TimePoint now);
  TimePoint NextWake() const;
  std::vector<Outcome> TakeOutcomes() { return std::exchange(outcomes_, {}); }
  std::span<const SampledToken> emitted() const { return emitted_; }
  bool idle() const;
  SchedulerStats stats() const;
  const CostModel& cost_model(WorkerId worker, ModelId model) const;
  absl::Status CheckInvariants() const;

 private:
  using ClassCounts = SchedulerStats::Class;

  static size_t Index(ClassId id) { return static_cast<size_t>(id.value()); }
  WorkerState* FindWorker(WorkerId id);
  const WorkerState* FindWorker(WorkerId id) const;
  ActiveRequest* Find(RequestId id);
  absl::Status Validate(const Request& request) const;
  TimeEstimate PredictFinish(const ActiveRequest& r, const Lane& lane, TimePoint free_at,
                             TimePoint now);
  absl::StatusOr<Lane*> ChooseLane(ActiveRequest& r, TimePoint now);
  ActiveRequest* FindGivingWay(const ActiveRequest& r);
  void Bind(ActiveRequest& r, Lane& lane);
  void Unbind(ActiveRequest& r);
  bool Steal(WorkerState& worker);

  void Finish(ActiveRequest& r, absl::Status status, TimePoint now);
  void FinishCompleted(ActiveRequest& r, TimePoint now);
  void Settle(ActiveRequest& r, TimePoint now);
  void Poison(ActiveRequest& r, absl::Status status, TimePoint now);
  void TakeTokens(const StepResult& result, TimePoint now);
  void FailWork(Lane& lane, const StepPlan& plan, const std::vector<ActiveRequest*>& named,
                const absl::Status& status, TimePoint now);
  void OnSliceDone(const StepPlan& plan, const StepResult& result, const InFlightStep& step,
                   TimePoint now);
  void SettleAll(const StepPlan& plan, TimePoint now);
  void Undo(Lane& lane, const StepPlan& plan);
  static bool Unwanted(const Lane& lane, const Pass& pass);
  void DropUnwanted(Lane& lane, TimePoint now);
  void TakeTops(const StepResult& result, TimePoint now);
  void ChooseBeams(ActiveRequest& r, TimePoint now);
  void CompleteStep(const StepPlan& plan, const StepResult& result, TimePoint now);
  void Predict(WorkerState& worker, TimePoint now) const;
  static void Withdraw(ActiveRequest& r, const TrunkItem& item);

  void FailAll(std::vector<ActiveRequest*> found, const absl::Status& status, TimePoint now);

  SchedulerOptions options_;  // constant but for max_queued
  Planner planner_;
  std::vector<std::shared_ptr<Lane>> lanes_;  // shared only so that others may drop the last ones
  std::deque<WorkerState> workers_;           // a deque: lanes and steps keep pointers
  std::unordered_map<RequestId, std::unique_ptr<ActiveRequest>> requests_;  // until destroyed
  std::vector<ClassCounts> classes_;
  // Requests a class may hold: its limit, or what it held when that was lowered and still holds.
  std::vector<uint32_t> allowed_;
  std::vector<Outcome> outcomes_;
  std::vector<SampledToken> emitted_;  // by the last OnStepDone
  mutable QueueLoad::Memory load_memory_;
  uint64_t next_step_ = 1;
  uint64_t next_order_ = 1;
  mutable TimePoint next_wake_ = kNever;
  mutable bool wake_known_ = true;
  const CostModel no_model_;
};

// ----------------------------------------------------------------------------------------- lookup

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

ActiveRequest* Scheduler::Impl::Find(RequestId id) {
  const auto it = requests_.find(id);
  return it == requests_.end() ? nullptr : it->second.get();
}

// -------------------------------------------------------------------------------------- admission

absl::Status Scheduler::Impl::Validate(const Request& request) const {
  if (request.klass.value() < 0 || Index(request.klass) >= classes_.size()) {
    return InvalidField("class", "is not configured");
  }
  if (request.timeline == nullptr || request.timeline->num_tokens() == 0) {
    return InvalidField("timeline", "holds no token");
  }
  if (!std::isfinite(request.temperature) || request.temperature < 0) {
    return InvalidField("temperature", "must be finite and not negative");
  }
  if (!(request.top_p > 0 && request.top_p <= 1)) {
    return InvalidField("top_p", "must be above 0 and at most 1");
  }
  if (request.beams) {
    const uint64_t most = kMaxTopTokens / BeamSearch::Candidates(1, request.stop_tokens.size());
    if (request.samples > most) {
      return InvalidField("beams",
                          StrCat("are ", request.samples, ", with ", request.stop_tokens.size(),
                                 " stop tokens the limit is ", most));
    }
    if (request.beams->results == 0 || request.beams->results > request.samples) {
      return InvalidField("results", "must be from 1 to the number of beams");
    }
    if (!std::isfinite(request.beams->length_penalty)) {
      return InvalidField("length_penalty", "must be finite");
    }
  }
  if (requests_.contains(request.id)) return InvalidField("id", "is in use");
  if (std::none_of(lanes_.begin(), lanes_.end(),
                   [&](const auto& lane) { return lane->options.model == request.model; })) {
    return InvalidField("model", "is not served");
  }
  return absl::OkStatus();
}

// From `free_at` until `r` is done on `lane`, after what goes before it.
TimeEstimate Scheduler::Impl::PredictFinish(const ActiveRequest& r, const Lane& lane,
                                            TimePoint free_at, TimePoint now) {
  WorkerState& worker = *FindWorker(lane.options.worker);
  const bool over_share = worker.JudgeJoining(r.request.session, Index(r.request.klass), now);
  QueueLoad load(worker, options_.step_ceiling, load_memory_);
  const ActiveRequest* oldest_lower = nullptr;
  for (const Lane* other : worker.lanes) {
    for (const ActiveRequest* a : other->active) {
      if (GoesBefore(*a, r.klass->tier, over_share, r.deadline)) {
        load.AddBefore(*a);
        continue;
      }
      if (a->klass->tier == r.klass->tier) load.AddAlongside(*a);
      if (a->klass->tier > 0 &&
          (oldest_lower == nullptr || a->served_at < oldest_lower->served_at)) {
        oldest_lower = a;
      }
    }
  }
  for (const Lane* other : worker.lanes) {
    for (const auto& pass : other->parked) {
      if (pass != nullptr && pass->place <= TiersAbove(options_.classes, r.klass->tier)) {
        load.AddBefore(*other, *pass);
      }
    }
  }
  const RemainingWork mine = lane.Remaining(r);
  TimeEstimate estimate = load.Finish(lane, mine, free_at);
  const Micros alone =
      QueueLoad(worker, options_.step_ceiling, load_memory_).Finish(lane, mine, free_at).p50;
  const double top = std::min(1.0, worker.UsedAbove(options_.classes, 1, now));
  estimate.p50 +=
      Scaled(estimate.p50 - alone, kQueueingReserve * (r.klass->tier == 0 ? top * top : 1.0));
  // Tiers above will go on taking what they took lately.
  const double above = worker.UsedAbove(options_.classes, r.klass->tier, now);
  estimate.p50 = Scaled(estimate.p50, 1 / (1 - std::clamp(above, 0.0, kMostUsedAbove)));
  // Room for what ageing may put before it: else a full top tier would starve the lowest for ever.
  if (oldest_lower != nullptr &&
      (oldest_lower->aged ||
       oldest_lower->served_at + options_.max_wait <= free_at + estimate.p50)) {
    const Lane& its_lane = *oldest_lower->lane;
    const RemainingWork work = its_lane.Remaining(*oldest_lower);
    StepShape unit{0, 0, work.decode_rows};
    if (work.frames > 0) {
      unit = {1, 0, 0};
    } else if (work.prefill_rows > 0) {
      unit = {0, std::min(work.prefill_rows, options_.min_prefill_chunk), 0};
    }
    Micros first = its_lane.cost.Predict(unit).p50;
    if (its_lane.NeedsCut(unit, options_.step_ceiling)) {
      first = std::min(first, options_.step_ceiling);
    }
    estimate.p50 += first + Scaled(estimate.p50, options_.ageing_share);
  }
  return estimate;
}

// The live lane that would finish `r` first, or why none takes it.
absl::StatusOr<Lane*> Scheduler::Impl::ChooseLane(ActiveRequest& r, TimePoint now) {
  Lane* best = nullptr;
  TimePoint best_finish = kNever;
  absl::Status refused = WorkerFailed("no worker of this model is alive");
  bool fits = false;
  for (const auto& candidate : lanes_) {
    Lane& lane = *candidate;
    if (lane.options.model != r.request.model || lane.lost) continue;
    const absl::Status status = lane.CheckFits(r.request);
    if (!status.ok()) {
      if (!fits) refused = status;
      continue;
    }
    fits = true;
    r.samples.resize(r.request.samples);
    const WorkerState& worker = *FindWorker(lane.options.worker);
    lane.Estimate(r);
    const TimePoint free_at = FreeFor(worker, r.klass->tier, now);
    const TimePoint finish = free_at + PredictFinish(r, lane, free_at, now).p99();
    if (best == nullptr || finish < best_finish ||
        (finish == best_finish && lane.active.size() < best->active.size())) {
      best = &lane;
      best_finish = finish;
    }
  }
  if (best == nullptr) return refused;
  best->Estimate(r);
  if (!r.may_expire() || best_finish <= r.deadline) return best;
  const WorkerState& worker = *FindWorker(best->options.worker);
  if (best->active.empty() && worker.in_flight.empty() &&
      now - best->observed_at > options_.probe_after) {
    return best;  // a stale prediction is refreshed, not obeyed
  }
  const Micros late_by = ToMicros(best_finish - r.deadline);
  const TimeEstimate alone =
      QueueLoad(worker, options_.step_ceiling, load_memory_).Finish(*best, best->Remaining(r), now);
  ErrorInfo info;
  info.reason = Reason::kLate;
  info.deadline = ToMicros(r.deadline - r.request.arrival);
  info.predicted_finish = ToMicros(best_finish - r.request.arrival);
  // What does not fit even alone fits at the earliest when the prediction is refreshed.
  info.retry_after = std::max(
      kLeastRetry, r.request.arrival + alone.p99() > r.deadline ? options_.probe_after : late_by);
  return MakeError(absl::StatusCode::kDeadlineExceeded,
                   StrCat("predicted to finish ", late_by.count(), " us after its deadline"), info);
}

absl::Status Scheduler::Impl::Offer(Request request, TimePoint now) {
  RETURN_IF_ERROR(Validate(request));
  auto owned = std::make_unique<ActiveRequest>();
  ActiveRequest& r = *owned;
  r.klass = &options_.classes[Index(request.klass)];
  ClassCounts& counts = classes_[Index(request.klass)];
  r.deadline = request.deadline;
  if (r.deadline == kNever && r.klass->deadline.count() > 0) {
    r.deadline = request.arrival + r.klass->deadline;
  }
  r.request = std::move(request);
  const auto segments = r.request.timeline->segments();
  r.frames =
      static_cast<uint32_t>(std::count_if(segments.begin(), segments.end(), [](const Segment& s) {
        return s.modality == Modality::kVision;
      }));
  const bool full = counts.queued + counts.running >= r.klass->max_queued;
  ActiveRequest* const gives_way = full ? FindGivingWay(r) : nullptr;
  if (full && gives_way == nullptr) {
    ErrorInfo info;
    info.reason = Reason::kQueueFull;
    info.retry_after = kLeastRetry;
    for (const auto& lane : lanes_) {
      if (lane->options.model != r.request.model || !lane->CheckFits(r.request).ok()) continue;
      r.samples.resize(r.request.samples);
      lane->Estimate(r);
      QueueLoad alone(*FindWorker(lane->options.worker), options_.step_ceiling, load_memory_);
      info.retry_after =
          std::max(*info.retry_after, alone.Finish(*lane, lane->Remaining(r), now).p50);
      break;
    }
    return MakeError(
        absl::StatusCode::kResourceExhausted,
        StrCat("class ", r.klass->name, " has ", r.klass->max_queued, " requests already"), info);
  }
  if (r.expired(now)) return Expired(r.request.arrival, r.deadline);
  ASSIGN_OR_RETURN(Lane* const lane, ChooseLane(r, now));
  if (r.request.beams) {
    r.search.emplace(r.request.samples, *r.request.beams, r.request.stop_tokens,
                     r.request.action_tokens);
  }

  if (gives_way != nullptr) {
    ErrorInfo info;
    info.reason = Reason::kQueueFull;
    info.retry_after = kLeastRetry;
    Finish(*gives_way,
           MakeError(absl::StatusCode::kResourceExhausted,
                     StrCat("class ", r.klass->name,
                            " is full, and this session has the most requests in it"),
                     info),
           now);
    Settle(*gives_way, now);
  }
  r.order = next_order_++;
  r.served_at = r.request.arrival;
  Bind(r, *lane);
  ++counts.queued;
  if (r.may_expire() && wake_known_) next_wake_ = std::min(next_wake_, r.deadline);
  // What every token of it goes into, so that none needs new memory.
  if (!r.search) {
    for (SampleState& sample : r.samples) sample.tokens.reserve(r.request.action_tokens);
  }
  requests_.emplace(r.request.id, std::move(owned));
  return absl::OkStatus();
}

// In a full class: the newest request that no step has taken yet of the session that has the most,
// when that is more than the session of `r` would have. So a session cannot fill the queue against
// the others.
ActiveRequest* Scheduler::Impl::FindGivingWay(const ActiveRequest& r) {
  uint32_t mine = 1;
  for (WorkerState& worker : workers_) {
    const SessionUse* const use = worker.FindSession(r.request.session, Index(r.request.klass));
    if (use != nullptr) mine += use->active;
  }
  ActiveRequest* found = nullptr;
  for (const auto& lane : lanes_) {
    for (ActiveRequest* a : lane->active) {
      if (a->klass != r.klass || a->planned || a->started || a->use->active <= mine) continue;
      if (found == nullptr ||
          std::tie(a->use->active, a->order) > std::tie(found->use->active, found->order)) {
        found = a;
      }
    }
  }
  return found;
}

void Scheduler::Impl::Bind(ActiveRequest& r, Lane& lane) {
  lane.Add(r);
  WorkerState& worker = *FindWorker(lane.options.worker);
  const size_t klass = Index(r.request.klass);
  ++worker.class_active[klass];
  r.use = worker.AddSession(r.request.session, klass);
}

void Scheduler::Impl::Unbind(ActiveRequest& r) {
  WorkerState& worker = *FindWorker(r.lane->options.worker);
  --worker.class_active[Index(r.request.klass)];
  worker.RemoveSession(*std::exchange(r.use, nullptr));
  r.lane->Remove(r);
}

// --------------------------------------------------------------------------------------- planning

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
  if (!plan && Steal(*worker)) plan = make();
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

bool Scheduler::Impl::ShouldRevoke(const StepPlan& queued, TimePoint now) const {
  const WorkerState* worker = FindWorker(queued.worker);
  if (worker == nullptr || worker->lost || worker->in_flight.size() < 2 ||
      worker->in_flight.back().id != queued.id) {
    return false;
  }
  const InFlightStep& step = worker->in_flight.back();
  for (const Lane* lane : worker->lanes) {
    for (const ActiveRequest* r : lane->active) {
      // Only what the planning of `queued` did not see, or could not start then: else it would be
      // planned and revoked for ever.
      const bool news = r->considered < queued.id || !r->considered.valid() ||
                        (r->blocked_epoch != 0 && lane->planned_epoch != lane->epoch);
      if (!news || r->preempting || r->fully_planned() || r->in_flight > 0 || r->expired(now)) {
        continue;
      }
      const uint32_t tier = r->klass->tier;
      if (tier < step.best_tier) return true;
      if (tier != 0 || step.best_tier != 0 || r->deadline >= step.earliest_deadline) continue;
      // Of one tier: only when waiting for the step would make it miss its deadline.
      const TimePoint after = std::max(worker->busy_until, now);
      const Micros rest = QueueLoad(*worker, options_.step_ceiling, load_memory_)
                              .Finish(*lane, lane->Remaining(*r), after)
                              .p50;
      if (after + rest > r->deadline && after - step.p50 + rest <= r->deadline) return true;
    }
  }
  return false;
}

// `r` is as it was before `item` was planned.
void Scheduler::Impl::Withdraw(ActiveRequest& r, const TrunkItem& item) {
  const uint32_t prompt = r.prompt_tokens();
  if (item.begin < prompt) {
    r.prompt_planned = item.begin;
  } else {
    for (SampleState& sample : r.samples) {
      if (sample.slot == item.slot) sample.planned_rows = item.begin - prompt;
    }
  }
  for (const SampleTarget& target : item.samples) {
    r.samples[target.sample].planned_tokens = target.index;
  }
  if (item.top) r.samples[item.top->sample].planned_tokens = item.top->index;
}

void Scheduler::Impl::OnStepRevoked(const StepPlan& plan, TimePoint now) {
  WorkerState* worker = FindWorker(plan.worker);
  if (worker == nullptr || worker->in_flight.empty() || worker->in_flight.back().id != plan.id) {
    return;
  }
  InFlightStep step = std::move(worker->in_flight.back());
  worker->in_flight.pop_back();
  Lane& lane = *step.lane;
  ++lane.epoch;
  if (step.pass != nullptr) {
    Pass& pass = *step.pass;
    pass.planned = plan.slice.begin;
    --pass.in_flight;
    if (pass.failure.ok() && !plan.slice.first()) lane.Park(step.pass);
  }
  if (step.pass == nullptr || plan.slice.first()) {
    if (step.pass != nullptr) lane.Forget(*step.pass);
    Undo(lane, plan);
    lane.copies.insert(lane.copies.begin(), plan.copies.begin(), plan.copies.end());
  }
  for (const auto& [klass, session, us] : step.charges) {
    if (SessionUse* use = worker->FindSession(session, klass)) {
      use->used = std::max(0.0, use->used - us);
    }
    worker->class_pass[klass] -= us / std::max<uint32_t>(options_.classes[klass].shares, 1);
    worker->class_used[klass] = std::max(0.0, worker->class_used[klass] - us);
  }
  worker->busy_until -= step.p50;
  if (step.pass != nullptr && !step.pass->failure.ok() && step.pass->in_flight == 0) {
    FailWork(lane, step.pass->plan, step.pass->requests, step.pass->failure, now);
  }
  SettleAll(plan, now);
  DropUnwanted(lane, now);
  planner_.Recycle(std::move(step));
}

// Everything in `plan` is plannable again.
void Scheduler::Impl::Undo(Lane& lane, const StepPlan& plan) {
  for (const EncodeItem& item : plan.encodes) {
    lane.frame(item.slot).stage = FrameState::Stage::kWanted;
    lane.frame(item.slot).pass = nullptr;
    if (ActiveRequest* r = Find(item.request)) --r->in_flight;
  }
  for (const TrunkItem& item : plan.trunk) {
    ActiveRequest* r = Find(item.request);
    if (r == nullptr) continue;
    --r->in_flight;
    Withdraw(*r, item);
  }
}

void Scheduler::Impl::SettleAll(const StepPlan& plan, TimePoint now) {
  for (const EncodeItem& item : plan.encodes) {
    if (ActiveRequest* r = Find(item.request)) Settle(*r, now);
  }
  for (const TrunkItem& item : plan.trunk) {
    if (ActiveRequest* r = Find(item.request)) Settle(*r, now);
  }
}

// Nobody needs what a parked pass computes, and no slice of it is in flight.
bool Scheduler::Impl::Unwanted(const Lane& lane, const Pass& pass) {
  const auto wants = [](const ActiveRequest* r) { return !r->ended && !r->preempting; };
  if (pass.in_flight > 0 || std::any_of(pass.requests.begin(), pass.requests.end(), wants)) {
    return false;
  }
  return !pass.vision ||
         std::none_of(lane.active.begin(), lane.active.end(), [&](const ActiveRequest* r) {
           return wants(r) &&
                  std::any_of(r->embeddings.begin(), r->embeddings.end(), [&](EmbeddingId slot) {
                    return slot.valid() && lane.frame(slot).pass == &pass;
                  });
         });
}

void Scheduler::Impl::DropUnwanted(Lane& lane, TimePoint now) {
  for (const auto& place : lane.parked) {
    if (place == nullptr || !Unwanted(lane, *place)) continue;
    const std::shared_ptr<Pass> pass = place;
    ++lane.epoch;
    lane.Forget(*pass);
    Undo(lane, pass->plan);
    SettleAll(pass->plan, now);
  }
}

// ---------------------------------------------------------------------------------------- results

void Scheduler::Impl::OnStepDone(const StepPlan& plan, const StepResult& result, TimePoint now) {
  emitted_.clear();
  WorkerState* worker = FindWorker(plan.worker);
  if (worker == nullptr || worker->in_flight.empty() || worker->in_flight.front().id != plan.id) {
    return;  // of a lost worker
  }
  InFlightStep step = std::move(worker->in_flight.front());
  worker->in_flight.erase(worker->in_flight.begin());
  Lane& lane = *step.lane;
  ++lane.epoch;
  if (result.status.ok()) {
    const Micros took = ToMicros(result.finished - result.started);
    if (plan.slice.whole()) {
      lane.cost.Observe(plan.shape, took);
    } else {
      lane.cost.Observe(plan.shape, plan.slice.share, took);
    }
    lane.observed_at = now;
  }
  Predict(*worker, now);

  if (step.pass != nullptr) {
    OnSliceDone(plan, result, step, now);
  } else if (result.status.ok()) {
    TakeTokens(result, now);
    TakeTops(result, now);
    CompleteStep(plan, result, now);
  } else {
    FailWork(lane, plan, step.requests, result.status, now);
  }
  SettleAll(plan, now);
  DropUnwanted(lane, now);
  planner_.Recycle(std::move(step));
}

// A pass has failed with its first slice that fails; its work is accounted for when no slice of it
// is in flight, and done with its last.
void Scheduler::Impl::OnSliceDone(const StepPlan& plan, const StepResult& result,
                                  const InFlightStep& step, TimePoint now) {
  Pass& pass = *step.pass;
  --pass.in_flight;
  for (ActiveRequest* r : pass.requests) {
    if (!r->first_started) r->first_started = result.started;
  }
  if (!result.status.ok() && pass.failure.ok()) {
    pass.failure = StepFailure(result.status);
    step.lane->Forget(pass);
    for (ActiveRequest* r : pass.requests) Poison(*r, pass.failure, now);
  }
  if (!pass.failure.ok()) {
    if (pass.in_flight == 0) FailWork(*step.lane, pass.plan, pass.requests, pass.failure, now);
  } else if (plan.slice.last()) {
    TakeTokens(result, now);
    TakeTops(result, now);
    CompleteStep(plan, result, now);
  }
}

void Scheduler::Impl::Predict(WorkerState& worker, TimePoint now) const {
  worker.busy_until = now;
  for (const InFlightStep& step : worker.in_flight) worker.busy_until += step.p50;
}

// Before anything is published: what a non-finite value touched must not be found again.
void Scheduler::Impl::TakeTokens(const StepResult& result, TimePoint now) {
  for (const SampledToken& token : result.tokens) {
    ActiveRequest* r = Find(token.request);
    if (r == nullptr || r->ended) continue;
    if (token.sample < r->samples.size() && r->samples[token.sample].stopped) {
      continue;  // its row was on the way when the stop token came
    }
    if (token.token < 0) {
      Poison(*r, NonFinite(token.index, token.sample), now);
      continue;
    }
    if (r->search || token.sample >= r->samples.size() ||
        token.index != r->samples[token.sample].tokens.size() ||
        token.index >= r->samples[token.sample].planned_tokens) {
      Poison(*r, Internal(Reason::kInternal, "the worker reported a token out of order"), now);
      continue;
    }
    SampleState& sample = r->samples[token.sample];
    sample.tokens.push_back(token.token);
    const std::vector<int32_t>& stops = r->request.stop_tokens;
    sample.stopped = std::find(stops.begin(), stops.end(), token.token) != stops.end();
    emitted_.push_back(token);
    if (!r->first_token) r->first_token = result.finished;
    r->last_token = result.finished;
  }
}

void Scheduler::Impl::TakeTops(const StepResult& result, TimePoint now) {
  for (const TopTokens& top : result.tops) {
    ActiveRequest* r = Find(top.request);
    if (r == nullptr || r->ended) continue;
    if (top.tokens.empty()) {
      Poison(*r, NonFinite(top.index, top.sample), now);
      continue;
    }
    if (!r->search || top.sample >= r->search->live() || !r->samples[top.sample].top.empty() ||
        top.index != r->samples[top.sample].tokens.size()) {
      Poison(*r, Internal(Reason::kInternal, "the worker reported a beam out of order"), now);
      continue;
    }
    r->samples[top.sample].top = top.tokens;
    if (!r->first_token) r->first_token = result.finished;
    r->last_token = result.finished;
  }
}

// Every beam has its candidates: some go on, the others' blocks are theirs.
void Scheduler::Impl::ChooseBeams(ActiveRequest& r, TimePoint now) {
  std::vector<std::vector<ScoredToken>> tops;
  for (uint32_t i = 0; i < r.search->live(); ++i) {
    tops.push_back(std::exchange(r.samples[i].top, {}));
  }
  const std::vector<BeamSearch::Next> next = r.search->Advance(tops);
  if (r.search->over()) {
    for (SampleState& sample : r.samples) sample.stopped = true;
    return;
  }
  ++r.lane->epoch;
  const absl::Status status = r.lane->Reorder(r, next);
  if (!status.ok()) Poison(r, Internal(Reason::kInternal, FromAbsl(status.message())), now);
}

void Scheduler::Impl::CompleteStep(const StepPlan& plan, const StepResult& result, TimePoint now) {
  for (const EncodeItem& item : plan.encodes) {
    ActiveRequest& r = *Find(item.request);
    --r.in_flight;
    if (!r.first_started) r.first_started = result.started;
    FrameState& frame = r.lane->frame(item.slot);
    frame.stage = FrameState::Stage::kReady;
    frame.ready_at = result.finished;
    r.lane->embeddings.Publish(item.slot);
  }
  for (const TrunkItem& item : plan.trunk) {
    ActiveRequest& r = *Find(item.request);
    --r.in_flight;
    if (!r.first_started) r.first_started = result.started;
    if (r.poisoned) continue;
    if (item.begin < r.prompt_tokens()) {
      r.prompt_done = item.begin + item.count;
      // The first sample computes the prompt; of a search, any beam's sequence may become its own.
      for (size_t i = 0; i < (r.search ? r.samples.size() : 1); ++i) {
        r.lane->kv->Publish(*r.samples[i].sequence, r.prompt_done, now);
      }
      if (r.prompt_done == r.prompt_tokens()) {
        for (const EmbeddingId slot : r.embeddings) {
          if (!slot.valid()) continue;
          const TimePoint ready_at = r.lane->frame(slot).ready_at;
          if (!r.frame_cached) r.encoded_at = std::max(r.encoded_at.value_or(ready_at), ready_at);
        }
        r.lane->ReleaseEmbeddings(r);
      }
    }
    if (r.ended) continue;
    const bool missing =
        (item.top && r.samples[item.top->sample].top.empty()) ||
        std::any_of(item.samples.begin(), item.samples.end(), [&r](const SampleTarget& target) {
          const SampleState& sample = r.samples[target.sample];
          return !sample.stopped && sample.tokens.size() <= target.index;
        });
    if (missing) Poison(r, Internal(Reason::kInternal, "the worker reported no token"), now);
  }
}

void Scheduler::Impl::FailWork(Lane& lane, const StepPlan& plan,
                               const std::vector<ActiveRequest*>& named, const absl::Status& status,
                               TimePoint now) {
  const absl::Status failure = StepFailure(status);
  for (ActiveRequest* r : named) {
    --r->in_flight;
    Poison(*r, failure, now);
  }
  // Copies that were not made were of beams, which later steps in flight may already read.
  if (!plan.copies.empty()) {
    const std::vector<ActiveRequest*> active = lane.active;
    for (ActiveRequest* r : active) {
      if (!r->search) continue;
      Poison(*r, failure, now);
      if (r->in_flight == 0) Settle(*r, now);
    }
  }
  // Later steps in flight read embeddings that were never made; what waits for them asks again.
  for (const EncodeItem& item : plan.encodes) {
    lane.frame(item.slot).stage = FrameState::Stage::kWanted;
    lane.frame(item.slot).pass = nullptr;
    const std::vector<ActiveRequest*> active = lane.active;
    for (ActiveRequest* r : active) {
      if (r->in_flight > 0 &&
          std::find(r->embeddings.begin(), r->embeddings.end(), item.slot) != r->embeddings.end()) {
        Poison(*r, failure, now);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------- endings

void Scheduler::Impl::Poison(ActiveRequest& r, absl::Status status, TimePoint now) {
  r.poisoned = true;
  Finish(r, std::move(status), now);
}

// The one place that makes an Outcome.
void Scheduler::Impl::Finish(ActiveRequest& r, absl::Status status, TimePoint now) {
  if (r.ended) return;
  r.ended = true;
  Unbind(r);
  ClassCounts& counts = classes_[Index(r.request.klass)];
  --(r.planned ? counts.running : counts.queued);
  allowed_[Index(r.request.klass)] = std::max(r.klass->max_queued, counts.queued + counts.running);
  if (r.may_expire()) wake_known_ = false;

  Outcome outcome;
  outcome.id = r.request.id;
  outcome.status = std::move(status);
  outcome.cached_tokens = r.cached_tokens;
  for (const Segment& segment : r.request.timeline->segments()) {
    outcome.prompt_tokens[static_cast<size_t>(segment.modality)] += segment.end - segment.begin;
  }
  outcome.frame_cached = r.reported_cache && r.frame_cached;
  const TimePoint end = r.complete() ? r.last_token : now;
  const TimePoint started = r.first_started.value_or(end);
  const TimePoint encoded = std::max(started, r.encoded_at.value_or(started));
  const TimePoint first_token = std::max(encoded, r.first_token.value_or(end));
  outcome.timings.queue = ToMicros(started - r.request.arrival);
  outcome.timings.encode = ToMicros(encoded - started);
  outcome.timings.prefill = ToMicros(first_token - encoded);
  outcome.timings.act = ToMicros(std::max(end, first_token) - first_token);
  outcome.timings.total = ToMicros(end - r.request.arrival);
  if (outcome.status.ok()) {
    outcome.late = r.deadline <= now;
    if (r.search) {
      for (BeamSearch::Hypothesis& h : r.search->Results()) {
        outcome.answers.push_back({std::move(h.tokens), h.stopped, h.log_prob, h.score});
      }
    } else {
      for (SampleState& sample : r.samples) {
        outcome.answers.push_back({.tokens = std::move(sample.tokens), .stopped = sample.stopped});
      }
    }
  }
  outcomes_.push_back(std::move(outcome));
}

// Nothing the client would get after its deadline is returned as on time.
void Scheduler::Impl::FinishCompleted(ActiveRequest& r, TimePoint now) {
  Finish(r, r.expired(now) ? Expired(r.request.arrival, r.deadline) : absl::OkStatus(), now);
}

// What is due once the items of a step are accounted for. May destroy `r`.
void Scheduler::Impl::Settle(ActiveRequest& r, TimePoint now) {
  if (!r.ended && r.may_choose()) ChooseBeams(r, now);
  if (!r.ended && r.complete()) FinishCompleted(r, now);
  if (r.in_flight > 0) return;
  if (r.ended) {
    r.lane->Release(r, now);
    requests_.erase(r.request.id);
  } else if (r.preempting) {
    r.lane->Preempt(r, now);
  }
}

void Scheduler::Impl::Fail(RequestId id, absl::Status status, TimePoint now) {
  ActiveRequest* r = Find(id);
  if (r == nullptr || r->ended) return;
  Lane& lane = *r->lane;
  Finish(*r, std::move(status), now);
  Settle(*r, now);
  DropUnwanted(lane, now);
}

void Scheduler::Impl::FailSession(SessionId id, const absl::Status& status, TimePoint now) {
  std::vector<ActiveRequest*> found;
  for (const auto& lane : lanes_) {
    for (ActiveRequest* r : lane->active) {
      if (r->request.session == id) found.push_back(r);
    }
  }
  FailAll(std::move(found), status, now);
}

void Scheduler::Impl::FailModel(ModelId id, const absl::Status& status, TimePoint now) {
  std::vector<ActiveRequest*> found;
  for (const auto& lane : lanes_) {
    if (lane->options.model == id)
      found.insert(found.end(), lane->active.begin(), lane->active.end());
  }
  FailAll(std::move(found), status, now);
}

void Scheduler::Impl::FailAll(std::vector<ActiveRequest*> found, const absl::Status& status,
                              TimePoint now) {
  std::sort(found.begin(), found.end(),
            [](const ActiveRequest* a, const ActiveRequest* b) { return a->order < b->order; });
  for (ActiveRequest* r : found) {
    Finish(*r, status, now);
    Settle(*r, now);
  }
  for (const auto& lane : lanes_) DropUnwanted(*lane, now);
}

void Scheduler::Impl::OnWorkerLost(WorkerId id, TimePoint now) {
  WorkerState* worker = FindWorker(id);
  if (worker == nullptr || worker->lost) return;
  worker->lost = true;
  worker->in_flight.clear();
  for (Lane* lane : worker->lanes) {
    lane->lost = true;
    for (auto& pass : lane->parked) pass = nullptr;
  }
  std::vector<ActiveRequest*> held;
  for (const auto& [request_id, r] : requests_) {
    if (r->lane->lost && r->lane->options.worker == id) held.push_back(r.get());
  }
  std::sort(held.begin(), held.end(),
            [](const ActiveRequest* a, const ActiveRequest* b) { return a->order < b->order; });
  for (ActiveRequest* r : held) {
    r->in_flight = 0;
    r->pass = nullptr;
    // Nothing in the lost worker's caches is worth keeping.
    r->poisoned = true;
  }
  for (ActiveRequest* r : held) {
    if (!r->ended && !r->planned) {
      // It has left nothing on the lost worker: another one may do it.
      Lane& lost = *r->lane;
      lost.Release(*r, now);
      Unbind(*r);
      r->poisoned = false;
      r->blocked_epoch = 0;
      r->considered = StepId();
      const absl::StatusOr<Lane*> lane = ChooseLane(*r, now);
      Bind(*r, lane.ok() ? **lane : lost);
      if (lane.ok()) continue;
      Finish(*r,
             GetErrorInfo(lane.status()).reason == Reason::kLate
                 ? lane.status()
                 : WorkerFailed("the worker that held the request failed"),
             now);
    } else {
      Finish(*r, WorkerFailed("the worker that held the request failed"), now);
    }
    Settle(*r, now);
  }
}

void Scheduler::Impl::Sweep(TimePoint now) {
  if (NextWake() > now) return;
  std::vector<ActiveRequest*> expired;
  for (const auto& lane : lanes_) {
    for (ActiveRequest* r : lane->active) {
      if (r->expired(now)) expired.push_back(r);
    }
  }
  std::sort(expired.begin(), expired.end(),
            [](const ActiveRequest* a, const ActiveRequest* b) { return a->order < b->order; });
  for (ActiveRequest* r : expired) {
    Finish(*r, Expired(r->request.arrival, r->deadline), now);
    Settle(*r, now);
  }
  for (const auto& lane : lanes_) DropUnwanted(*lane, now);
}

TimePoint Scheduler::Impl::NextWake() const {
  if (!wake_known_) {
    wake_known_ = true;
    next_wake_ = kNever;
    for (const auto& lane : lanes_) {
      for (const ActiveRequest* r : lane->active) {
        if (r->may_expire()) next_wake_ = std::min(next_wake_, r->deadline);
      }
    }
  }
  return next_wake_;
}

// ------------------------------------------------------------------------------------ observation

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

absl::Status Scheduler::Impl::CheckInvariants() const {
  const auto broken = [](auto&&... parts) {
    return absl::InternalError(StrCat("scheduler: ", parts...));
  };
  std::unordered_map<const ActiveRequest*, uint32_t> in_flight;
  for (const WorkerState& worker : workers_) {
    if (worker.in_flight.size() > options_.pipeline_depth) {
      return broken("worker ", worker.id.value(), " has too many steps");
    }
    std::unordered_map<const Pass*, uint32_t> passes;  // to their slices in flight
    for (const Lane* lane : worker.lanes) {
      for (const auto& pass : lane->parked) {
        if (pass != nullptr) passes.try_emplace(pass.get(), 0);
      }
    }
    for (const InFlightStep& step : worker.in_flight) {
      for (const ActiveRequest* r : step.requests) ++in_flight[r];
      if (step.pass != nullptr) ++passes[step.pass.get()];
    }
    for (const auto& [pass, slices] : passes) {
      if (pass->in_flight != slices) return broken("a pass counts its slices wrong");
      for (const ActiveRequest* r : pass->requests) ++in_flight[r];
    }
  }
  std::vector<ClassCounts> classes(classes_.size());
  std::unordered_map<const Lane*, std::vector<const ActiveRequest*>> holders;
  size_t unended = 0;
  size_t named = 0;
  for (const auto& [id, r] : requests_) {
    if (id != r->request.id) return broken("request ", id.value(), " has another id");
    const auto it = in_flight.find(r.get());
    const uint32_t steps = it == in_flight.end() ? 0 : it->second;
    named += it == in_flight.end() ? 0 : 1;
    if (steps != r->in_flight) {
      return broken("request ", id.value(), " counts ", r->in_flight, " items in flight, has ",
                    steps);
    }
    if (r->ended && r->in_flight == 0) return broken("request ", id.value(), " outlived its end");
    if (!r->ended && r->lane->lost) return broken("request ", id.value(), " is on a lost worker");
    if (r->preempting && r->in_flight == 0) {
      return broken("request ", id.value(), " is to be preempted by no step");
    }
    holders[r->lane].push_back(r.get());
    if (r->ended) continue;
    ++unended;
    ClassCounts& counts = classes[Index(r->request.klass)];
    ++(r->planned ? counts.running : counts.queued);
  }
  if (named != in_flight.size()) return broken("a step in flight names a request that is gone");
  for (size_t c = 0; c < classes.size(); ++c) {
    if (classes[c].queued != classes_[c].queued || classes[c].running != classes_[c].running) {
      return broken("class ", options_.classes[c].name, " counts wrong");
    }
    if (classes[c].queued + classes[c].running > allowed_[c]) {
      return broken("class ", options_.classes[c].name, " holds more than it may");
    }
    uint32_t bound = 0;
    for (const WorkerState& worker : workers_) {
      bound += worker.class_active[c];
      uint32_t of_sessions = 0;
      uint32_t sessions = 0;
      for (const auto& use : worker.sessions) {
        if (use->klass != c) continue;
        of_sessions += use->active;
        sessions += use->active > 0 ? 1 : 0;
      }
      if (of_sessions != worker.class_active[c] || sessions != worker.class_sessions[c]) {
        return broken("class ", options_.classes[c].name, " counts sessions wrong");
      }
    }
    if (bound != classes[c].queued + classes[c].running) {
      return broken("class ", options_.classes[c].name, " is bound elsewhere");
    }
  }
  size_t active = 0;
  for (const auto& lane : lanes_) {
    active += lane->active.size();
    RETURN_IF_ERROR(lane->CheckInvariants(holders[lane.get()]));
  }
  if (active != unended) return broken("a request is on no lane, or on two");
  return absl::OkStatus();
}

// ----------------------------------------------------------------------------------------- public

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
