// Scheduler: who is taken in, by which lane, and who gives way for it.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "base/strings.h"
#include "sched/scheduler_impl.h"

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

}  // namespace

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
      unit = {0, std::max(1u, oldest_lower->least_rows(options_.min_prefill_chunk)), 0};
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
  if (Degrade(r, *best, now)) return best;
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

// Cuts the denoise steps of a request that would be late on `lane` to the most that are on time, as
// far as its class and itself allow it. False: it is as it was.
bool Scheduler::Impl::Degrade(ActiveRequest& r, const Lane& lane, TimePoint now) {
  const uint32_t asked = r.request.action_tokens;
  if (r.klass->on_late != OnLate::kDegrade || !r.denoises() || r.request.least_steps == 0) {
    return false;
  }
  const TimePoint free_at = FreeFor(*FindWorker(lane.options.worker), r.klass->tier, now);
  uint32_t fits = 0;
  for (uint32_t low = r.request.least_steps, high = asked; low < high;) {  // of [low, high)
    const uint32_t steps = fits == 0 ? low : low + (high - low) / 2;       // first whether any does
    r.request.action_tokens = steps;
    if (free_at + PredictFinish(r, lane, free_at, now).p99() <= r.deadline) {
      fits = steps;
      low = steps + 1;
    } else {
      high = steps;
    }
  }
  r.request.action_tokens = fits > 0 ? fits : asked;
  r.degraded = fits > 0;
  return r.degraded;
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
  Forget(r.request.session, r.request.klass);  // the arrival that was announced is this one
  ASSIGN_OR_RETURN(Lane* const lane, ChooseLane(r, now));
  if (r.request.next_arrival != kNever) {
    FindWorker(lane->options.worker)
        ->arrivals.push_back(
            {r.request.session, r.request.klass, r.klass->tier, r.request.next_arrival});
  }
  if (r.request.beams) {
    r.search.emplace(r.request.samples, *r.request.beams, r.request.stop_tokens,
                     r.request.action_tokens);
  }

  if (gives_way != nullptr) {
    ErrorInfo info;
    info.reason = Reason::kQueueFull;
    info.retry_after = kLeastRetry;
    // Its place is taken at once: also above a lowered limit the class holds as many as before.
    const uint32_t allowed = allowed_[Index(r.request.klass)];
    Finish(*gives_way,
           MakeError(absl::StatusCode::kResourceExhausted,
                     StrCat("class ", r.klass->name,
                            " is full, and this session has the most requests in it"),
                     info),
           now);
    Settle(*gives_way, now);
    allowed_[Index(r.request.klass)] = allowed;
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

}  // namespace saccade
