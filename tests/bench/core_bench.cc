// The core without a model: scheduler per step at 256 sessions, K/V blocks, prefix look-up.
// Allocations are counted, by an operator new of this program's own.
//   core_bench [--check]
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <new>
#include <vector>

#include "CLI/CLI.hpp"
#include "kv/kv_cache.h"
#include "nlohmann/json.hpp"
#include "sched/scheduler.h"
#include "tests/bench/timing.h"

namespace {
std::atomic<uint64_t> allocations{0};

void* Counted(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(std::size_t bytes) { return Counted(bytes); }
void* operator new[](std::size_t bytes) { return Counted(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace saccade::bench {
namespace {

constexpr double kStepBar = 50;   // microseconds of the scheduler per step
constexpr double kBlockBar = 1;   // to get and give back one block
constexpr double kLookupBar = 2;  // to find 20 cached blocks
constexpr uint32_t kSessions = 256;
constexpr uint32_t kSteps = 400;
constexpr uint32_t kRounds = 9;

template <class T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return std::move(*value);
  std::cerr << value.status() << "\n";
  std::exit(2);
}

std::shared_ptr<const Timeline> Prompt(int32_t seed, uint32_t tokens) {
  TimelineBuilder builder(DigestBuilder("bench").Finish(), 16);
  std::vector<int32_t> text(tokens);
  for (uint32_t i = 0; i < tokens; ++i) text[i] = static_cast<int32_t>(i) * 7919 % 30'000 + seed;
  builder.AddText(text);
  return builder.Build();
}

LaneOptions Lane() {
  LaneOptions lane;
  lane.worker = WorkerId(0);
  lane.model = ModelId(0);
  lane.kv.num_blocks = 16'384;
  for (PartitionQuota& quota : lane.kv.partitions) quota = {0, lane.kv.num_blocks};
  lane.embedding_slots = 64;
  lane.sequence_slots = 512;
  lane.max_action_tokens = 64;
  lane.max_rows = 512;
  lane.max_frames = 8;
  lane.max_logit_rows = 64;
  return lane;
}

struct StepCost {
  double plan_us = 0;
  double done_us = 0;
  double offer_us = 0;
  double items = 0;
  double allocations_per_token = 0;
};

// 256 sessions with a request each, of four classes; whoever ends is followed by the next.
StepCost MeasureSteps() {
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
  const LaneOptions lane = Lane();
  const auto scheduler = Must(Scheduler::Create(options, {&lane, 1}));
  std::vector<std::shared_ptr<const Timeline>> prompts;
  for (int32_t i = 0; i < 64; ++i) prompts.push_back(Prompt(i, 120));
  TimePoint now{Micros(1'000'000)};
  uint64_t next = 1;
  uint64_t tokens = 0;
  double offer = 0;
  double plan_s = 0;
  double done_s = 0;
  uint64_t items = 0;
  uint64_t live = 0;
  uint64_t steps = 0;
  const auto fill = [&] {
    const uint64_t first = next;
    offer += CpuSeconds([&] {
      for (; live < kSessions; ++live, ++next) {
        Request request;
        request.id = RequestId(next);
        request.session = SessionId(next % kSessions);
        request.model = ModelId(0);
        request.klass = ClassId(static_cast<int32_t>(next % 4));
        request.arrival = now;
        request.timeline = prompts[next % prompts.size()];
        request.action_tokens = 40;
        if (!scheduler->Offer(std::move(request), now).ok()) std::exit(2);
      }
    });
    return next - first;
  };
  uint64_t offers = fill();
  // Until the cost model knows the steps and requests are at every stage of their life.
  const auto run = [&](uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
      std::optional<StepPlan> plan;
      plan_s += CpuSeconds([&] { plan = scheduler->Plan(WorkerId(0), now, now); });
      if (!plan) std::exit(2);
      StepResult result;
      result.id = plan->id;
      result.started = now;
      now += Micros(200 + 50 * plan->shape.prefill_rows + 250 * plan->shape.decode_rows);
      result.finished = now;
      for (const TrunkItem& item : plan->trunk) {
        for (const SampleTarget& target : item.samples) {
          result.tokens.push_back({item.request, target.sample, target.index, 5});
        }
      }
      items += plan->trunk.size();
      tokens += result.tokens.size();
      done_s += CpuSeconds([&] {
        scheduler->OnStepDone(*plan, result, now);
        live -= scheduler->TakeOutcomes().size();
      });
      ++steps;
      offers += fill();
    }
  };
  run(kSteps);
  StepCost best;
  best.plan_us = best.done_us = best.offer_us = 1e9;
  for (uint32_t round = 0; round < kRounds; ++round) {
    offer = plan_s = done_s = 0;
    items = steps = offers = tokens = 0;
    const uint64_t before = allocations.load();
    run(kSteps);
    const uint64_t made = allocations.load() - before;
    const double n = static_cast<double>(steps);
    best.plan_us = std::min(best.plan_us, 1e6 * plan_s / n);
    best.done_us = std::min(best.done_us, 1e6 * done_s / n);
    if (offers > 0)
      best.offer_us = std::min(best.offer_us, 1e6 * offer / static_cast<double>(offers));
    best.items = static_cast<double>(items) / n;
    best.allocations_per_token = static_cast<double>(made) / static_cast<double>(tokens);
  }
  return best;
}

struct KvCost {
  double block_us = 1e9;
  double lookup_us = 1e9;
};

KvCost MeasureKv() {
  constexpr uint32_t kBlocks = 20;
  constexpr uint32_t kTimes = 2'000;
  KvCost cost;
  const auto cache = Must(KvCache::Create(Lane().kv));
  const TimePoint now{Micros(1)};
  // One token more than 20 blocks: the last block is never looked up.
  const auto prompt = Prompt(3, kBlocks * 16 + 1);
  {
    auto sequence = cache->Open(prompt, now);
    KvTransaction transaction = cache->Begin(now);
    if (!transaction.Reserve(*sequence, prompt->num_tokens()).ok()) std::exit(2);
    std::move(transaction).Commit();
    cache->Publish(*sequence, prompt->num_tokens(), now);
    cache->Close(std::move(sequence), now);
  }
  // Of another request, equal in content: that is compared after the keys.
  const auto same = Prompt(3, kBlocks * 16 + 1);
  uint64_t found = 0;
  for (uint32_t round = 0; round < kRounds; ++round) {
    const double s = CpuSeconds([&] {
      for (uint32_t i = 0; i < kTimes; ++i) found += cache->CachedTokens(*same);
    });
    cost.lookup_us = std::min(cost.lookup_us, 1e6 * s / kTimes);
  }
  if (found != uint64_t{kRounds} * kTimes * kBlocks * 16) std::exit(2);
  std::vector<std::shared_ptr<const Timeline>> prompts;
  for (int32_t i = 0; i < 32; ++i) prompts.push_back(Prompt(100 + i, 64 * 16));
  for (uint32_t round = 0; round < kRounds; ++round) {
    uint64_t blocks = 0;
    const double s = CpuSeconds([&] {
      for (uint32_t i = 0; i < 64; ++i) {
        auto sequence = cache->Open(prompts[i % prompts.size()], now);
        KvTransaction transaction = cache->Begin(now);
        if (!transaction.Reserve(*sequence, 64 * 16).ok()) std::exit(2);
        std::move(transaction).Commit();
        cache->Close(std::move(sequence), now);
        blocks += 64;
      }
    });
    cost.block_us = std::min(cost.block_us, 1e6 * s / static_cast<double>(blocks));
  }
  return cost;
}

int Run(bool check) {
  const StepCost step = MeasureSteps();
  const KvCost kv = MeasureKv();
  const double scheduler_us = step.plan_us + step.done_us;
  const bool holds =
      scheduler_us <= kStepBar && kv.block_us <= kBlockBar && kv.lookup_us <= kLookupBar;
  std::printf(
      "scheduler at %u sessions, %.1f items a step: %.1f us a step (plan %.1f, done %.1f), "
      "bar %.0f; %.1f us an offer\n",
      kSessions, step.items, scheduler_us, step.plan_us, step.done_us, kStepBar, step.offer_us);
  std::printf(
      "K/V: %.3f us a block got and given back, bar %.0f; %.2f us to find 20 blocks, bar "
      "%.0f\n",
      kv.block_us, kBlockBar, kv.lookup_us, kLookupBar);
  std::printf("allocations: %.1f a token, offers included\n", step.allocations_per_token);
  const nlohmann::json summary = {{"name", "core"},
                                  {"scheduler_us_per_step", scheduler_us},
                                  {"plan_us", step.plan_us},
                                  {"done_us", step.done_us},
                                  {"offer_us", step.offer_us},
                                  {"items_per_step", step.items},
                                  {"allocation_us_per_block", kv.block_us},
                                  {"prefix_lookup_us", kv.lookup_us},
                                  {"allocations_per_token", step.allocations_per_token},
                                  {"pass", holds}};
  std::cout << summary.dump() << std::endl;
  return check && !holds ? 1 : 0;
}

}  // namespace
}  // namespace saccade::bench

int main(int argc, char** argv) {
  CLI::App app("The core without a model");
  bool check = false;
  app.add_flag("--check", check, "exit 1 unless the bars hold");
  CLI11_PARSE(app, argc, argv);
  return saccade::bench::Run(check);
}
