// Scheduler: what comes back from the workers: tokens, frames and blocks to publish, failed steps.
#include <algorithm>
#include <utility>

#include "base/strings.h"
#include "sched/scheduler_impl.h"

namespace saccade {
namespace {

absl::Status Internal(Reason reason, std::string_view message) {
  ErrorInfo info;
  info.reason = reason;
  return MakeError(absl::StatusCode::kInternal, message, info);
}

absl::Status NonFinite(uint32_t index, uint32_t sample) {
  return Internal(Reason::kNonFinite,
                  StrCat("what gives token ", index, " of sample ", sample, " is not finite"));
}

}  // namespace

absl::Status Scheduler::Impl::StepFailure(const absl::Status& status) {
  return GetErrorInfo(status).reason != Reason::kUnspecified
             ? status
             : WorkerFailed(StrCat("a step failed: ", FromAbsl(status.message())));
}

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
    TakeChunks(result);
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
    TakeChunks(result);
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
    if (r->request.kind == AnswerKind::kTokens) emitted_.push_back(token);
    if (!r->first_token) r->first_token = result.finished;
    r->last_token = result.finished;
  }
}

void Scheduler::Impl::TakeChunks(const StepResult& result) {
  for (const SampledChunk& chunk : result.chunks) {
    ActiveRequest* r = Find(chunk.request);
    if (r == nullptr || r->ended || chunk.sample >= r->samples.size()) continue;
    r->samples[chunk.sample].chunk = chunk.values;
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
          return !sample.stopped &&
                 (sample.tokens.size() <= target.index ||
                  (r.request.kind == AnswerKind::kOnePass && sample.chunk.empty()));
        });
    if (missing) Poison(r, Internal(Reason::kInternal, "the worker reported no token"), now);
  }
  for (const FlowItem& item : plan.flows) {
    ActiveRequest& r = *Find(item.request);
    --r.in_flight;
    if (!r.first_started) r.first_started = result.started;
    if (r.ended) continue;
    const SampleState& sample = r.samples[item.sample];
    // It may have found its whole prompt in the cache.
    if (sample.sequence != nullptr) r.lane->kv->CountUse(*sample.sequence);
    if (sample.tokens.size() <= item.index ||
        (item.index + 1 == item.steps && sample.chunk.empty())) {
      Poison(r, Internal(Reason::kInternal, "the worker reported no denoise step"), now);
    }
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

}  // namespace saccade
