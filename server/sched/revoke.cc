// Scheduler: work that was planned and is given up: a queued step that is taken back for a more
// urgent one, and a pass that nobody wants any more.
#include <algorithm>
#include <utility>

#include "sched/scheduler_impl.h"

namespace saccade {

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
  for (const FlowItem& item : plan.flows) {
    ActiveRequest* r = Find(item.request);
    if (r == nullptr) continue;
    --r->in_flight;
    r->samples[item.sample].planned_tokens = item.index;
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

}  // namespace saccade
