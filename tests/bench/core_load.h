#pragma once
// The load that core_bench times and core_counts counts: 256 sessions with a request each, of four
// classes, on one worker; whoever ends is followed by the next.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kv/kv_cache.h"
#include "sched/scheduler.h"

namespace saccade::bench {

inline constexpr uint32_t kSessions = 256;

template <class T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return std::move(*value);
  std::cerr << value.status() << "\n";
  std::exit(2);
}

inline std::shared_ptr<const Timeline> Prompt(int32_t seed, uint32_t tokens) {
  TimelineBuilder builder(DigestBuilder("bench").Finish(), 16);
  std::vector<int32_t> text(tokens);
  for (uint32_t i = 0; i < tokens; ++i) text[i] = static_cast<int32_t>(i) * 7919 % 30'000 + seed;
  builder.AddText(text);
  return builder.Build();
}

inline LaneOptions Lane(uint32_t answer) {
  LaneOptions lane;
  lane.worker = WorkerId(0);
  lane.model = ModelId(0);
  lane.kv.num_blocks = 16'384;
  for (PartitionQuota& quota : lane.kv.partitions) quota = {0, lane.kv.num_blocks};
  lane.embedding_slots = 64;
  lane.sequence_slots = 512;
  lane.max_action_tokens = answer;
  lane.max_rows = 512;
  lane.max_frames = 8;
  lane.max_logit_rows = 64;
  return lane;
}

inline std::unique_ptr<Scheduler> MakeScheduler(uint32_t answer) {
  SchedulerOptions options;
  for (uint32_t c = 0; c < 4; ++c) {
    LatencyClass klass;
    klass.name = std::string(1, static_cast<char>('a' + c));
    klass.tier = std::min(c, 2u);
    klass.deadline = Micros(c == 3 ? 0 : 50'000'000);
    klass.on_late = OnLate::kRunLate;
    klass.max_queued = 512;
    options.classes.push_back(klass);
  }
  options.step_ceiling = Micros(10'000);
  const LaneOptions lane = Lane(answer);
  return Must(Scheduler::Create(options, {&lane, 1}));
}

// Simulated time: a step takes what its rows cost.
class SchedulerLoad {
 public:
  // `answer`: tokens of a request.
  explicit SchedulerLoad(uint32_t answer = 40)
      : scheduler_(MakeScheduler(answer)), answer_(answer) {
    for (int32_t i = 0; i < 64; ++i) prompts_.push_back(Prompt(i, 120));
  }
  // Offers what is missing; the number of offers.
  uint64_t Fill() {
    const uint64_t first = next_;
    for (; live_ < kSessions; ++live_, ++next_) {
      Request request;
      request.id = RequestId(next_);
      request.session = SessionId(next_ % kSessions);
      request.model = ModelId(0);
      request.klass = ClassId(static_cast<int32_t>(next_ % 4));
      request.arrival = now_;
      request.timeline = prompts_[next_ % prompts_.size()];
      request.action_tokens = answer_;
      if (!scheduler_->Offer(std::move(request), now_).ok()) std::exit(2);
    }
    return next_ - first;
  }
  void Plan() {
    plan_ = scheduler_->Plan(WorkerId(0), now_, now_);
    if (!plan_) std::exit(2);
  }
  // The worker's part; the number of tokens it gives.
  size_t Execute() {
    result_.Clear();
    result_.id = plan_->id;
    result_.started = now_;
    now_ += Micros(200 + 50 * plan_->shape.prefill_rows + 250 * plan_->shape.decode_rows);
    result_.finished = now_;
    for (const TrunkItem& item : plan_->trunk) {
      for (const SampleTarget& target : item.samples) {
        result_.tokens.push_back({item.request, target.sample, target.index, 5});
      }
    }
    return result_.tokens.size();
  }
  void Done() {
    scheduler_->OnStepDone(*plan_, result_, now_);
    scheduler_->Recycle(*std::move(plan_));
    live_ -= scheduler_->TakeOutcomes().size();
  }
  size_t items() const { return plan_->trunk.size(); }

 private:
  std::unique_ptr<Scheduler> scheduler_;
  const uint32_t answer_;
  std::vector<std::shared_ptr<const Timeline>> prompts_;
  std::optional<StepPlan> plan_;
  StepResult result_;
  TimePoint now_{Micros(1'000'000)};
  uint64_t next_ = 1;
  uint64_t live_ = 0;
};

// Runs tokens of 256 running requests through the scheduler, of which none begins or ends, and
// calls visit(tokens, allocations of the plan, allocations of its end) after each step.
// `allocations` counts.
template <class Count, class Visit>
void VisitRunningSteps(const Count& allocations, const Visit& visit) {
  constexpr uint32_t kWarmUp = 400;  // steps, in which all requests begin
  constexpr uint32_t kVisited = 350;
  SchedulerLoad load(/*answer=*/800);
  load.Fill();
  for (uint32_t i = 0; i < kWarmUp + kVisited; ++i) {
    const uint64_t before = allocations();
    load.Plan();
    const uint64_t planned = allocations();
    const uint64_t tokens = load.Execute();
    const uint64_t executed = allocations();
    load.Done();
    if (i >= kWarmUp) visit(tokens, planned - before, allocations() - executed);
  }
}

// Blocks got and given back, and prefixes found.
class KvLoad {
 public:
  static constexpr uint32_t kBlocks = 64;  // of one Churn
  static constexpr uint32_t kCached = 20;  // blocks that Find finds
  KvLoad() : cache_(Must(KvCache::Create(Lane(40).kv))), find_(Cached()) {
    for (int32_t i = 0; i < 32; ++i) prompts_.push_back(Prompt(100 + i, kBlocks * 16));
    auto sequence = cache_->Open(Cached(), now_);
    KvTransaction transaction = cache_->Begin(now_);
    if (!transaction.Reserve(*sequence, find_->num_tokens()).ok()) std::exit(2);
    std::move(transaction).Commit();
    cache_->Publish(*sequence, find_->num_tokens(), now_);
    cache_->Close(std::move(sequence), now_);
  }
  void Churn(uint32_t i) {
    auto sequence = cache_->Open(prompts_[i % prompts_.size()], now_);
    KvTransaction transaction = cache_->Begin(now_);
    if (!transaction.Reserve(*sequence, kBlocks * 16).ok()) std::exit(2);
    std::move(transaction).Commit();
    cache_->Close(std::move(sequence), now_);
  }
  // Of another request, equal in content: that is compared after the keys.
  void Find() {
    if (cache_->CachedTokens(*find_) != kCached * 16) std::exit(2);
  }

 private:
  // One token more than its blocks: the last block is never looked up.
  static std::shared_ptr<const Timeline> Cached() { return Prompt(3, kCached * 16 + 1); }
  const TimePoint now_{Micros(1)};
  std::unique_ptr<KvCache> cache_;
  std::shared_ptr<const Timeline> find_;
  std::vector<std::shared_ptr<const Timeline>> prompts_;
};

}  // namespace saccade::bench
