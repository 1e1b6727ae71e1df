#include "sched/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "sched/estimate.h"

namespace saccade {
namespace {

// A request that lost its place this often keeps it: forward progress for low tiers.
constexpr uint32_t kMaxPreemptions = 4;
// Lower tiers leave a request of tier 0 the slack for that many more of its kind with nothing
// cached.
constexpr int kArrivals = 2;
// Where a single layer of the first unit passes the ceiling, the layer may grow by that much.
constexpr double kLongLayer = 1.25;
constexpr uint32_t kNoCap = std::numeric_limits<uint32_t>::max();

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

uint64_t SplitMix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

bool HasWantedFrame(const ActiveRequest& r) {
  return std::any_of(r.embeddings.begin(), r.embeddings.end(), [&](EmbeddingId slot) {
    return slot.valid() && r.lane->frame(slot).stage == FrameState::Stage::kWanted;
  });
}

Micros Since(TimePoint from, TimePoint to) { return ToMicros(to - from); }

}  // namespace

bool Planner::StepOrder(const Candidate& a, const Candidate& b) {
  return std::tie(a.tier, a.hopeless, a.group, a.pass, a.over_share, a.deadline, a.rank, a.order) <
         std::tie(b.tier, b.hopeless, b.group, b.pass, b.over_share, b.deadline, b.rank, b.order);
}

bool Planner::MoreUrgent(const Candidate& a, const Candidate& b) {
  return std::tie(a.tier, a.hopeless, a.pass, a.over_share, a.deadline, a.rank, a.order) <
         std::tie(b.tier, b.hopeless, b.pass, b.over_share, b.deadline, b.rank, b.order);
}

// ------------------------------------------------------------------------------------- choosing

std::optional<StepPlan> Planner::Plan(WorkerState& worker, StepId id, TimePoint now,
                                      TimePoint start, InFlightStep& record) {
  worker_ = &worker;
  record_ = &record;
  id_ = id;
  now_ = now;
  start_ = start;

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
    const bool alone = forced != nullptr &&
                       (lane_ != first_lane || lane_->NeedsCut(UnitOf(*forced), Ceiling(*lane_)) ||
                        lane_->NeedsCut(UnitOf(*head_), Ceiling(*lane_)));
    BuildStep(candidates, forced, alone);
    if (empty() && alone) {
      head_ = head.request;
      BuildStep(candidates, nullptr, false);
    }
    if (empty()) continue;
    const CostPrediction predicted = lane_->cost.Predict(plan_.shape);
    if (cut_ != Cut::kNone && predicted.p99 > Ceiling(*lane_)) return CutPlan();
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
  lane_->pass += std::max(1.0, static_cast<double>(predicted.p50.count()));
}

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
  const uint32_t end = lane_->SliceEnd(*pass, Ceiling(*lane_));
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
      if (!r->aged && Since(r->served_at, now_) < options_.max_wait) continue;
      if (oldest == nullptr || r->order < oldest->order) oldest = r;
    }
  }
  if (oldest == nullptr) return nullptr;
  const Lane& lane = *oldest->lane;
  StepShape unit = UnitOf(*oldest);
  const bool cut = lane.NeedsCut(unit, Ceiling(lane));
  aged_pass_ = lane.WaitsFor(*oldest, options_.min_prefill_chunk);
  if (aged_pass_ == nullptr && cut) aged_pass_ = lane.parked[PlaceOf(*oldest)].get();
  if (aged_pass_ != nullptr) {
    const auto head = std::find_if(parked_heads_.begin(), parked_heads_.end(),
                                   [&](const Candidate& c) { return c.parked == aged_pass_; });
    if (head == parked_heads_.end()) return nullptr;
    const LayerShare part =
        lane.split(aged_pass_->vision)
            .Part(aged_pass_->planned, lane.SliceEnd(*aged_pass_, Ceiling(lane)));
    aged_cost_ = std::max(Micros(1), lane.cost.Predict(aged_pass_->plan.shape, part).p50);
  } else if (cut) {
    aged_cost_ = Ceiling(lane);
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

// ------------------------------------------------------------------------------------- one step

void Planner::BuildStep(std::vector<Candidate>& candidates, ActiveRequest* aged, bool only_aged) {
  Recycle(std::exchange(plan_, StepPlan()));
  if (!spare_plans_.empty()) {
    plan_ = std::move(spare_plans_.back());
    spare_plans_.pop_back();
  }
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
    const size_t items = plan_.encodes.size() + plan_.trunk.size();
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
    if (plan_.encodes.size() + plan_.trunk.size() > items) Constrain(c);
  }
  TakeCopies();
}

