#pragma once
// A discrete-event simulation of the engine around the real scheduler and caches: a manual clock,
// workers with known true costs, and a device whose "model" is a hash chain over real page tables,
// so that a wrong page, a stale embedding, a lost or a repeated token changes the answer.
//
// After every event it checks: the plan keeps its limits; no work of an ended or expired request
// runs; a sequence has one item per step; a worker is never idle while work waits; one Outcome per
// admitted request; answers equal those of the request alone; nothing late is called on time;
// Scheduler::CheckInvariants.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/digest.h"
#include "kv/timeline.h"
#include "sched/scheduler.h"

namespace saccade::sim {

inline uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Deterministic on every platform: from a seed, or from the bytes of a fuzzer, one for each number.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  explicit Random(std::span<const uint8_t> bytes) : state_(0), bytes_(bytes) {}
  uint64_t Next() {
    if (!bytes_) return state_ = Mix(state_, 1);
    if (bytes_->empty()) return ~uint64_t{0};  // no chance of anything
    const uint8_t byte = bytes_->front();
    bytes_ = bytes_->subspan(1);
    return Mix(byte, 1);
  }
  bool done() const { return bytes_ && bytes_->empty(); }
  uint32_t Below(uint32_t n) { return n == 0 ? 0 : static_cast<uint32_t>((Next() >> 32) % n); }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  bool Chance(double p) { return Uniform() < p; }

 private:
  uint64_t state_;
  std::optional<std::span<const uint8_t>> bytes_;
};

// What a step really takes, in microseconds.
struct TrueCosts {
  double vision_base = 500;
  double frame = 3000;
  double trunk_base = 1000;
  double prefill_row = 50;
  double decode_row = 100;
  double noise = 0;   // uniform, +- this fraction
  double slice = 50;  // each slice of a pass, beside its layers

  double Of(const StepShape& s) const {
    const bool trunk = s.prefill_rows + s.decode_rows > 0;
    return (s.frames > 0 ? vision_base : 0) + frame * s.frames + (trunk ? trunk_base : 0) +
           prefill_row * s.prefill_rows + decode_row * s.decode_rows;
  }
  double Of(const StepPlan& plan) const {
    if (plan.slice.whole()) return Of(plan.shape);
    TrueCosts part = *this;
    for (double* base : {&part.vision_base, &part.trunk_base, &part.decode_row}) {
      *base *= plan.slice.share.base;
    }
    for (double* rows : {&part.frame, &part.prefill_row}) *rows *= plan.slice.share.rows;
    return slice + part.Of(plan.shape);
  }
};

// The model of the simulation: the value of a row hashes its input and everything before it.
struct Chain {
  uint64_t state = 1;
  uint64_t Push(uint64_t position, uint64_t input) {
    const uint64_t value = Mix(Mix(state, position), input);
    state = Mix(state, value);
    return value;
  }
  void Read(uint64_t value) { state = Mix(state, value); }
  // A row of a group, which depends on all of them: what is stored is its own part, and whoever
  // reads it reads the others too.
  static uint64_t GroupRow(uint64_t position, uint64_t input) {
    return Mix(Mix(0x6772'6f75'70ull, position), input);
  }
  uint64_t PushAny(const Timeline& timeline, uint32_t position, uint64_t input) {
    if (position >= timeline.group_tokens()) return Push(position, input);
    const uint64_t value = GroupRow(position, input);
    Read(value);
    return value;
  }
  int32_t Sample(const SampleTarget& target) const {
    const uint64_t draw = target.temperature > 0 ? Mix(target.seed, target.index) : 0;
    return static_cast<int32_t>(Mix(state, draw) % 1000);
  }
  // Tokens of a vocabulary of 1000, and log-probabilities that fall.
  std::vector<ScoredToken> Top(uint32_t count) const {
    std::vector<ScoredToken> top;
    float log_prob = 0;
    for (uint32_t i = 0; i < count; ++i) {
      log_prob -= 0.1F + static_cast<float>(Mix(state, 500 + i) % 1000) / 1000;
      top.push_back({static_cast<int32_t>((Mix(state, 0) + i * 7) % 1000), log_prob});
    }
    return top;
  }
};
inline uint64_t FrameValue(const Content& frame, uint32_t camera) {
  return Mix(Mix(frame.digest.high, frame.digest.low), camera);
}
inline uint64_t VisionInput(uint64_t frame_value, uint32_t offset) {
  return Mix(frame_value, 1'000'000 + offset);
}

