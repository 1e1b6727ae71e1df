#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <future>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>

#include "base/inbox.h"
#include "base/logging.h"
#include "base/strings.h"
#include "base/wakeup.h"
#include "engine/engine_metrics.h"
#include "engine/recorder.h"
#include "engine/worker.h"

namespace saccade {
namespace {

// A worker whose steps fail this often in a row is taken out.
constexpr int kFailuresUntilLost = 3;
// A worker hangs when the same step was seen this often, at equal times over the timeout.
constexpr int kLooksUntilStuck = 4;
// Cache gauges follow the cache at most this much later.
constexpr Micros kStatsInterval{100'000};

absl::Status Draining() {
  ErrorInfo info;
  info.reason = Reason::kDraining;
  return MakeError(absl::StatusCode::kUnavailable, "the server is shutting down", info);
}

absl::Status Stopped() { return absl::UnavailableError("the engine has stopped"); }

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, std::vector<std::unique_ptr<Backend>> backends,
       std::vector<ServedModel> models, const Clock& clock, Metrics* metrics)
      : options_(options),
        backends_(std::move(backends)),
        models_(std::move(models)),
        clock_(clock),
        metrics_(metrics, models_.size()) {}

  ~Impl() {
    if (thread_.joinable()) {
      Drain(clock_.Now());
      Put(StopMessage{});
      thread_.join();
    }
    workers_.clear();  // before the models and backends they use
  }

  absl::Status Start();
  absl::Status WarmUp();

  absl::StatusOr<RequestId> Submit(ActRequest request);
  void Cancel(RequestId id) { Put(CancelMessage{id}); }
  void Supersede(RequestId id) { Put(SupersedeMessage{id}); }
  void CancelSession(SessionId id) { Put(CancelSessionMessage{id}); }
  void Drain(TimePoint until);
  bool draining() const { return draining_.load(std::memory_order_acquire); }
  bool stuck() const { return stuck_.load(std::memory_order_acquire) > 0; }
  bool Ready() const;
  absl::StatusOr<SchedulerStats> Stats();
  absl::StatusOr<RecentWork> Recent();
  absl::Status CheckInvariants();

  const EngineOptions& options() const { return options_; }
  const std::vector<ServedModel>& models() const { return models_; }

 private:
  // What the engine keeps of a request beside the scheduler's own state.
  struct Active {
    ActRequest request;
    bool started = false;  // a step of it was handed to a worker
  };
  struct WorkerState {
    // Oldest first: the running step, then a queued one. Outlives the worker, which borrows the
    // plans.
    std::deque<std::unique_ptr<const StepPlan>> outstanding;
    std::unique_ptr<Worker> worker;
    TimePoint free_at{};  // predicted end of what it has
    int failures = 0;     // in a row
    StepId watched;       // the running step at the last look
    int looks = 0;        // at which it was the same
    bool stuck = false;
    bool lost = false;
  };

  struct SubmitMessage {
    RequestId id;
    std::unique_ptr<ActRequest> request;
  };
  struct CancelMessage {
    RequestId id;
  };
  struct SupersedeMessage {
    RequestId id;
  };
  struct CancelSessionMessage {
    SessionId id;
  };
  struct StepMessage {
    WorkerId worker;
    StepResult result;
  };
  struct DrainMessage {
    TimePoint until;
    std::promise<void> done;
  };
  struct AskMessage {
    std::function<void()> ask;
    std::promise<void> asked;
  };
  struct StopMessage {};
  using Message = std::variant<SubmitMessage, CancelMessage, SupersedeMessage, CancelSessionMessage,
                               StepMessage, DrainMessage, AskMessage, StopMessage>;

  void Put(Message message) {
    inbox_.Put(std::move(message));
    wakeup_.Notify();
  }

  // Runs `ask` on the engine thread and waits for it. False: the engine has stopped.
  bool AskEngineThread(std::function<void()> ask);