// The copies that starts asked for go into the step, or wait for the next one.
void Planner::TakeCopies() {
  if (!empty()) plan_.copies = std::exchange(lane_->copies, {});
}

// What `r` goes on with.
StepShape Planner::UnitOf(const ActiveRequest& r) const {
  const StepShape unit = FirstUnit(r).shape;
  return unit == StepShape{} ? StepShape{0, 0, 1} : unit;
}

// Sets the limits of a step that begins with `unit` of `r`: those of a pass where it does not fit
// the ceiling. False: the place for that pass is taken.
bool Planner::SetCut(const ActiveRequest& r, const StepShape& unit) {
  cut_ = Cut::kNone;
  step_limit_ = Ceiling(*lane_);
  if (!lane_->NeedsCut(unit, Ceiling(*lane_))) return true;
  if (lane_->parked[PlaceOf(r)] != nullptr) return false;
  const bool vision = unit.frames > 0;
  cut_ = vision ? Cut::kVision : Cut::kTrunk;
  pass_tier_ = r.klass->tier;
  step_limit_ = lane_->PassLimit(unit);
  const LayerShare layer = lane_->split(vision).largest();
  layer_limit_ =
      std::max(Ceiling(*lane_), Scaled(lane_->cost.Predict(unit, layer).p99, kLongLayer));
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
  return cut_ == (unit.frames > 0 ? Cut::kVision : Cut::kTrunk) && r.klass->tier >= pass_tier_;
}

