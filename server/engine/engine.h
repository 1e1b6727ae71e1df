#pragma once
// Engine: every request and all K/V metadata, and one worker per backend instance. Everything
// mutable is touched by the holder of the turn only (README.md): the engine's own thread, or one
// that just submitted or ran a step. Others reach it through a bounded inbox.
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/memory_budget.h"
#include "base/status.h"
#include "engine/cost_table.h"
#include "engine/page_guard.h"
#include "kv/timeline.h"
#include "model/model.h"
#include "sched/scheduler.h"
#include "sched/step.h"

namespace saccade {

class Metrics;

// A model the engine serves, and how much it may use on each of its workers. Immutable from
// Engine::Load on, shared by whoever still uses it.
struct ServedModel {
  ModelId id;  // set by the engine; never used again for another load
  std::string name;
  MemoryHold weights;                             // of all instances
  std::vector<std::unique_ptr<Model>> instances;  // one per entry of `workers`
  std::vector<WorkerId> workers;
  InvalidTokenPolicy invalid_tokens = InvalidTokenPolicy::kFail;
  uint32_t least_flow_steps = 0;  // of a request that says nothing; 0: it may not be cut
  KvCacheOptions kv;              // per worker; num_blocks > 0
  uint32_t embedding_slots = 0;   // per worker
  uint32_t max_sequences = 0;     // sequences with action tokens at a time, per worker
  const ModelSpec& spec() const { return instances.front()->spec(); }
  // New timelines for the model use its salt and block size.
  TimelineBuilder NewTimeline() const;
};
using ModelRef = std::shared_ptr<const ServedModel>;

struct EngineOptions {
  std::vector<LatencyClass> classes;
  Micros step_ceiling{0};
  uint32_t pipeline_depth = 2;
  Micros max_wait{200'000};  // this and the next two: as in SchedulerOptions
  double ageing_share = 0.1;
  Micros probe_after{1'000'000};
  // A worker whose step takes this long hangs, and is taken out. Counted in quarters of it that the
  // engine saw pass, so that a machine that stood still accuses nobody.
  Micros step_timeout{30'000'000};
  uint32_t max_rows = 512;  // trunk rows of one step
  uint32_t max_frames = 8;  // encodes of one step
  uint32_t max_logit_rows = 64;
  uint32_t max_new_tokens = 0;  // of one text; 0: none is written
  size_t inbox_capacity = 4096;
  MemoryBudget* memory = nullptr;  // holds what models need; outlives the engine and its models
  CostTable costs;                 // step times of earlier runs; what is not in it is learned
  bool check_pages = kCheckPages;  // each step, see page_guard.h
};

inline constexpr uint32_t kMaxFlowSteps = 1000;  // of one request

// What a request for text asks for, in place of actions.
struct TextRequest {
  uint32_t max_new_tokens = 0;
  float top_p = 1;                   // (0, 1]
  std::vector<int32_t> stop_tokens;  // the model's and the request's own
  std::optional<BeamOptions> beams;  // over `samples` beams
};

struct ActResult {
  std::vector<ActionChunk> chunks;       // of actions: one per sample
  std::vector<Outcome::Answer> answers;  // of text: one per sample, or the best hypotheses
  Timings timings;
  std::array<uint32_t, kModalities> cached_tokens{};
  std::array<uint32_t, kModalities> prompt_tokens{};
  std::vector<KvRun> frame_runs;  // as KvCache::FrameRuns
  bool frame_cached = false;
  bool late = false;
  uint32_t denoise_steps = 0;  // of a model that denoises
  bool degraded = false;       // fewer of them than were asked for
  TimePoint finished{};
};

// Implemented by the rpc stream; called by the holder of the engine's turn, one call at a time,
// also from inside Submit; must not block. OnDone is called exactly once. OnToken comes before it,
// never for beams and never after a sample's stop token.
class ResponseSink {
 public:
  virtual ~ResponseSink() = default;
  virtual void OnToken(RequestId id, uint32_t sample, uint32_t index, int32_t token) = 0;
  virtual void OnDone(RequestId id, absl::StatusOr<ActResult> result) = 0;
};

struct ActRequest {
  SessionId session;
  ModelId model;
  ClassId klass;
  TimePoint arrival{};
  TimePoint deadline = kNever;
  TimePoint next_arrival = kNever;  // of the session's next act, where that is known
  std::shared_ptr<const Timeline> timeline;
  std::string statistics_key;       // valid for the model; not used for text
  std::optional<TextRequest> text;  // absent: actions
  bool prefix_only = false;         // asks for nothing but the K/V of its timeline
  uint32_t samples = 1;
  float temperature = 0;
  uint64_t seed = 0;
  // Of a model that denoises: steps (0: the model's own), and what the answer is made from; and the
  // robot's state in its own units, for actions that are relative to it.
  uint32_t flow_steps = 0;
  uint32_t least_flow_steps = 0;  // what a class that degrades may cut them to; 0: the model's
  std::shared_ptr<const FlowInput> flow;
  std::vector<float> state;
  TimePoint frame_captured{};  // oldest frame it uses, for the frame-age histogram; zero: none
  std::shared_ptr<ResponseSink> sink;
  std::shared_ptr<TapSink> tap;
};

// What one step was and took.
struct StepRecord {
  StepId id;
  WorkerId worker;
  ModelId model;
  StepShape shape;
  LayerSlice slice;
  uint32_t sequences = 0;
  TimePoint started{};
  TimePoint finished{};
  Micros predicted_p50{0};
  bool ok = true;
};

// What became of one request.
struct RequestRecord {
  RequestId id;
  SessionId session;
  ModelId model;
  ClassId klass;
  TimePoint arrival{};
  TimePoint deadline = kNever;
  TimePoint next_arrival = kNever;  // as its ActRequest said
  TimePoint finished{};
  absl::StatusCode code = absl::StatusCode::kOk;
  Reason reason = Reason::kUnspecified;  // when it failed or was refused
  Timings timings;                       // zero unless it was answered
  std::array<uint32_t, kModalities> cached_tokens{};
  std::array<uint32_t, kModalities> prompt_tokens{};
  bool late = false;
};

// The last of both, oldest first. Bounded.
struct RecentWork {
  std::vector<StepRecord> steps;
  std::vector<RequestRecord> requests;
};

class Engine {
 public:
  // `backends[i]` becomes worker i. Starts the threads and loads the models, at least one.
  // `metrics` may be null.
  static absl::StatusOr<std::unique_ptr<Engine>> Start(
      const EngineOptions& options, std::vector<std::unique_ptr<Backend>> backends,
      std::vector<ServedModel> models, const Clock& clock, Metrics* metrics);
  ~Engine();  // drains with no patience