  // --- engine thread ---
  void Loop();
  void Handle(SubmitMessage& message, TimePoint now);
  void Handle(CancelMessage& message, TimePoint now);
  void Handle(SupersedeMessage& message, TimePoint now);
  void Handle(CancelSessionMessage& message, TimePoint now);
  void Handle(StepMessage& message, TimePoint now);
  void Handle(DrainMessage& message, TimePoint now);
  void Handle(AskMessage& message, TimePoint now);
  void Handle(StopMessage& message, TimePoint now);
  void MarkStarted(const StepPlan& plan);
  void FeedWorkers(TimePoint now);
  void RevokeForUrgentWork(WorkerState& state, TimePoint now);
  void Deliver(TimePoint now);
  void Finish(Active& active, Outcome outcome, TimePoint now);
  void LoseWorker(WorkerId id, TimePoint now);
  void WatchWorkers(TimePoint now);
  void FinishDrain(TimePoint now);

  const EngineOptions options_;
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<ServedModel> models_;
  const Clock& clock_;
  EngineMetrics metrics_;  // engine thread only
  Recorder recorder_;      // engine thread only

  Inbox<Message> inbox_;
  Wakeup wakeup_;
  std::atomic<uint64_t> next_request_{1};
  std::atomic<size_t> pending_submits_{0};
  std::atomic<bool> draining_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<bool> warm_{false};
  std::atomic<int> stuck_{0};  // workers
  std::vector<std::atomic<bool>> worker_up_;

  // Engine thread only.
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<WorkerState> workers_;
  std::unordered_map<RequestId, Active> active_;
  std::vector<DrainMessage> drains_;
  TimePoint stats_due_{};
  bool stats_dirty_ = true;
  TimePoint watch_due_ = kNever;  // while a worker has work
  bool stop_ = false;

  std::thread thread_;
};

// ------------------------------------------------------------------------------------------------------------
// start

absl::Status Engine::Impl::Start() {
  if (models_.empty()) return absl::InvalidArgumentError("no model to serve");
  if (options_.pipeline_depth < 1 || options_.pipeline_depth > 2) {
    return absl::InvalidArgumentError("pipeline_depth must be 1 or 2");
  }
  std::vector<std::vector<Worker::ModelOnWorker>> on_worker(backends_.size());
  std::vector<LaneOptions> lanes;
  for (size_t m = 0; m < models_.size(); ++m) {
    const ServedModel& model = models_[m];
    const ModelId id(static_cast<int32_t>(m));
    if (model.instances.empty() || model.instances.size() != model.workers.size()) {
      return absl::InvalidArgumentError(
          StrCat("model ", model.name, ": one instance per worker is needed"));
    }
    for (size_t i = 0; i < model.instances.size(); ++i) {
      const auto worker = static_cast<size_t>(model.workers[i].value());
      if (worker >= backends_.size()) {
        return absl::InvalidArgumentError(StrCat("model ", model.name, ": no such worker"));
      }
      DeviceModelOptions device;
      device.num_blocks = model.kv.num_blocks;
      device.embedding_slots = model.embedding_slots;
      device.sequence_slots = model.max_sequences;
      device.max_rows = options_.max_rows;
      device.max_frames = options_.max_frames;
      device.max_logit_rows = options_.max_logit_rows;
      device.check_pages = options_.check_pages;
      on_worker[worker].push_back({id, model.instances[i].get(), device});
      LaneOptions lane;
      lane.worker = model.workers[i];
      lane.model = id;
      lane.kv = model.kv;
      lane.embedding_slots = model.embedding_slots;
      lane.sequence_slots = model.max_sequences;
      lane.max_action_tokens = std::max(model.spec().max_action_tokens, options_.max_new_tokens);
      lane.max_rows = options_.max_rows;
      lane.max_frames = options_.max_frames;
      lane.max_logit_rows = options_.max_logit_rows;
      lanes.push_back(lane);
    }
  }
  SchedulerOptions scheduler;
  scheduler.classes = options_.classes;
  scheduler.step_ceiling = options_.step_ceiling;
  scheduler.pipeline_depth = options_.pipeline_depth;
  scheduler.max_wait = options_.max_wait;
  scheduler.ageing_share = options_.ageing_share;
  scheduler.probe_after = options_.probe_after;
  ASSIGN_OR_RETURN(scheduler_, Scheduler::Create(scheduler, lanes));

  worker_up_ = std::vector<std::atomic<bool>>(backends_.size());
  workers_.resize(backends_.size());
  for (size_t i = 0; i < backends_.size(); ++i) {
    const WorkerId id(static_cast<int32_t>(i));
    ASSIGN_OR_RETURN(workers_[i].worker,
                     Worker::Start(*backends_[i], on_worker[i], clock_, [this, id](StepResult r) {
                       Put(StepMessage{id, std::move(r)});
                     }));
    worker_up_[i].store(true, std::memory_order_release);
    metrics_.SetWorkerUp(id, true);
  }
  thread_ = std::thread([this] { Loop(); });
  return absl::OkStatus();
}

namespace {

class WarmUpSink final : public ResponseSink {
 public:
  void OnToken(RequestId, uint32_t, uint32_t, int32_t) override {}
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    done_.set_value(result.status());
  }
  std::future<absl::Status> future() { return done_.get_future(); }

