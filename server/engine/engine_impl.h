#pragma once
// Engine::Impl: the engine's state and what it does with it, over several files: the public door
// (engine.cc), engine_models.cc, engine_turn.cc, engine_steps.cc. Private to engine/.
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/inbox.h"
#include "base/memory_budget.h"
#include "base/spares.h"
#include "base/status.h"
#include "base/turn.h"
#include "base/wakeup.h"
#include "engine/engine.h"
#include "engine/engine_metrics.h"
#include "engine/recorder.h"
#include "engine/worker.h"
#include "sched/scheduler.h"

namespace saccade {

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, std::vector<std::unique_ptr<Backend>> backends,
       const Clock& clock, Metrics* metrics)
      : options_(options),
        backends_(std::move(backends)),
        clock_(clock),
        registry_(metrics),
        metrics_(metrics),
        spare_steps_(2 * backends_.size()) {
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

  static absl::Status Draining();
  static absl::Status Stopped();
  void Put(Message message) {
    inbox_.Put(std::move(message));
    wakeup_.Notify();
  }
  // Runs `ask` on the engine thread and waits for it. False: the engine has stopped.
  bool AskEngineThread(std::function<void()> ask);

  // --- engine_models.cc ---
  absl::StatusOr<Loaded> Prepare(ServedModel model);
  absl::Status WarmUp(const ServedModel& model);

  // --- engine_turn.cc ---
  void Loop();  // the engine thread
  // After something was put where a turn looks: if nobody has the turn this thread takes one, which
  // saves the engine thread's wake-up. `worker`: the idle one whose thread this is.
  void RunTurn(std::optional<WorkerId> worker);
  void OnStep(WorkerId worker, WorkerStep& step, bool more);  // its thread

  // --- engine_turn.cc, by the holder of the turn ---
  // False: answers wait for delivery, but the thread of `worker` has a step to run first.
  bool TakeTurn(std::optional<WorkerId> worker);
  TimePoint NextWake() const;
  void Handle(SubmitMessage& message, TimePoint now);
  void Handle(CancelMessage& message, TimePoint now);
  void Handle(SupersedeMessage& message, TimePoint now);
  void Handle(CancelSessionMessage& message, TimePoint now);
  void Handle(DrainMessage& message, TimePoint now);
  void Handle(UnloadMessage& message, TimePoint now);
  void Handle(ForgetMessage& message, TimePoint now);
  void Handle(AskMessage& message, TimePoint now);
  void Handle(StopMessage& message, TimePoint now);
  void FinishDrain(TimePoint now);
  void FinishUnloads(TimePoint now);
  const Loaded* FindModel(ModelId id) const {
    const auto it = models_.find(id);
    return it == models_.end() ? nullptr : &it->second;
  }

  // --- engine_steps.cc, by the holder of the turn ---
  void FeedWorkers(TimePoint now);
  void RevokeForUrgentWork(WorkerState& state, TimePoint now);
  void MarkStarted(const StepPlan& plan);
  std::shared_ptr<DeviceModel> DeviceOf(const StepPlan& plan) const;
  void TakeSteps(WorkerId id, TimePoint now);
  void Handle(WorkerId id, WorkerStep& step, TimePoint now);
  void Recycle(std::unique_ptr<WorkerStep> step);
  void Deliver(TimePoint now);
  void Finish(Active& active, Outcome outcome, TimePoint now);
  void LoseWorker(WorkerId id, TimePoint now);
  void WatchWorkers(TimePoint now);

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
  Spares<std::unique_ptr<WorkerStep>> spare_steps_;
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

}  // namespace saccade
