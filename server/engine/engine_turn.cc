// Engine: the turns: who takes them, the messages that come in, and what waits for their end.
#include <pthread.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "base/strings.h"
#include "engine/engine_impl.h"

namespace saccade {
namespace {

constexpr std::chrono::seconds kForgetInterval{1};
// Cache gauges follow the cache at most this much later.
constexpr Micros kStatsInterval{100'000};
// While other threads take turns the engine thread looks at its timers this often, so that a
// request whose deadline is no nearer has nobody to wake.
constexpr Micros kTimerTick{20'000};
// After a step shorter than a wake-up its worker takes the turn, even when the next step waits.
constexpr Micros kBriefStep{50};

absl::Status Unloaded() {
  ErrorInfo info;
  info.reason = Reason::kModelUnloaded;
  return MakeError(absl::StatusCode::kUnavailable, "the model was unloaded", info);
}

}  // namespace

void Engine::Impl::Loop() {
  pthread_setname_np(pthread_self(), "saccade-engine");
  while (true) {
    const uint32_t epoch = wakeup_.Epoch();
    if (!turn_.TryTake()) {
      wakeup_.WaitUntil(epoch, kNever);  // the holder notifies when it has done
      continue;
    }
    TakeTurn(std::nullopt);
    if (stop_) break;  // and nobody has a turn again
    TimePoint wake = NextWake();
    if (std::exchange(guests_, false)) wake = std::min(wake, clock_.Now() + kTimerTick);
    armed_until_ = wake;
    if (!turn_.Release()) wakeup_.WaitUntil(epoch, wake);
  }
  stopped_.store(true, std::memory_order_release);
}

void Engine::Impl::RunTurn(std::optional<WorkerId> worker) {
  if (!turn_.TryTake()) return;
  guests_ = true;
  const bool complete = TakeTurn(worker);
  const bool engine_thread_is_needed = !complete || stop_ || NextWake() < armed_until_;
  if (turn_.Release() || engine_thread_is_needed) wakeup_.Notify();
}

void Engine::Impl::OnStep(WorkerId worker, WorkerStep& step, bool more) {
  const bool brief = step.plan.predicted_p50 < kBriefStep;
  step.done.store(true, std::memory_order_release);
  if (brief) {
    RunTurn(std::nullopt);
  } else if (more) {
    wakeup_.Notify();
  } else {
    RunTurn(worker);
  }
}

bool Engine::Impl::TakeTurn(std::optional<WorkerId> worker) {
  TimePoint now = clock_.Now();
  for (size_t i = 0; i < workers_.size(); ++i) TakeSteps(WorkerId(static_cast<int32_t>(i)), now);
  for (Message& message : inbox_.TakeAll()) {
    std::visit([&](auto& m) { Handle(m, now); }, message);
  }
  scheduler_->Sweep(now);
  WatchWorkers(now);
  FeedWorkers(now);
  if (worker && !workers_[static_cast<size_t>(worker->value())].outstanding.empty()) return false;
  Deliver(now);
  FinishUnloads(now);
  FinishDrain(now);
  now = clock_.Now();
  if (stats_dirty_ && now >= stats_due_) {
    metrics_.SetSchedulerStats(scheduler_->stats());
    stats_due_ = now + kStatsInterval;
    stats_dirty_ = false;
  }
  return true;
}

TimePoint Engine::Impl::NextWake() const {
  TimePoint wake = std::min(scheduler_->NextWake(), watch_due_);
  if (stats_dirty_) wake = std::min(wake, stats_due_);
  for (const DrainMessage& drain : drains_) wake = std::min(wake, drain.until);
  for (const UnloadMessage& unload : unloads_) {
    if (unload.until > clock_.Now())
      wake = std::min(wake, unload.until);  // else it waits for a step
  }
  return wake;
}

// ---------------------------------------------------------------------------------------- messages

namespace {

void OfferActions(const ServedModel& served, const StatisticsSpec& statistics,
                  const ActRequest& request, Request& offered) {
  const ModelSpec& model = served.spec();
  const ActionHeadSpec& head = model.head;
  switch (head.kind) {
    case HeadKind::kTokens:
      offered.action_tokens =
          head.stop_tokens.empty() ? statistics.action_dim : model.max_action_tokens;
      offered.stop_tokens = head.stop_tokens;
      break;
    case HeadKind::kFlow:
      offered.kind = AnswerKind::kFlow;
      offered.action_tokens = request.flow_steps > 0 ? request.flow_steps : head.steps;
      offered.least_steps =
          request.least_flow_steps > 0 ? request.least_flow_steps : served.least_flow_steps;
      offered.flow = request.flow;
      break;
    case HeadKind::kOnePass:
      offered.kind = AnswerKind::kOnePass;
      offered.action_tokens = 1;
      break;
  }
}

}  // namespace

void Engine::Impl::Handle(SubmitMessage& message, TimePoint now) {
  pending_submits_.fetch_sub(1, std::memory_order_acq_rel);
  ActRequest& request = *message.request;
  const Loaded* const model = FindModel(request.model);
  const StatisticsSpec* spec = nullptr;
  if (model != nullptr) {
    for (const StatisticsSpec& statistics : model->served->spec().statistics) {
      if (statistics.key == request.statistics_key) spec = &statistics;
    }
  }
  absl::Status status;
  if (draining_.load(std::memory_order_acquire)) {
    status = Draining();
  } else if (model == nullptr || model->closing) {
    status = Unloaded();
  } else if (request.text &&
             uint64_t{request.timeline->num_tokens()} + request.text->max_new_tokens >
                 model->served->spec().max_positions) {
    ErrorInfo info;
    info.reason = Reason::kNeverFits;
    info.field = "max_new_tokens";
    status = MakeError(
        absl::StatusCode::kInvalidArgument,
        StrCat("max_new_tokens: a prompt of ", request.timeline->num_tokens(), " tokens and ",
               request.text->max_new_tokens, " new ones do not fit the model's ",
               model->served->spec().max_positions, " positions"),
        info);
  } else if (!request.text && spec == nullptr) {
    status = InvalidField("statistics_key", "the model has no such statistics");
  } else {
    Request offered;
    offered.id = message.id;
    offered.session = request.session;
    offered.model = request.model;
    offered.klass = request.klass;
    offered.arrival = request.arrival;
    offered.deadline = request.deadline;
    offered.next_arrival = request.next_arrival;
    offered.timeline = request.timeline;
    offered.samples = request.samples;
    if (request.prefix_only) {
      offered.kind = AnswerKind::kPrefix;
    } else if (request.text) {
      offered.action_tokens = request.text->max_new_tokens;
      offered.top_p = request.text->top_p;
      offered.stop_tokens = request.text->stop_tokens;
      offered.beams = request.text->beams;
    } else {
      OfferActions(*model->served, *spec, request, offered);
    }
    offered.temperature = request.temperature;
    offered.seed = request.seed;
    offered.tap = request.tap;
    status = scheduler_->Offer(std::move(offered), now);
  }
  stats_dirty_ = true;
  const bool warm = model == nullptr || model->warm;
  if (status.ok()) {
    metrics_.Admitted(request.klass, warm);
    active_.emplace(message.id, Active{.request = std::move(request)});
    return;
  }
  metrics_.Rejected(request.klass, GetErrorInfo(status).reason, warm);
  recorder_.Request(message.id, request, status, nullptr, now);
  request.sink->OnDone(message.id, std::move(status));
}

void Engine::Impl::Handle(CancelMessage& message, TimePoint now) {
  ErrorInfo info;
  info.reason = Reason::kCancelled;
  scheduler_->Fail(message.id,
                   MakeError(absl::StatusCode::kCancelled, "cancelled by the client", info), now);
}

void Engine::Impl::Handle(SupersedeMessage& message, TimePoint now) {
  const auto it = active_.find(message.id);
  if (it == active_.end() || it->second.started) return;
  ErrorInfo info;
  info.reason = Reason::kSuperseded;
  scheduler_->Fail(message.id,
                   MakeError(absl::StatusCode::kCancelled, "replaced by a newer request", info),
                   now);
}

void Engine::Impl::Handle(CancelSessionMessage& message, TimePoint now) {
  ErrorInfo info;
  info.reason = Reason::kCancelled;
  scheduler_->FailSession(message.id,
                          MakeError(absl::StatusCode::kCancelled, "the session ended", info), now);
}

void Engine::Impl::Handle(DrainMessage& message, TimePoint) {
  drains_.push_back(std::move(message));
}

void Engine::Impl::Handle(UnloadMessage& message, TimePoint) {
  unloads_.push_back(std::move(message));
}

void Engine::Impl::Handle(ForgetMessage&, TimePoint now) {
  forget_asked_.store(false, std::memory_order_release);
  if (now < forget_due_) return;
  forget_due_ = now + kForgetInterval;
  scheduler_->FlushIdle();
  stats_dirty_ = true;
}

void Engine::Impl::Handle(AskMessage& message, TimePoint) {
  message.ask();
  message.asked.set_value();
}

void Engine::Impl::Handle(StopMessage&, TimePoint) { stop_ = true; }

// -------------------------------------------------------------------------------------- what waits

void Engine::Impl::FinishDrain(TimePoint now) {
  if (drains_.empty()) return;
  const bool patience_over =
      std::any_of(drains_.begin(), drains_.end(),
                  [now](const DrainMessage& drain) { return drain.until <= now; });
  if (patience_over && !active_.empty()) {
    for (auto& [id, active] : active_) scheduler_->Fail(id, Draining(), now);
    Deliver(now);
  }
  // A submission may still sit in the inbox: it is refused there, so it is waited for too. A step
  // in flight is not: the worker finishes it before it is joined.
  if (!active_.empty() || pending_submits_.load(std::memory_order_acquire) > 0) return;
  for (DrainMessage& drain : drains_) drain.done.set_value();
  drains_.clear();
}

void Engine::Impl::FinishUnloads(TimePoint now) {
  for (size_t i = 0; i < unloads_.size();) {
    UnloadMessage& unload = unloads_[i];
    if (unload.until <= now) {
      scheduler_->FailModel(unload.id, unload.why, now);
      Deliver(now);
    }
    std::optional<std::vector<std::shared_ptr<Lane>>> lanes = scheduler_->RemoveModel(unload.id);
    if (!lanes) {
      ++i;
      continue;
    }
    auto model = models_.extract(unload.id);
    model.mapped().lanes = *std::move(lanes);
    metrics_.RemoveModel(unload.id);
    stats_dirty_ = true;
    unload.done.set_value(std::move(model.mapped()));
    unloads_.erase(unloads_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace saccade