  // Any thread but the engine's, for as long as it takes: allocates what the model needs on its
  // workers, runs its whole path a few times, and serves it. Steps of other models go on. Models of
  // one name may be there at a time. An error leaves nothing behind.
  absl::StatusOr<ModelRef> Load(ServedModel model);
  // The same thread rule. Requests for the model are refused from now on (kModelUnloaded); what was
  // admitted is finished, or fails with `why` at `until`. Returns when the engine holds nothing of
  // it. NOT_FOUND when it is not there.
  absl::Status Unload(ModelId id, TimePoint until, absl::Status why);
  // Gives up idle K/V blocks, and with them the frames that they keep; soon, at most once a second.
  // For when memory is short.
  void ForgetIdle();
  // From now on, for class `id`.
  void SetMaxQueued(ClassId id, uint32_t max_queued);

  // Any thread. The id is this request's from now on; every outcome, refusals included, arrives by
  // sink->OnDone, except a full inbox or a draining engine, which is returned and leaves the sink
  // untouched.
  absl::StatusOr<RequestId> Submit(ActRequest request);
  void Cancel(RequestId id);
  // A newer request of its session takes its place: ends it (CANCELLED, kSuperseded) unless a step
  // of it went to a worker.
  void Supersede(RequestId id);
  void CancelSession(SessionId id);  // the client is gone
  // Stops admitting; returns when nothing is left or at `until`, then fails what is left with
  // kDraining.
  void Drain(TimePoint until);
  bool draining() const;
  bool Ready() const;  // a model, a healthy worker for every one, not draining
  bool Ready(const ServedModel& model) const;  // a healthy worker for it, not draining
  bool stuck() const;                          // a worker hangs: destruction would wait for it
  absl::StatusOr<SchedulerStats> Stats();      // asks the engine thread; UNAVAILABLE after shutdown
  absl::StatusOr<RecentWork> Recent();         // asks the engine thread
  absl::StatusOr<CostTable> Costs();           // asks the engine thread
  absl::Status CheckInvariants();              // asks the engine thread

  // Those that take requests, in the order of loading.
  std::vector<ModelRef> models() const;
  // Of a model that is or was there; of the last thousand loads.
  std::string ModelName(ModelId id) const;
  std::span<Backend* const> backends() const;  // by WorkerId
  std::span<const LatencyClass> classes() const;

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace saccade
