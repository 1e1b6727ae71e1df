// Engine: steps on their way to the workers and back, the answers they end in, and workers that
// fail or hang. By the holder of the turn.
#include <algorithm>
#include <utility>

#include "base/logging.h"
#include "base/strings.h"
#include "engine/engine_impl.h"

namespace saccade {
namespace {

// A worker whose steps fail this often in a row is taken out.
constexpr int kFailuresUntilLost = 3;
// A worker hangs when the same step was seen this often, at equal times over the timeout.
constexpr int kLooksUntilStuck = 4;

}  // namespace

void Engine::Impl::FeedWorkers(TimePoint now) {
  for (size_t i = 0; i < workers_.size(); ++i) {
    WorkerState& state = workers_[i];
    if (state.lost) continue;
    RevokeForUrgentWork(state, now);
    while (state.outstanding.size() < options_.pipeline_depth) {
      state.free_at = std::max(state.free_at, now);
      std::optional<StepPlan> plan =
          scheduler_->Plan(WorkerId(static_cast<int32_t>(i)), now, state.free_at);
      if (!plan) break;
      state.free_at += plan->predicted_p50;
      MarkStarted(*plan);
      std::shared_ptr<DeviceModel> device = DeviceOf(*plan);
      std::unique_ptr<WorkerStep> step = spare_steps_.Take();
      if (step == nullptr) {
        step = std::make_unique<WorkerStep>();
        step->result.tokens.reserve(options_.max_logit_rows);
      }
      step->plan = *std::move(plan);
      step->model = std::move(device);
      state.outstanding.push_back(std::move(step));
      state.worker->Submit(state.outstanding.back().get());
    }
  }
}

void Engine::Impl::RevokeForUrgentWork(WorkerState& state, TimePoint now) {
  if (state.outstanding.size() < 2) return;
  const StepPlan& queued = state.outstanding.back()->plan;
  if (!scheduler_->ShouldRevoke(queued, now)) return;
  if (!state.worker->Revoke()) return;  // it has started
  scheduler_->OnStepRevoked(queued, now);
  state.free_at -= std::min(queued.predicted_p50, ToMicros(state.free_at - now));
  Recycle(std::move(state.outstanding.back()));
  state.outstanding.pop_back();
}

void Engine::Impl::MarkStarted(const StepPlan& plan) {
  const auto mark = [this](RequestId id) {
    const auto it = active_.find(id);
    if (it != active_.end()) it->second.started = true;
  };
  for (const EncodeItem& item : plan.encodes) mark(item.request);
  for (const TrunkItem& item : plan.trunk) mark(item.request);
  for (const FlowItem& item : plan.flows) mark(item.request);
}

std::shared_ptr<DeviceModel> Engine::Impl::DeviceOf(const StepPlan& plan) const {
  const Loaded& loaded = models_.at(plan.model);
  const std::vector<WorkerId>& workers = loaded.served->workers;
  const auto at = std::find(workers.begin(), workers.end(), plan.worker) - workers.begin();
  return loaded.devices[static_cast<size_t>(at)];
}

void Engine::Impl::TakeSteps(WorkerId id, TimePoint now) {
  std::vector<std::unique_ptr<WorkerStep>>& outstanding =
      workers_[static_cast<size_t>(id.value())].outstanding;
  while (!outstanding.empty() && outstanding.front()->done.load(std::memory_order_acquire)) {
    std::unique_ptr<WorkerStep> step = std::move(outstanding.front());
    outstanding.erase(outstanding.begin());
    Handle(id, *step, now);
    Recycle(std::move(step));
  }
}

void Engine::Impl::Handle(WorkerId id, WorkerStep& step, TimePoint now) {
  WorkerState& state = workers_[static_cast<size_t>(id.value())];
  const StepPlan& plan = step.plan;
  if (state.lost) {
    if (std::exchange(state.stuck, false)) {
      stuck_.fetch_sub(1, std::memory_order_acq_rel);
      LogWarn("a worker that hung has come back; it stays out", {{"step", plan.id.value()}});
    }
    return;
  }
  const StepResult& result = step.result;
  stats_dirty_ = true;
  if (state.outstanding.empty()) state.free_at = now;
  // An id outside the action range ends its request before more work is spent on it, where every
  // token is an action of its own. A model stays
  // while a step of it is in flight.
  const Loaded& loaded = models_.at(plan.model);
  const ServedModel& model = *loaded.served;
  if (result.status.ok() && model.invalid_tokens == InvalidTokenPolicy::kFail) {
    for (const SampledToken& token : result.tokens) {
      if (token.token == kInvalidSample || model.spec().head.kind != HeadKind::kTokens ||
          !model.spec().head.stop_tokens.empty() ||
          model.instances.front()->IsActionToken(token.token)) {
        continue;
      }
      const auto it = active_.find(token.request);
      if (it == active_.end() || it->second.request.text) continue;
      ErrorInfo info;
      info.reason = Reason::kInvalidActionToken;
      scheduler_->Fail(token.request,
                       MakeError(absl::StatusCode::kInternal,
                                 StrCat("action token ", token.index, " of sample ", token.sample,
                                        " is id ", token.token, ", which is no action token"),
                                 info),
                       now);
    }
  }
  scheduler_->OnStepDone(plan, result, now);
  metrics_.StepDone(plan, result, loaded.warm);
  recorder_.Step(plan, result);
  for (const SampledToken& token : scheduler_->emitted()) {
    const auto it = active_.find(token.request);
    if (it == active_.end()) continue;
    it->second.request.sink->OnToken(token.request, token.sample, token.index, token.token);
  }
  if (result.status.ok()) {
    state.failures = 0;
  } else if (++state.failures >= kFailuresUntilLost) {
    LoseWorker(id, now);
  }
}

// What is done with, for the steps to come.
void Engine::Impl::Recycle(std::unique_ptr<WorkerStep> step) {
  scheduler_->Recycle(std::move(step->plan));
  step->model = nullptr;  // which may go away
  step->done.store(false, std::memory_order_relaxed);
  spare_steps_.Give(std::move(step));
}

// ----------------------------------------------------------------------------------------- answers

void Engine::Impl::Deliver(TimePoint now) {
  for (Outcome& outcome : scheduler_->TakeOutcomes()) {
    const auto it = active_.find(outcome.id);
    if (it == active_.end()) continue;
    Finish(it->second, std::move(outcome), now);
    active_.erase(it);
    stats_dirty_ = true;
  }
}

void Engine::Impl::Finish(Active& active, Outcome outcome, TimePoint now) {
  const ActRequest& request = active.request;
  const Loaded& loaded = models_.at(request.model);  // it stays while it has requests
  const ServedModel& model = *loaded.served;
  ActResult result;
  absl::Status status = std::move(outcome.status);
  if (request.text) result.answers = std::exchange(outcome.answers, {});
  for (const Outcome::Answer& answer : outcome.answers) {
    if (!status.ok() || request.prefix_only) break;
    const Model& family = *model.instances.front();
    absl::StatusOr<ActionChunk> chunk =
        family.spec().head.kind == HeadKind::kTokens
            ? family.DecodeActions(answer.tokens, request.statistics_key, model.invalid_tokens)
            : family.FinishActions(answer.chunk, request.statistics_key, request.state);
    if (chunk.ok()) {
      result.chunks.push_back(*std::move(chunk));
    } else {
      status = chunk.status();
    }
  }
  result.timings = outcome.timings;
  result.cached_tokens = outcome.cached_tokens;
  result.prompt_tokens = outcome.prompt_tokens;
  result.frame_runs = std::move(outcome.frame_runs);
  result.frame_cached = outcome.frame_cached;
  result.late = outcome.late;
  result.denoise_steps = outcome.denoise_steps;
  result.degraded = outcome.degraded;
  result.finished = now;
  metrics_.Finished(request, status, result, loaded.warm);
  recorder_.Request(outcome.id, request, status, status.ok() ? &result : nullptr, now);
  if (status.ok()) {
    request.sink->OnDone(outcome.id, std::move(result));
  } else {
    request.sink->OnDone(outcome.id, std::move(status));
  }
}

// ----------------------------------------------------------------------------------------- workers

void Engine::Impl::LoseWorker(WorkerId id, TimePoint now) {
  WorkerState& state = workers_[static_cast<size_t>(id.value())];
  if (state.lost) return;
  state.lost = true;
  worker_up_[static_cast<size_t>(id.value())].store(false, std::memory_order_release);
  metrics_.SetWorkerUp(id, false);
  scheduler_->OnWorkerLost(id, now);
}

void Engine::Impl::WatchWorkers(TimePoint now) {
  const bool due = watch_due_ <= now;
  bool busy = false;
  for (size_t i = 0; i < workers_.size(); ++i) {
    WorkerState& state = workers_[i];
    if (state.lost || state.outstanding.empty()) continue;
    busy = true;
    if (!due) continue;
    const StepId running = state.outstanding.front()->plan.id;
    state.looks = running == state.watched ? state.looks + 1 : 0;
    state.watched = running;
    if (state.looks < kLooksUntilStuck) continue;
    LogError("a worker hangs; its requests fail and it gets no more",
             {{"worker", i}, {"step", running.value()}});
    state.stuck = true;
    stuck_.fetch_add(1, std::memory_order_acq_rel);
    LoseWorker(WorkerId(static_cast<int32_t>(i)), now);
  }
  if (!busy) {
    watch_due_ = kNever;
  } else if (due || watch_due_ == kNever) {
    watch_due_ = now + options_.step_timeout / kLooksUntilStuck;
  }
}

}  // namespace saccade
