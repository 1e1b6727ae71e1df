#pragma once
// Planner: chooses the work of one step: whose turn it is (planner.cc), what joins the step
// (planner_step.cc), in which rows and frames (planner_items.cc). Private to sched/.
//
// Order inside a lane, most urgent first: tier; requests that can still meet their deadline before
// those that cannot; decode rows before the rest (they are one row each, and a long prefill must
// not stop a running stream); below tier 0 the class with the least predicted time per share;
// sessions within their share of their class before those above it; deadline; the class's preferred
// modality; admission.
//
// Time limits of a unit, all against the predicted p99 of the whole step:
//  - the step ceiling;
//  - what more urgent requests already in the step can spare: the slack of each, spread evenly over
//    the steps it still needs, so that none uses up what it may need later. Decode rows of the same
//    tier are exempt. Lower tiers leave tier 0 slack for kArrivals further requests: whoever
//    arrives there next needs it. While tier 0 leaves gaps they make its steps barely longer: what
//    takes time runs in those.
// The most urgent unit of a step is under no limit, so a step always makes progress, and decode
// rows leave room for it.
//
// A more urgent request that is expected at a known time finds the worker free: a step ends before
// that time, and where its smallest piece would not, it is held back. Held back is what fits the
// ceiling, for one arrival; then it runs, whoever else is expected.
//
// Passes: where that unit alone is longer than the ceiling, and the lane's model can be cut by
// layers, the step becomes a pass of several slices. It may be some times as long as the unit, so
// that what it pays once (reading the weights) is paid for more than one row, and each of its
// layers still fits the ceiling. A pass encodes frames of one camera or computes rows of the trunk,
// never both, so that one kind of hidden state is parked between slices. A tier has one pass at a
// time on a lane. Its next slice competes with new work by the most urgent request that waits for
// it.
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/spares.h"
#include "sched/estimate.h"
#include "sched/scheduler.h"
#include "sched/worker_state.h"

namespace saccade {

class Planner {
 public:
  explicit Planner(const SchedulerOptions& options) : options_(options) {}

  // The next step of `worker`, and its record; nothing when no work can go on.
  std::optional<StepPlan> Plan(WorkerState& worker, StepId id, TimePoint now, TimePoint start,
                               InFlightStep& record);
  // Takes back what a plan that is done with was made of, so that the next ones need no new memory.
  void Recycle(StepPlan plan);
  // A record with nothing in it, and one that is done with.
  InFlightStep TakeRecord() { return spare_records_.Take(); }
  void Recycle(InFlightStep record);

 private:
  enum class Kind : uint8_t { kDecode, kEncode, kPrefill };
  struct Candidate {
    ActiveRequest* request = nullptr;
    Kind kind = Kind::kDecode;
    uint32_t tier = 0;
    bool hopeless = false;  // cannot meet its deadline even alone
    uint8_t group = 0;
    uint8_t rank = 0;  // by preferred modality
    double pass = 0;
    bool over_share = false;  // its session is, among those of its class
    TimePoint deadline = kNever;
    uint64_t order = 0;
    Pass* parked = nullptr;  // the next slice of this; null: new work of the request's lane
  };
  enum class Cut : uint8_t { kNone, kVision, kTrunk };
  // What a request in the step allows less urgent work of its tier.
  struct Peer {
    double pass;
    bool over_share;
    TimePoint deadline;
    Micros limit;
  };
  // Room kept for the head's first unit while decode rows are added.
  struct Reserve {
    StepShape shape;
    uint32_t logit_rows = 0;
    bool any() const { return shape != StepShape{}; }
    uint32_t rows() const { return shape.prefill_rows; }
  };

  static constexpr uint32_t kNoCap = std::numeric_limits<uint32_t>::max();

  uint32_t PlaceOf(const ActiveRequest& r) const {
    return TiersAbove(options_.classes, r.klass->tier);
  }
  Micros Ceiling() const {
    return options_.step_ceiling.count() > 0 ? options_.step_ceiling : Micros::max();
  }
  // Of a step: the ceiling, or the room before a more urgent request that is expected.
  Micros StepLimit() const { return std::min(Ceiling(), room_); }
  bool empty() const { return items() == 0; }
  size_t items() const { return plan_.encodes.size() + plan_.trunk.size() + plan_.flows.size(); }
  uint32_t rows() const { return plan_.shape.prefill_rows + plan_.shape.decode_rows; }

