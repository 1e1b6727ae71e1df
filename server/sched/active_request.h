#pragma once
// ActiveRequest: a request between Offer and the moment nothing names it any more. Private to
// sched/.
//
//   waiting ──Lane::TryStart──> started ──all tokens──> ended ──no step in flight──> destroyed
//      ^                           │
//      └────────preempted──────────┘   (tokens stay; their K/V is computed again)
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "kv/kv_cache.h"
#include "sched/beam_search.h"
#include "sched/latency_class.h"
#include "sched/scheduler.h"

namespace saccade {

class Lane;
struct Pass;

// One of the request's samples. "Planned" counts what finished and in-flight steps do.
struct SampleState {
  std::unique_ptr<Sequence> sequence;  // sample 0's computes the prompt; the others are its forks
  SequenceSlot slot;
  std::vector<int32_t> tokens;  // sampled and reported, in order; of a beam, chosen; of a flow, one
                                // for each denoise step
  std::vector<float> chunk;     // of a flow, or of one pass, when it is done
  std::vector<ScoredToken> top;  // of a beam: candidates that wait for those of the other beams
  bool stopped = false;          // by a stop token; a beam: the search has dropped it
  uint32_t planned_tokens = 0;   // answer tokens sampled
  uint32_t planned_rows = 0;     // answer rows computed, counted past the prompt
  StepId last_step;              // newest step with rows of it: a step has one item of a sequence
  uint32_t host_tokens = 0;      // first tokens that the device row does not hold
};

// What one session takes of one class on one worker.
struct SessionUse {
  SessionId session;
  size_t klass = 0;
  uint32_t active = 0;      // requests that have not ended
  double used = 0;          // predicted microseconds given to it lately, fading
  bool over_share = false;  // as of the newest JudgeSessions
};

// Work that no step has taken yet.
struct RemainingWork {
  uint32_t frames = 0;
  uint32_t prefill_rows = 0;
  uint32_t decode_steps = 0;  // after the prefill; each has a row per sample
  uint32_t decode_rows = 0;   // of one such step
};

struct ActiveRequest {
  Request request;
  const LatencyClass* klass = nullptr;
  Lane* lane = nullptr;
  SessionUse* use = nullptr;  // of its session on the lane's worker, while not ended
  size_t position = 0;        // in lane->active, while not ended
  uint64_t order = 0;         // of admission
  bool degraded = false;      // it has fewer denoise steps than it asked for
  uint32_t frames = 0;        // of the prompt, cached or not
  TimePoint deadline = kNever;

  bool started = false;     // holds sequences, slots and embeddings
  bool planned = false;     // some step was planned for it
  bool ended = false;       // its Outcome is out
  bool poisoned = false;    // its K/V must not be found again
  bool preempting = false;  // gives its resources back when no step names it
  bool aged = false;
  uint32_t preemptions = 0;
  uint32_t in_flight = 0;  // items of steps in flight and of parked passes that name it
  Pass* pass = nullptr;    // names it and has slices that are not planned: it waits for these

  uint32_t prompt_planned = 0;  // prompt rows in finished or in-flight steps, and cached ones
  uint32_t prompt_done = 0;
  std::vector<SampleState> samples;
  std::optional<BeamSearch> search;     // over the samples, which are its beams
  std::unique_ptr<KvReserve> reserve;   // of a search, while started
  std::vector<EmbeddingId> embeddings;  // per segment; invalid: not needed (any more)
  uint32_t cached_estimate = 0;         // while not started: prompt tokens Open would find
  uint32_t frames_estimate = 0;         // while not started: encodes it would ask for

  TimePoint served_at{};       // arrival, then the time it was last put in a step
  StepId considered;           // newest step whose planning saw it
  uint64_t blocked_epoch = 0;  // Lane::epoch when its start failed; 0: it did not

  std::optional<TimePoint> first_started;
  std::optional<TimePoint> encoded_at;
  std::optional<TimePoint> first_token;
  TimePoint last_token{};
  std::array<uint32_t, kModalities> cached_tokens{};
  std::vector<KvRun> frame_runs;
  bool reported_cache = false;  // these and frame_cached are of its first start
  bool frame_cached = true;

  bool denoises() const { return request.kind == AnswerKind::kFlow; }
  bool prefix_only() const { return request.kind == AnswerKind::kPrefix; }
  // Samples that take their first token, or their chunk, from the prompt's last step: of a search
  // its only beam.
  size_t sampled_by_prompt() const {
    return denoises() || prefix_only() ? 0 : search ? 1 : samples.size();
  }
  // The least rows that its prompt can go on with: what is left of its group, which runs at once,
  // else a piece of `chunk` rows. 0: the prompt is planned.
  uint32_t least_rows(uint32_t chunk) const {
    const uint32_t begin =
        started ? prompt_planned : std::min(cached_estimate, request.timeline->num_tokens());
    const uint32_t group = request.timeline->group_tokens();
    return begin < group ? group - begin : std::min(chunk, prompt_tokens() - begin);
  }
  uint32_t prompt_tokens() const { return request.timeline->num_tokens(); }
  bool may_expire() const { return klass->on_late != OnLate::kRunLate && deadline != kNever; }
  bool expired(TimePoint at) const { return may_expire() && deadline <= at; }
  bool complete() const {
    if (prefix_only()) return prompt_done == prompt_tokens();
    if (search) return search->over();
    return std::all_of(samples.begin(), samples.end(), [this](const SampleState& s) {
      return s.stopped || s.tokens.size() >= request.action_tokens;
    });
  }
  // More tokens of `s` can be planned, now or later.
  bool open(const SampleState& s) const {
    return !s.stopped && s.planned_tokens < request.action_tokens;
  }
  // Rows of `s` that the next step may take: one is a decode, more are after a preemption. A beam's
  // next token must be chosen first.
  uint32_t rows_to_plan(const SampleState& s) const {
    if (denoises()) return open(s) ? 1 : 0;
    if (!open(s) || (search && s.planned_tokens > s.tokens.size())) return 0;
    return s.planned_tokens - s.planned_rows;
  }
  // Nothing is left that a step could still do.
  bool fully_planned() const {
    if (prefix_only()) return prompt_planned == prompt_tokens();
    return std::none_of(samples.begin(), samples.end(),
                        [this](const SampleState& s) { return open(s); });
  }
  // Every live beam has its candidates.
  bool may_choose() const {
    return search && !search->over() &&
           std::none_of(samples.begin(), samples.begin() + search->live(),
                        [](const SampleState& s) { return s.top.empty(); });
  }
};

}  // namespace saccade
