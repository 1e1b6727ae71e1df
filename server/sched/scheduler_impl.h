#pragma once
// Scheduler::Impl: the scheduler's state and what it does with it, over several files: lanes and
// planning (scheduler.cc), admission.cc, revoke.cc, results.cc, endings.cc, invariants.cc. Private
// to sched/.
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/status.h"
#include "sched/active_request.h"
#include "sched/cost_model.h"
#include "sched/estimate.h"
#include "sched/lane.h"
#include "sched/planner.h"
#include "sched/scheduler.h"
#include "sched/worker_state.h"

namespace saccade {

class Scheduler::Impl {
 public:
  explicit Impl(SchedulerOptions options)
      : options_(std::move(options)), planner_(options_), classes_(options_.classes.size()) {
    for (const LatencyClass& c : options_.classes) allowed_.push_back(c.max_queued);
  }

  absl::Status AddLane(std::shared_ptr<Lane> lane);
  void FailModel(ModelId id, const absl::Status& status, TimePoint now);
  std::optional<std::vector<std::shared_ptr<Lane>>> RemoveModel(ModelId id);
  void SetMaxQueued(ClassId id, uint32_t max_queued);
  void FlushIdle() {
    for (const auto& lane : lanes_) lane->kv->FlushIdle();
  }

  absl::Status Offer(Request request, TimePoint now);
  std::optional<StepPlan> Plan(WorkerId id, TimePoint now, TimePoint free_at);
  bool ShouldRevoke(const StepPlan& queued, TimePoint now) const;
  void OnStepRevoked(const StepPlan& plan, TimePoint now);
  void OnStepDone(const StepPlan& plan, const StepResult& result, TimePoint now);
  void Recycle(StepPlan plan) { planner_.Recycle(std::move(plan)); }
  void Fail(RequestId id, absl::Status status, TimePoint now);
  void FailSession(SessionId id, const absl::Status& status, TimePoint now);
  void OnWorkerLost(WorkerId id, TimePoint now);
  void Sweep(TimePoint now);
  TimePoint NextWake() const;
  std::vector<Outcome> TakeOutcomes() { return std::exchange(outcomes_, {}); }
  std::span<const SampledToken> emitted() const { return emitted_; }
  bool idle() const;
  SchedulerStats stats() const;
  const CostModel& cost_model(WorkerId worker, ModelId model) const;
  absl::Status CheckInvariants() const;

 private:
  using ClassCounts = SchedulerStats::Class;

  static size_t Index(ClassId id) { return static_cast<size_t>(id.value()); }
  WorkerState* FindWorker(WorkerId id);
  const WorkerState* FindWorker(WorkerId id) const;
  ActiveRequest* Find(RequestId id) {
    const auto it = requests_.find(id);
    return it == requests_.end() ? nullptr : it->second.get();
  }
  bool Steal(WorkerState& worker);
  void Forget(SessionId id, std::optional<ClassId> klass = std::nullopt);

  // --- admission.cc ---
  absl::Status Validate(const Request& request) const;
  TimeEstimate PredictFinish(const ActiveRequest& r, const Lane& lane, TimePoint free_at,
                             TimePoint now);
  absl::StatusOr<Lane*> ChooseLane(ActiveRequest& r, TimePoint now);
  bool Degrade(ActiveRequest& r, const Lane& lane, TimePoint now);
  ActiveRequest* FindGivingWay(const ActiveRequest& r);
  void Bind(ActiveRequest& r, Lane& lane);
  void Unbind(ActiveRequest& r);

  // --- revoke.cc ---
  static void Withdraw(ActiveRequest& r, const TrunkItem& item);
  void Undo(Lane& lane, const StepPlan& plan);
  static bool Unwanted(const Lane& lane, const Pass& pass);
  void DropUnwanted(Lane& lane, TimePoint now);

  // --- results.cc ---
  static absl::Status StepFailure(const absl::Status& status);
  void OnSliceDone(const StepPlan& plan, const StepResult& result, const InFlightStep& step,
                   TimePoint now);
  void Predict(WorkerState& worker, TimePoint now) const;
  void TakeTokens(const StepResult& result, TimePoint now);
  void TakeChunks(const StepResult& result);
  void TakeTops(const StepResult& result, TimePoint now);
  void ChooseBeams(ActiveRequest& r, TimePoint now);
  void CompleteStep(const StepPlan& plan, const StepResult& result, TimePoint now);
  void FailWork(Lane& lane, const StepPlan& plan, const std::vector<ActiveRequest*>& named,
                const absl::Status& status, TimePoint now);

  // --- endings.cc ---
  static absl::Status WorkerFailed(std::string_view message);
  static absl::Status Expired(TimePoint arrival, TimePoint deadline);
  void Poison(ActiveRequest& r, absl::Status status, TimePoint now);
  void Finish(ActiveRequest& r, absl::Status status, TimePoint now);
  void FinishCompleted(ActiveRequest& r, TimePoint now);
  void Settle(ActiveRequest& r, TimePoint now);
  void SettleAll(const StepPlan& plan, TimePoint now);
  void FailAll(std::vector<ActiveRequest*> found, const absl::Status& status, TimePoint now);

  SchedulerOptions options_;  // constant but for max_queued
  Planner planner_;
  std::vector<std::shared_ptr<Lane>> lanes_;  // shared only so that others may drop the last ones
  std::deque<WorkerState> workers_;           // a deque: lanes and steps keep pointers
  std::unordered_map<RequestId, std::unique_ptr<ActiveRequest>> requests_;  // until destroyed
  std::vector<ClassCounts> classes_;
  // Requests a class may hold: its limit, or what it held when that was lowered and still holds.
  std::vector<uint32_t> allowed_;
  std::vector<Outcome> outcomes_;
  std::vector<SampledToken> emitted_;  // by the last OnStepDone
  mutable QueueLoad::Memory load_memory_;
  uint64_t next_step_ = 1;
  uint64_t next_order_ = 1;
  mutable TimePoint next_wake_ = kNever;
  mutable bool wake_known_ = true;
  const CostModel no_model_;
};

}  // namespace saccade