  // --- planner.cc ---
  static bool MoreUrgent(const Candidate& a, const Candidate& b);
  void Publish(StepPlan& plan, const CostPrediction& predicted);
  Candidate CandidateOf(const WorkerState& worker, ActiveRequest& r, Micros first) const;
  void AddParked(const Candidate& c);
  void Collect(const WorkerState& worker, Lane& lane, std::vector<Candidate>& out);
  ActiveRequest* PickAged(WorkerState& worker, const Lane& first);
  void MarkAged(ActiveRequest& r);
  bool TopTierCanWait(const WorkerState& worker, Micros extra) const;
  bool HoldBack(WorkerState& worker, const Candidate& head);
  StepPlan CutPlan();
  StepPlan PlanSlice(std::shared_ptr<Pass> pass, uint32_t tier, TimePoint deadline);

  // --- planner_step.cc ---
  static bool StepOrder(const Candidate& a, const Candidate& b);
  void BuildStep(std::vector<Candidate>& candidates, ActiveRequest* aged, bool only_aged);
  void TakeCopies();
  StepShape UnitOf(const ActiveRequest& r) const;
  bool SetCut(const ActiveRequest& r, const StepShape& unit);
  bool Admits(const ActiveRequest& r, const StepShape& unit, Micros& limit);
  bool ChooseCut(const std::vector<Candidate>& candidates, ActiveRequest* aged, bool alone);
  void EnterTier(const Candidate& entering, const std::vector<Candidate>& others);
  Micros TimeLimit(const Candidate& c);
  void Constrain(const Candidate& c);
  void ForceUnit(ActiveRequest& aged);
  bool EnsureStarted(ActiveRequest& r, bool aged);
  bool MakeRoom(ActiveRequest& r, bool can_wait);

  // --- planner_items.cc ---
  static bool HasWantedFrame(const ActiveRequest& r);
  uint32_t RowsLeft() const;
  uint32_t LogitRowsLeft() const;
  bool Full() const;
  bool Fits(const StepShape& more, Micros limit) const;
  uint32_t FitRows(uint32_t wanted, Micros limit) const;
  Reserve FirstUnit(const ActiveRequest& r) const;
  void PlanDecode(ActiveRequest& r, Micros limit);
  void PlanEncodes(ActiveRequest& r, Micros limit, uint32_t max_frames);
  void PlanPrefill(ActiveRequest& r, Micros limit, uint32_t max_rows);
  void PlanPromptRows(ActiveRequest& r, Micros limit, uint32_t max_rows);
  void PlanAnswerRows(ActiveRequest& r, SampleState& sample, uint32_t count);
  void PlanDenoise(ActiveRequest& r, SampleState& sample);
  void AddTarget(const ActiveRequest& r, SampleState& sample, TrunkItem& item);
  void Name(ActiveRequest& r);
  void ChargeTo(ActiveRequest& r, Micros more, uint32_t units);

  const SchedulerOptions& options_;
  // Empty but for their memory.
  Spares<TrunkItem> spare_items_{1024};
  Spares<StepPlan> spare_plans_{4};
  Spares<InFlightStep> spare_records_{4};

  // Of the plan being made.
  WorkerState* worker_ = nullptr;
  Lane* lane_ = nullptr;
  InFlightStep* record_ = nullptr;
  StepId id_;
  TimePoint now_{};
  TimePoint start_{};
  StepPlan plan_;
  uint32_t logit_rows_ = 0;
  Reserve reserve_;
  ActiveRequest* head_ = nullptr;
  Cut cut_ = Cut::kNone;
  Micros room_ = Micros::max();         // until a more urgent request is expected
  Micros step_limit_ = Micros::max();   // StepLimit, or what a pass may take
  Micros layer_limit_ = Micros::max();  // of the longest layer of a pass
  uint32_t pass_tier_ = 0;              // whose place the pass takes
  uint32_t camera_ = 0;                 // of the frames of a vision pass
  Micros aged_cost_{0};                 // of the unit that ageing may put first
  Pass* aged_pass_ = nullptr;           // that unit is its next slice
  std::optional<uint32_t> tier_;
  uint32_t tier_decode_rows_ = 0;       // decode rows that the current tier may add
  Micros upper_limit_ = Micros::max();  // by requests of higher tiers
  Micros lower_limit_ = Micros::max();  // by every request in the step, for lower tiers
  Micros peer_limit_ = Micros::max();   // by peers up to peer_next_
  std::vector<Peer> peers_;
  size_t peer_next_ = 0;
  bool starts_barred_ = false;        // somebody more urgent waits for resources
  bool lower_starts_barred_ = false;  // the same, but only below tier 0

  // Reused between plans.
  std::vector<std::vector<Candidate>> candidates_;
  std::vector<Candidate> heads_;
  std::vector<Candidate> parked_heads_;
  std::vector<ActiveRequest*> victims_;
  mutable QueueLoad::Memory load_memory_;
};

}  // namespace saccade