 private:
  std::promise<absl::Status> done_;
};

}  // namespace

// Runs every model's whole path a few times before anybody may ask: pages weights in, fills lazily
// made tables, and gives the cost model its first observations. Answers do not matter here; a
// device that fails does.
absl::Status Engine::Impl::WarmUp() {
  constexpr int kRuns = 3;
  ClassId klass(0);
  for (size_t c = 0; c < options_.classes.size(); ++c) {  // the most patient class
    if (options_.classes[c].tier >= options_.classes[static_cast<size_t>(klass.value())].tier) {
      klass = ClassId(static_cast<int32_t>(c));
    }
  }
  for (size_t m = 0; m < models_.size(); ++m) {
    const ServedModel& model = models_[m];
    const ModelSpec& spec = model.spec();
    ASSIGN_OR_RETURN(const Prompt prompt, model.instances.front()->BuildPrompt("warm up"));
    for (size_t run = 0; run < kRuns * model.instances.size(); ++run) {
      TimelineBuilder builder(
          DigestBuilder("kv.salt.v1").Field("warm up").Field(uint64_t{run}).Finish(),
          model.kv.block_tokens);
      for (const PromptSegment& segment : prompt) {
        if (segment.modality != Modality::kVision) {
          builder.AddText(segment.tokens);
          continue;
        }
        auto frame = std::make_shared<Content>();
        frame->width = spec.cameras[segment.camera].width;
        frame->height = spec.cameras[segment.camera].height;
        frame->rgb.assign(size_t{frame->width} * frame->height * 3, static_cast<uint8_t>(run));
        frame->digest = DigestBytes("frame.warmup", frame->rgb);
        builder.AddVision(segment.camera, std::move(frame), spec.vision_tokens);
      }
      auto sink = std::make_shared<WarmUpSink>();
      std::future<absl::Status> done = sink->future();
      ActRequest request;
      request.session = SessionId(0);
      request.model = ModelId(static_cast<int32_t>(m));
      request.klass = klass;
      request.arrival = clock_.Now();
      request.timeline = builder.Build();
      request.statistics_key = spec.statistics.front().key;
      request.sink = std::move(sink);
      ASSIGN_OR_RETURN(const RequestId id, Submit(std::move(request)));
      (void)id;
      const absl::Status status = done.get();
      const Reason reason = GetErrorInfo(status).reason;
      if (!status.ok() && reason != Reason::kInvalidActionToken && reason != Reason::kNonFinite) {
        return absl::Status(status.code(),
                            StrCat("warm-up of model ", model.name, ": ", status.message()));
      }
    }
  }
  warm_.store(true, std::memory_order_release);
  return absl::OkStatus();
}

// -------------------------------------------------------------------------------------------------------
// any thread

