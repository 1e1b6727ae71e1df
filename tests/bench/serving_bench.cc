// The policy against one lock: the same engine, model, caches and requests, once as configured and
// once with a single sequence slot and one class without deadlines, which is first come, first
// served, one request at a time.
//
// - control: eight robots ask for 8 tokens each, among planners that ask for 96; Poisson arrivals
//   at 70 % of what each way gets done of this very mix (measured first, from a backlog). Nobody is
//   refused, so every control request counts. Judged: the p99 of control.
// - batch: eight clients, one request each, decode on the 22x2048 shape. Judged: tokens a second.
//
// Weights are random BF16. Requests never share a prompt, so both ways compute everything.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "backend/cpu/cpu_backend.h"
#include "engine/engine.h"
#include "tests/bench/random_llama.h"

namespace saccade::bench {
namespace {

constexpr double kLoad = 0.7;      // of each way's own capacity
constexpr double kControlBar = 5;  // times lower p99
constexpr double kBatchBar = 2;    // times the throughput
constexpr int kRobots = 8;
constexpr int kPlanners = 2;
constexpr int kControlPerPlan = 8;  // requests of the mix
constexpr uint32_t kControlTokens = 8;
constexpr uint32_t kPlanTokens = 96;
constexpr int kControlPrompt = 24;
constexpr int kPlanPrompt = 192;

enum class Way { kLock, kPolicy };

using Clock = std::chrono::steady_clock;

template <class T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "serving: %s\n", value.status().ToString().c_str());
  std::exit(2);
}

struct Shape {
  uint32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
};
constexpr Shape kSmall = {4, 384, 6, 2, 64, 1024, 2048};
constexpr Shape kLarge = {22, 2048, 32, 4, 64, 5632, 32000};

