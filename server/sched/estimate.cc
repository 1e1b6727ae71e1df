#include "sched/estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace saccade {
namespace {

// A request further away than this many steps is estimated by its remaining work alone.
constexpr int kMaxSteps = 256;
constexpr double kNoLimit = std::numeric_limits<double>::infinity();

double Us(Micros t) { return static_cast<double>(t.count()); }
Micros ToTime(double us) { return Micros(std::llround(std::min(us, 1e15))); }

uint32_t CeilDiv(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

}  // namespace

QueueLoad::QueueLoad(const WorkerState& worker, Micros step_ceiling, Memory& memory)
    : worker_(worker), ceiling_(step_ceiling), memory_(memory) {
  memory_.entries_.clear();
}

void QueueLoad::Add(const ActiveRequest& request, TimePoint deadline, const RemainingWork& work) {
  memory_.entries_.push_back({deadline, request.klass->tier, memory_.entries_.size(),
                              request.lane->index_on_worker, work});
}

void QueueLoad::AddBefore(const ActiveRequest& request) {
  Add(request, request.deadline, request.lane->Remaining(request));
}

void QueueLoad::AddAlongside(const ActiveRequest& request) {
  const RemainingWork work = request.lane->Remaining(request);
  if (work.prefill_rows == 0) Add(request, kNever, work);
}

void QueueLoad::Sort() {
  std::sort(memory_.entries_.begin(), memory_.entries_.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.tier, a.deadline, a.number) < std::tie(b.tier, b.deadline, b.number);
  });
}

void QueueLoad::SumByLane() {
  memory_.loads_.assign(worker_.lanes.size(), LaneLoad());
  for (const Entry& entry : memory_.entries_) {
    LaneLoad& load = memory_.loads_[entry.lane];
    load.frames += entry.work.frames;
    load.prefill_rows += entry.work.prefill_rows;
    load.decode_rows += entry.work.decode_rows;
    load.decode_steps = std::max(load.decode_steps, entry.work.decode_steps);
  }
}

// The ceiling, or where a single row is longer and can be cut, what a pass may take.
Micros QueueLoad::StepLimit(const Lane& lane) const {
  const StepShape row{0, 0, 1};
  return lane.NeedsCut(row, ceiling_) ? lane.PassLimit(row) : ceiling_;
}

// What cutting a pass of that length costs.
double QueueLoad::Overhead(const Lane& lane, double us) const {
  if (ceiling_.count() == 0 || us <= Us(ceiling_)) return 0;
  return std::ceil(us / Us(ceiling_)) * Us(lane.cost.Predict({}, LayerShare{}).p50);
}

// Microseconds of encodes and prefills in steps of their own.
double QueueLoad::Prefill(const Lane& lane, uint32_t frames, uint32_t rows) const {
  if (frames == 0 && rows == 0) return 0;
  const CostPrediction all = lane.cost.Predict({frames, rows, 0});
  double steps = std::max(
      {1u, CeilDiv(frames, lane.options.max_frames), CeilDiv(rows, lane.options.max_rows)});
  if (ceiling_.count() > 0) steps = std::max(steps, std::ceil(Us(all.p99) / Us(StepLimit(lane))));
  // Each further step pays the base of the trunk again.
  const StepShape row = lane.options.denoises ? StepShape{0, 1, 0} : StepShape{0, 0, 1};
  return Us(all.p50) + (steps - 1) * Us(lane.cost.Predict(row).p50);
}

// Microseconds for one token of each of `rows` sequences.
double QueueLoad::DecodeStep(const Lane& lane, uint32_t rows) const {
  if (rows == 0) return 0;
  const uint32_t batch = std::min(
      {rows, lane.options.max_logit_rows, lane.options.sequence_slots, lane.options.max_rows});
  return CeilDiv(rows, batch) * Us(lane.cost.Predict({0, 0, batch}).p50);
}