absl::StatusOr<RequestId> Engine::Impl::Submit(ActRequest request) {
  if (draining()) return Draining();
  if (request.sink == nullptr || request.timeline == nullptr || request.model.value() < 0 ||
      static_cast<size_t>(request.model.value()) >= models_.size() || request.klass.value() < 0 ||
      static_cast<size_t>(request.klass.value()) >= options_.classes.size()) {
    return absl::InvalidArgumentError(
        "an act request needs a sink, a timeline, a known model and a known class");
  }
  if (pending_submits_.fetch_add(1, std::memory_order_acq_rel) >= options_.inbox_capacity) {
    pending_submits_.fetch_sub(1, std::memory_order_acq_rel);
    ErrorInfo info;
    info.reason = Reason::kQueueFull;
    return MakeError(absl::StatusCode::kResourceExhausted, "the engine's inbox is full", info);
  }
  const RequestId id(next_request_.fetch_add(1, std::memory_order_relaxed));
  Put(SubmitMessage{id, std::make_unique<ActRequest>(std::move(request))});
  return id;
}

void Engine::Impl::Drain(TimePoint until) {
  draining_.store(true, std::memory_order_release);
  if (!thread_.joinable()) return;
  DrainMessage message{until, {}};
  std::future<void> done = message.done.get_future();
  Put(std::move(message));
  done.wait();
}

bool Engine::Impl::Ready() const {
  if (draining() || !warm_.load(std::memory_order_acquire)) return false;
  return std::all_of(models_.begin(), models_.end(), [this](const ServedModel& model) {
    return std::any_of(model.workers.begin(), model.workers.end(), [this](WorkerId id) {
      return worker_up_[static_cast<size_t>(id.value())].load(std::memory_order_acquire);
    });
  });
}

bool Engine::Impl::AskEngineThread(std::function<void()> ask) {
  if (stopped_.load(std::memory_order_acquire)) return false;
  AskMessage message{std::move(ask), {}};
  std::future<void> asked = message.asked.get_future();
  Put(std::move(message));
  asked.wait();
  return true;
}

absl::StatusOr<SchedulerStats> Engine::Impl::Stats() {
  SchedulerStats stats;
  if (!AskEngineThread([&] { stats = scheduler_->stats(); })) return Stopped();
  return stats;
}

absl::StatusOr<RecentWork> Engine::Impl::Recent() {
  RecentWork recent;
  if (!AskEngineThread([&] { recent = recorder_.Recent(); })) return Stopped();
  return recent;
}

absl::Status Engine::Impl::CheckInvariants() {
  absl::Status status;
  if (!AskEngineThread([&] { status = scheduler_->CheckInvariants(); })) return Stopped();
  return status;
}

// ----------------------------------------------------------------------------------------------------
// engine thread

void Engine::Impl::Loop() {
  pthread_setname_np(pthread_self(), "saccade-engine");
  while (!stop_) {
    const uint32_t epoch = wakeup_.Epoch();
    TimePoint now = clock_.Now();
    for (Message& message : inbox_.TakeAll()) {
      std::visit([&](auto& m) { Handle(m, now); }, message);
    }
    scheduler_->Sweep(now);
    WatchWorkers(now);
    FeedWorkers(now);
    Deliver(now);
    FinishDrain(now);
    now = clock_.Now();
    if (stats_dirty_ && now >= stats_due_) {
      metrics_.SetSchedulerStats(scheduler_->stats());
      stats_due_ = now + kStatsInterval;
      stats_dirty_ = false;
    }
    TimePoint wake = scheduler_->NextWake();
    if (stats_dirty_) wake = std::min(wake, stats_due_);
    wake = std::min(wake, watch_due_);
    for (const DrainMessage& drain : drains_) wake = std::min(wake, drain.until);
    if (!stop_) wakeup_.WaitUntil(epoch, wake);
  }
  stopped_.store(true, std::memory_order_release);
}

