// Planner: one step of one lane: in which order work joins it, within which limits, and who is
// started for it.
#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "sched/planner.h"

namespace saccade {
namespace {

// A request that lost its place this often keeps it: forward progress for low tiers.
constexpr uint32_t kMaxPreemptions = 4;
// Lower tiers leave a request of tier 0 the slack for that many more of its kind with nothing
// cached.
constexpr int kArrivals = 2;
// Tier 0 leaves gaps while it lately used less than this part of the time. Lower tiers then make a
// step of it this much longer at most; all else of theirs gets steps of its own, in the gaps. Above
// that sharing steps is what lets lower tiers run at all.
constexpr double kBusy = 0.25;
constexpr double kBarelyLonger = 1.1;
// Where a single layer of the first unit passes the ceiling, the layer may grow by that much.
constexpr double kLongLayer = 1.25;

}  // namespace

bool Planner::StepOrder(const Candidate& a, const Candidate& b) {
  return std::tie(a.tier, a.hopeless, a.group, a.pass, a.over_share, a.deadline, a.rank, a.order) <
         std::tie(b.tier, b.hopeless, b.group, b.pass, b.over_share, b.deadline, b.rank, b.order);
}

void Planner::BuildStep(std::vector<Candidate>& candidates, ActiveRequest* aged, bool only_aged) {
  Recycle(std::exchange(plan_, StepPlan()));
  plan_ = spare_plans_.Take();
  plan_.id = id_;
  plan_.worker = lane_->options.worker;
  plan_.model = lane_->options.model;
  record_->Clear();
  record_->best_tier = kNoCap;
  logit_rows_ = 0;
  reserve_ = Reserve();
  tier_.reset();
  upper_limit_ = lower_limit_ = Micros::max();
  starts_barred_ = lower_starts_barred_ = false;
  if (!ChooseCut(candidates, aged, only_aged)) return TakeCopies();

  // A tapped request runs alone: its taps are the tensors of its steps.
  const bool solo = head_->request.tap != nullptr;
  if (aged != nullptr && !solo) ForceUnit(*aged);
  if (only_aged && !empty()) candidates.clear();
  // It has just started and waits for a parked pass.
  if (only_aged && empty() && cut_ != Cut::kNone) return TakeCopies();
  // A heap: a full step ends long before the last of many requests.
  const auto after = [](const Candidate& a, const Candidate& b) { return StepOrder(b, a); };
  std::make_heap(candidates.begin(), candidates.end(), after);
  while (!candidates.empty()) {
    std::pop_heap(candidates.begin(), candidates.end(), after);
    const Candidate c = candidates.back();
    candidates.pop_back();
    ActiveRequest& r = *c.request;
    if (solo ? &r != head_ : r.request.tap != nullptr) continue;
    if (tier_ != c.tier) EnterTier(c, candidates);
    if (Full()) break;
    // Somebody more urgent in this very plan took its resources, or will.
    if (r.preempting) continue;
    if (c.kind == Kind::kDecode && (!r.started || r.prompt_planned < r.prompt_tokens())) continue;
    if (&r == head_ && c.kind != Kind::kDecode) reserve_ = Reserve();
    const size_t before = items();
    switch (c.kind) {
      case Kind::kDecode:
        PlanDecode(r, TimeLimit(c));
        break;
      case Kind::kEncode:
      case Kind::kPrefill: {
        const Micros limit = TimeLimit(c);
        // A request that the step has no room for keeps waiting: it holds nothing, and finds later
        // what others publish meanwhile.
        if (!r.started && !empty() && !Fits(FirstUnit(r).shape, limit)) break;
        if (!EnsureStarted(r, false)) break;
        // The head started before its turn: its frames may be there already.
        if (c.kind == Kind::kEncode && (&r != head_ || HasWantedFrame(r))) {
          PlanEncodes(r, limit, kNoCap);
        } else {
          PlanPrefill(r, limit, kNoCap);
        }
        break;
      }
    }
    if (items() > before) Constrain(c);
  }
  TakeCopies();
}

// The copies that starts asked for go into the step, or wait for the next one.
void Planner::TakeCopies() {
  if (!empty()) plan_.copies = std::exchange(lane_->copies, {});
}

// -------------------------------------------------------------------------------------------- cuts

// What `r` goes on with.
StepShape Planner::UnitOf(const ActiveRequest& r) const {
  const StepShape unit = FirstUnit(r).shape;
  return unit == StepShape{} ? StepShape{0, 0, 1} : unit;
}

// Sets the limits of a step that begins with `unit` of `r`: those of a pass where it does not fit
// the ceiling. False: the place for that pass is taken.
bool Planner::SetCut(const ActiveRequest& r, const StepShape& unit) {
  cut_ = Cut::kNone;
  step_limit_ = StepLimit();
  if (!lane_->NeedsCut(unit, Ceiling())) return true;
  if (lane_->parked[PlaceOf(r)] != nullptr) return false;
  const bool vision = unit.frames > 0;
  cut_ = vision ? Cut::kVision : Cut::kTrunk;
  pass_tier_ = r.klass->tier;
  step_limit_ = lane_->PassLimit(unit);
  const LayerShare layer = lane_->split(vision).largest();
  layer_limit_ = std::max(Ceiling(), Scaled(lane_->cost.Predict(unit, layer).p99, kLongLayer));
  return true;
}

// Whether `unit` of `r` may come into the step as it is cut; the first one decides how. `limit`
// becomes no more than the limit of the step.
bool Planner::Admits(const ActiveRequest& r, const StepShape& unit, Micros& limit) {
  if (empty() && !reserve_.any()) {
    const bool admitted = SetCut(r, unit);
    limit = std::min(limit, step_limit_);
    return admitted;
  }
  if (cut_ == Cut::kNone) return true;
  if (r.denoises() && unit.decode_rows > 0) return false;  // it needs the whole pass before it
  return cut_ == (unit.frames > 0 ? Cut::kVision : Cut::kTrunk) && r.klass->tier >= pass_tier_;
}

// Looks ahead to the unit that the step is for: that of `aged` when it is alone, or of the head,
// for which others leave room. False: nothing can be planned.
bool Planner::ChooseCut(const std::vector<Candidate>& candidates, ActiveRequest* aged, bool alone) {
  cut_ = Cut::kNone;
  step_limit_ = StepLimit();
  if (!lane_->divisible() || Ceiling() == Micros::max()) return true;
  ActiveRequest* first = alone ? aged : head_;
  if (!first->started) lane_->Estimate(*first);
  if (!SetCut(*first, UnitOf(*first))) return false;
  // What it goes on with is known once it has started. Who cannot start leaves the turn to the most
  // urgent of those that have.
  if (aged != nullptr && !EnsureStarted(*aged, true) && alone) return false;
  if (!EnsureStarted(*first, false)) {
    const Candidate* next = nullptr;
    for (const Candidate& c : candidates) {
      if (!c.request->started || c.request->preempting) continue;
      if (next == nullptr || MoreUrgent(c, *next)) next = &c;
    }
    if (next == nullptr) return false;
    first = next->request;
  }
  head_ = first;
  return SetCut(*first, UnitOf(*first));
}

// ------------------------------------------------------------------------------------- time limits

void Planner::EnterTier(const Candidate& entering, const std::vector<Candidate>& others) {
  const bool first = !tier_.has_value();
  if (tier_ == 0U && !empty() && worker_->UsedAbove(options_.classes, 1, now_) < kBusy) {
    lower_limit_ =
        std::min(lower_limit_, Scaled(lane_->cost.Predict(plan_.shape).p99, kBarelyLonger));
  }
  tier_ = entering.tier;
  upper_limit_ = lower_limit_;
  peer_limit_ = Micros::max();
  peers_.clear();
  peer_next_ = 0;
  tier_decode_rows_ = plan_.shape.decode_rows;
  const auto count = [this](const Candidate& c) {
    if (c.tier == tier_ && c.kind == Kind::kDecode) {
      tier_decode_rows_ += c.request->request.samples;
    }
  };
  count(entering);
  std::for_each(others.begin(), others.end(), count);
  if (!first) return;
  // The head is of the first tier. Its turn may come after decode rows: they leave it room.
  ActiveRequest& head = *head_;
  const bool prefill =
      !head.started || head.prompt_planned < head.prompt_tokens() || FirstUnit(head).any();
  if (prefill && EnsureStarted(head, false)) reserve_ = FirstUnit(head);
}

Micros Planner::TimeLimit(const Candidate& c) {
  const Micros limit = std::min(step_limit_, upper_limit_);
  if (c.kind == Kind::kDecode || c.request == head_) return limit;
  // Decode rows came first, in the order of urgency: those less urgent than `c` do not bind it.
  while (peer_next_ < peers_.size() &&
         (c.hopeless ||
          std::tie(peers_[peer_next_].pass, peers_[peer_next_].over_share,
                   peers_[peer_next_].deadline) <= std::tie(c.pass, c.over_share, c.deadline))) {
    peer_limit_ = std::min(peer_limit_, peers_[peer_next_++].limit);
  }
  return std::min(limit, peer_limit_);
}

// What `c`, now in the step, lets others add to it.
void Planner::Constrain(const Candidate& c) {
  const ActiveRequest& r = *c.request;
  if (r.deadline == kNever) return;
  const RemainingWork rest = lane_->Remaining(r);
  const CostPrediction now = lane_->cost.Predict(plan_.shape);
  const CostPrediction prefill = lane_->cost.Predict({rest.frames, rest.prefill_rows, 0});
  const CostPrediction decode =
      lane_->cost.Predict({0, 0, std::max(tier_decode_rows_, rest.decode_rows)});
  const TimePoint likely = start_ + now.p50 + prefill.p50 + rest.decode_steps * decode.p50;
  if (likely > r.deadline) return;  // it is late whatever others do
  // What is promised away here cannot be taken back when a step takes longer.
  const TimePoint safe = start_ + now.p99 + prefill.p99 + rest.decode_steps * decode.p99;
  const Micros own = now.p99;
  const Micros slack = std::max(Micros(0), ToMicros(r.deadline - safe));
  const int64_t steps = 1 + rest.decode_steps + (rest.prefill_rows > 0 ? 1 : 0);
  const Micros limit = own + slack / steps;
  Micros for_lower = slack;
  if (c.tier == 0) {
    const Micros fresh = lane_->cost.Predict({r.frames, r.prompt_tokens(), 0}).p50 +
                         r.request.action_tokens * lane_->cost.Predict({0, 0, 1}).p50;
    for_lower = std::max(Micros(0), slack - kArrivals * fresh);
  }
  lower_limit_ = std::min(lower_limit_, own + for_lower / steps);
  if (c.group == 0) {
    peers_.push_back({c.pass, c.over_share, c.deadline, limit});
  } else {
    peer_limit_ = std::min(peer_limit_, limit);
  }
}

void Planner::ForceUnit(ActiveRequest& aged) {
  if (!EnsureStarted(aged, true)) return;
  // A pass is for as many rows as it may take: its slices are what is small.
  const uint32_t rows =
      lane_->NeedsCut(UnitOf(aged), Ceiling()) ? kNoCap : options_.min_prefill_chunk;
  if (HasWantedFrame(aged)) {
    PlanEncodes(aged, step_limit_, 1);
  } else if (aged.prompt_planned < aged.prompt_tokens()) {
    PlanPrefill(aged, step_limit_, rows);
  } else {
    PlanDecode(aged, step_limit_);
    if (empty()) PlanPrefill(aged, step_limit_, rows);
  }
  if (!empty()) MarkAged(aged);
}

// ------------------------------------------------------------------------------------------ starts

bool Planner::EnsureStarted(ActiveRequest& r, bool aged) {
  if (r.started) return true;
  if (starts_barred_ || (lower_starts_barred_ && r.klass->tier > 0)) return false;
  if (r.blocked_epoch != lane_->epoch) {
    // Whoever has aged goes first for once, and may use the headroom.
    const bool can_wait = r.klass->tier > 0 && !aged;
    const Lane::Start start = lane_->TryStart(r, can_wait, now_);
    if (start == Lane::Start::kStarted || MakeRoom(r, can_wait)) {
      r.blocked_epoch = 0;
      return true;
    }
    // Ageing may still start what only the headroom holds back.
    if (start == Lane::Start::kShort) r.blocked_epoch = lane_->epoch;
  }
  // What becomes free is for `r`: nobody less urgent takes it meanwhile.
  (aged ? lower_starts_barred_ : starts_barred_) = true;
  return false;
}

// Takes resources back from less urgent requests, the least urgent first. A victim that a step in
// flight names gives them back when that step is done.
bool Planner::MakeRoom(ActiveRequest& r, bool can_wait) {
  const uint32_t tier = r.klass->tier;
  victims_.clear();
  for (ActiveRequest* v : lane_->active) {
    if (!v->started || v->preemptions >= kMaxPreemptions) continue;
    const bool lower =
        v->klass->tier > tier || (tier == 0 && v->klass->tier == 0 && v->deadline > r.deadline);
    if (lower) victims_.push_back(v);
  }
  if (victims_.empty()) return false;
  std::sort(victims_.begin(), victims_.end(), [](const ActiveRequest* a, const ActiveRequest* b) {
    return std::tie(a->klass->tier, a->deadline, a->order) >
           std::tie(b->klass->tier, b->deadline, b->order);
  });
  Lane::Needs needs = lane_->NeedsOf(r);
  if (can_wait) needs.blocks += lane_->options.kv.headroom;
  Lane::Needs got = lane_->Free();
  const auto enough = [&] {
    return got.blocks >= needs.blocks && got.slots >= needs.slots &&
           got.embeddings >= needs.embeddings;
  };
  const auto add = [&](const ActiveRequest& v) {
    const Lane::Needs gives = lane_->NeedsOf(v);
    got.blocks += gives.blocks;
    got.slots += gives.slots;
    got.embeddings += gives.embeddings;
  };
  const Lane::Needs free = got;
  for (const ActiveRequest* v : victims_) add(*v);
  if (!enough()) return false;  // all of them together would not help
  got = free;
  bool pending = false;
  for (const ActiveRequest* v : victims_) {
    if (!v->preempting) continue;
    pending = true;
    add(*v);
  }
  if (pending && enough()) return false;
  for (ActiveRequest* v : victims_) {
    if (v->preempting) continue;
    add(*v);
    if (v->in_flight == 0) {
      lane_->Preempt(*v, now_);
    } else {
      v->preempting = pending = true;
    }
    if (!enough()) continue;
    if (pending) return false;
    if (lane_->TryStart(r, can_wait, now_) == Lane::Start::kStarted) return true;
  }
  return false;
}

}  // namespace saccade