// Looks ahead to the unit that the step is for: that of `aged` when it is alone, or of the head,
// for which others leave room. False: nothing can be planned.
bool Planner::ChooseCut(const std::vector<Candidate>& candidates, ActiveRequest* aged, bool alone) {
  cut_ = Cut::kNone;
  step_limit_ = Ceiling(*lane_);
  if (!lane_->divisible() || Ceiling(*lane_) == Micros::max()) return true;
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

void Planner::EnterTier(const Candidate& entering, const std::vector<Candidate>& others) {
  const bool first = !tier_.has_value();
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
  const Micros slack = std::max(Micros(0), Since(safe, r.deadline));
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
      lane_->NeedsCut(UnitOf(aged), Ceiling(*lane_)) ? kNoCap : options_.min_prefill_chunk;
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

// ---------------------------------------------------------------------------------------- starts

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

// ----------------------------------------------------------------------------------------- units

uint32_t Planner::RowsLeft() const {
  const uint32_t used = rows() + reserve_.rows();
  return used >= lane_->options.max_rows ? 0 : lane_->options.max_rows - used;
}

uint32_t Planner::LogitRowsLeft() const {
  const uint32_t used = logit_rows_ + reserve_.logit_rows;
  return used >= lane_->options.max_logit_rows ? 0 : lane_->options.max_logit_rows - used;
}

// Not even the cheapest unit fits any more.
bool Planner::Full() const {
  if (empty() || reserve_.any()) return false;
  const bool limited = step_limit_ != Micros::max();
  const bool frames_full = cut_ == Cut::kTrunk || plan_.shape.frames >= lane_->options.max_frames;
  const bool rows_full = cut_ == Cut::kVision || RowsLeft() == 0;
  if (frames_full && rows_full) return true;
  return limited && !Fits({0, 0, 1}, step_limit_) && !Fits({0, 1, 0}, step_limit_) &&
         !Fits({1, 0, 0}, step_limit_);
}

bool Planner::Fits(const StepShape& more, Micros limit) const {
  const StepShape& now = plan_.shape;
  const StepShape& kept = reserve_.shape;
  const StepShape all{now.frames + kept.frames + more.frames,
                      now.prefill_rows + kept.prefill_rows + more.prefill_rows,
                      now.decode_rows + kept.decode_rows + more.decode_rows};
  if (lane_->cost.Predict(all).p99 > limit) return false;
  return cut_ == Cut::kNone ||
         lane_->cost.Predict(all, lane_->split(cut_ == Cut::kVision).largest()).p99 <= layer_limit_;
}

uint32_t Planner::FitRows(uint32_t wanted, Micros limit) const {
  if (limit == Micros::max() || Fits({0, wanted, 0}, limit)) return wanted;
  uint32_t fits = 0;
  uint32_t too_many = wanted;
  while (too_many - fits > 1) {
    const uint32_t middle = fits + (too_many - fits) / 2;
    (Fits({0, middle, 0}, limit) ? fits : too_many) = middle;
  }
  return fits;
}

// The smallest unit that `r`'s prefill can go on with; nothing when it only decodes.
Planner::Reserve Planner::FirstUnit(const ActiveRequest& r) const {
  Reserve unit;
  const RemainingWork work = r.lane->Remaining(r);
  if (work.frames > 0) {
    unit.shape.frames = 1;
  } else if (work.prefill_rows > 0) {
    unit.shape.prefill_rows =
        std::min({work.prefill_rows, options_.min_prefill_chunk, r.lane->options.max_rows});
    unit.logit_rows = r.request.samples;
  }
  return unit;
}

// The last row of `item` gives the next token of `sample`.
void Planner::AddTarget(const ActiveRequest& r, SampleState& sample, TrunkItem& item) {
  const auto number = static_cast<uint32_t>(&sample - r.samples.data());
  const uint32_t index = sample.planned_tokens++;
  ++logit_rows_;
  if (r.search) {
    item.top = TopTarget{number, index, r.search->candidates()};
    return;
  }
  SampleTarget target;
  target.sample = number;
  target.slot = sample.slot;
  target.index = index;
  target.temperature = r.request.temperature;
  target.top_p = r.request.top_p;
  target.seed = number == 0 ? r.request.seed : SplitMix64(r.request.seed ^ SplitMix64(number));
  item.samples.push_back(target);
}

// Records that an item of the step names `r`.
void Planner::Name(ActiveRequest& r) {
  ++r.in_flight;
  r.served_at = now_;
  record_->requests.push_back(&r);
  const uint32_t tier = r.klass->tier;
  if (tier < record_->best_tier) {
    record_->best_tier = tier;
    record_->earliest_deadline = r.deadline;
  } else if (tier == record_->best_tier) {
    record_->earliest_deadline = std::min(record_->earliest_deadline, r.deadline);
  }
}

// `units` on top, so that work which the cost model knows nothing of yet is not free.
void Planner::ChargeTo(ActiveRequest& r, Micros more, uint32_t units) {
  const double us = static_cast<double>(more.count()) + units;
  record_->charges.push_back({static_cast<size_t>(r.request.klass.value()), r.request.session, us});
}

void Planner::PlanDecode(ActiveRequest& r, Micros limit) {
  if (!Admits(r, {0, 0, 1}, limit)) return;
  for (SampleState& sample : r.samples) {
    if (r.rows_to_plan(sample) != 1 || sample.last_step == id_) continue;
    if (RowsLeft() == 0 || LogitRowsLeft() == 0) return;
    const bool forced = empty() && !reserve_.any();
    if (!forced && !Fits({0, 0, 1}, limit)) return;
    PlanAnswerRows(r, sample, 1);
  }
}

void Planner::PlanEncodes(ActiveRequest& r, Micros limit, uint32_t max_frames) {
  if (!HasWantedFrame(r) || !Admits(r, {1, 0, 0}, limit)) return;
  const std::span<const Segment> segments = r.request.timeline->segments();
  uint32_t planned = 0;
  for (size_t i = 0; i < segments.size() && planned < max_frames; ++i) {
    const EmbeddingId slot = r.embeddings[i];
    if (!slot.valid()) continue;
    FrameState& frame = lane_->frame(slot);
    if (frame.stage != FrameState::Stage::kWanted) continue;
    if (cut_ == Cut::kVision && !empty() && segments[i].camera != camera_) continue;
    if (plan_.shape.frames + reserve_.shape.frames >= lane_->options.max_frames) return;
    const bool forced = empty() && !reserve_.any();
    if (!forced && !Fits({1, 0, 0}, limit)) return;
    frame.stage = FrameState::Stage::kInFlight;
    camera_ = segments[i].camera;
    plan_.encodes.push_back(
        {r.request.id, segments[i].content, segments[i].camera, slot, r.request.tap});
    const Micros before = lane_->cost.Predict(plan_.shape).p50;
    ++plan_.shape.frames;
    Name(r);
    ChargeTo(r, lane_->cost.Predict(plan_.shape).p50 - before, 1);
    ++planned;
  }
}

void Planner::PlanPrefill(ActiveRequest& r, Micros limit, uint32_t max_rows) {
  if (r.prompt_planned < r.prompt_tokens()) {
    PlanEncodes(r, limit, kNoCap);
    PlanPromptRows(r, limit, max_rows);
    return;
  }
  // After a preemption: the K/V of tokens that are sampled already.
  for (SampleState& sample : r.samples) {
    const uint32_t gap = r.rows_to_plan(sample);
    if (gap <= 1 || sample.last_step == id_) continue;
    if (LogitRowsLeft() == 0) return;
    const uint32_t wanted = std::min({gap, RowsLeft(), max_rows});
    const StepShape unit{0, std::min(wanted, options_.min_prefill_chunk), 0};
    if (wanted == 0 || !Admits(r, unit, limit)) return;
    const bool forced = empty() && !reserve_.any();
    const uint32_t least = std::min(wanted, options_.min_prefill_chunk);
    uint32_t count = FitRows(wanted, limit);
    if (forced) count = std::max(count, least);
    if (count < least) return;
    PlanAnswerRows(r, sample, count);
    max_rows -= count;
  }
}

void Planner::PlanPromptRows(ActiveRequest& r, Micros limit, uint32_t max_rows) {
  if (r.samples[0].last_step == id_) return;
  const std::span<const Segment> segments = r.request.timeline->segments();
  const uint32_t begin = r.prompt_planned;
  uint32_t end = r.prompt_tokens();  // of the rows whose embeddings are there or on their way
  bool waits = false;                // for a parked pass: no small piece before it
  for (size_t i = 0; i < segments.size(); ++i) {
    const EmbeddingId slot = r.embeddings[i];
    if (!slot.valid() || segments[i].end <= begin) continue;
    const FrameState::Stage stage = lane_->frame(slot).stage;
    waits = stage == FrameState::Stage::kParked;
    if (waits || stage == FrameState::Stage::kWanted) {
      end = std::max(begin, segments[i].begin);
      break;
    }
  }
  // Small pieces only where the prompt ends: each pays the base of a step.
  const uint32_t least = std::min(options_.min_prefill_chunk, r.prompt_tokens() - begin);
  const uint32_t wanted = std::min({end - begin, RowsLeft(), max_rows});
  if (wanted == 0 || (waits && end - begin < least)) return;
  const uint32_t unit = std::min(wanted, options_.min_prefill_chunk);
  if (!Admits(r, {0, unit, 0}, limit)) return;
  const bool forced = empty() && !reserve_.any();
  uint32_t count = FitRows(wanted, limit);
  if (forced) count = std::max(count, unit);
  if (!forced && count < std::min(least, max_rows)) return;

  // Who takes a first token from the prompt's last row: every sample; of a search, its only beam.
  const size_t first = r.search ? 1 : r.samples.size();
  uint32_t sampled = 0;
  for (size_t i = 0; i < first; ++i) sampled += r.samples[i].planned_tokens == 0 ? 1 : 0;
  if (begin + count == r.prompt_tokens() && sampled > LogitRowsLeft()) --count;
  if (count == 0) return;

  TrunkItem item = TakeItem();
  item.request = r.request.id;
  item.timeline = r.request.timeline;
  item.begin = begin;
  item.count = count;
  r.samples[0].sequence->PageTable(begin + count, item.pages);
  item.embeddings.resize(segments.size());
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].begin < begin + count && segments[i].end > begin) {
      item.embeddings[i] = r.embeddings[i];
    }
  }
  item.tap = r.request.tap;
  r.samples[0].last_step = id_;
  r.prompt_planned += count;
  if (r.prompt_planned == r.prompt_tokens()) {
    for (size_t i = 0; i < first; ++i) {
      if (r.samples[i].planned_tokens == 0) AddTarget(r, r.samples[i], item);
    }
  }
  const Micros before = lane_->cost.Predict(plan_.shape).p50;
  plan_.shape.prefill_rows += count;
  plan_.trunk.push_back(std::move(item));
  Name(r);
  ChargeTo(r, lane_->cost.Predict(plan_.shape).p50 - before, count);
}