void Engine::Impl::Handle(SubmitMessage& message, TimePoint now) {
  pending_submits_.fetch_sub(1, std::memory_order_acq_rel);
  ActRequest& request = *message.request;
  const ServedModel& model = models_[static_cast<size_t>(request.model.value())];
  const auto& statistics = model.spec().statistics;
  const auto spec =
      std::find_if(statistics.begin(), statistics.end(),
                   [&](const StatisticsSpec& s) { return s.key == request.statistics_key; });
  absl::Status status;
  if (draining_.load(std::memory_order_acquire)) {
    status = Draining();
  } else if (request.text &&
             uint64_t{request.timeline->num_tokens()} + request.text->max_new_tokens >
                 model.spec().max_positions) {
    ErrorInfo info;
    info.reason = Reason::kNeverFits;
    info.field = "max_new_tokens";
    status = MakeError(
        absl::StatusCode::kInvalidArgument,
        StrCat("max_new_tokens: a prompt of ", request.timeline->num_tokens(), " tokens and ",
               request.text->max_new_tokens, " new ones do not fit the model's ",
               model.spec().max_positions, " positions"),
        info);
  } else if (!request.text && spec == statistics.end()) {
    status = InvalidField("statistics_key", "the model has no such statistics");
  } else {
    Request offered;
    offered.id = message.id;
    offered.session = request.session;
    offered.model = request.model;
    offered.klass = request.klass;
    offered.arrival = request.arrival;
    offered.deadline = request.deadline;
    offered.timeline = request.timeline;
    if (request.text) {
      offered.action_tokens = request.text->max_new_tokens;
      offered.top_p = request.text->top_p;
      offered.stop_tokens = request.text->stop_tokens;
      offered.beams = request.text->beams;
    } else {
      offered.action_tokens = spec->action_dim;
    }
    offered.samples = request.samples;
    offered.temperature = request.temperature;
    offered.seed = request.seed;
    offered.tap = request.tap;
    status = scheduler_->Offer(std::move(offered), now);
  }
  stats_dirty_ = true;
  if (status.ok()) {
    metrics_.Admitted(request.klass, warm_);
    active_.emplace(message.id, Active{.request = std::move(request)});
    return;
  }
  metrics_.Rejected(request.klass, GetErrorInfo(status).reason, warm_);
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

void Engine::Impl::Handle(StepMessage& message, TimePoint now) {
  WorkerState& state = workers_[static_cast<size_t>(message.worker.value())];
  if (state.outstanding.empty() || state.outstanding.front()->id != message.result.id) return;
  const std::unique_ptr<const StepPlan> done = std::move(state.outstanding.front());
  const StepPlan& plan = *done;
  state.outstanding.pop_front();
  if (state.lost) {
    if (std::exchange(state.stuck, false)) {
      stuck_.fetch_sub(1, std::memory_order_acq_rel);
      LogWarn("a worker that hung has come back; it stays out", {{"step", plan.id.value()}});
    }
    return;
  }
  const StepResult& result = message.result;
  stats_dirty_ = true;
  if (state.outstanding.empty()) state.free_at = now;
  // An id outside the action range ends its request before more work is spent on it.
  const ServedModel& model = models_[static_cast<size_t>(plan.model.value())];
  if (result.status.ok() && model.invalid_tokens == InvalidTokenPolicy::kFail) {
    for (const SampledToken& token : result.tokens) {
      if (token.token == kInvalidSample || model.instances.front()->IsActionToken(token.token))
        continue;
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
  metrics_.StepDone(plan, result, warm_);
  recorder_.Step(plan, result);
  for (const SampledToken& token : scheduler_->TakeEmitted()) {
    const auto it = active_.find(token.request);
    if (it == active_.end()) continue;
    it->second.request.sink->OnToken(token.request, token.sample, token.index, token.token);
  }
  if (result.status.ok()) {
    state.failures = 0;
  } else if (++state.failures >= kFailuresUntilLost) {
    LoseWorker(message.worker, now);
  }
}

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
    const StepId running = state.outstanding.front()->id;
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

void Engine::Impl::Handle(DrainMessage& message, TimePoint) {
  drains_.push_back(std::move(message));
}

void Engine::Impl::Handle(AskMessage& message, TimePoint) {
  message.ask();
  message.asked.set_value();
}

void Engine::Impl::Handle(StopMessage&, TimePoint) { stop_ = true; }

void Engine::Impl::RevokeForUrgentWork(WorkerState& state, TimePoint now) {
  if (state.outstanding.size() < 2 || !scheduler_->ShouldRevoke(*state.outstanding.back(), now))
    return;
  if (!state.worker->Revoke()) return;  // it has started
  scheduler_->OnStepRevoked(*state.outstanding.back(), now);
  state.free_at -= std::min(state.outstanding.back()->predicted_p50, ToMicros(state.free_at - now));
  state.outstanding.pop_back();
}

void Engine::Impl::MarkStarted(const StepPlan& plan) {
  const auto mark = [this](RequestId id) {
    const auto it = active_.find(id);
    if (it != active_.end()) it->second.started = true;
  };
  for (const EncodeItem& item : plan.encodes) mark(item.request);
  for (const TrunkItem& item : plan.trunk) mark(item.request);
}

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
      state.outstanding.push_back(std::make_unique<const StepPlan>(*std::move(plan)));
      state.worker->Submit(state.outstanding.back().get());
    }
  }
}

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
  const ServedModel& model = models_[static_cast<size_t>(request.model.value())];
  ActResult result;
  absl::Status status = std::move(outcome.status);
  if (request.text) result.answers = std::exchange(outcome.answers, {});
  for (const Outcome::Answer& answer : outcome.answers) {
    if (!status.ok()) break;
    absl::StatusOr<ActionChunk> chunk = model.instances.front()->DecodeActions(
        answer.tokens, request.statistics_key, model.invalid_tokens);
    if (chunk.ok()) {
      result.chunks.push_back(*std::move(chunk));
    } else {
      status = chunk.status();
    }
  }
  result.timings = outcome.timings;
  result.cached_tokens = outcome.cached_tokens;
  result.prompt_tokens = outcome.prompt_tokens;
  result.frame_cached = outcome.frame_cached;
  result.late = outcome.late;
  result.finished = now;
  metrics_.Finished(request, status, result, warm_);
  recorder_.Request(outcome.id, request, status, status.ok() ? &result : nullptr, now);
  if (status.ok()) {
    request.sink->OnDone(outcome.id, std::move(result));
  } else {
    request.sink->OnDone(outcome.id, std::move(status));
  }
}

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

