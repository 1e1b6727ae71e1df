// Engine: its public door, the start and the drain, and what other threads ask of it.
#include "engine/engine.h"

#include <algorithm>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "engine/engine_impl.h"

namespace saccade {

absl::Status Engine::Impl::Draining() {
  ErrorInfo info;
  info.reason = Reason::kDraining;
  return MakeError(absl::StatusCode::kUnavailable, "the server is shutting down", info);
}

absl::Status Engine::Impl::Stopped() { return absl::UnavailableError("the engine has stopped"); }

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

void Engine::Impl::Drain(TimePoint until) {
  draining_.store(true, std::memory_order_release);
  if (!thread_.joinable()) return;
  DrainMessage message{until, {}};
  std::future<void> done = message.done.get_future();
  Put(std::move(message));
  done.wait();
}

// -------------------------------------------------------------------------------------- any thread

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

// ------------------------------------------------------------------------------------------ public

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

}  // namespace saccade