TrunkItem Planner::TakeItem() {
  if (spare_items_.empty()) return {};
  TrunkItem item = std::move(spare_items_.back());
  spare_items_.pop_back();
  return item;
}

void Planner::Recycle(StepPlan plan) {
  constexpr size_t kPlans = 4;
  constexpr size_t kItems = 1024;
  for (TrunkItem& old : plan.trunk) {
    if (spare_items_.size() >= kItems) break;
    TrunkItem item;
    const auto keep = [](auto& to, auto& from) {
      from.clear();
      to = std::move(from);
    };
    keep(item.pages, old.pages);
    keep(item.embeddings, old.embeddings);
    keep(item.known_tokens, old.known_tokens);
    keep(item.samples, old.samples);
    spare_items_.push_back(std::move(item));
  }
  if (spare_plans_.size() >= kPlans) return;
  StepPlan empty;
  plan.trunk.clear();
  plan.encodes.clear();
  plan.copies.clear();
  empty.trunk = std::move(plan.trunk);
  empty.encodes = std::move(plan.encodes);
  empty.copies = std::move(plan.copies);
  spare_plans_.push_back(std::move(empty));
}

InFlightStep Planner::TakeRecord() {
  if (spare_records_.empty()) return {};
  InFlightStep record = std::move(spare_records_.back());
  spare_records_.pop_back();
  return record;
}

