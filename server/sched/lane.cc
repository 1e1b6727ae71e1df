#include "sched/lane.h"

#include <utility>

#include "base/strings.h"

namespace saccade {
namespace {

absl::Status NeverFits(std::string_view what, uint64_t needs, uint64_t has) {
  ErrorInfo info;
  info.reason = Reason::kNeverFits;
  return MakeError(absl::StatusCode::kResourceExhausted,
                   StrCat("the request needs ", needs, " ", what, ", the model has ", has), info);
}

constexpr double kLongPass = 2;  // times its first unit

// The last token of an answer has no row, a chunk has none at all.
uint32_t AnswerRows(const Request& request) {
  return request.kind == AnswerKind::kTokens ? request.action_tokens - 1 : 0;
}

uint32_t AnswerBlocks(const Request& request, uint32_t block_tokens) {
  return request.samples * ((AnswerRows(request) + block_tokens - 1) / block_tokens);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Lane>> Lane::Create(const LaneOptions& options,
                                                   uint32_t parking_places) {
  if (!options.worker.valid() || !options.model.valid()) {
    return absl::InvalidArgumentError("a lane needs a worker and a model");
  }
  if (options.sequence_slots == 0 || options.max_action_tokens == 0 || options.max_rows == 0 ||
      options.max_frames == 0 || options.max_logit_rows == 0) {
    return absl::InvalidArgumentError(
        "a lane needs at least one sequence slot, answer token, row, frame and logit row");
  }
  ASSIGN_OR_RETURN(std::unique_ptr<KvCache> cache, KvCache::Create(options.kv));
  return std::unique_ptr<Lane>(new Lane(options, parking_places, std::move(cache)));
}

LayerSplit::LayerSplit(const std::vector<LayerShare>& costs) {
  LayerShare sum{0, 0};
  for (const LayerShare& layer : costs) {
    sum.base += layer.base;
    sum.rows += layer.rows;
  }
  until_.push_back({0, 0});
  for (const LayerShare& layer : costs) {
    const LayerShare part{sum.base > 0 ? layer.base / sum.base : 0,
                          sum.rows > 0 ? layer.rows / sum.rows : 0};
    until_.push_back({until_.back().base + part.base, until_.back().rows + part.rows});
    if (part.rows > largest_.rows) largest_ = part;
  }
}

Lane::Lane(const LaneOptions& lane_options, uint32_t parking_places, std::unique_ptr<KvCache> cache)
    : options(lane_options),
      kv(std::move(cache)),
      embeddings(lane_options.embedding_slots),
      cost(lane_options.cost),
      vision_split(lane_options.vision_layers),
      trunk_split(lane_options.trunk_layers),
      parked(parking_places),
      frames_(lane_options.embedding_slots) {
  free_slots_.reserve(options.sequence_slots);
  for (uint32_t i = options.sequence_slots; i-- > 0;) {
    free_slots_.emplace_back(static_cast<int32_t>(i));
  }
}

absl::Status Lane::CheckFits(const Request& request) const {
  const bool prefix = request.kind == AnswerKind::kPrefix;
  if (prefix != (request.action_tokens == 0)) {
    return InvalidField("action_tokens", prefix ? "must be 0" : "must be at least 1");
  }
  if (prefix && (request.samples > 1 || request.timeline->reuse() != PrefixReuse::kAllButLast)) {
    return InvalidField("timeline", "a prefix has one sample, and its last block is computed");
  }
  if (request.samples == 0) return InvalidField("samples", "must be at least 1");
  if (request.action_tokens > options.max_action_tokens) {
    return NeverFits("answer tokens", request.action_tokens, options.max_action_tokens);
  }
  const uint32_t samples = options.denoises
                               ? options.sequence_slots
                               : std::min(options.sequence_slots, options.max_logit_rows);
  if (request.samples > samples) return NeverFits("samples", request.samples, samples);
  if (!prefix && options.denoises != (request.kind == AnswerKind::kFlow)) {
    return InvalidField("kind", "is not what the model answers with");
  }
  if (request.timeline->group_tokens() > options.max_rows) {
    return NeverFits("rows at once", request.timeline->group_tokens(), options.max_rows);
  }
  uint32_t frames = 0;
  for (const Segment& segment : request.timeline->segments()) {
    if (segment.modality != Modality::kVision) continue;
    if (segment.content == nullptr) return InvalidField("timeline", "a frame is missing");
    ++frames;
  }
  if (frames > options.embedding_slots) {
    return NeverFits("frames", frames, options.embedding_slots);
  }
  return kv->CheckFits(*request.timeline, AnswerRows(request), request.samples);
}

void Lane::Add(ActiveRequest& r) {
  r.lane = this;
  r.position = active.size();
  active.push_back(&r);
}

void Lane::Remove(ActiveRequest& r) {
  active[r.position] = active.back();
  active[r.position]->position = r.position;
  active.pop_back();
}

void Lane::Estimate(ActiveRequest& r) const {
  const Timeline& timeline = *r.request.timeline;
  r.cached_estimate = kv->CachedTokens(timeline);
  r.frames_estimate = 0;
  for (const Segment& segment : timeline.segments()) {
    if (segment.modality != Modality::kVision || segment.end <= r.cached_estimate) continue;
    const bool held = std::any_of(frames_.begin(), frames_.end(), [&](const FrameState& frame) {
      return (frame.stage == FrameState::Stage::kParked ||
              frame.stage == FrameState::Stage::kInFlight ||
              frame.stage == FrameState::Stage::kReady) &&
             frame.frame == segment.content.get() && frame.camera == segment.camera;
    });
    if (!held) ++r.frames_estimate;
  }
}

RemainingWork Lane::Remaining(const ActiveRequest& r) const {
  RemainingWork work;
  bool prefill = true;  // a step of it ends with a sampled token
  if (r.started) {
    for (const EmbeddingId slot : r.embeddings) {
      if (slot.valid() && frame(slot).stage == FrameState::Stage::kWanted) ++work.frames;
    }
    work.prefill_rows = r.prompt_tokens() - r.prompt_planned;
    prefill = work.prefill_rows > 0;
  } else {
    work.frames = r.frames_estimate;
    work.prefill_rows = r.prompt_tokens() - std::min(r.cached_estimate, r.prompt_tokens());
  }
  for (const SampleState& sample : r.samples) {
    if (!r.open(sample)) continue;
    uint32_t steps = r.request.action_tokens - sample.planned_tokens;
    const uint32_t catch_up = sample.planned_tokens - sample.planned_rows;
    if (!r.denoises() && catch_up > 1) work.prefill_rows += catch_up;
    if (!r.denoises() && (prefill || catch_up > 1)) --steps;
    work.decode_steps = std::max(work.decode_steps, steps);
    ++work.decode_rows;
  }
  return work;
}

Lane::Needs Lane::NeedsOf(const ActiveRequest& r) const {
  Needs needs;
  const Timeline& timeline = *r.request.timeline;
  for (const TimelineBlock& block : timeline.blocks()) {
    if (r.started || block.begin >= r.cached_estimate) ++needs.blocks;
  }
  needs.blocks += AnswerBlocks(r.request, options.kv.block_tokens);
  needs.slots = r.request.samples;
  if (r.started) {
    for (const EmbeddingId slot : r.embeddings) needs.embeddings += slot.valid() ? 1 : 0;
  } else {
    needs.embeddings = r.frames_estimate;
  }
  return needs;
}

Lane::Needs Lane::Free() const {
  Needs free;
  const KvStats stats = kv->stats();
  free.blocks = stats.free_blocks;
  for (const PartitionStats& partition : stats.partitions) free.blocks += partition.idle;
  free.slots = free_slots();
  free.embeddings = embeddings.num_slots() - embeddings.held();
  return free;
}

Lane::Start Lane::TryStart(ActiveRequest& r, bool can_wait, TimePoint now) {
  if (free_slots_.size() < r.request.samples) return Start::kShort;
  std::unique_ptr<Sequence> sequence = kv->Open(r.request.timeline, now);
  const uint32_t cached = sequence->cached_tokens();
  const std::array<uint32_t, kModalities> by_modality = sequence->cached_by_modality();
  if (can_wait) {
    uint32_t found = 0;
    uint32_t needs = AnswerBlocks(r.request, options.kv.block_tokens);
    for (const TimelineBlock& block : r.request.timeline->blocks()) {
      ++(block.begin < cached ? found : needs);
    }
    if (!kv->LeavesHeadroom(needs, found)) {
      kv->Close(std::move(sequence), now);
      return Start::kNoHeadroom;
    }
  }
  if (!TakeEmbeddings(r, cached)) {
    kv->Close(std::move(sequence), now);
    return Start::kShort;
  }
  if (!TakeBlocks(r, std::move(sequence), now)) {
    ReleaseEmbeddings(r);
    return Start::kShort;
  }
  for (SampleState& sample : r.samples) {
    sample.slot = free_slots_.back();
    free_slots_.pop_back();
    sample.planned_rows = 0;
    if (r.denoises()) sample.tokens.clear();  // the latents were in the slot that it gives up
    sample.planned_tokens = sample.host_tokens = static_cast<uint32_t>(sample.tokens.size());
  }
  r.prompt_planned = r.prompt_done = cached;
  r.started = true;
  if (!r.reported_cache) {
    r.reported_cache = true;
    r.cached_tokens = by_modality;
    kv->FrameRuns(*r.samples[0].sequence, r.frame_runs);
    r.frame_cached = std::all_of(r.embeddings.begin(), r.embeddings.end(), [this](EmbeddingId e) {
      return !e.valid() || frame(e).stage == FrameState::Stage::kReady;
    });
  }
  return Start::kStarted;
}

// A place for every frame that rows past the cached prefix read.
bool Lane::TakeEmbeddings(ActiveRequest& r, uint32_t cached_tokens) {
  const std::span<const Segment> segments = r.request.timeline->segments();
  r.embeddings.assign(segments.size(), EmbeddingId());
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    if (segment.modality != Modality::kVision || segment.end <= cached_tokens) continue;
    if (const auto found = embeddings.Acquire(segment.content, segment.camera)) {
      r.embeddings[i] = found->slot;
      ++frame(found->slot).users;
      continue;
    }
    const absl::StatusOr<EmbeddingId> slot = embeddings.Reserve(segment.content, segment.camera);
    if (!slot.ok()) {
      ReleaseEmbeddings(r);
      return false;
    }
    r.embeddings[i] = *slot;
    frame(*slot) = {
        FrameState::Stage::kWanted, 1, segment.content.get(), segment.camera, nullptr, {}};
  }
  return true;
}

// The forks are made before the prompt is computed: they share its blocks and take their own for
// their answers, so that nothing is left to reserve later.
bool Lane::TakeBlocks(ActiveRequest& r, std::unique_ptr<Sequence> sequence, TimePoint now) {
  const uint32_t prompt = r.prompt_tokens();
  const uint32_t all = prompt + AnswerRows(r.request);
  const bool forks = r.samples.size() > 1 || r.search;
  const auto commit = [&](KvTransaction transaction) {
    const std::vector<BlockCopy> made = std::move(transaction).Commit();
    copies.insert(copies.end(), made.begin(), made.end());
  };
  KvTransaction transaction = kv->Begin(now);
  if (!transaction.Reserve(*sequence, forks ? prompt : all).ok()) {
    kv->Close(std::move(sequence), now);
    return false;
  }
  commit(std::move(transaction));
  r.samples[0].sequence = std::move(sequence);
  if (!forks) return true;
  for (size_t i = 1; i < r.samples.size(); ++i) {
    r.samples[i].sequence = kv->Fork(*r.samples[0].sequence);
  }
  bool fits = false;
  if (r.search) {
    fits = TakeReserve(r, now);
  } else {
    KvTransaction answers = kv->Begin(now);
    fits = std::all_of(r.samples.begin(), r.samples.end(), [&](SampleState& sample) {
      return answers.Reserve(*sample.sequence, all).ok();
    });
    if (fits) commit(std::move(answers));
  }
  if (!fits) {
    for (SampleState& sample : r.samples) kv->Close(std::move(sample.sequence), now);
  }
  return fits;
}

// All blocks of the answers, and room in them for what was chosen before a preemption.
bool Lane::TakeReserve(ActiveRequest& r, TimePoint now) {
  r.reserve = kv->SetAside(r.request.timeline->answer(),
                           AnswerBlocks(r.request, options.kv.block_tokens), now);
  return r.reserve != nullptr &&
         std::all_of(r.samples.begin(), r.samples.end(), [&](SampleState& sample) {
           const uint32_t upto = r.prompt_tokens() + static_cast<uint32_t>(sample.tokens.size());
           return kv->Extend(*sample.sequence, upto, *r.reserve, copies).ok();
         });
}

absl::Status Lane::Reorder(ActiveRequest& r, std::span<const BeamSearch::Next> next) {
  // Samples that are no beam any more stay with the first one's blocks: they need none of their
  // own.
  std::vector<std::unique_ptr<Sequence>> forks;
  std::vector<std::vector<int32_t>> tokens(r.samples.size());
  for (size_t i = 0; i < r.samples.size(); ++i) {
    const SampleState& parent = r.samples[next[i < next.size() ? i : 0].parent];
    forks.push_back(kv->Fork(*parent.sequence));
    if (i >= next.size()) continue;
    tokens[i] = parent.tokens;
    tokens[i].push_back(next[i].token);
  }
  for (SampleState& sample : r.samples) kv->Drop(std::move(sample.sequence), *r.reserve);
  absl::Status status;
  for (size_t i = 0; i < r.samples.size(); ++i) {
    SampleState& sample = r.samples[i];
    sample.sequence = std::move(forks[i]);
    sample.tokens = std::move(tokens[i]);
    sample.top.clear();
    sample.stopped = i >= next.size();
    sample.planned_tokens = sample.host_tokens = static_cast<uint32_t>(sample.tokens.size());
    sample.planned_rows = sample.planned_tokens - (sample.stopped ? 0 : 1);
    if (sample.stopped || !status.ok()) continue;
    status =
        kv->Extend(*sample.sequence, r.prompt_tokens() + sample.planned_tokens, *r.reserve, copies);
  }
  return status;
}

void Lane::Release(ActiveRequest& r, TimePoint now) {
  ++epoch;
  if (!r.started) return;
  ReleaseEmbeddings(r);
  for (SampleState& sample : r.samples) {
    kv->Close(std::move(sample.sequence), now, r.poisoned);
    free_slots_.push_back(std::exchange(sample.slot, SequenceSlot()));
  }
  r.reserve = nullptr;
  r.started = false;
}

void Lane::Preempt(ActiveRequest& r, TimePoint now) {
  Release(r, now);
  ++r.preemptions;
  r.preempting = false;
  r.prompt_planned = r.prompt_done = 0;
  for (SampleState& sample : r.samples) {
    sample.top.clear();
    sample.planned_rows = 0;
    sample.planned_tokens = sample.host_tokens = static_cast<uint32_t>(sample.tokens.size());
  }
  Estimate(r);
}

void Lane::ReleaseEmbeddings(ActiveRequest& r) {
  for (EmbeddingId& slot : r.embeddings) {
    if (slot.valid()) ReleaseEmbedding(std::exchange(slot, EmbeddingId()), r.poisoned);
  }
}

void Lane::ReleaseEmbedding(EmbeddingId slot, bool poisoned) {
  FrameState& state = frame(slot);
  --state.users;
  // A poisoned request may have its non-finite values from a frame: it is not offered again.
  if (poisoned && state.stage == FrameState::Stage::kReady) embeddings.Abandon(slot);
  if (state.users == 0 && !embeddings.Ready(slot)) state = {};
  embeddings.Release(slot);
}

bool Lane::NeedsCut(const StepShape& unit, Micros ceiling) const {
  // A denoise step is not cut.
  if (options.denoises && unit.frames == 0 && unit.prefill_rows == 0) return false;
  return ceiling.count() > 0 && split(unit.frames > 0).divisible() &&
         cost.Predict(unit).p99 > ceiling;
}

Micros Lane::PassLimit(const StepShape& unit) const {
  return Scaled(cost.Predict(unit).p99, kLongPass);
}

Micros Lane::PieceLimit(const StepShape& unit, Micros ceiling) const {
  const Micros layer = cost.Predict(unit, split(unit.frames > 0).largest()).p99;
  return std::max(layer, std::min(Scaled(layer, kLongPass), ceiling));
}

void Lane::Park(const std::shared_ptr<Pass>& pass) {
  parked[pass->place] = pass;
  for (ActiveRequest* r : pass->requests) r->pass = pass.get();
  for (const EncodeItem& item : pass->plan.encodes) {
    frame(item.slot).stage = FrameState::Stage::kParked;
    frame(item.slot).pass = pass.get();
  }
}

void Lane::Unpark(Pass& pass) {
  for (const EncodeItem& item : pass.plan.encodes) {
    frame(item.slot).stage = FrameState::Stage::kInFlight;
    frame(item.slot).pass = nullptr;
  }
  Forget(pass);
}

void Lane::Forget(Pass& pass) {
  // Where all slices of this one are planned, a request may be in another already.
  for (ActiveRequest* r : pass.requests) {
    if (r->pass == &pass) r->pass = nullptr;
  }
  // Last: the lane may own the pass alone.
  if (parked[pass.place].get() == &pass) parked[pass.place] = nullptr;
}

Pass* Lane::WaitsFor(const ActiveRequest& r, uint32_t chunk) const {
  if (r.pass != nullptr) return r.pass;
  if (!r.started || r.prompt_planned >= r.prompt_tokens()) return nullptr;
  const std::span<const Segment> segments = r.request.timeline->segments();
  const uint32_t piece = std::max(chunk, r.least_rows(chunk));
  Pass* first = nullptr;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (!r.embeddings[i].valid()) continue;
    const FrameState& state = frame(r.embeddings[i]);
    if (state.stage == FrameState::Stage::kWanted) return nullptr;
    if (first != nullptr || state.stage != FrameState::Stage::kParked) continue;
    if (segments[i].begin >= r.prompt_planned + piece) return nullptr;
    first = state.pass;
  }
  return first;
}

uint32_t Lane::SliceEnd(const Pass& pass, Micros ceiling) const {
  const LayerSplit& layers = split(pass.vision);
  uint32_t end = pass.planned + 1;
  while (end < pass.layers &&
         cost.Predict(pass.plan.shape, layers.Part(pass.planned, end + 1)).p99 <= ceiling) {
    ++end;
  }
  return end;
}

Micros Lane::Left(const Pass& pass) const {
  return cost.Predict(pass.plan.shape, split(pass.vision).Part(pass.planned, pass.layers)).p50;
}

absl::Status Lane::CheckInvariants(const std::vector<const ActiveRequest*>& holders) const {
  const auto broken = [this](auto&&... parts) {
    return absl::InternalError(StrCat("scheduler: model ", options.model.value(), " on worker ",
                                      options.worker.value(), ": ", parts...));
  };
  std::vector<uint8_t> slot_used(options.sequence_slots, 0);
  const auto use_slot = [&](SequenceSlot slot) {
    const auto i = static_cast<size_t>(slot.value());
    return slot.valid() && i < slot_used.size() && std::exchange(slot_used[i], 1) == 0;
  };
  for (const SequenceSlot slot : free_slots_) {
    if (!use_slot(slot)) return broken("free slot ", slot.value(), " is listed twice");
  }
  std::vector<uint32_t> users(frames_.size(), 0);
  size_t slots = free_slots_.size();
  for (const ActiveRequest* r : holders) {
    for (const EmbeddingId e : r->embeddings) {
      if (!e.valid()) continue;
      if (!r->started) return broken("request ", r->request.id.value(), " holds a frame unstarted");
      ++users[static_cast<size_t>(e.value())];
      if (frame(e).stage == FrameState::Stage::kEmpty) {
        return broken("request ", r->request.id.value(), " holds an empty embedding slot");
      }
      if (embeddings.Ready(e) && frame(e).stage != FrameState::Stage::kReady) {
        return broken("embedding slot ", e.value(), " was published too early");
      }
    }
    for (const SampleState& sample : r->samples) {
      if ((sample.sequence != nullptr) != r->started || sample.slot.valid() != r->started) {
        return broken("request ", r->request.id.value(), " is started in part");
      }
      if (!r->started) continue;
      ++slots;
      if (!use_slot(sample.slot)) return broken("slot ", sample.slot.value(), " has two owners");
      if (sample.planned_rows > sample.planned_tokens ||
          sample.tokens.size() > sample.planned_tokens ||
          sample.planned_tokens > r->request.action_tokens) {
        return broken("request ", r->request.id.value(), " has planned what cannot be");
      }
    }
    if (r->started &&
        (r->prompt_done > r->prompt_planned || r->prompt_planned > r->prompt_tokens() ||
         r->samples[0].sequence->committed_tokens() < r->prompt_done)) {
      return broken("request ", r->request.id.value(), " has prompt rows out of order");
    }
    if ((r->reserve != nullptr) != (r->started && r->search)) {
      return broken("request ", r->request.id.value(), " has a reserve without need, or none");
    }
    if (r->started && r->in_flight == 0 &&
        (r->prompt_done != r->prompt_planned ||
         std::any_of(r->samples.begin(), r->samples.end(),
                     [](const SampleState& s) {
                       const size_t reported = s.tokens.size() + (s.top.empty() ? 0 : 1);
                       return !s.stopped && reported != s.planned_tokens;
                     })) &&
        !r->ended) {
      return broken("request ", r->request.id.value(), " waits for a step that does not exist");
    }
  }
  if (slots != options.sequence_slots) return broken("a sequence slot is lost");
  for (size_t i = 0; i < frames_.size(); ++i) {
    if (frames_[i].users != users[i]) return broken("embedding slot ", i, " counts wrong users");
  }
  const auto held = static_cast<uint32_t>(
      std::count_if(users.begin(), users.end(), [](uint32_t count) { return count > 0; }));
  if (held != embeddings.held()) return broken("the embedding cache holds others' slots");
  for (size_t place = 0; place < parked.size(); ++place) {
    const Pass* const pass = parked[place].get();
    if (pass == nullptr) continue;
    if (pass->place != place || pass->planned >= pass->layers || !pass->failure.ok()) {
      return broken("a parked pass cannot go on");
    }
    for (const ActiveRequest* r : pass->requests) {
      if (r->pass != pass) return broken("a request does not wait for the pass it is in");
    }
    for (const EncodeItem& item : pass->plan.encodes) {
      if (frame(item.slot).stage != FrameState::Stage::kParked || frame(item.slot).pass != pass) {
        return broken("embedding slot ", item.slot.value(), " does not wait for its pass");
      }
    }
  }
  for (size_t i = 0; i < active.size(); ++i) {
    if (active[i]->lane != this || active[i]->position != i || active[i]->ended) {
      return broken("active request ", i, " is not where it says");
    }
  }
  RETURN_IF_ERROR(embeddings.CheckInvariants());
  return kv->CheckInvariants();
}

}  // namespace saccade