TimeEstimate QueueLoad::Finish(const Lane& lane, const RemainingWork& mine, TimePoint start) {
  double time = Us(before_);
  if (worker_.lanes.size() > 1) {
    SumByLane();
    const std::vector<LaneLoad>& loads = memory_.loads_;
    for (size_t i = 0; i < loads.size(); ++i) {
      if (i == lane.index_on_worker) continue;
      const Lane& other = *worker_.lanes[i];
      time += Prefill(other, loads[i].frames, loads[i].prefill_rows) +
              loads[i].decode_steps * DecodeStep(other, loads[i].decode_rows);
    }
  }
  // What is left of the requests of this lane; `mine` comes last.
  const CostPrediction base = lane.cost.Predict({0, 0, 1});
  const double spread = base.p50.count() > 0 ? Us(base.p99) / Us(base.p50) : 1;
  const auto job_of = [&](const RemainingWork& work, double deadline) {
    const Micros with = lane.cost.Predict({work.frames, work.prefill_rows, 1}).p50;
    return Job{deadline, std::max(0.0, Us(with - base.p50)), static_cast<double>(work.decode_steps),
               work.decode_rows};
  };
  Sort();
  std::vector<Job>& jobs = memory_.jobs_;
  jobs.clear();
  for (const Entry& entry : memory_.entries_) {
    if (entry.lane != lane.index_on_worker) continue;
    const double deadline =
        entry.deadline == kNever ? kNoLimit : Us(ToMicros(entry.deadline - start));
    jobs.push_back(job_of(entry.work, deadline));
  }
  jobs.push_back(job_of(mine, kNoLimit));
  // Prefills go in order, so only jobs that decode and the first that waits are ever touched.
  const size_t me = jobs.size() - 1;
  std::vector<size_t>& decoding = memory_.decoding_;
  decoding.clear();
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (jobs[i].prefill <= 0 && jobs[i].decode_steps > 0) decoding.push_back(i);
  }
  const bool mine_prefills = jobs[me].prefill > 0;
  size_t next = 0;
  const double ceiling = ceiling_.count() > 0 ? Us(StepLimit(lane)) / spread : kNoLimit;
  double squares = 0;
  for (int steps = 0; (mine_prefills && next <= me) || jobs[me].decode_steps > 0; ++steps) {
    if (steps == kMaxSteps) {
      for (const Job& job : jobs) time += job.prefill;
      time += jobs[me].decode_steps * DecodeStep(lane, jobs[me].rows);
      break;
    }
    uint32_t rows = 0;
    for (const size_t i : decoding) rows += jobs[i].rows;
    const double decode = DecodeStep(lane, rows);
    // What the decoding ones let in, each by its own slack spread over its steps.
    double room = ceiling - std::max(decode, Us(base.p50));
    for (const size_t i : decoding) {
      const double left = jobs[i].deadline - time - jobs[i].decode_steps * decode;
      if (left < 0) continue;  // late whatever others do
      const double safe = left - (spread - 1) * jobs[i].decode_steps * decode;
      room = std::min(room, std::max(0.0, safe / jobs[i].decode_steps));
    }
    // Without decodes a step always takes something.
    if (rows == 0) room = std::max(room, 1.0);
    for (const size_t i : decoding) jobs[i].decode_steps -= 1;
    std::erase_if(decoding, [&](size_t i) { return jobs[i].decode_steps <= 0; });
    double taken = 0;
    for (; next <= me; ++next) {
      Job& job = jobs[next];
      if (job.prefill <= 0) continue;
      const double part = std::clamp(room - taken, 0.0, job.prefill);
      taken += part;
      job.prefill -= part;
      if (job.prefill > 0) break;
      if (job.decode_steps > 0) decoding.push_back(next);
    }
    double step = std::max(decode, taken > 0 ? Us(base.p50) : 0) + taken;
    step += Overhead(lane, step);
    time += step;
    squares += step * step;
  }
  return {ToTime(time), ToTime((spread - 1) * std::sqrt(squares))};
}

bool QueueLoad::CanWait(TimePoint start, Micros extra) {
  Sort();
  SumByLane();
  double decode = 0;
  for (size_t i = 0; i < worker_.lanes.size(); ++i) {
    decode += DecodeStep(*worker_.lanes[i], memory_.loads_[i].decode_rows);
  }
  std::vector<LaneLoad>& sums = memory_.loads_;
  sums.assign(worker_.lanes.size(), LaneLoad());
  double all = Us(before_);  // and the prefills up to the entry
  for (const Entry& entry : memory_.entries_) {
    if (entry.work.frames > 0 || entry.work.prefill_rows > 0) {
      LaneLoad& sum = sums[entry.lane];
      sum.frames += entry.work.frames;
      sum.prefill_rows += entry.work.prefill_rows;
      all -= sum.prefill_us;
      sum.prefill_us = Prefill(*worker_.lanes[entry.lane], sum.frames, sum.prefill_rows);
      all += sum.prefill_us;
    }
    if (entry.deadline == kNever) break;
    const TimePoint finish = start + ToTime(all + entry.work.decode_steps * decode);
    if (finish <= entry.deadline && finish + extra > entry.deadline) return false;
  }
  return true;
}

bool GoesBefore(const ActiveRequest& other, uint32_t tier, bool over_share, TimePoint deadline) {
  if (other.klass->tier != tier) return other.klass->tier < tier;
  return std::tie(other.use->over_share, other.deadline) <= std::tie(over_share, deadline);
}

TimePoint FreeFor(const WorkerState& worker, uint32_t tier, TimePoint now) {
  TimePoint free_at = worker.busy_until;
  if (worker.in_flight.size() > 1 && worker.in_flight.back().best_tier > tier) {
    free_at -= worker.in_flight.back().p50;
  }
  return std::max(free_at, now);
}

}  // namespace saccade
