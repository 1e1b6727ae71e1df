// Planner: the items of one step: which rows and frames of a request go into it, and what it still
// has room for.
#include <algorithm>
#include <utility>

#include "sched/planner.h"

namespace saccade {
namespace {

uint64_t SplitMix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Of one sample: the request's own for the first.
uint64_t SeedOf(const Request& request, uint32_t sample) {
  return sample == 0 ? request.seed : SplitMix64(request.seed ^ SplitMix64(sample));
}

}  // namespace

bool Planner::HasWantedFrame(const ActiveRequest& r) {
  return std::any_of(r.embeddings.begin(), r.embeddings.end(), [&](EmbeddingId slot) {
    return slot.valid() && r.lane->frame(slot).stage == FrameState::Stage::kWanted;
  });
}

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
    const uint32_t least = r.least_rows(options_.min_prefill_chunk);
    unit.shape.prefill_rows =
        std::min(least > 0 ? least : std::min(work.prefill_rows, options_.min_prefill_chunk),
                 r.lane->options.max_rows);
    unit.logit_rows = static_cast<uint32_t>(r.sampled_by_prompt());
  }
  return unit;
}

// ------------------------------------------------------------------------------------------- items

void Planner::PlanDecode(ActiveRequest& r, Micros limit) {
  if (!Admits(r, {0, 0, 1}, limit)) return;
  for (SampleState& sample : r.samples) {
    if (r.rows_to_plan(sample) != 1 || sample.last_step == id_) continue;
    if (LogitRowsLeft() == 0 || (!r.denoises() && RowsLeft() == 0)) return;
    const bool forced = empty() && !reserve_.any();
    if (!forced && !Fits({0, 0, 1}, limit)) return;
    if (r.denoises()) {
      PlanDenoise(r, sample);
    } else {
      PlanAnswerRows(r, sample, 1);
    }
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
  // All of its prompt was found when it started.
  if (r.denoises()) return PlanDecode(r, limit);
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
  // Small pieces only where the prompt ends: each pays the base of a step. A group is one piece.
  const uint32_t least = r.least_rows(options_.min_prefill_chunk);
  const bool group = begin < r.request.timeline->group_tokens();
  if (group) max_rows = std::max(max_rows, least);
  const uint32_t wanted = std::min({end - begin, RowsLeft(), max_rows});
  if (wanted == 0 || ((waits || group) && wanted < least)) return;
  const uint32_t unit = group ? least : std::min(wanted, options_.min_prefill_chunk);
  if (!Admits(r, {0, unit, 0}, limit)) return;
  const bool forced = empty() && !reserve_.any();
  uint32_t count = FitRows(wanted, limit);
  if (forced) count = std::max(count, unit);
  if (!forced && count < std::min(least, max_rows)) return;

  const size_t first = r.sampled_by_prompt();
  uint32_t sampled = 0;
  for (size_t i = 0; i < first; ++i) sampled += r.samples[i].planned_tokens == 0 ? 1 : 0;
  if (begin + count == r.prompt_tokens() && sampled > LogitRowsLeft()) {
    if (begin < r.request.timeline->group_tokens() && count == least) return;
    --count;
  }
  if (count == 0) return;

  TrunkItem item = spare_items_.Take();
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

// The next `count` answer rows of a sample. Its last open row is a decode row.
void Planner::PlanAnswerRows(ActiveRequest& r, SampleState& sample, uint32_t count) {
  const uint32_t prompt = r.prompt_tokens();
  TrunkItem item = spare_items_.Take();
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

// The next denoise step of a sample.
void Planner::PlanDenoise(ActiveRequest& r, SampleState& sample) {
  FlowItem item;
  item.request = r.request.id;
  item.sample = static_cast<uint32_t>(&sample - r.samples.data());
  item.index = sample.planned_tokens++;
  item.steps = r.request.action_tokens;
  item.slot = sample.slot;
  item.timeline = r.request.timeline;
  sample.sequence->PageTable(r.prompt_tokens(), item.pages);
  item.seed = SeedOf(r.request, item.sample);
  item.input = r.request.flow;
  item.tap = r.request.tap;
  sample.last_step = id_;
  ++logit_rows_;
  const Micros before = lane_->cost.Predict(plan_.shape).p50;
  ++plan_.shape.decode_rows;
  plan_.flows.push_back(std::move(item));
  Name(r);
  ChargeTo(r, lane_->cost.Predict(plan_.shape).p50 - before, 1);
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
  target.seed = SeedOf(r.request, number);
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

// ------------------------------------------------------------------------------------------ memory

void Planner::Recycle(StepPlan plan) {
  for (TrunkItem& old : plan.trunk) {
    if (spare_items_.full()) break;
    TrunkItem item;
    const auto keep = [](auto& to, auto& from) {
      from.clear();
      to = std::move(from);
    };
    keep(item.pages, old.pages);
    keep(item.embeddings, old.embeddings);
    keep(item.known_tokens, old.known_tokens);
    keep(item.samples, old.samples);
    spare_items_.Give(std::move(item));
  }
  StepPlan empty;
  plan.trunk.clear();
  plan.encodes.clear();
  plan.copies.clear();
  plan.flows.clear();
  empty.flows = std::move(plan.flows);
  empty.trunk = std::move(plan.trunk);
  empty.encodes = std::move(plan.encodes);
  empty.copies = std::move(plan.copies);
  spare_plans_.Give(std::move(empty));
}

void Planner::Recycle(InFlightStep record) {
  record.Clear();
  spare_records_.Give(std::move(record));
}

}  // namespace saccade