class Server {
 public:
  Server(const Shape& shape, std::vector<StatisticsSpec> statistics, Way way) {
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(Must(MakeCpuBackend({})));
    RandomLlamaOptions model;
    model.trunk.vocab = shape.vocab;
    model.trunk.hidden = shape.hidden;
    model.trunk.layers = shape.layers;
    model.trunk.heads = shape.heads;
    model.trunk.kv_heads = shape.kv_heads;
    model.trunk.head_dim = shape.head_dim;
    model.trunk.intermediate = shape.intermediate;
    model.statistics = std::move(statistics);
    vocab_ = shape.vocab;
    ServedModel served;
    served.name = "random";
    served.instances.push_back(Must(MakeRandomLlama(*backends[0], model)));
    served.workers = {WorkerId(0)};
    served.kv.num_blocks = 4096;
    for (PartitionQuota& quota : served.kv.partitions) quota.cap = served.kv.num_blocks;
    served.embedding_slots = 1;
    served.max_sequences = way == Way::kLock ? 1 : 64;
    std::vector<ServedModel> models;
    models.push_back(std::move(served));
    EngineOptions options;
    options.max_rows = 512;
    const bool policy = way == Way::kPolicy;
    options.step_ceiling = policy ? Micros(10'000) : Micros(0);
    options.classes = {
        {"control", Micros(policy ? 50'000 : 0), 0, Modality::kAction, 8, OnLate::kRunLate,
         100'000},
        {"planning", Micros(0), policy ? 1U : 0U, Modality::kText, 1, OnLate::kRunLate, 100'000}};
    engine_ = Must(Engine::Start(options, std::move(backends), std::move(models), clock_, nullptr));
  }

  // Asks and calls `done` with the seconds it took, on the engine thread.
  void Submit(int client, ClassId klass, const char* key, int prompt,
              std::function<void(double)> done) {
    std::vector<int32_t> ids(static_cast<size_t>(prompt));
    for (int32_t& id : ids) {
      state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
      id = static_cast<int32_t>((state_ >> 33) % vocab_);
    }
    const ModelRef served = engine_->models().front();
    TimelineBuilder timeline = served->NewTimeline();
    timeline.AddText(ids);
    ActRequest request;
    request.session = SessionId(client + 1);
    request.model = served->id;
    request.klass = klass;
    request.arrival = clock_.Now();
    const Micros deadline = engine_->classes()[static_cast<size_t>(klass.value())].deadline;
    if (deadline.count() > 0) request.deadline = request.arrival + deadline;
    request.timeline = timeline.Build();
    request.statistics_key = key;
    request.sink = std::make_shared<Sink>(request.arrival, std::move(done));
    static_cast<void>(Must(engine_->Submit(std::move(request))));
  }

 private:
  class Sink final : public ResponseSink {
   public:
    Sink(TimePoint arrival, std::function<void(double)> done)
        : arrival_(arrival), done_(std::move(done)) {}
    void OnToken(RequestId, uint32_t, uint32_t, int32_t) override {}
    void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
      if (!result.ok()) {
        std::fprintf(stderr, "serving: %s\n", result.status().ToString().c_str());
        std::exit(2);
      }
      done_(std::chrono::duration<double>(Clock::now() - arrival_).count());
    }

   private:
    const TimePoint arrival_;
    const std::function<void(double)> done_;
  };

  SteadyClock clock_;
  std::unique_ptr<Engine> engine_;
  uint32_t vocab_ = 0;
  uint64_t state_ = 1;
};

// Counts answers; waits for all of them.
class Tally {
 public:
  std::function<void(double)> Expect(bool keep) {
    const std::lock_guard lock(mu_);
    ++waiting_;
    return [this, keep](double seconds) {
      const std::lock_guard done(mu_);
      if (keep) seconds_.push_back(seconds);
      if (--waiting_ == 0) none_.notify_all();
    };
  }
  void Wait() {
    std::unique_lock lock(mu_);
    none_.wait(lock, [this] { return waiting_ == 0; });
  }
  std::vector<double> seconds() const { return seconds_; }  // after Wait

 private:
  std::mutex mu_;
  std::condition_variable none_;
  std::vector<double> seconds_;
  int waiting_ = 0;
};

struct Mixed {
  double capacity = 0;  // control requests a second, with their planning
  size_t count = 0;
  double p50_ms = 0;
  double p99_ms = 0;
};

void SubmitControl(Server& server, Tally& tally, int robot, bool keep) {
  server.Submit(robot, ClassId(0), "control", kControlPrompt, tally.Expect(keep));
}
void SubmitPlan(Server& server, Tally& tally, int planner) {
  server.Submit(kRobots + planner, ClassId(1), "plan", kPlanPrompt, tally.Expect(false));
}

// Control requests a second from a backlog of the mix.
double Capacity(Server& server) {
  Tally tally;
  constexpr int kPlans = 8;
  const auto begin = Clock::now();
  for (int i = 0; i < kPlans * kControlPerPlan; ++i) {
    SubmitControl(server, tally, i % kRobots, false);
    if (i % kControlPerPlan == 0) SubmitPlan(server, tally, i / kControlPerPlan % kPlanners);
  }
  tally.Wait();
  return kPlans * kControlPerPlan / std::chrono::duration<double>(Clock::now() - begin).count();
}

// Seconds of each control request, arriving at `rate` a second for a while.
std::vector<double> Arrivals(Server& server, double rate, double seconds, uint64_t seed) {
  Tally tally;
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> control_gap(rate);
  std::exponential_distribution<double> plan_gap(rate / kControlPerPlan);
  const auto begin = Clock::now();
  double next_control = control_gap(random);
  double next_plan = plan_gap(random);
  for (int i = 0;; ++i) {
    const double next = std::min(next_control, next_plan);
    if (next > seconds) break;
    std::this_thread::sleep_until(
        begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(next)));
    if (next_control <= next_plan) {
      SubmitControl(server, tally, i % kRobots, true);
      next_control += control_gap(random);
    } else {
      SubmitPlan(server, tally, i % kPlanners);
      next_plan += plan_gap(random);
    }
  }
  tally.Wait();
  return tally.seconds();
}

// Both ways in turns, so that both meet the same machine.
std::array<Mixed, 2> RunMixed(double seconds) {
  const std::vector<StatisticsSpec> keys = {{"control", kControlTokens}, {"plan", kPlanTokens}};
  std::array<std::unique_ptr<Server>, 2> servers;
  for (const Way way : {Way::kLock, Way::kPolicy}) {
    auto& server = servers[static_cast<size_t>(way)];
    server = std::make_unique<Server>(kSmall, keys, way);
    Capacity(*server);  // teaches the cost model
  }
  constexpr int kTurns = 4;
  std::array<Mixed, 2> out;
  std::array<std::vector<double>, 2> all;
  for (int turn = 0; turn < kTurns; ++turn) {
    for (size_t way = 0; way < 2; ++way) {
      const double capacity = Capacity(*servers[way]);
      const std::vector<double> part =
          Arrivals(*servers[way], kLoad * capacity, seconds / kTurns, static_cast<uint64_t>(turn));
      all[way].insert(all[way].end(), part.begin(), part.end());
      out[way].capacity += capacity / kTurns;
    }
  }
  for (size_t way = 0; way < 2; ++way) {
    std::vector<double>& sorted = all[way];
    std::sort(sorted.begin(), sorted.end());
    out[way].count = sorted.size();
    if (sorted.empty()) continue;
    out[way].p50_ms = 1e3 * sorted[sorted.size() / 2];
    out[way].p99_ms = 1e3 * sorted[std::min(sorted.size() - 1, sorted.size() * 99 / 100)];
  }
  return out;
}

// Tokens a second of eight clients that each wait for their answer.
double RunBatch(Way way, uint32_t tokens) {
  Server server(kLarge, {{"plan", tokens}}, way);
  Tally tally;
  const auto begin = Clock::now();
  for (int client = 0; client < kRobots; ++client) {
    server.Submit(client, ClassId(1), "plan", 4, tally.Expect(false));
  }
  tally.Wait();
  return kRobots * tokens / std::chrono::duration<double>(Clock::now() - begin).count();
}

int Main(int argc, char** argv) {
  CLI::App app("The policy against one lock");
  bool check = false;
  double seconds = 30;
  uint32_t tokens = 24;
  std::string only;
  app.add_flag("--check", check, "exit 0 only when the bars hold");
  app.add_option("--seconds", seconds, "of mixed traffic each way")->check(CLI::Range(1.0, 3600.0));
  app.add_option("--tokens", tokens, "decoded by each of the eight clients")
      ->check(CLI::Range(2, 512));
  app.add_option("--only", only, "mix or batch")->check(CLI::IsMember({"mix", "batch"}));
  CLI11_PARSE(app, argc, argv);

  nlohmann::json json = {{"bench", "serving"}};
  bool ok = true;
  if (only != "batch") {
    const auto [lock, policy] = RunMixed(seconds);
    const double ratio = lock.p99_ms / std::max(policy.p99_ms, 1e-3);
    std::printf("mix: %d robots of 8 tokens, %d planners of %u, each way at %.0f %% of its own\n",
                kRobots, kPlanners, kPlanTokens, 100 * kLoad);
    std::printf("%-8s %18s %10s %10s %10s\n", "", "capacity, control/s", "requests", "p50, ms",
                "p99, ms");
    for (const auto& [name, m] : {std::pair("lock", lock), std::pair("policy", policy)}) {
      std::printf("%-8s %18.1f %10zu %10.2f %10.2f\n", name, m.capacity, m.count, m.p50_ms,
                  m.p99_ms);
      json[name] = {{"capacity", m.capacity},
                    {"requests", m.count},
                    {"p50_ms", m.p50_ms},
                    {"p99_ms", m.p99_ms}};
    }
    const bool held = ratio >= kControlBar;
    ok = ok && held;
    std::printf("p99 of control %.1f times lower; bar: %.0f times: %s\n\n", ratio, kControlBar,
                held ? "held" : "missed");
    json["p99_ratio"] = ratio;
  }
  if (only != "mix") {
    const double lock = RunBatch(Way::kLock, tokens);
    const double policy = RunBatch(Way::kPolicy, tokens);
    const double ratio = policy / lock;
    const bool held = ratio >= kBatchBar;
    ok = ok && held;
    std::printf(
        "batch: 8 clients, 22x2048: lock %.2f tokens/s, policy %.2f: %.1f times; bar: %.0f "
        "times: %s\n",
        lock, policy, ratio, kBatchBar, held ? "held" : "missed");
    json["batch"] = {
        {"lock_tokens_per_s", lock}, {"policy_tokens_per_s", policy}, {"ratio", ratio}};
  }
  json["ok"] = ok;
  std::printf("%s\n", json.dump().c_str());
  return check && !ok ? 1 : 0;
}

}  // namespace
}  // namespace saccade::bench

int main(int argc, char** argv) { return saccade::bench::Main(argc, argv); }
