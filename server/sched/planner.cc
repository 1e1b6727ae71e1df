// Planner: which work is the most urgent, and whether it is a step, a new pass or a slice.
#include "sched/planner.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "sched/estimate.h"

namespace saccade {
namespace {

// Order of the kinds of work inside equal urgency, by what the class prefers.
uint8_t RankOf(Modality preferred, bool decode, bool encode) {
  switch (preferred) {
    case Modality::kVision:
      return encode ? 0 : decode ? 1 : 2;
    case Modality::kText:
      return decode ? 1 : encode ? 2 : 0;
    case Modality::kState:
    case Modality::kAction:
      break;
  }
  return decode ? 0 : encode ? 1 : 2;
}

}  // namespace

bool Planner::MoreUrgent(const Candidate& a, const Candidate& b) {
  return std::tie(a.tier, a.hopeless, a.pass, a.over_share, a.deadline, a.rank, a.order) <
         std::tie(b.tier, b.hopeless, b.pass, b.over_share, b.deadline, b.rank, b.order);
}

std::optional<StepPlan> Planner::Plan(WorkerState& worker, StepId id, TimePoint now,
                                      TimePoint start, InFlightStep& record) {
  worker_ = &worker;
  record_ = &record;
  id_ = id;
  now_ = now;
  start_ = start;

  worker.held_until = kNever;
  worker.JudgeSessions(now);
  candidates_.resize(worker.lanes.size());
  heads_.clear();
  parked_heads_.clear();
  for (size_t i = 0; i < worker.lanes.size(); ++i) {
    Collect(worker, *worker.lanes[i], candidates_[i]);
    const auto head = std::min_element(candidates_[i].begin(), candidates_[i].end(), MoreUrgent);
    if (head != candidates_[i].end()) heads_.push_back(*head);
  }
  heads_.insert(heads_.end(), parked_heads_.begin(), parked_heads_.end());
  if (heads_.empty()) return std::nullopt;
  // By the most urgent work; on ties the lane that got least, and there what was begun.
  std::sort(heads_.begin(), heads_.end(), [](const Candidate& a, const Candidate& b) {
    const double a_got = a.request->lane->pass;
    const double b_got = b.request->lane->pass;
    const bool a_new = a.parked == nullptr;
    const bool b_new = b.parked == nullptr;
    return std::tie(a.tier, a.hopeless, a.pass, a.over_share, a.deadline, a_got, a_new, a.order) <
           std::tie(b.tier, b.hopeless, b.pass, b.over_share, b.deadline, b_got, b_new, b.order);
  });
  const Lane* const first_lane = heads_.front().request->lane;
  ActiveRequest* aged = PickAged(worker, *first_lane);
  if (aged == heads_.front().request) aged = nullptr;  // it goes first anyway
  if (aged != nullptr) {
    // Its head, of which there is one, goes before the others.
    const auto its = std::find_if(heads_.begin(), heads_.end(), [&](const Candidate& head) {
      return aged_pass_ != nullptr ? head.parked == aged_pass_
                                   : head.parked == nullptr && head.request->lane == aged->lane;
    });
    if (its != heads_.end()) std::rotate(heads_.begin(), its, its + 1);
  }
  for (const Candidate& head : heads_) {
    lane_ = head.request->lane;
    room_ = Micros::max();
    if (HoldBack(worker, head)) continue;
    if (head.parked != nullptr) {
      StepPlan plan = PlanSlice(lane_->parked[head.parked->place], head.tier, head.deadline);
      if (aged != nullptr && head.parked == aged_pass_) MarkAged(*aged);
      return plan;
    }
    head_ = head.request;
    std::vector<Candidate>& candidates = candidates_[lane_->index_on_worker];
    ActiveRequest* const forced =
        aged != nullptr && aged_pass_ == nullptr && aged->lane == lane_ ? aged : nullptr;
    // Put before another lane's work, or where either is cut, it gets its unit and nothing is added
    // to it.
    if (forced != nullptr && !forced->started) lane_->Estimate(*forced);
    const bool alone =
        forced != nullptr && (lane_ != first_lane || lane_->NeedsCut(UnitOf(*forced), Ceiling()) ||
                              lane_->NeedsCut(UnitOf(*head_), Ceiling()));
    BuildStep(candidates, forced, alone);
    if (empty() && alone) {
      head_ = head.request;
      BuildStep(candidates, nullptr, false);
    }
    if (empty()) continue;
    const CostPrediction predicted = lane_->cost.Predict(plan_.shape);
    if (cut_ != Cut::kNone && predicted.p99 > StepLimit()) return CutPlan();
    Publish(plan_, predicted);
    return std::exchange(plan_, StepPlan());
  }
  return std::nullopt;
}

void Planner::Publish(StepPlan& plan, const CostPrediction& predicted) {
  plan.predicted_p50 = record_->p50 = predicted.p50;
  plan.predicted_p99 = predicted.p99;
  record_->id = id_;
  record_->lane = lane_;
  if (record_->best_tier > 0) worker_->held_for = kNever;
  lane_->pass += std::max(1.0, static_cast<double>(predicted.p50.count()));
}

// -------------------------------------------------------------------------------------- candidates

Planner::Candidate Planner::CandidateOf(const WorkerState& worker, ActiveRequest& r,
                                        Micros first) const {
  const Lane& lane = *r.lane;
  Candidate c;
  c.request = &r;
  c.tier = r.klass->tier;
  if (c.tier > 0) c.pass = worker.class_pass[static_cast<size_t>(r.request.klass.value())];
  c.deadline = r.deadline;
  c.over_share = r.use->over_share;
  c.order = r.order;
  if (r.may_expire()) {
    const RemainingWork work = lane.Remaining(r);
    const Micros alone = first + lane.cost.Predict({work.frames, work.prefill_rows, 0}).p50 +
                         work.decode_steps * lane.cost.Predict({0, 0, work.decode_rows}).p50;
    c.hopeless = start_ + alone > r.deadline;
  }
  return c;
}

// A parked pass is as urgent as the most urgent request that waits for it.
void Planner::AddParked(const Candidate& c) {
  const auto same = std::find_if(parked_heads_.begin(), parked_heads_.end(),
                                 [&](const Candidate& p) { return p.parked == c.parked; });
  if (same == parked_heads_.end()) {
    parked_heads_.push_back(c);
  } else if (MoreUrgent(c, *same)) {
    *same = c;
  }
}

void Planner::Collect(const WorkerState& worker, Lane& lane, std::vector<Candidate>& out) {
  out.clear();
  const bool frames_parked =
      std::any_of(lane.parked.begin(), lane.parked.end(),
                  [](const auto& pass) { return pass != nullptr && pass->vision; });
  for (ActiveRequest* r : lane.active) {
    r->considered = id_;
    if (r->preempting || r->expired(start_)) continue;
    const auto wants = [&](Pass* pass) {
      if (lane.parked[pass->place].get() != pass) return;  // it failed
      Candidate c = CandidateOf(worker, *r, lane.Left(*pass));
      c.parked = pass;
      AddParked(c);
    };
    for (size_t e = 0; frames_parked && e < r->embeddings.size(); ++e) {
      if (!r->embeddings[e].valid()) continue;
      if (Pass* const pass = lane.frame(r->embeddings[e]).pass) wants(pass);
    }
    if (Pass* const pass = lane.WaitsFor(*r, options_.min_prefill_chunk)) {
      wants(pass);
      continue;
    }
    if (r->fully_planned()) continue;
    Candidate c = CandidateOf(worker, *r, Micros(0));
    const auto add = [&](Kind kind) {
      const Modality preferred = r->klass->preferred;
      const bool action_first = preferred == Modality::kAction || preferred == Modality::kState;
      c.kind = kind;
      c.group = kind == Kind::kDecode && action_first ? 0 : 1;
      c.rank = RankOf(preferred, kind == Kind::kDecode, kind == Kind::kEncode);
      out.push_back(c);
    };
    if (!r->started || r->prompt_planned < r->prompt_tokens()) {
      if (r->started ? HasWantedFrame(*r) : r->frames_estimate > 0) add(Kind::kEncode);
      add(Kind::kPrefill);
      continue;
    }
    bool decode = false;
    bool catch_up = false;
    for (const SampleState& sample : r->samples) {
      const uint32_t rows = r->rows_to_plan(sample);
      decode = decode || rows == 1;
      catch_up = catch_up || rows > 1;
    }
    if (decode) add(Kind::kDecode);
    if (catch_up) add(Kind::kPrefill);
  }
}

// ------------------------------------------------------------------------------------------ ageing

// The oldest request below the top tier that waited too long, when ageing has share left and no
// request of the top tier would miss its deadline because of one unit of it.
ActiveRequest* Planner::PickAged(WorkerState& worker, const Lane& first) {
  aged_pass_ = nullptr;
  if (now_ < worker.next_aged) return nullptr;
  ActiveRequest* oldest = nullptr;
  for (const Lane* lane : worker.lanes) {
    for (ActiveRequest* r : lane->active) {
      if (r->klass->tier == 0 || r->preempting || r->expired(start_) || r->request.tap != nullptr) {
        continue;
      }
      if (lane->WaitsFor(*r, options_.min_prefill_chunk) == nullptr &&
          (r->fully_planned() || r->blocked_epoch == lane->epoch ||
           (r->search && r->in_flight > 0))) {
        continue;
      }
      if (!r->aged && ToMicros(now_ - r->served_at) < options_.max_wait) continue;
      if (oldest == nullptr || r->order < oldest->order) oldest = r;
    }
  }
  if (oldest == nullptr) return nullptr;
  const Lane& lane = *oldest->lane;
  StepShape unit = UnitOf(*oldest);
  const bool cut = lane.NeedsCut(unit, Ceiling());
  aged_pass_ = lane.WaitsFor(*oldest, options_.min_prefill_chunk);
  if (aged_pass_ == nullptr && cut) aged_pass_ = lane.parked[PlaceOf(*oldest)].get();
  if (aged_pass_ != nullptr) {
    const auto head = std::find_if(parked_heads_.begin(), parked_heads_.end(),
                                   [&](const Candidate& c) { return c.parked == aged_pass_; });
    if (head == parked_heads_.end()) return nullptr;
    const LayerShare part = lane.split(aged_pass_->vision)
                                .Part(aged_pass_->planned, lane.SliceEnd(*aged_pass_, Ceiling()));
    aged_cost_ = std::max(Micros(1), lane.cost.Predict(aged_pass_->plan.shape, part).p50);
  } else if (cut) {
    aged_cost_ = Ceiling();
  } else {
    // On the lane whose turn it is, it shares its step with other decodes, and so their base. On
    // another lane it has a step of its own.
    const Micros others =
        &lane == &first && lane.active.size() > 1 ? lane.cost.Predict({0, 0, 1}).p50 : Micros(0);
    ++unit.decode_rows;
    aged_cost_ = std::max(Micros(1), lane.cost.Predict(unit).p50 - others);
  }
  return TopTierCanWait(worker, aged_cost_) ? oldest : nullptr;
}

void Planner::MarkAged(ActiveRequest& r) {
  r.aged = true;
  worker_->next_aged =
      now_ + Micros(std::llround(static_cast<double>(aged_cost_.count()) / options_.ageing_share));
}

bool Planner::TopTierCanWait(const WorkerState& worker, Micros extra) const {
  QueueLoad load(worker, options_.step_ceiling, load_memory_);
  for (const Lane* lane : worker.lanes) {
    for (const ActiveRequest* r : lane->active) {
      if (r->klass->tier == 0 && !r->expired(start_)) load.AddBefore(*r);
    }
    for (const auto& pass : lane->parked) {
      if (pass != nullptr && pass->place == 0) load.AddBefore(*lane, *pass);
    }
  }
  return load.CanWait(start_, extra);
}

// ---------------------------------------------------------------------------------------- arrivals

// Sets the room that `head` has before a more urgent request is expected. True: its smallest piece
// does not fit and waits.
bool Planner::HoldBack(WorkerState& worker, const Candidate& head) {
  if (head.tier == 0 || Ceiling() == Micros::max()) return false;
  const TimePoint arrival = worker.NextArrival(head.tier, now_);
  if (arrival - start_ >= Ceiling()) return false;
  if (worker.held_for != kNever && worker.held_for != arrival) return false;
  ActiveRequest& r = *head.request;
  Micros piece{0};
  if (head.parked != nullptr) {
    const Pass& pass = *head.parked;
    const LayerShare next = lane_->split(pass.vision).Part(pass.planned, pass.planned + 1);
    piece = lane_->cost.Predict(pass.plan.shape, next).p99;
  } else {
    if (!r.started) lane_->Estimate(r);
    const StepShape unit = UnitOf(r);
    piece = lane_->NeedsCut(unit, Ceiling()) ? lane_->PieceLimit(unit, Ceiling())
                                             : lane_->cost.Predict(unit).p99;
  }
  if (piece > Ceiling()) return false;
  const Micros room = std::max(Micros(0), ToMicros(arrival - start_));
  if (piece <= room) {
    room_ = room;
    return false;
  }
  worker.held_for = arrival;
  worker.held_until = arrival + WorkerState::kPatience;
  return true;
}

// ------------------------------------------------------------------------------------------ slices

// The plan that was made is longer than a step: its first slice.
StepPlan Planner::CutPlan() {
  auto pass = std::make_shared<Pass>();
  pass->plan = std::exchange(plan_, StepPlan());
  pass->vision = cut_ == Cut::kVision;
  pass->place = TiersAbove(options_.classes, record_->best_tier);
  const bool sampled =
      std::any_of(pass->plan.trunk.begin(), pass->plan.trunk.end(),
                  [](const TrunkItem& item) { return !item.samples.empty() || item.top; });
  pass->layers = lane_->split(pass->vision).layers() - (pass->vision || sampled ? 0 : 1);
  pass->p50 = lane_->cost.Predict(pass->plan.shape).p50;
  pass->requests = std::move(record_->requests);
  pass->charges = std::move(record_->charges);
  const uint32_t tier = record_->best_tier;
  const TimePoint deadline = record_->earliest_deadline;
  lane_->Park(pass);
  return PlanSlice(std::move(pass), tier, deadline);
}

StepPlan Planner::PlanSlice(std::shared_ptr<Pass> pass, uint32_t tier, TimePoint deadline) {
  StepPlan plan = pass->plan;
  plan.id = id_;
  const uint32_t begin = pass->planned;
  const uint32_t end = lane_->SliceEnd(*pass, StepLimit());
  if (begin > 0) plan.copies.clear();
  plan.slice = {begin,       end,           pass->layers,
                pass->place, pass->plan.id, lane_->split(pass->vision).Part(begin, end)};
  const CostPrediction predicted = lane_->cost.Predict(plan.shape, plan.slice.share);
  record_->Clear();
  record_->best_tier = tier;
  record_->earliest_deadline = deadline;
  Publish(plan, predicted);
  const double part = static_cast<double>(predicted.p50.count()) /
                      std::max(1.0, static_cast<double>(pass->p50.count()));
  for (Charge charge : pass->charges) {
    charge.us *= part;
    record_->charges.push_back(charge);
  }
  for (ActiveRequest* r : pass->requests) r->served_at = now_;
  pass->planned = end;
  ++pass->in_flight;
  if (end == pass->layers) lane_->Unpark(*pass);
  record_->pass = std::move(pass);
  return plan;
}

}  // namespace saccade