void Planner::Recycle(InFlightStep record) {
  constexpr size_t kRecords = 4;
  if (spare_records_.size() >= kRecords) return;
  record.Clear();
  spare_records_.push_back(std::move(record));
}

// The next `count` answer rows of a sample. Its last open row is a decode row.
void Planner::PlanAnswerRows(ActiveRequest& r, SampleState& sample, uint32_t count) {
  const uint32_t prompt = r.prompt_tokens();
  TrunkItem item = TakeItem();
  item.request = r.request.id;
  item.timeline = r.request.timeline;
  item.begin = prompt + sample.planned_rows;
  item.count = count;
  // Enough for the request's last token, so that the item grows once: part-full pages end segments.
  item.pages.reserve((prompt + r.request.action_tokens) / lane_->options.kv.block_tokens + 1 +
                     r.request.timeline->segments().size());
  sample.sequence->PageTable(item.begin + count, item.pages);
  item.embeddings.resize(r.request.timeline->segments().size());
  item.slot = sample.slot;
  item.tap = r.request.tap;
  if (sample.planned_rows < sample.host_tokens) {
    item.known_tokens.assign(sample.tokens.begin() + sample.planned_rows,
                             sample.tokens.begin() + sample.planned_rows + count);
  }
  const bool decode = sample.planned_tokens - sample.planned_rows == 1;
  sample.last_step = id_;
  sample.planned_rows += count;
  if (sample.planned_rows == sample.planned_tokens) AddTarget(r, sample, item);
  const Micros before = lane_->cost.Predict(plan_.shape).p50;
  (decode ? plan_.shape.decode_rows : plan_.shape.prefill_rows) += count;
  plan_.trunk.push_back(std::move(item));
  Name(r);
  ChargeTo(r, lane_->cost.Predict(plan_.shape).p50 - before, count);
}

}  // namespace saccade