inline uint64_t StateInputOf(const Segment& s) {
  uint64_t value = 5;
  for (const float v : *s.state) value = Mix(value, std::bit_cast<uint32_t>(v));
  return value;
}
// What a prompt token that is no vision is made from.
inline uint64_t PromptInput(const Timeline& timeline, const Segment& s, uint32_t token) {
  return s.modality == Modality::kState ? StateInputOf(s)
                                        : static_cast<uint64_t>(timeline.tokens()[token]);
}
// A latent before its first denoise step, and after another one over a prompt.
inline uint64_t FirstLatent(uint64_t seed) { return Mix(seed, 0x6e6f'6973ull); }
inline uint64_t NextLatent(uint64_t latent, const Chain& prompt, uint32_t index, uint32_t steps) {
  return Mix(Mix(latent, prompt.state), uint64_t{index} << 32 | steps);
}
inline std::vector<float> ChunkOf(uint64_t latent) {
  return {static_cast<float>(latent % 100'000), static_cast<float>((latent >> 32) % 100'000)};
}

// The bytes of one lane.
class FakeDevice {
 public:
  explicit FakeDevice(const LaneOptions& options)
      : options_(options),
        kv_(size_t{options.kv.num_blocks} * options.kv.block_tokens),
        embeddings_(options.embedding_slots),
        tokens_(size_t{options.sequence_slots} * kColumns, -7),
        latents_(options.sequence_slots) {}

  void Run(const StepPlan& plan, StepResult& out, bool lose_rows = false);
  // A slice of the pass failed: one that was queued behind it finds nothing.
  void Fail(const StepPlan& plan) { failed_ = plan.slice.pass; }

 private:
  // What lies in a parking place: what the first slice of a pass read, as the inputs of its frames
  // or rows.
  struct Parked {
    StepId pass;
    uint32_t layers = 0;  // that have run
    std::vector<uint64_t> inputs;
  };

  // A row reads the token before it and no older one, so few columns do.
  static constexpr uint32_t kColumns = 2;
  uint64_t& Cell(const TrunkItem& item, uint32_t token, size_t& page);
  void ReadInputs(const StepPlan& plan, std::vector<uint64_t>& out) const;

  LaneOptions options_;
  std::map<uint32_t, Parked> parked_;  // by place
  StepId failed_;
  std::vector<uint64_t> kv_;
  std::vector<uint64_t> embeddings_;
  std::vector<int32_t> tokens_;
  std::vector<uint64_t> latents_;
};

struct Spec {
  uint32_t klass = 0;
  uint32_t model = 0;
  uint64_t session = 1;
  std::shared_ptr<const Timeline> timeline = nullptr;
  uint32_t action_tokens = 7;
  uint32_t least_steps = 0;
  uint32_t samples = 1;
  float temperature = 0;
  uint64_t seed = 0;
  AnswerKind kind = AnswerKind::kTokens;
  std::vector<int32_t> stop_tokens = {};
  std::optional<BeamOptions> beams = std::nullopt;
  std::optional<Micros> deadline = std::nullopt;  // from now; the class's when absent
  std::optional<Micros> next = std::nullopt;      // from now: when the session's next one comes
  std::shared_ptr<TapSink> tap = nullptr;
};

// What became of a request.
struct Tracked {
  RequestId id;
  Spec spec;
  TimePoint arrival{};
  TimePoint deadline = kNever;
  absl::Status offered;
  std::optional<Outcome> outcome;
  TimePoint outcome_at{};
  std::optional<TimePoint> first_start;
  uint32_t steps = 0;  // that named it and finished
  uint32_t encodes = 0;
  std::vector<std::vector<int32_t>> streamed;  // as the engine would emit them
  std::vector<TimePoint> token_times;          // of sample 0

  bool ok() const { return outcome && outcome->status.ok(); }
  std::vector<std::vector<int32_t>> tokens() const {
    std::vector<std::vector<int32_t>> all;
    for (const Outcome::Answer& answer : outcome->answers) all.push_back(answer.tokens);
    return all;
  }
  Reason reason() const { return GetErrorInfo(outcome ? outcome->status : offered).reason; }
  Micros latency() const { return ToMicros(outcome_at - arrival); }
};

struct FinishedStep {
  StepPlan plan;
  TimePoint started;
  TimePoint finished;
};

struct Options {
  SchedulerOptions scheduler;
  std::vector<LaneOptions> lanes;
  TrueCosts costs;
  uint64_t seed = 1;
  uint32_t check_every = 1;  // events between full checks
  bool keep_steps = true;
  // What a step really takes in microseconds; `costs` when empty.
  std::function<double(const StepPlan&)> step_us = nullptr;
  std::function<void(const StepPlan&, Micros took)> on_start = nullptr;
  std::function<void(const Tracked&)> on_outcome = nullptr;
  // False: the device computes nothing and answers are not compared, for simulated hours. Prompts
  // and tokens of finished requests are then forgotten too.
  bool verify = true;
  // A fault for tests of the simulation itself: the device loses the first row of a prompt's
  // later chunks.
  bool lose_rows = false;
};

inline LatencyClass Class(std::string name, uint32_t tier, int64_t deadline_us,
                          OnLate on_late = OnLate::kReject, uint32_t max_queued = 64,
                          uint32_t shares = 1, Modality preferred = Modality::kAction) {
  LatencyClass c;
  c.name = std::move(name);
  c.tier = tier;
  c.deadline = Micros(deadline_us);
  c.on_late = on_late;
  c.max_queued = max_queued;
  c.shares = shares;
  c.preferred = preferred;
  return c;
}

inline LaneOptions Lane(int32_t worker = 0, int32_t model = 0, uint32_t blocks = 512) {
  LaneOptions lane;
  lane.worker = WorkerId(worker);
  lane.model = ModelId(model);
  lane.kv.num_blocks = blocks;
  lane.kv.block_tokens = 16;
  for (PartitionQuota& quota : lane.kv.partitions) quota = {0, blocks};
  lane.embedding_slots = 64;
  lane.sequence_slots = 64;
  lane.max_action_tokens = 64;
  lane.max_rows = 512;
  lane.max_frames = 8;
  lane.max_logit_rows = 64;
  return lane;
}

// `count` layers alike, and for the trunk a head.
inline std::vector<LayerShare> EvenLayers(uint32_t count, double head = 0) {
  std::vector<LayerShare> layers(count, LayerShare{1, 1});
  if (head > 0) layers.push_back({head, 0});
  return layers;
}

// Four classes: 0 control (tier 0), 1 perception and 2 planning (tier 1), 3 best effort (tier 2).
inline Options DefaultOptions() {
  Options options;
  options.scheduler.classes = {Class("control", 0, 40'000),
                               Class("perception", 1, 0, OnLate::kRunLate, 64, 4),
                               Class("planning", 1, 0, OnLate::kRunLate, 64, 2),
                               Class("best_effort", 2, 0, OnLate::kRunLate, 256, 1)};
  options.lanes = {Lane()};
  return options;
}

class Simulation {
 public:
  explicit Simulation(Options options);

  // Pixels are interned: one number, one frame.
  ContentRef Frame(uint64_t number);
  // A prefix-LM prompt: [32 vision tokens of each frame] [text] as a group, then one state row
  // unless `state` is 0. For flows: all of it may be reused.
  std::shared_ptr<const Timeline> Prefix(const std::vector<uint64_t>& frames, uint32_t text_tokens,
                                         uint64_t text_seed = 1, uint64_t state = 0,
                                         PrefixReuse reuse = PrefixReuse::kAll);
  // [BOS] [32 vision tokens of each frame] [text].
  std::shared_ptr<const Timeline> Prompt(const std::vector<uint64_t>& frames, uint32_t text_tokens,
                                         uint64_t text_seed = 1, uint32_t vision_tokens = 32);

  size_t Offer(Spec spec);  // now; index into requests()
  void After(Micros delay, std::function<void()> action);
  void RunFor(Micros time);
  // Until nothing is left to do; fails the test when that takes longer than `limit`.
  void RunToIdle(Micros limit = Micros(600'000'000));
  // One more event; false when there is none.
  bool Step();

  // Models come and go. What they hold in the device is lost with them.
  absl::Status AddLane(const LaneOptions& lane);
  std::optional<std::vector<std::shared_ptr<saccade::Lane>>> RemoveModel(uint32_t model);
  void FailModel(uint32_t model);

  void Cancel(size_t request);
  void CancelSession(uint64_t session);
  void LoseWorker(int32_t worker);
  void FailRunningStep(int32_t worker);  // when it finishes
  // The step that runs on the worker takes that much longer.
  void Hang(int32_t worker, Micros time);
  // The process does not run for that long, and then everything that was due happens at once.
  void Suspend(Micros time) { now_ += time; }
  void MakeNonFinite(size_t request, uint32_t sample, uint32_t index);

  TimePoint now() const { return now_; }
  Scheduler& scheduler() { return *scheduler_; }
  const std::vector<Tracked>& requests() const { return requests_; }
  const Tracked& request(size_t i) const { return requests_[i]; }
  const std::vector<FinishedStep>& steps() const { return steps_; }
  uint64_t revocations() const { return revocations_; }
  // Steps of the worker that is running, and one queued.
  const StepPlan* running(int32_t worker = 0) const;
  const StepPlan* queued(int32_t worker = 0) const;
  bool InFlight(size_t request) const;
  double MicrosOf(const StepShape& shape) const { return options_.costs.Of(shape); }
  uint32_t HeldBlocks(size_t lane = 0);
  // Nothing is held anywhere.
  void ExpectBaseline();

 private:
  struct Worker {
    WorkerId id;
    std::optional<StepPlan> running;
    std::optional<StepPlan> queued;
    TimePoint started{};
    TimePoint finishes{};
    bool fail = false;
    bool lost = false;
  };
  struct Event {
    TimePoint at;
    uint64_t order;
    std::function<void()> action;
    bool operator>(const Event& other) const {
      return std::tie(at, order) > std::tie(other.at, other.order);
    }
  };

  void StartStep(Worker& worker, StepPlan plan);
  void FinishStep(Worker& worker);
  void CheckPlan(const Worker& worker, const StepPlan& plan, TimePoint start);
  void Pump();
  void Deliver();
  bool ArrivalIsNear();
  void CheckAll();
  void AddDevice(const LaneOptions& lane);
  std::vector<std::vector<int32_t>> Expected(const Tracked& request) const;
  static Chain ReadPrompt(const Timeline& timeline);
  void ExpectChunks(const Tracked& request);
  static std::vector<std::vector<int32_t>> ExpectedBeams(const Tracked& r, const Chain& prompt);
  Tracked* Find(RequestId id);
  FakeDevice& DeviceOf(const StepPlan& plan);

  Options options_;
  const uint32_t block_tokens_;  // of every lane
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<FakeDevice> devices_;  // by lane
  std::vector<Worker> workers_;
  std::vector<Event> events_;  // a heap
  uint64_t next_event_ = 0;
  TimePoint now_{Micros(1'000'000)};
  Random noise_;
  std::map<uint64_t, ContentRef> frames_;
  std::vector<Tracked> requests_;
  std::unordered_map<RequestId, size_t> index_;
  std::vector<FinishedStep> steps_;
  std::set<std::tuple<uint64_t, uint32_t, uint32_t>> non_finite_;
  uint64_t revocations_ = 0;
  uint64_t checks_ = 0;
  size_t live_ = 0;
  std::vector<TimePoint> announced_;  // that may still come
};

// ------------------------------------------------------------------------------------------------

inline uint64_t& FakeDevice::Cell(const TrunkItem& item, uint32_t token, size_t& page) {
  while (page < item.pages.size() && token >= item.pages[page].position + item.pages[page].len) {
    ++page;
  }
  static uint64_t nowhere;
  if (page == item.pages.size() || token < item.pages[page].position) {
    ADD_FAILURE() << "token " << token << " has no page";
    return nowhere;
  }
  const size_t offset = token - item.pages[page].position;
  EXPECT_LT(offset, options_.kv.block_tokens);
  EXPECT_LT(static_cast<uint32_t>(item.pages[page].block.value()), options_.kv.num_blocks);
  return kv_[static_cast<size_t>(item.pages[page].block.value()) * options_.kv.block_tokens +
             offset];
}

inline void FakeDevice::ReadInputs(const StepPlan& plan, std::vector<uint64_t>& out) const {
  for (const EncodeItem& item : plan.encodes) out.push_back(FrameValue(*item.frame, item.camera));
  for (const TrunkItem& item : plan.trunk) {
    const Timeline& timeline = *item.timeline;
    size_t segment = 0;
    for (uint32_t t = item.begin; t < item.begin + item.count; ++t) {
      if (!item.known_tokens.empty()) {
        ASSERT_EQ(item.known_tokens.size(), item.count);
        ASSERT_GE(t, timeline.num_tokens());
        out.push_back(static_cast<uint64_t>(item.known_tokens[t - item.begin]));
      } else if (t >= timeline.num_tokens()) {
        ASSERT_TRUE(item.slot.valid());
        out.push_back(
            static_cast<uint64_t>(tokens_[static_cast<size_t>(item.slot.value()) * kColumns +
                                          (t - timeline.num_tokens()) % kColumns]));
      } else {
        while (t >= timeline.segments()[segment].end) ++segment;
        const Segment& s = timeline.segments()[segment];
        if (s.modality == Modality::kVision) {
          ASSERT_TRUE(item.embeddings[segment].valid());
          out.push_back(VisionInput(
              embeddings_[static_cast<size_t>(item.embeddings[segment].value())], t - s.begin));
        } else {
          out.push_back(PromptInput(timeline, s, t));
        }
      }
    }
  }
}

inline void FakeDevice::Run(const StepPlan& plan, StepResult& out, bool lose_rows) {
  for (const BlockCopy& copy : plan.copies) {
    const size_t n = options_.kv.block_tokens;
    std::copy_n(kv_.begin() + static_cast<std::ptrdiff_t>(copy.from.value() * n), n,
                kv_.begin() + static_cast<std::ptrdiff_t>(copy.to.value() * n));
  }
  std::vector<uint64_t> inputs;
  // Rows of a step may read what its own encodes write.
  for (const EncodeItem& item : plan.encodes) {
    if (!plan.slice.whole()) break;
    embeddings_[static_cast<size_t>(item.slot.value())] = FrameValue(*item.frame, item.camera);
  }
  if (!plan.slice.whole() && plan.slice.pass == failed_) return;
  if (plan.slice.first()) ReadInputs(plan, inputs);
  if (!plan.slice.whole()) {
    Parked& parked = parked_[plan.slice.place];
    if (plan.slice.first()) {
      parked = {plan.slice.pass, 0, std::move(inputs)};
    } else {
      ASSERT_TRUE(plan.copies.empty()) << "blocks are copied twice";
    }
    ASSERT_EQ(parked.pass, plan.slice.pass) << "another pass took the parking place";
    ASSERT_EQ(parked.layers, plan.slice.begin) << "a slice is lost or runs twice";
    parked.layers = plan.slice.end;
    if (!plan.slice.last()) return;
    inputs = std::move(parked.inputs);
  }
  size_t next = 0;
  for (const EncodeItem& item : plan.encodes) {
    embeddings_[static_cast<size_t>(item.slot.value())] = inputs[next++];
  }
  for (const TrunkItem& item : plan.trunk) {
    const Timeline& timeline = *item.timeline;
    Chain chain;
    size_t page = 0;
    for (uint32_t t = 0; t < item.begin; ++t) chain.Read(Cell(item, t, page));
    for (uint32_t t = item.begin; t < item.begin + item.count; ++t) {
      const uint64_t input = inputs[next++];
      const uint64_t value = chain.PushAny(timeline, t, input);
      const bool lost = lose_rows && t == item.begin && t > 0 && t < timeline.num_tokens();
      Cell(item, t, page) = lost ? 0 : value;
    }
    for (const SampleTarget& target : item.samples) {
      if (timeline.reuse() == PrefixReuse::kNone) {  // a head that reads the prompt
        out.tokens.push_back({item.request, target.sample, target.index, 0});
        out.chunks.push_back({item.request, target.sample, ChunkOf(chain.state)});
        continue;
      }
      const int32_t token = chain.Sample(target);
      tokens_[static_cast<size_t>(target.slot.value()) * kColumns + target.index % kColumns] =
          token;
      out.tokens.push_back({item.request, target.sample, target.index, token});
    }
    if (item.top) {
      out.tops.push_back(
          {item.request, item.top->sample, item.top->index, chain.Top(item.top->count)});
    }
  }
  for (const FlowItem& flow : plan.flows) {
    TrunkItem item;  // for its pages
    item.pages = flow.pages;
    Chain prompt;
    size_t page = 0;
    const uint32_t tokens = flow.timeline->num_tokens();
    for (uint32_t t = 0; t < tokens; ++t) prompt.Read(Cell(item, t, page));
    uint64_t& latent = latents_[static_cast<size_t>(flow.slot.value())];
    if (flow.index == 0) latent = FirstLatent(flow.seed);
    latent = NextLatent(latent, prompt, flow.index, flow.steps);
    out.tokens.push_back({flow.request, flow.sample, flow.index, 0});
    if (flow.index + 1 == flow.steps) {
      out.chunks.push_back({flow.request, flow.sample, ChunkOf(latent)});
    }
  }
}

inline Simulation::Simulation(Options options)
    : options_(std::move(options)),
      block_tokens_(options_.lanes[0].kv.block_tokens),
      noise_(options_.seed) {
  auto scheduler = Scheduler::Create(options_.scheduler, options_.lanes);
  EXPECT_TRUE(scheduler.ok()) << scheduler.status();
  scheduler_ = *std::move(scheduler);
  for (const LaneOptions& lane : options_.lanes) AddDevice(lane);
}

inline void Simulation::AddDevice(const LaneOptions& lane) {
  devices_.emplace_back(lane);
  const bool known = std::any_of(workers_.begin(), workers_.end(),
                                 [&](const Worker& w) { return w.id == lane.worker; });
  if (!known) workers_.emplace_back().id = lane.worker;
}

inline absl::Status Simulation::AddLane(const LaneOptions& lane) {
  ASSIGN_OR_RETURN(auto made, Scheduler::MakeLane(lane, ParkingPlaces(options_.scheduler.classes)));
  const absl::Status status = scheduler_->AddLane(std::move(made));
  CheckAll();
  if (!status.ok()) return status;
  options_.lanes.push_back(lane);
  AddDevice(lane);
  After(Micros(0), [] {});  // the engine looks for work
  return status;
}

inline std::optional<std::vector<std::shared_ptr<saccade::Lane>>> Simulation::RemoveModel(
    uint32_t model) {
  const ModelId id(static_cast<int32_t>(model));
  auto removed = scheduler_->RemoveModel(id);
  CheckAll();
  for (size_t i = options_.lanes.size(); removed && i-- > 0;) {
    if (options_.lanes[i].model != id) continue;
    options_.lanes.erase(options_.lanes.begin() + static_cast<std::ptrdiff_t>(i));
    devices_.erase(devices_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return removed;
}

inline void Simulation::FailModel(uint32_t model) {
  scheduler_->FailModel(ModelId(static_cast<int32_t>(model)), absl::UnavailableError("unloaded"),
                        now_);
  CheckAll();
  After(Micros(0), [] {});
}

inline ContentRef Simulation::Frame(uint64_t number) {
  ContentRef& frame = frames_[number];
  if (frame == nullptr) {
    auto content = std::make_shared<Content>();
    content->digest = DigestBuilder("frame.v1").Field(number).Finish();
    content->width = content->height = 1;
    content->rgb = {1, 2, 3};
    frame = std::move(content);
  }
  return frame;
}

inline std::shared_ptr<const Timeline> Simulation::Prompt(const std::vector<uint64_t>& frames,
                                                          uint32_t text_tokens, uint64_t text_seed,
                                                          uint32_t vision_tokens) {
  TimelineBuilder builder(DigestBuilder("salt").Finish(), block_tokens_);
  builder.AddText(std::vector<int32_t>{1});
  for (uint32_t camera = 0; camera < frames.size(); ++camera) {
    builder.AddVision(camera, Frame(frames[camera]), vision_tokens);
  }
  std::vector<int32_t> text;
  for (uint32_t i = 0; i < text_tokens; ++i) {
    text.push_back(static_cast<int32_t>(Mix(text_seed, i) % 30000));
  }
  builder.AddText(text);
  return builder.Build();
}

inline std::shared_ptr<const Timeline> Simulation::Prefix(const std::vector<uint64_t>& frames,
                                                          uint32_t text_tokens, uint64_t text_seed,
                                                          uint64_t state, PrefixReuse reuse) {
  TimelineBuilder builder(DigestBuilder("salt").Finish(), block_tokens_);
  for (uint32_t camera = 0; camera < frames.size(); ++camera) {
    builder.AddVision(camera, Frame(frames[camera]), 32);
  }
  std::vector<int32_t> text;
  for (uint32_t i = 0; i < text_tokens; ++i) {
    text.push_back(static_cast<int32_t>(Mix(text_seed, i) % 30000));
  }
  builder.AddText(text).EndGroup().SetReuse(reuse);
  if (state != 0) {
    builder.AddState(std::make_shared<const std::vector<float>>(3, static_cast<float>(state)));
  }
  return builder.Build();
}

inline size_t Simulation::Offer(Spec spec) {
  if (!options_.verify && frames_.size() > 4096) frames_.clear();  // pixels live as long as used
  Tracked tracked;
  tracked.id = RequestId(requests_.size() + 1);
  tracked.arrival = now_;
  tracked.streamed.resize(spec.samples);
  Request request;
  request.id = tracked.id;
  request.session = SessionId(spec.session);
  request.model = ModelId(static_cast<int32_t>(spec.model));
  request.klass = ClassId(static_cast<int32_t>(spec.klass));
  request.arrival = now_;
  if (spec.deadline) request.deadline = now_ + *spec.deadline;
  if (spec.next) {
    request.next_arrival = now_ + *spec.next;
    announced_.push_back(request.next_arrival);
  }
  request.timeline = spec.timeline;
  request.kind = spec.kind;
  request.action_tokens = spec.action_tokens;
  request.least_steps = spec.least_steps;
  request.samples = spec.samples;
  request.temperature = spec.temperature;
  request.seed = spec.seed;
  request.stop_tokens = spec.stop_tokens;
  request.beams = spec.beams;
  request.tap = spec.tap;
  tracked.deadline = request.deadline;
  const Micros of_class = options_.scheduler.classes[spec.klass].deadline;
  if (tracked.deadline == kNever && of_class.count() > 0) tracked.deadline = now_ + of_class;
  tracked.spec = std::move(spec);
  tracked.offered = scheduler_->Offer(std::move(request), now_);
  if (tracked.offered.ok()) ++live_;
  index_[tracked.id] = requests_.size();
  requests_.push_back(std::move(tracked));
  After(Micros(0), [] {});  // the engine looks for work
  return requests_.size() - 1;
}

inline void Simulation::After(Micros delay, std::function<void()> action) {
  events_.push_back({now_ + delay, next_event_++, std::move(action)});
  std::push_heap(events_.begin(), events_.end(), std::greater<>());
}

inline bool Simulation::Step() {
  // The earliest of: a scripted event, a finished step, the scheduler's own wake-up.
  TimePoint next = kNever;
  Worker* finished = nullptr;
  for (Worker& worker : workers_) {
    if (worker.running && !worker.lost && worker.finishes < next) {
      next = worker.finishes;
      finished = &worker;
    }
  }
  const bool scripted = !events_.empty() && events_.front().at <= next;
  if (scripted) next = events_.front().at;
  const TimePoint wake = scheduler_->NextWake();
  if (wake < next) {
    now_ = std::max(now_, wake);
  } else if (next == kNever) {
    return false;
  } else if (scripted) {
    now_ = std::max(now_, next);
    std::pop_heap(events_.begin(), events_.end(), std::greater<>());
    const Event event = std::move(events_.back());
    events_.pop_back();
    event.action();
  } else {
    now_ = std::max(now_, next);
    FinishStep(*finished);
  }
  Pump();
  return true;
}

inline void Simulation::RunFor(Micros time) {
  bool over = false;
  After(time, [&over] { over = true; });
  while (!over && Step()) {
  }
}

inline void Simulation::RunToIdle(Micros limit) {
  const TimePoint until = now_ + limit;
  while (Step()) {
    if (now_ > until) {
      ADD_FAILURE() << "not idle after " << limit.count() << " us, " << live_ << " requests live";
      return;
    }
  }
  EXPECT_EQ(live_, 0u);
  EXPECT_TRUE(scheduler_->idle());
}

inline void Simulation::Cancel(size_t request) {
  scheduler_->Fail(requests_[request].id, absl::CancelledError("cancelled"), now_);
  CheckAll();
}

inline void Simulation::CancelSession(uint64_t session) {
  scheduler_->FailSession(SessionId(session), absl::CancelledError("gone"), now_);
  CheckAll();
}

inline void Simulation::LoseWorker(int32_t worker) {
  for (Worker& w : workers_) {
    if (w.id != WorkerId(worker)) continue;
    w.lost = true;
    w.running.reset();
    w.queued.reset();
  }
  scheduler_->OnWorkerLost(WorkerId(worker), now_);
  CheckAll();
  After(Micros(0), [] {});
}

inline void Simulation::FailRunningStep(int32_t worker) {
  for (Worker& w : workers_) {
    if (w.id == WorkerId(worker)) w.fail = true;
  }
}

inline void Simulation::MakeNonFinite(size_t request, uint32_t sample, uint32_t index) {
  non_finite_.insert({requests_[request].id.value(), sample, index});
}

inline void Simulation::Hang(int32_t worker, Micros time) {
  for (Worker& w : workers_) {
    if (w.id == WorkerId(worker) && w.running) w.finishes += time;
  }
}

inline const StepPlan* Simulation::running(int32_t worker) const {
  for (const Worker& w : workers_) {
    if (w.id == WorkerId(worker) && w.running) return &*w.running;
  }
  return nullptr;
}

inline const StepPlan* Simulation::queued(int32_t worker) const {
  for (const Worker& w : workers_) {
    if (w.id == WorkerId(worker) && w.queued) return &*w.queued;
  }
  return nullptr;
}

inline bool Names(const StepPlan& plan, RequestId id) {
  return std::any_of(plan.trunk.begin(), plan.trunk.end(),
                     [id](const TrunkItem& item) { return item.request == id; }) ||
         std::any_of(plan.encodes.begin(), plan.encodes.end(),
                     [id](const EncodeItem& item) { return item.request == id; });
}

inline bool Simulation::InFlight(size_t request) const {
  return std::any_of(workers_.begin(), workers_.end(), [&](const Worker& worker) {
    return (worker.running && Names(*worker.running, requests_[request].id)) ||
           (worker.queued && Names(*worker.queued, requests_[request].id));
  });
}

inline uint32_t Simulation::HeldBlocks(size_t lane) {
  const KvStats stats = scheduler_->stats().lanes[lane].kv;
  uint32_t held = 0;
  for (const PartitionStats& p : stats.partitions) held += p.held;
  return held;
}

inline void Simulation::ExpectBaseline() {
  const SchedulerStats stats = scheduler_->stats();
  for (const SchedulerStats::Class& c : stats.classes) EXPECT_EQ(c.queued + c.running, 0u);
  for (const SchedulerStats::Lane& lane : stats.lanes) {
    uint32_t idle = 0;
    for (const PartitionStats& p : lane.kv.partitions) {
      EXPECT_EQ(p.held, 0u);
      idle += p.idle;
    }
    EXPECT_EQ(lane.kv.free_blocks + idle, lane.kv.num_blocks);
    EXPECT_EQ(lane.embeddings_held, 0u);
  }
  EXPECT_TRUE(scheduler_->CheckInvariants().ok()) << scheduler_->CheckInvariants();
}

inline FakeDevice& Simulation::DeviceOf(const StepPlan& plan) {
  for (size_t i = 0; i < options_.lanes.size(); ++i) {
    if (options_.lanes[i].worker == plan.worker && options_.lanes[i].model == plan.model) {
      return devices_[i];
    }
  }
  ADD_FAILURE() << "a step for an unknown lane";
  return devices_[0];
}

inline Tracked* Simulation::Find(RequestId id) {
  const auto it = index_.find(id);
  return it == index_.end() ? nullptr : &requests_[it->second];
}

inline void Simulation::StartStep(Worker& worker, StepPlan plan) {
  const double noise = 1 + options_.costs.noise * (2 * noise_.Uniform() - 1);
  const double us = options_.step_us ? options_.step_us(plan) : options_.costs.Of(plan) * noise;
  const Micros took(std::max<int64_t>(1, std::llround(us)));
  worker.started = now_;
  worker.finishes = now_ + took;
  if (options_.on_start) options_.on_start(plan, took);
  for (const TrunkItem& item : plan.trunk) {
    Tracked& r = *Find(item.request);
    if (!r.first_start) r.first_start = now_;
  }
  for (const FlowItem& item : plan.flows) {
    Tracked& r = *Find(item.request);
    if (!r.first_start) r.first_start = now_;
  }
  for (const EncodeItem& item : plan.encodes) {
    Tracked& r = *Find(item.request);
    if (!r.first_start) r.first_start = now_;
    r.encodes += plan.slice.first() ? 1 : 0;
  }
  worker.running = std::move(plan);
}

inline void Simulation::FinishStep(Worker& worker) {
  const StepPlan plan = *std::exchange(worker.running, std::nullopt);
  StepResult result;
  result.id = plan.id;
  result.started = worker.started;
  result.finished = now_;
  if (worker.fail) {
    worker.fail = false;
    result.status = absl::InternalError("injected");
    DeviceOf(plan).Fail(plan);
  } else {
    if (options_.verify) {
      DeviceOf(plan).Run(plan, result, options_.lose_rows);
    } else {
      for (const TrunkItem& item : plan.trunk) {
        if (!plan.slice.last()) break;
        if (item.top) {
          result.tops.push_back(
              {item.request, item.top->sample, item.top->index, Chain().Top(item.top->count)});
        }
        for (const SampleTarget& target : item.samples) {
          result.tokens.push_back({item.request, target.sample, target.index, 0});
        }
      }
      for (const FlowItem& item : plan.flows) {
        result.tokens.push_back({item.request, item.sample, item.index, 0});
        if (item.index + 1 == item.steps) result.chunks.push_back({item.request, item.sample, {0}});
      }
    }
    for (SampledToken& token : result.tokens) {
      if (non_finite_.contains({token.request.value(), token.sample, token.index})) {
        token.token = -1;
      }
    }
    for (TopTokens& top : result.tops) {
      if (non_finite_.contains({top.request.value(), top.sample, top.index})) top.tokens.clear();
    }
  }
  if (worker.queued) StartStep(worker, *std::exchange(worker.queued, std::nullopt));
  scheduler_->OnStepDone(plan, result, now_);
  std::set<uint64_t> named;
  for (const TrunkItem& item : plan.trunk) named.insert(item.request.value());
  for (const EncodeItem& item : plan.encodes) named.insert(item.request.value());
  for (const FlowItem& item : plan.flows) named.insert(item.request.value());
  for (const uint64_t id : named) ++Find(RequestId(id))->steps;
  for (const SampledToken& token : scheduler_->emitted()) {
    Tracked& r = *Find(token.request);
    ASSERT_FALSE(r.outcome.has_value()) << "a token after the end";
    ASSERT_EQ(r.streamed[token.sample].size(), token.index) << "a token is lost or repeated";
    r.streamed[token.sample].push_back(token.token);
    if (token.sample == 0) r.token_times.push_back(now_);
  }
  if (options_.keep_steps) steps_.push_back({plan, result.started, now_});
}

inline void Simulation::CheckPlan(const Worker& worker, const StepPlan& plan, TimePoint start) {
  EXPECT_EQ(plan.worker, worker.id);
  const auto lane = std::find_if(options_.lanes.begin(), options_.lanes.end(), [&](const auto& l) {
    return l.worker == plan.worker && l.model == plan.model;
  });
  ASSERT_NE(lane, options_.lanes.end());
  StepShape shape;
  uint32_t logits = 0;
  std::set<std::pair<uint64_t, int32_t>> sequences;
  bool wanted = false;
  const auto check_request = [&](RequestId id) {
    const Tracked& r = *Find(id);
    wanted |= !r.outcome.has_value();
    if (!plan.slice.first()) return;  // what a pass has begun, it carries on
    EXPECT_FALSE(r.outcome.has_value()) << "work for an ended request";
    const LatencyClass& klass = options_.scheduler.classes[r.spec.klass];
    if (klass.on_late != OnLate::kRunLate) {
      EXPECT_GT(r.deadline, start) << "expired work runs";
    }
  };
  for (const EncodeItem& item : plan.encodes) {
    check_request(item.request);
    ASSERT_NE(item.frame, nullptr);
    ++shape.frames;
  }
  for (const TrunkItem& item : plan.trunk) {
    check_request(item.request);
    EXPECT_GT(item.count, 0u);
    const uint32_t group = item.timeline->group_tokens();
    EXPECT_TRUE(item.begin >= group || item.begin + item.count >= group) << "a group in pieces";
    const bool wanted = !item.samples.empty() || item.top;
    const bool decode = item.slot.valid() && item.count == 1 && wanted;
    (decode ? shape.decode_rows : shape.prefill_rows) += item.count;
    logits += static_cast<uint32_t>(item.samples.size()) + (item.top ? 1 : 0);
    EXPECT_TRUE(sequences.insert({item.request.value(), item.slot.value()}).second)
        << "two items of one sequence in a step";
  }
  for (const FlowItem& item : plan.flows) {
    check_request(item.request);
    ++shape.decode_rows;
    ++logits;
    EXPECT_LT(item.index, item.steps);
    EXPECT_TRUE(sequences.insert({item.request.value(), item.slot.value()}).second)
        << "two denoise steps of one sample in a step";
  }
  EXPECT_TRUE(wanted || !plan.encodes.empty()) << "work that nobody waits for";
  if (!plan.slice.whole()) {
    EXPECT_LT(plan.slice.begin, plan.slice.end);
    EXPECT_LE(plan.slice.end, plan.slice.layers);
    EXPECT_TRUE(plan.encodes.empty() || plan.trunk.empty());
    for (const EncodeItem& item : plan.encodes) {
      EXPECT_EQ(item.camera, plan.encodes.front().camera);
    }
  }
  EXPECT_EQ(shape, plan.shape);
  EXPECT_GT(shape.frames + shape.prefill_rows + shape.decode_rows, 0u) << "an empty step";
  EXPECT_LE(shape.frames, lane->max_frames);
  EXPECT_LE(shape.prefill_rows + (lane->denoises ? 0 : shape.decode_rows), lane->max_rows);
  EXPECT_TRUE(plan.flows.empty() || plan.slice.whole()) << "a denoise step before its prompt";
  EXPECT_LE(logits, lane->max_logit_rows);
  const Micros ceiling = options_.scheduler.step_ceiling;
  if (ceiling.count() > 0 && plan.predicted_p99 > ceiling) {
    SCOPED_TRACE(testing::Message()
                 << "predicted " << plan.predicted_p99.count() << " us, " << shape.frames
                 << " frames, " << shape.prefill_rows << " + " << shape.decode_rows << " rows");
    // Only a single layer may pass it, and the smallest unit of one request that cannot be cut.
    if (!plan.slice.whole()) {
      EXPECT_EQ(plan.slice.end - plan.slice.begin, 1u);
      return;
    }
    EXPECT_EQ(plan.encodes.size() + plan.trunk.size() + plan.flows.size(), 1u);
    if (!plan.flows.empty()) return;
    EXPECT_TRUE(plan.shape.frames > 0 ? lane->vision_layers.size() < 2
                                      : lane->trunk_layers.size() < 2);
    EXPECT_LE(plan.shape.frames, 1u);
    const uint32_t group = plan.trunk.empty() ? 0 : plan.trunk[0].timeline->group_tokens();
    EXPECT_LE(plan.shape.prefill_rows, std::max(group, options_.scheduler.min_prefill_chunk));
  }
}

inline void Simulation::Pump() {
  scheduler_->Sweep(now_);
  for (Worker& worker : workers_) {
    if (worker.lost) continue;
    for (int round = 0; worker.queued && scheduler_->ShouldRevoke(*worker.queued, now_); ++round) {
      ASSERT_LT(round, 3) << "revoked and planned for ever";
      scheduler_->OnStepRevoked(*worker.queued, now_);
      worker.queued.reset();
      ++revocations_;
      const TimePoint free_at = std::max(now_, worker.started + worker.running->predicted_p50);
      if (auto plan = scheduler_->Plan(worker.id, now_, free_at)) {
        CheckPlan(worker, *plan, free_at);
        worker.queued = std::move(plan);
      }
    }
    for (;;) {
      const uint32_t depth = (worker.running ? 1u : 0u) + (worker.queued ? 1u : 0u);
      if (depth >= options_.scheduler.pipeline_depth || worker.queued) break;
      TimePoint free_at = now_;
      if (worker.running) {
        free_at = std::max(now_, worker.started + worker.running->predicted_p50);
      }
      auto plan = scheduler_->Plan(worker.id, now_, free_at);
      if (!plan) break;
      CheckPlan(worker, *plan, free_at);
      if (worker.running) {
        worker.queued = std::move(plan);
      } else {
        StartStep(worker, *std::move(plan));
      }
    }
  }
  Deliver();
  const bool all_idle = std::none_of(workers_.begin(), workers_.end(),
                                     [](const Worker& w) { return w.running.has_value(); });
  if (all_idle && live_ > 0 && !ArrivalIsNear()) {
    ADD_FAILURE() << "every worker is idle, " << live_ << " requests wait";
  }
  if (++checks_ % options_.check_every == 0) CheckAll();
}

// Less urgent work may be held back for an announced request: for a ceiling before it is due and a
// millisecond after.
inline bool Simulation::ArrivalIsNear() {
  std::erase_if(announced_, [this](TimePoint at) { return at + Micros(1'000) < now_; });
  return std::any_of(announced_.begin(), announced_.end(),
                     [this](TimePoint at) { return at - now_ <= options_.scheduler.step_ceiling; });
}

inline void Simulation::CheckAll() {
  const absl::Status status = scheduler_->CheckInvariants();
  ASSERT_TRUE(status.ok()) << status;
}

inline void Simulation::Deliver() {
  for (Outcome& outcome : scheduler_->TakeOutcomes()) {
    Tracked* r = Find(outcome.id);
    ASSERT_NE(r, nullptr);
    ASSERT_TRUE(r->offered.ok()) << "an outcome of a refused request";
    ASSERT_FALSE(r->outcome.has_value()) << "two outcomes of one request";
    r->outcome = std::move(outcome);
    r->outcome_at = now_;
    --live_;
    if (options_.on_outcome) options_.on_outcome(*r);
    if (!options_.verify) {
      r->spec.timeline = nullptr;
      r->streamed.clear();
      r->outcome->answers.clear();
      r->token_times.clear();
    }
    if (!r->outcome->status.ok()) continue;
    if (options_.verify) {
      if (r->spec.kind == AnswerKind::kPrefix) {
        EXPECT_EQ(r->streamed, std::vector<std::vector<int32_t>>(1));
      } else if (r->spec.kind != AnswerKind::kTokens) {
        ExpectChunks(*r);
      } else {
        if (r->spec.beams) {
          EXPECT_EQ(r->streamed, std::vector<std::vector<int32_t>>(r->spec.samples));
        } else {
          EXPECT_EQ(r->tokens(), r->streamed);
        }
        EXPECT_EQ(r->tokens(), Expected(*r)) << "request " << r->id.value();
      }
    }
    if (options_.scheduler.classes[r->spec.klass].on_late != OnLate::kRunLate) {
      EXPECT_LT(now_, r->deadline) << "a late answer passes for one on time";
      EXPECT_FALSE(r->outcome->late);
    } else {
      EXPECT_EQ(r->outcome->late, r->deadline <= now_);
    }
  }
}

inline Chain Simulation::ReadPrompt(const Timeline& timeline) {
  Chain prompt;
  for (const Segment& s : timeline.segments()) {
    for (uint32_t t = s.begin; t < s.end; ++t) {
      prompt.PushAny(timeline, t,
                     s.modality == Modality::kVision
                         ? VisionInput(FrameValue(*s.content, s.camera), t - s.begin)
                         : PromptInput(timeline, s, t));
    }
  }
  return prompt;
}

inline void Simulation::ExpectChunks(const Tracked& r) {
  ASSERT_EQ(r.outcome->answers.size(), r.spec.samples);
  EXPECT_EQ(r.streamed, std::vector<std::vector<int32_t>>(r.spec.samples));
  const Chain prompt = ReadPrompt(*r.spec.timeline);
  const bool flow = r.spec.kind == AnswerKind::kFlow;
  const uint32_t steps = r.outcome->denoise_steps;
  if (r.outcome->degraded) {
    EXPECT_EQ(options_.scheduler.classes[r.spec.klass].on_late, OnLate::kDegrade);
    EXPECT_GT(r.spec.least_steps, 0u);
    EXPECT_GE(steps, r.spec.least_steps);
    EXPECT_LT(steps, r.spec.action_tokens);
  } else {
    EXPECT_EQ(steps, flow ? r.spec.action_tokens : 0);
  }
  uint64_t latent = FirstLatent(r.spec.seed);
  for (uint32_t i = 0; i < steps; ++i) latent = NextLatent(latent, prompt, i, steps);
  EXPECT_EQ(r.outcome->answers[0].chunk, ChunkOf(flow ? latent : prompt.state))
      << "request " << r.id.value();
  // Seeds of further samples are the scheduler's to choose.
  for (const Outcome::Answer& answer : r.outcome->answers) EXPECT_EQ(answer.chunk.size(), 2u);
}

inline std::vector<std::vector<int32_t>> Simulation::Expected(const Tracked& r) const {
  const Timeline& timeline = *r.spec.timeline;
  const Chain prompt = ReadPrompt(timeline);
  if (r.spec.beams) return ExpectedBeams(r, prompt);
  std::vector<std::vector<int32_t>> tokens(r.spec.samples);
  for (uint32_t sample = 0; sample < r.spec.samples; ++sample) {
    Chain chain = prompt;
    SampleTarget target;
    target.temperature = r.spec.temperature;
    target.seed = r.spec.seed;
    // Seeds of further samples are the scheduler's to choose: only greedy ones are known here.
    if (sample > 0 && r.spec.temperature > 0) {
      tokens[sample] = r.outcome->answers[sample].tokens;
      continue;
    }
    for (uint32_t i = 0; i < r.spec.action_tokens; ++i) {
      target.index = i;
      tokens[sample].push_back(chain.Sample(target));
      const std::vector<int32_t>& stops = r.spec.stop_tokens;
      if (std::find(stops.begin(), stops.end(), tokens[sample].back()) != stops.end()) break;
      chain.Push(timeline.num_tokens() + i, static_cast<uint64_t>(tokens[sample].back()));
    }
  }
  return tokens;
}

// The search over chains of its own, each computed from the prompt: nothing is shared.
inline std::vector<std::vector<int32_t>> Simulation::ExpectedBeams(const Tracked& r,
                                                                   const Chain& prompt) {
  const uint32_t begin = r.spec.timeline->num_tokens();
  BeamSearch search(r.spec.samples, *r.spec.beams, r.spec.stop_tokens, r.spec.action_tokens);
  std::vector<std::vector<int32_t>> live(1);
  while (!search.over()) {
    std::vector<std::vector<ScoredToken>> tops;
    for (const std::vector<int32_t>& tokens : live) {
      Chain chain = prompt;
      for (uint32_t i = 0; i < tokens.size(); ++i) {
        chain.Push(begin + i, static_cast<uint64_t>(tokens[i]));
      }
      tops.push_back(chain.Top(search.candidates()));
    }
    std::vector<std::vector<int32_t>> next;
    for (const BeamSearch::Next& n : search.Advance(tops)) {
      next.push_back(live[n.parent]);
      next.back().push_back(n.token);
    }
    live = std::move(next);
  }
  std::vector<std::vector<int32_t>> tokens;
  for (const BeamSearch::Hypothesis& h : search.Results()) tokens.push_back(h.tokens);
  return tokens;
}

// Teaches the cost model, with prompts that nobody else uses, in the last class.
inline void WarmUp(Simulation& sim, uint32_t model = 0) {
  const auto last = static_cast<uint32_t>(sim.scheduler().stats().classes.size() - 1);
  for (uint64_t i = 0; i < 6; ++i) {
    sim.Offer({.klass = last,
               .model = model,
               .timeline = sim.Prompt({900'000 + i}, 20 + 30 * static_cast<uint32_t>(i), 77 + i)});
    sim.RunToIdle();
  }
}

}  // namespace saccade::sim
