#include "sched/estimate.h"

#include <algorithm>
#include <cmath>

namespace saccade {
namespace {

double Us(Micros t) { return static_cast<double>(t.count()); }

uint32_t CeilDiv(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

}  // namespace

QueueLoad::QueueLoad(const WorkerState& worker, Micros step_ceiling)
    : worker_(worker), ceiling_(step_ceiling), loads_(worker.lanes.size()) {}

void QueueLoad::Add(const ActiveRequest& request) {
  const RemainingWork work = request.lane->Remaining(request);
  LaneLoad& load = loads_[request.lane->index_on_worker];
  load.frames += work.frames;
  load.prefill_rows += work.prefill_rows;
  load.decode_rows += work.decode_rows;
  load.decode_steps = std::max(load.decode_steps, work.decode_steps);
}

void QueueLoad::Sum::AddSteps(double steps, const CostPrediction& one) {
  const double spread = Us(one.p99) - Us(one.p50);
  p50 += steps * Us(one.p50);
  variance += steps * spread * spread;
}

void QueueLoad::AddPrefill(Sum& sum, const Lane& lane, const LaneLoad& load) const {
  if (load.frames == 0 && load.prefill_rows == 0) return;
  const CostPrediction all = lane.cost.Predict({load.frames, load.prefill_rows, 0});
  double steps = std::max({1u, CeilDiv(load.frames, lane.options.max_frames),
                           CeilDiv(load.prefill_rows, lane.options.max_rows)});
  if (ceiling_.count() > 0) steps = std::max(steps, std::ceil(Us(all.p99) / Us(ceiling_)));
  // Each further step pays the base of the trunk again.
  const CostPrediction base = lane.cost.Predict({0, 0, 1});
  const double spread = Us(all.p99) - Us(all.p50);
  sum.p50 += Us(all.p50) + (steps - 1) * Us(base.p50);
  sum.variance += spread * spread / steps;
}

void QueueLoad::AddDecode(Sum& sum, const Lane& lane, uint32_t rows, uint32_t steps) {
  if (rows == 0 || steps == 0) return;
  const uint32_t batch = std::min(
      {rows, lane.options.max_logit_rows, lane.options.sequence_slots, lane.options.max_rows});
  sum.AddSteps(static_cast<double>(steps) * CeilDiv(rows, batch), lane.cost.Predict({0, 0, batch}));
}

TimeEstimate QueueLoad::Finish(const Lane& lane, const RemainingWork& mine) const {
  Sum sum;
  for (size_t i = 0; i < loads_.size(); ++i) {
    LaneLoad load = loads_[i];
    if (i != lane.index_on_worker) {
      AddPrefill(sum, *worker_.lanes[i], load);
      AddDecode(sum, *worker_.lanes[i], load.decode_rows, load.decode_steps);
      continue;
    }
    load.frames += mine.frames;
    load.prefill_rows += mine.prefill_rows;
    AddPrefill(sum, lane, load);
    AddDecode(sum, lane, load.decode_rows + mine.decode_rows, mine.decode_steps);
  }
  return {Micros(std::llround(sum.p50)), Micros(std::llround(std::sqrt(sum.variance)))};
}

bool GoesBefore(const ActiveRequest& other, uint32_t tier, TimePoint deadline) {
  if (other.klass->tier != tier) return other.klass->tier < tier;
  return other.deadline <= deadline;
}

TimePoint FreeFor(const WorkerState& worker, uint32_t tier, TimePoint now) {
  TimePoint free_at = worker.busy_until;
  if (worker.in_flight.size() > 1 && worker.in_flight.back().best_tier > tier) {
    free_at -= worker.in_flight.back().p50;
  }
  return std::max(free_at, now);
}

}  // namespace saccade
