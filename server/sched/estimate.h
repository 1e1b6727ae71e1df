#pragma once
// QueueLoad: when a request would be finished, and whether others can wait, by the cost models of
// a worker's lanes. Private to sched/.
#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "sched/worker_state.h"

namespace saccade {

struct TimeEstimate {
  Micros p50{0};
  Micros margin{0};  // from p50 to p99: steps vary independently, so their margins add as squares
  Micros p99() const { return p50 + margin; }
};

class QueueLoad {
 private:
  struct Entry {
    TimePoint deadline;
    uint32_t tier;
    size_t number;  // of adding
    size_t lane;    // Lane::index_on_worker
    RemainingWork work;
  };
  struct LaneLoad {
    uint32_t frames = 0;
    uint32_t prefill_rows = 0;
    uint32_t decode_rows = 0;
    uint32_t decode_steps = 0;
    double prefill_us = 0;  // of the frames and rows
  };
  // A request of the lane in question.
  struct Job {
    double deadline;  // microseconds from the start
    double prefill;   // microseconds, without the base of a step
    double decode_steps;
    uint32_t rows;
  };

 public:
  // What estimates, one after the other, are made in.
  class Memory {
    friend class QueueLoad;
    std::vector<Entry> entries_;
    std::vector<LaneLoad> loads_;
    std::vector<Job> jobs_;
    std::vector<size_t> decoding_;
  };
  // `memory` is this one's until the next is made.
  QueueLoad(const WorkerState& worker, Micros step_ceiling, Memory& memory);
  // A request that goes before.
  void AddBefore(const ActiveRequest& request);
  // What is left of a pass that goes before.
  void AddBefore(const Lane& lane, const Pass& pass) { before_ += lane.Left(pass); }
  // One whose decodes run along, whoever is more urgent.
  void AddAlongside(const ActiveRequest& request);
  // From `start` until `mine` on `lane` is finished, with what was added: the steps that the
  // planner would make, one by one, each as long as the ceiling and the slack of those in it allow.
  // Other lanes of the worker take their time first.
  TimeEstimate Finish(const Lane& lane, const RemainingWork& mine, TimePoint start);
  // Whether each of the added requests that would meet its deadline from `start` still does when
  // `extra` goes first.
  bool CanWait(TimePoint start, Micros extra);

 private:
  void Add(const ActiveRequest& request, TimePoint deadline, const RemainingWork& work);
  void Sort();
  void SumByLane();
  double Prefill(const Lane& lane, uint32_t frames, uint32_t rows) const;
  double DecodeStep(const Lane& lane, uint32_t rows) const;
  Micros StepLimit(const Lane& lane) const;
  double Overhead(const Lane& lane, double us) const;

  const WorkerState& worker_;
  const Micros ceiling_;
  Memory& memory_;
  Micros before_{0};
};

// Whether `other` goes before a request of `tier` and `deadline`, of a session that is above its
// share of its class or is not.
bool GoesBefore(const ActiveRequest& other, uint32_t tier, bool over_share, TimePoint deadline);

// When the worker is free for a request of `tier`: a queued step of lower work would be revoked.
TimePoint FreeFor(const WorkerState& worker, uint32_t tier, TimePoint now);

}  // namespace saccade