// ------------------------------------------------------------------------------------------------------------
// engine

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

absl::StatusOr<std::unique_ptr<Engine>> Engine::Start(
    const EngineOptions& options, std::vector<std::unique_ptr<Backend>> backends,
    std::vector<ServedModel> models, const Clock& clock, Metrics* metrics) {
  auto impl =
      std::make_unique<Impl>(options, std::move(backends), std::move(models), clock, metrics);
  RETURN_IF_ERROR(impl->Start());
  RETURN_IF_ERROR(impl->WarmUp());
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

absl::StatusOr<RequestId> Engine::Submit(ActRequest request) {
  return impl_->Submit(std::move(request));
}
void Engine::Cancel(RequestId id) { impl_->Cancel(id); }
void Engine::Supersede(RequestId id) { impl_->Supersede(id); }
void Engine::CancelSession(SessionId id) { impl_->CancelSession(id); }
void Engine::Drain(TimePoint until) { impl_->Drain(until); }
bool Engine::draining() const { return impl_->draining(); }
bool Engine::Ready() const { return impl_->Ready(); }
bool Engine::stuck() const { return impl_->stuck(); }
absl::StatusOr<SchedulerStats> Engine::Stats() { return impl_->Stats(); }
absl::StatusOr<RecentWork> Engine::Recent() { return impl_->Recent(); }
absl::Status Engine::CheckInvariants() { return impl_->CheckInvariants(); }
std::span<const ServedModel> Engine::models() const { return impl_->models(); }
std::span<const LatencyClass> Engine::classes() const { return impl_->options().classes; }

std::optional<ModelId> Engine::FindModel(std::string_view name) const {
  const auto& models = impl_->models();
  for (size_t i = 0; i < models.size(); ++i) {
    if (models[i].name == name) return ModelId(static_cast<int32_t>(i));
  }
  return std::nullopt;
}

TimelineBuilder Engine::NewTimeline(ModelId model) const {
  const ServedModel& served = impl_->models()[static_cast<size_t>(model.value())];
  const Digest128 salt =
      DigestBuilder("kv.salt.v1").Field(served.name).Field(served.spec().fingerprint).Finish();
  return TimelineBuilder(salt, served.kv.block_tokens);
}

}  // namespace saccade
