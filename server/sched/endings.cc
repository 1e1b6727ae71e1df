// Scheduler: how requests end, each in one Outcome: complete, failed, expired, with their worker.
#include <algorithm>
#include <utility>

#include "sched/scheduler_impl.h"

namespace saccade {

absl::Status Scheduler::Impl::WorkerFailed(std::string_view message) {
  ErrorInfo info;
  info.reason = Reason::kWorkerFailed;
  return MakeError(absl::StatusCode::kUnavailable, message, info);
}

absl::Status Scheduler::Impl::Expired(TimePoint arrival, TimePoint deadline) {
  ErrorInfo info;
  info.reason = Reason::kExpired;
  info.deadline = ToMicros(deadline - arrival);
  return MakeError(absl::StatusCode::kDeadlineExceeded, "the deadline has passed", info);
}

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
  outcome.frame_runs = std::move(r.frame_runs);
  for (const Segment& segment : r.request.timeline->segments()) {
    outcome.prompt_tokens[static_cast<size_t>(segment.modality)] += segment.end - segment.begin;
  }
  outcome.frame_cached = r.reported_cache && r.frame_cached;
  const TimePoint end = r.complete() && !r.prefix_only() ? r.last_token : now;
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
    if (r.denoises()) outcome.denoise_steps = r.request.action_tokens;
    outcome.degraded = r.degraded;
    if (r.search) {
      for (BeamSearch::Hypothesis& h : r.search->Results()) {
        outcome.answers.push_back({std::move(h.tokens), h.stopped, h.log_prob, h.score, {}});
      }
    } else {
      for (SampleState& sample : r.samples) {
        outcome.answers.push_back({.tokens = std::move(sample.tokens),
                                   .stopped = sample.stopped,
                                   .chunk = std::move(sample.chunk)});
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

void Scheduler::Impl::SettleAll(const StepPlan& plan, TimePoint now) {
  for (const EncodeItem& item : plan.encodes) {
    if (ActiveRequest* r = Find(item.request)) Settle(*r, now);
  }
  for (const TrunkItem& item : plan.trunk) {
    if (ActiveRequest* r = Find(item.request)) Settle(*r, now);
  }
  for (const FlowItem& item : plan.flows) {
    if (ActiveRequest* r = Find(item.request)) Settle(*r, now);
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
  Forget(id);
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
  worker->arrivals.clear();
  worker->held_until = kNever;  // it is never asked for a step again
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
  TimePoint wake = next_wake_;
  for (const WorkerState& worker : workers_) wake = std::min(wake, worker.held_until);
  return wake;
}

}  // namespace saccade
