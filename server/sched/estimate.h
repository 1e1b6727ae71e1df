#pragma once
// QueueLoad: how long a worker needs for a set of requests, by the cost models of its lanes.
// Private to sched/. Decodes of one lane run together, encodes and prefills add up; lanes of a
// worker take turns.
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
 public:
  QueueLoad(const WorkerState& worker, Micros step_ceiling);
  void Add(const ActiveRequest& request);
  // Until `mine` on `lane` is finished together with all that was added.
  TimeEstimate Finish(const Lane& lane, const RemainingWork& mine) const;

 private:
  struct LaneLoad {
    uint32_t frames = 0;
    uint32_t prefill_rows = 0;
    uint32_t decode_rows = 0;
    uint32_t decode_steps = 0;
  };
  struct Sum {
    double p50 = 0;
    double variance = 0;
    // `steps` equal steps, `one` each.
    void AddSteps(double steps, const CostPrediction& one);
  };
  void AddPrefill(Sum& sum, const Lane& lane, const LaneLoad& load) const;
  static void AddDecode(Sum& sum, const Lane& lane, uint32_t rows, uint32_t steps);

  const WorkerState& worker_;
  const Micros ceiling_;
  std::vector<LaneLoad> loads_;  // by Lane::index_on_worker
};

// Whether `other` goes before a request of `tier` and `deadline`.
bool GoesBefore(const ActiveRequest& other, uint32_t tier, TimePoint deadline);

// When the worker is free for a request of `tier`: a queued step of lower work would be revoked.
TimePoint FreeFor(const WorkerState& worker, uint32_t tier, TimePoint now);

}  // namespace saccade
