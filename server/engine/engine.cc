#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <future>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>

#include "base/inbox.h"
#include "base/logging.h"
#include "base/strings.h"
#include "base/turn.h"
#include "base/wakeup.h"
#include "engine/engine_metrics.h"
#include "engine/recorder.h"
#include "engine/worker.h"
#include "session/prompt_timeline.h"

namespace saccade {
namespace {

// A worker whose steps fail this often in a row is taken out.
constexpr int kFailuresUntilLost = 3;
// A worker hangs when the same step was seen this often, at equal times over the timeout.
constexpr int kLooksUntilStuck = 4;
// Loads whose names are kept for what is told of the past.
constexpr size_t kNames = 1024;
constexpr std::chrono::hours kWarmUpPatience{1};
constexpr int kWarmUpAttempts = 1000;  // 10 ms apart, against a full class
constexpr std::chrono::seconds kForgetInterval{1};
// Cache gauges follow the cache at most this much later.
constexpr Micros kStatsInterval{100'000};
// While other threads take turns the engine thread looks at its timers this often, so that a
// request whose deadline is no nearer has nobody to wake.
constexpr Micros kTimerTick{20'000};
// After a step shorter than a wake-up its worker takes the turn, even when the next step waits.
constexpr Micros kBriefStep{50};

absl::Status Draining() {
  ErrorInfo info;
  info.reason = Reason::kDraining;
  return MakeError(absl::StatusCode::kUnavailable, "the server is shutting down", info);
}

// Numbers of weights stand for time: what matters is how the layers compare.
std::vector<LayerShare> SharesOf(const std::vector<LayerCost>& layers) {
  std::vector<LayerShare> shares;
  for (const LayerCost& layer : layers) {
    shares.push_back({static_cast<double>(layer.weights), static_cast<double>(layer.row_weights)});
  }
  return shares;
}

absl::Status Unloaded() {
  ErrorInfo info;
  info.reason = Reason::kModelUnloaded;
  return MakeError(absl::StatusCode::kUnavailable, "the model was unloaded", info);
}

absl::Status Stopped() { return absl::UnavailableError("the engine has stopped"); }

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, std::vector<std::unique_ptr<Backend>> backends,
       const Clock& clock, Metrics* metrics)
      : options_(options),
        backends_(std::move(backends)),
        clock_(clock),
        registry_(metrics),
        metrics_(metrics) {
    for (const std::unique_ptr<Backend>& backend : backends_)
      backend_views_.push_back(backend.get());
  }

  ~Impl() {
    if (thread_.joinable()) {
      Drain(clock_.Now());
      Put(StopMessage{});
      thread_.join();
    }
    workers_.clear();  // before the models and backends they use
  }

  absl::Status Start(std::vector<ServedModel> models);
  absl::StatusOr<ModelRef> Load(ServedModel model);
  absl::Status Unload(ModelId id, TimePoint until, absl::Status why);
  void SetMaxQueued(ClassId id, uint32_t max_queued) {
    AskEngineThread([&] { scheduler_->SetMaxQueued(id, max_queued); });
  }

  absl::StatusOr<RequestId> Submit(ActRequest request);
  void Cancel(RequestId id) { Put(CancelMessage{id}); }
  void Supersede(RequestId id) { Put(SupersedeMessage{id}); }
  void CancelSession(SessionId id) { Put(CancelSessionMessage{id}); }
  void ForgetIdle() {
    if (!forget_asked_.exchange(true, std::memory_order_acq_rel)) Put(ForgetMessage{});
  }
  void Drain(TimePoint until);
  bool draining() const { return draining_.load(std::memory_order_acquire); }
  bool stuck() const { return stuck_.load(std::memory_order_acquire) > 0; }
  bool Ready() const;
  bool Ready(const ServedModel& model) const;
  absl::StatusOr<SchedulerStats> Stats();
  absl::StatusOr<RecentWork> Recent();
  absl::StatusOr<CostTable> Costs();
  absl::Status CheckInvariants();

  const EngineOptions& options() const { return options_; }
  std::vector<ModelRef> models() const {
    const std::lock_guard lock(table_mu_);
    return table_;
  }
  std::string ModelName(ModelId id) const;
  std::span<Backend* const> backends() const { return backend_views_; }

 private:
  // A model on this engine: what it is, and its device side by entry of `served->workers`.
  struct Loaded {
    ModelRef served;
    std::vector<std::shared_ptr<DeviceModel>> devices;
    std::vector<std::shared_ptr<Lane>> lanes;  // while they are not the scheduler's
    bool warm = false;                         // what it did before is in no counter
    bool closing = false;                      // takes nothing more
  };
  // What the engine keeps of a request beside the scheduler's own state.
  struct Active {
    ActRequest request;
    bool started = false;  // a step of it was handed to a worker
  };
  struct WorkerState {
    // Oldest first: the running step, then a queued one. Outlives the worker, which borrows them.
    std::vector<std::unique_ptr<WorkerStep>> outstanding;
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
  struct DrainMessage {
    TimePoint until;
    std::promise<void> done;
  };
  struct UnloadMessage {
    ModelId id;
    TimePoint until;
    absl::Status why;
    std::promise<Loaded> done;  // what is left is destroyed by whoever waits
  };
  struct AskMessage {
    std::function<void()> ask;
    std::promise<void> asked;
  };
  struct ForgetMessage {};
  struct StopMessage {};
  using Message = std::variant<SubmitMessage, CancelMessage, SupersedeMessage, CancelSessionMessage,
                               DrainMessage, UnloadMessage, ForgetMessage, AskMessage, StopMessage>;

  void Put(Message message) {
    inbox_.Put(std::move(message));
    wakeup_.Notify();
  }
  // After something was put where a turn looks: if nobody has the turn this thread takes one, which
  // saves the engine thread's wake-up. `worker`: the idle one whose thread this is.
  void RunTurn(std::optional<WorkerId> worker);
  void OnStep(WorkerId worker, WorkerStep& step, bool more);  // its thread

  // Runs `ask` on the engine thread and waits for it. False: the engine has stopped.
  bool AskEngineThread(std::function<void()> ask);
  absl::StatusOr<Loaded> Prepare(ServedModel model);
  absl::Status WarmUp(const ServedModel& model);

  void Loop();  // the engine thread

  // --- by the holder of the turn ---
  // False: answers wait for delivery, but the thread of `worker` has a step to run first.
  bool TakeTurn(std::optional<WorkerId> worker);
  TimePoint NextWake() const;
  void Handle(SubmitMessage& message, TimePoint now);
  void Handle(CancelMessage& message, TimePoint now);
  void Handle(SupersedeMessage& message, TimePoint now);
  void Handle(CancelSessionMessage& message, TimePoint now);
  void TakeSteps(WorkerId id, TimePoint now);
  void Handle(WorkerId id, WorkerStep& step, TimePoint now);
  void Handle(DrainMessage& message, TimePoint now);
  void Handle(UnloadMessage& message, TimePoint now);
  void Handle(ForgetMessage& message, TimePoint now);
  void Handle(AskMessage& message, TimePoint now);
  void Handle(StopMessage& message, TimePoint now);
  void Recycle(std::unique_ptr<WorkerStep> step);
  void MarkStarted(const StepPlan& plan);
  std::shared_ptr<DeviceModel> DeviceOf(const StepPlan& plan) const;
  void FeedWorkers(TimePoint now);
  void RevokeForUrgentWork(WorkerState& state, TimePoint now);
  void Deliver(TimePoint now);
  void Finish(Active& active, Outcome outcome, TimePoint now);
  void LoseWorker(WorkerId id, TimePoint now);
  void WatchWorkers(TimePoint now);
  void FinishDrain(TimePoint now);
  void FinishUnloads(TimePoint now);
  const Loaded* FindModel(ModelId id) const {
    const auto it = models_.find(id);
    return it == models_.end() ? nullptr : &it->second;
  }

  const EngineOptions options_;
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<Backend*> backend_views_;
  const Clock& clock_;
  Metrics* const registry_;
  EngineMetrics metrics_;  // by the holder of the turn
  Recorder recorder_;      // by the holder of the turn
  MemoryHold recorder_memory_;

  Inbox<Message> inbox_;
  Turn turn_;
  Wakeup wakeup_;
  std::atomic<uint64_t> next_request_{1};
  std::atomic<size_t> pending_submits_{0};
  std::atomic<bool> draining_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<int32_t> next_model_{0};
  std::atomic<bool> forget_asked_{false};
  std::atomic<int> stuck_{0};  // workers
  std::vector<std::atomic<bool>> worker_up_;

  // What other threads see of the models. No holder of the turn takes this lock inside it.
  mutable std::mutex table_mu_;
  std::vector<ModelRef> table_;
  std::deque<std::pair<ModelId, std::string>> names_;  // of the last kNames loads

  // By the holder of the turn only.
  std::unordered_map<ModelId, Loaded> models_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<WorkerState> workers_;
  std::vector<std::unique_ptr<WorkerStep>> spare_steps_;
  std::unordered_map<RequestId, Active> active_;
  std::vector<DrainMessage> drains_;
  std::vector<UnloadMessage> unloads_;
  TimePoint stats_due_{};
  TimePoint forget_due_{};
  bool stats_dirty_ = true;
  TimePoint watch_due_ = kNever;  // while a worker has work
  TimePoint armed_until_{};       // when the engine thread wakes by itself
  bool guests_ = false;           // other threads took turns since it last did
  bool stop_ = false;

  std::thread thread_;
};

// ------------------------------------------------------------------------------------------------------------
// start

absl::Status Engine::Impl::Start(std::vector<ServedModel> models) {
  if (models.empty()) return absl::InvalidArgumentError("no model to serve");
  if (options_.pipeline_depth < 1 || options_.pipeline_depth > 2) {
    return absl::InvalidArgumentError("pipeline_depth must be 1 or 2");
  }
  ASSIGN_OR_RETURN(recorder_memory_,
                   MemoryBudget::Hold(options_.memory, MemoryKind::kRecorder, Recorder::kBytes));
  SchedulerOptions scheduler;
  scheduler.classes = options_.classes;
  scheduler.step_ceiling = options_.step_ceiling;
  scheduler.pipeline_depth = options_.pipeline_depth;
  scheduler.max_wait = options_.max_wait;
  scheduler.ageing_share = options_.ageing_share;
  scheduler.probe_after = options_.probe_after;
  ASSIGN_OR_RETURN(scheduler_, Scheduler::Create(scheduler, {}));

  worker_up_ = std::vector<std::atomic<bool>>(backends_.size());
  workers_.resize(backends_.size());
  spare_steps_.reserve(2 * backends_.size());
  for (size_t i = 0; i < backends_.size(); ++i) {
    const WorkerId id(static_cast<int32_t>(i));
    backends_[i]->BeginServing();
    ASSIGN_OR_RETURN(workers_[i].worker,
                     Worker::Start(*backends_[i], clock_, [this, id](WorkerStep& step, bool more) {
                       OnStep(id, step, more);
                     }));
    worker_up_[i].store(true, std::memory_order_release);
    metrics_.SetWorkerUp(id, true);
  }
  thread_ = std::thread([this] { Loop(); });
  for (ServedModel& model : models) RETURN_IF_ERROR(Load(std::move(model)).status());
  return absl::OkStatus();
}

// Everything of a model that can be made without the engine thread.
absl::StatusOr<Engine::Impl::Loaded> Engine::Impl::Prepare(ServedModel model) {
  if (model.instances.empty() || model.instances.size() != model.workers.size()) {
    return absl::InvalidArgumentError(
        StrCat("model ", model.name, ": one instance per worker is needed"));
  }
  model.id = ModelId(next_model_.fetch_add(1, std::memory_order_relaxed));
  Loaded loaded;
  loaded.served = std::make_shared<const ServedModel>(std::move(model));
  const ServedModel& served = *loaded.served;
  for (size_t i = 0; i < served.instances.size(); ++i) {
    const auto worker = static_cast<size_t>(served.workers[i].value());
    if (worker >= workers_.size()) {
      return absl::InvalidArgumentError(StrCat("model ", served.name, ": no such worker"));
    }
    DeviceModelOptions device;
    device.num_blocks = served.kv.num_blocks;
    device.embedding_slots = served.embedding_slots;
    device.sequence_slots = served.max_sequences;
    device.max_rows = options_.max_rows;
    device.max_frames = options_.max_frames;
    device.max_logit_rows = options_.max_logit_rows;
    device.check_pages = options_.check_pages;
    if (options_.step_ceiling.count() > 0) {
      device.parking_places = ParkingPlaces(options_.classes);
    }
    ASSIGN_OR_RETURN(std::unique_ptr<DeviceModel> made,
                     DeviceModel::Create(*backends_[worker], workers_[worker].worker->stream(),
                                         *served.instances[i], device, options_.memory));
    // A step that hangs keeps its device side, and that its model.
    auto kept = std::make_shared<std::pair<ModelRef, std::unique_ptr<DeviceModel>>>(
        loaded.served, std::move(made));
    loaded.devices.emplace_back(kept, kept->second.get());
    LaneOptions lane;
    lane.worker = served.workers[i];
    lane.model = served.id;
    lane.kv = served.kv;
    lane.embedding_slots = served.embedding_slots;
    lane.sequence_slots = served.max_sequences;
    lane.max_action_tokens = std::max(served.spec().max_action_tokens, options_.max_new_tokens);
    lane.max_rows = options_.max_rows;
    lane.max_frames = options_.max_frames;
    lane.max_logit_rows = options_.max_logit_rows;
    lane.vision_layers = SharesOf(served.spec().vision_layers);
    lane.trunk_layers = SharesOf(served.spec().trunk_layers);
    const auto costs = options_.costs.find(CostKey(served.spec(), *backends_[worker]));
    if (costs != options_.costs.end()) lane.cost = costs->second;
    ASSIGN_OR_RETURN(std::shared_ptr<Lane> made_lane,
                     Scheduler::MakeLane(lane, ParkingPlaces(options_.classes)));
    loaded.lanes.push_back(std::move(made_lane));
  }
  return loaded;
}

absl::StatusOr<ModelRef> Engine::Impl::Load(ServedModel model) {
  if (draining()) return Draining();
  ASSIGN_OR_RETURN(Loaded loaded, Prepare(std::move(model)));
  const ModelRef served = loaded.served;
  ModelMetrics* const metrics = registry_ == nullptr ? nullptr : &registry_->model(served->name);
  {
    const std::lock_guard lock(table_mu_);
    names_.emplace_back(served->id, served->name);
    if (names_.size() > kNames) names_.pop_front();
  }
  absl::Status status;
  const bool asked = AskEngineThread([&] {
    for (std::shared_ptr<Lane>& lane : loaded.lanes) {
      if (status.ok()) status = scheduler_->AddLane(std::move(lane));
    }
    loaded.lanes.clear();
    metrics_.AddModel(served->id, metrics);
    models_.emplace(served->id, std::move(loaded));
    stats_dirty_ = true;
  });
  if (!asked) return Stopped();
  if (status.ok()) status = WarmUp(*served);
  if (!status.ok()) {
    RETURN_IF_ERROR(Unload(served->id, clock_.Now(), status));
    return status;
  }
  AskEngineThread([&] { models_.at(served->id).warm = true; });
  const std::lock_guard lock(table_mu_);
  table_.push_back(served);
  if (metrics != nullptr) metrics->loads->Increment();
  return served;
}

absl::Status Engine::Impl::Unload(ModelId id, TimePoint until, absl::Status why) {
  {
    const std::lock_guard lock(table_mu_);
    const auto it = std::find_if(table_.begin(), table_.end(),
                                 [id](const ModelRef& model) { return model->id == id; });
    if (it != table_.end()) {
      if (registry_ != nullptr) registry_->model((*it)->name).loads->Decrement();
      table_.erase(it);
    }
  }
  bool known = false;
  if (!AskEngineThread([&] {
        const auto it = models_.find(id);
        known = it != models_.end() && !it->second.closing;
        if (known) it->second.closing = true;
      })) {
    return Stopped();
  }
  if (!known) return absl::NotFoundError("the model is not loaded");
  UnloadMessage message{id, until, std::move(why), {}};
  std::future<Loaded> done = message.done.get_future();
  Put(std::move(message));
  const Loaded rest = done.get();  // destroyed here: pools of memory take their time
  return absl::OkStatus();
}

std::string Engine::Impl::ModelName(ModelId id) const {
  const std::lock_guard lock(table_mu_);
  const auto it = std::find_if(names_.begin(), names_.end(),
                               [id](const auto& entry) { return entry.first == id; });
  return it == names_.end() ? StrCat("model ", id.value()) : it->second;
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

// Runs the model's whole path a few times on each worker before anybody may ask: pages weights in,
// fills lazily made tables, and gives the cost model its first observations. Answers do not matter
// here; a device that fails does.
absl::Status Engine::Impl::WarmUp(const ServedModel& model) {
  constexpr int kRuns = 3;
  ClassId klass(0);
  for (size_t c = 0; c < options_.classes.size(); ++c) {  // the most patient class
    if (options_.classes[c].tier >= options_.classes[static_cast<size_t>(klass.value())].tier) {
      klass = ClassId(static_cast<int32_t>(c));
    }
  }
  const ModelSpec& spec = model.spec();
  ASSIGN_OR_RETURN(const Prompt prompt, model.instances.front()->BuildPrompt("warm up"));
  for (size_t run = 0, attempts = 0; run < kRuns * model.instances.size();) {
    TimelineBuilder builder(
        DigestBuilder("kv.salt.v1").Field("warm up").Field(uint64_t{run}).Finish(),
        model.kv.block_tokens);
    const auto frame_of = [&](uint32_t camera) -> ContentRef {
      auto frame = std::make_shared<Content>();
      frame->width = spec.cameras[camera].width;
      frame->height = spec.cameras[camera].height;
      frame->rgb.assign(size_t{frame->width} * frame->height * 3, static_cast<uint8_t>(run));
      frame->digest = DigestBytes("frame.warmup", frame->rgb);
      return frame;
    };
    RETURN_IF_ERROR(AddPrompt(prompt, spec.vision_tokens, frame_of, builder));
    auto sink = std::make_shared<WarmUpSink>();
    std::future<absl::Status> done = sink->future();
    ActRequest request;
    request.session = SessionId(0);
    request.model = model.id;
    request.klass = klass;
    request.arrival = clock_.Now();
    request.deadline = request.arrival + kWarmUpPatience;
    request.timeline = builder.Build();
    request.statistics_key = spec.statistics.front().key;
    request.sink = std::move(sink);
    const absl::Status submitted = Submit(std::move(request)).status();
    const absl::Status status = submitted.ok() ? done.get() : submitted;
    const Reason reason = GetErrorInfo(status).reason;
    if (status.ok() || reason == Reason::kInvalidActionToken || reason == Reason::kNonFinite) {
      ++run;
    } else if (reason == Reason::kQueueFull && ++attempts < kWarmUpAttempts) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // others fill the class
    } else {
      return absl::Status(status.code(),
                          StrCat("warm-up of model ", model.name, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

// -------------------------------------------------------------------------------------------------------
// any thread

absl::StatusOr<RequestId> Engine::Impl::Submit(ActRequest request) {
  if (draining()) return Draining();
  if (request.sink == nullptr || request.timeline == nullptr || request.model.value() < 0 ||
      request.model.value() >= next_model_.load(std::memory_order_relaxed) ||
      request.klass.value() < 0 ||
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
  inbox_.Put(SubmitMessage{id, std::make_unique<ActRequest>(std::move(request))});
  RunTurn(std::nullopt);
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
  const std::vector<ModelRef> loaded = models();
  return !loaded.empty() && std::all_of(loaded.begin(), loaded.end(),
                                        [this](const ModelRef& model) { return Ready(*model); });
}

bool Engine::Impl::Ready(const ServedModel& model) const {
  return !draining() &&
         std::any_of(model.workers.begin(), model.workers.end(), [this](WorkerId id) {
           return worker_up_[static_cast<size_t>(id.value())].load(std::memory_order_acquire);
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

absl::StatusOr<CostTable> Engine::Impl::Costs() {
  CostTable costs;
  const auto copy = [&] {
    for (const auto& [id, loaded] : models_) {
      for (const WorkerId worker : loaded.served->workers) {
        const Backend& backend = *backends_[static_cast<size_t>(worker.value())];
        costs.insert_or_assign(CostKey(loaded.served->spec(), backend),
                               scheduler_->cost_model(worker, id));
      }
    }
  };
  if (!AskEngineThread(copy)) return Stopped();
  return costs;
}

absl::Status Engine::Impl::CheckInvariants() {
  absl::Status status;
  if (!AskEngineThread([&] { status = scheduler_->CheckInvariants(); })) return Stopped();
  return status;
}

// ----------------------------------------------------------------------------------------------------
// turns

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

// What is done with, for the steps to come.
void Engine::Impl::Recycle(std::unique_ptr<WorkerStep> step) {
  scheduler_->Recycle(std::move(step->plan));
  step->model = nullptr;  // which may go away
  step->done.store(false, std::memory_order_relaxed);
  if (spare_steps_.size() < spare_steps_.capacity()) spare_steps_.push_back(std::move(step));
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
  // An id outside the action range ends its request before more work is spent on it. A model stays
  // while a step of it is in flight.
  const Loaded& loaded = models_.at(plan.model);
  const ServedModel& model = *loaded.served;
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
}

std::shared_ptr<DeviceModel> Engine::Impl::DeviceOf(const StepPlan& plan) const {
  const Loaded& loaded = models_.at(plan.model);
  const std::vector<WorkerId>& workers = loaded.served->workers;
  const auto at = std::find(workers.begin(), workers.end(), plan.worker) - workers.begin();
  return loaded.devices[static_cast<size_t>(at)];
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
      std::shared_ptr<DeviceModel> device = DeviceOf(*plan);
      std::unique_ptr<WorkerStep> step;
      if (spare_steps_.empty()) {
        step = std::make_unique<WorkerStep>();
        step->result.tokens.reserve(options_.max_logit_rows);
      } else {
        step = std::move(spare_steps_.back());
        spare_steps_.pop_back();
      }
      step->plan = *std::move(plan);
      step->model = std::move(device);
      state.outstanding.push_back(std::move(step));
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
  const Loaded& loaded = models_.at(request.model);  // it stays while it has requests
  const ServedModel& model = *loaded.served;
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
  metrics_.Finished(request, status, result, loaded.warm);
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

// ------------------------------------------------------------------------------------------------------------
// engine

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

absl::StatusOr<std::unique_ptr<Engine>> Engine::Start(
    const EngineOptions& options, std::vector<std::unique_ptr<Backend>> backends,
    std::vector<ServedModel> models, const Clock& clock, Metrics* metrics) {
  auto impl = std::make_unique<Impl>(options, std::move(backends), clock, metrics);
  RETURN_IF_ERROR(impl->Start(std::move(models)));
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
absl::StatusOr<CostTable> Engine::Costs() { return impl_->Costs(); }
absl::Status Engine::CheckInvariants() { return impl_->CheckInvariants(); }
absl::StatusOr<ModelRef> Engine::Load(ServedModel model) { return impl_->Load(std::move(model)); }
absl::Status Engine::Unload(ModelId id, TimePoint until, absl::Status why) {
  return impl_->Unload(id, until, std::move(why));
}
void Engine::SetMaxQueued(ClassId id, uint32_t max_queued) { impl_->SetMaxQueued(id, max_queued); }
void Engine::ForgetIdle() { impl_->ForgetIdle(); }
bool Engine::Ready(const ServedModel& model) const { return impl_->Ready(model); }
std::vector<ModelRef> Engine::models() const { return impl_->models(); }
std::string Engine::ModelName(ModelId id) const { return impl_->ModelName(id); }
std::span<Backend* const> Engine::backends() const { return impl_->backends(); }
std::span<const LatencyClass> Engine::classes() const { return impl_->options().classes; }

TimelineBuilder ServedModel::NewTimeline() const {
  const Digest128 salt = DigestBuilder("kv.salt.v1").Field(name).Field(spec().fingerprint).Finish();
  return TimelineBuilder(salt, kv.block_tokens);
}

}  // namespace saccade
