#pragma once
// Scheduler: decides what runs next. Pure: no clock, no thread, no I/O; the same calls give the
// same plans. Owns every request between Offer and its Outcome, and drives KvCache and
// EmbeddingCache of each lane.
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/status.h"
#include "kv/embedding_cache.h"
#include "kv/kv_cache.h"
#include "sched/beam_search.h"
#include "sched/cost_model.h"
#include "sched/latency_class.h"
#include "sched/step.h"

namespace saccade {

// One model on one worker.
struct LaneOptions {
  WorkerId worker;
  ModelId model;
  KvCacheOptions kv;
  uint32_t embedding_slots = 0;
  uint32_t sequence_slots = 0;     // rows of the device's token array
  uint32_t max_action_tokens = 0;  // of one sample
  uint32_t max_rows = 0;           // trunk rows of one step (arena size)
  uint32_t max_frames = 0;         // encodes of one step
  bool denoises = false;           // its answers are flows: a decode row is a denoise step
  uint32_t max_logit_rows = 0;     // also the most denoise steps in one step
  // What each layer costs, in any unit, in the order in which they run; empty or one: cannot be
  // cut. The last of the trunk is its head: it runs only when a row is sampled.
  std::vector<LayerShare> vision_layers;
  std::vector<LayerShare> trunk_layers;
  CostModel cost;  // what is known of its step times already
};

struct SchedulerOptions {
  std::vector<LatencyClass> classes;  // indexed by ClassId
  // A step's predicted p99 time; 0: no ceiling. Where the smallest unit of the most urgent work is
  // longer, it is cut into ranges of layers; a single layer runs even when it alone is longer, and
  // so does what cannot be cut.
  Micros step_ceiling{0};
  uint32_t pipeline_depth = 2;      // steps per worker, running plus queued
  uint32_t min_prefill_chunk = 16;  // rows
  // Ageing: a request below the top tier that got nothing for `max_wait` goes first in a step, one
  // smallest unit at a time, for at most `ageing_share` of the worker's time, and only while no
  // request of the top tier would miss its deadline because of it.
  Micros max_wait{200'000};
  double ageing_share = 0.1;  // (0, 1]
  // An idle lane whose newest step is older than this admits one request that it would have
  // refused as late: a stale prediction must not refuse for ever.
  Micros probe_after{1'000'000};
};

// What an answer is made of.
enum class AnswerKind : uint8_t {
  kTokens,   // one after another, each with K/V of its own
  kFlow,     // a chunk of actions, in denoise steps over the prompt's K/V
  kOnePass,  // a chunk of actions, out of the pass over the prompt
  kPrefix,   // nothing: the prompt's K/V, for those who ask later
};

struct Request {
  RequestId id;
  SessionId session;
  ModelId model;
  ClassId klass;
  TimePoint arrival{};
  TimePoint deadline = kNever;
  // When the next request of this session and class comes, where that is known: less urgent steps
  // leave room for it.
  TimePoint next_arrival = kNever;
  std::shared_ptr<const Timeline> timeline;
  AnswerKind kind = AnswerKind::kTokens;
  // Tokens of the answer, to decode per sample; at most, when there are stop tokens. Of a flow its
  // denoise steps; of a chunk from one pass 1; of a prefix 0.
  uint32_t action_tokens = 0;
  // Of a flow: what a class that degrades may cut its steps to, so that it is on time; 0: nothing.
  uint32_t least_steps = 0;
  std::shared_ptr<const FlowInput> flow;  // kFlow
  uint32_t samples = 1;
  float temperature = 0;  // 0: greedy
  float top_p = 1;        // (0, 1]: of the most likely tokens
  uint64_t seed = 0;
  std::vector<int32_t> stop_tokens;  // a sample ends with any of these
  // Beam search over `samples` beams in place of independent samples.
  std::optional<BeamOptions> beams;
  std::shared_ptr<TapSink> tap;
};

struct Timings {
  Micros queue{0};    // arrival to the start of its first step
  Micros encode{0};   // first step to the end of its last encode; 0 when all frames were cached
  Micros prefill{0};  // to the first token of the answer
  Micros act{0};      // to the last one
  Micros total{0};
};

struct Outcome {
  RequestId id;
  absl::Status status;  // OK: `answers` holds every sample, or the best hypotheses, best first
  struct Answer {
    std::vector<int32_t> tokens;  // with the stop token that ended it
    bool stopped = false;
    double log_prob = 0;         // of beams: sum over the tokens
    double score = 0;            // of beams: what they are ordered by
    std::vector<float> chunk{};  // of a flow, or of one pass: [horizon, width]
  };
  std::vector<Answer> answers;
  Timings timings;
  std::array<uint32_t, kModalities> cached_tokens{};
  std::array<uint32_t, kModalities> prompt_tokens{};
  std::vector<KvRun> frame_runs;  // as KvCache::FrameRuns
  bool frame_cached = false;      // no encode was needed
  bool late = false;              // finished after its deadline (class says run_late)
  uint32_t denoise_steps = 0;     // of a flow
  bool degraded = false;          // fewer than it asked for
};

struct SchedulerStats {
  struct Class {
    uint32_t queued = 0;  // no step yet
    uint32_t running = 0;
  };
  std::vector<Class> classes;
  struct Lane {
    WorkerId worker;
    ModelId model;
    KvStats kv;
    uint32_t embeddings_held = 0;
    uint32_t embeddings_idle = 0;
    uint64_t embedding_hits = 0;
    uint64_t embedding_misses = 0;
  };
  std::vector<Lane> lanes;
};

class Lane;

class Scheduler {
 public:
  ~Scheduler();
  // INVALID_ARGUMENT names the option that is out of range.
  static absl::StatusOr<std::unique_ptr<Scheduler>> Create(SchedulerOptions options,
                                                           std::span<const LaneOptions> lanes);
  // Lanes may also come and go later. Making one takes time with its blocks and is done on any
  // thread; so is destroying what RemoveModel gives back.
  static absl::StatusOr<std::shared_ptr<Lane>> MakeLane(const LaneOptions& options,
                                                        uint32_t parking_places);
  // INVALID_ARGUMENT when the model is on that worker already.
  absl::Status AddLane(std::shared_ptr<Lane> lane);
  // Fails every request of the model that has not ended.
  void FailModel(ModelId id, const absl::Status& status, TimePoint now);
  // The model's lanes, which are not the scheduler's any more; nothing while a request or a step in
  // flight names one.
  std::optional<std::vector<std::shared_ptr<Lane>>> RemoveModel(ModelId id);
  // Every idle K/V block of every lane loses its content, and what it kept alive goes.
  void FlushIdle();
  // From now on; what is in the class beyond it stays.
  void SetMaxQueued(ClassId id, uint32_t max_queued);
  // Admits or refuses. Refused: the status carries the reason (kLate with predicted_finish and
  // retry_after, kQueueFull, kNeverFits, kWorkerFailed) and no Outcome follows. Admitted: exactly
  // one Outcome follows.
  absl::Status Offer(Request request, TimePoint now);
  // The next step for this worker, or nothing. Reserves its blocks. Call while the worker has fewer
  // than pipeline_depth steps. `free_at`: when the worker will have finished what it has.
  std::optional<StepPlan> Plan(WorkerId worker, TimePoint now, TimePoint free_at);
  // True when urgent work that is not in `queued` should go before it (the engine then tries to
  // revoke it).
  bool ShouldRevoke(const StepPlan& queued, TimePoint now) const;
  // The step was taken back before it started; it is the newest step of its worker. Everything in
  // it is plannable again.
  void OnStepRevoked(const StepPlan& plan, TimePoint now);
  void OnStepDone(const StepPlan& plan, const StepResult& result, TimePoint now);
  // Of a step that is done, taken back or lost; only spares memory.
  void Recycle(StepPlan plan);
  // Ends a request early: cancellation, an invalid token, a dead client. Its blocks are freed when
  // no step names them.
  void Fail(RequestId id, absl::Status status, TimePoint now);
  void FailSession(SessionId id, absl::Status status, TimePoint now);
  // The worker is gone: fails what it holds, UNAVAILABLE with kWorkerFailed; its lanes take nothing
  // more.
  void OnWorkerLost(WorkerId worker, TimePoint now);
  // Ends what has expired (DEADLINE_EXCEEDED, kExpired; unless the class runs late).
  void Sweep(TimePoint now);
  // When Sweep has something to do next.
  TimePoint NextWake() const;
  // Outcomes since the last call, in order.
  std::vector<Outcome> TakeOutcomes();
  // Tokens of samples that the last OnStepDone brought, in order, until the next one: nothing of
  // chunks, of a request or a sample that had ended, and nothing of beams, which may still be
  // dropped.
  std::span<const SampledToken> emitted() const;
  bool idle() const;  // no request and no step in flight
  SchedulerStats stats() const;
  const CostModel& cost_model(WorkerId worker, ModelId model) const;
  // Counters, slots, references and in-flight marks recomputed; KvCache and EmbeddingCache of every
  // lane. INTERNAL names the first broken one.
  absl::Status CheckInvariants() const;

 private:
  class Impl;
  explicit Scheduler(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace saccade
