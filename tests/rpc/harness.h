#pragma once
// A whole server in the test's process: the reference backend, FakeModel, the real engine, and the
// real port on loopback.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/ref/ref_backend.h"
#include "base/clock.h"
#include "config/config.h"
#include "engine/engine.h"
#include "metrics/metrics.h"
#include "rpc/server.h"
#include "tests/rpc/fake_model.h"

namespace saccade::testing {

// Waits for a condition that other threads bring about; false when it does not come in ten seconds.
inline bool Eventually(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (std::chrono::steady_clock::now() < until) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

struct ServerOptions {
  FakeModelOptions model = {};
  std::function<void(Config&)> config = nullptr;  // changes to the defaults
  Micros step_timeout{30'000'000};
  std::function<void()> on_drain = nullptr;
  CostTable costs = {};  // step times of earlier runs
  bool serve = true;     // false: the port is open, the engine is not attached
  // What makes models that Admin calls load, on the one backend; null: none are.
  std::function<absl::StatusOr<ServedModel>(const ModelConfig&, Backend&)> source = nullptr;
  uint64_t memory = 0;  // the budget in bytes; 0: none
};

// A FakeModel as the engine takes it.
inline absl::StatusOr<ServedModel> ServeFake(Backend& backend, const std::string& name,
                                             FakeModelOptions options) {
  ServedModel served;
  served.name = name;
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model, FakeModel::Load(backend, std::move(options)));
  served.instances.push_back(std::move(model));
  served.workers = {WorkerId(0)};
  served.kv.num_blocks = 512;
  for (PartitionQuota& quota : served.kv.partitions) quota.cap = served.kv.num_blocks;
  served.embedding_slots = 64;
  served.max_sequences = 64;
  return served;
}

// The engine with one FakeModel "fake". Requests without a class have no deadline.
class TestServer {
 public:
  explicit TestServer(ServerOptions options = {}) {
    config_.server.listen = "127.0.0.1:0";
    config_.models.resize(1);
    config_.models[0].name = "fake";
    config_.models[0].default_class = "best_effort";
    config_.limits.acts_per_s = 1e5;
    config_.limits.frames_per_s = 1e5;
    if (options.config) options.config(config_);

    MetricsOptions metrics;
    for (const ClassConfig& klass : config_.classes) metrics.classes.push_back(klass.name);
    metrics.models = {"fake"};
    metrics.backends = {"ref"};
    metrics_ = std::make_unique<Metrics>(metrics);

    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(MakeRefBackend({}).value());
    if (options.memory > 0) memory_ = std::make_unique<MemoryBudget>(options.memory);
    std::vector<ServedModel> models;
    models.push_back(ServeFake(*backends[0], "fake", options.model).value());
    EngineOptions engine;
    engine.memory = memory_.get();
    engine.step_timeout = options.step_timeout;
    engine.costs = options.costs;
    engine.max_new_tokens = config_.limits.max_new_tokens;
    for (const ClassConfig& klass : config_.classes) {
      engine.classes.push_back({klass.name, Micros(static_cast<int64_t>(klass.deadline_ms * 1000)),
                                klass.tier, klass.preferred, klass.shares, klass.on_late,
                                klass.max_queued});
    }
    engine_ = Engine::Start(engine, std::move(backends), std::move(models), clock_, metrics_.get())
                  .value();
    rpc_ =
        RpcServer::Start(config_, clock_, metrics_.get(), "1.2.3", options.on_drain, memory_.get())
            .value();
    if (options.source) {
      source_ = [this, source = options.source](const ModelConfig& model) {
        return source(model, *engine_->backends().front());
      };
    }
    if (options.serve) Serve();
  }

  void Serve() { ASSERT_TRUE(rpc_->Serve(*engine_, source_).ok()); }
  std::string address() const { return "127.0.0.1:" + std::to_string(rpc_->port()); }
  RpcServer& rpc() { return *rpc_; }
  Engine& engine() { return *engine_; }
  Metrics& metrics() { return *metrics_; }
  MemoryBudget* memory() { return memory_.get(); }
  const Config& config() const { return config_; }

  // Nothing is queued, running or held, and nobody is connected.
  bool Idle() {
    const absl::StatusOr<SchedulerStats> stats = engine_->Stats();
    if (!stats.ok()) return false;
    for (const auto& klass : stats->classes) {
      if (klass.queued + klass.running != 0) return false;
    }
    for (const auto& lane : stats->lanes) {
      if (lane.embeddings_held != 0) return false;
      for (const PartitionStats& partition : lane.kv.partitions) {
        if (partition.held != 0) return false;
      }
    }
    return metrics_->streams->Value() == 0 && metrics_->model("fake").sessions->Value() == 0;
  }
  void ExpectIdleSoon() {
    EXPECT_TRUE(Eventually([this] { return Idle(); }));
    EXPECT_TRUE(engine_->CheckInvariants().ok()) << engine_->CheckInvariants();
  }

 private:
  Config config_;
  SteadyClock clock_;
  std::unique_ptr<MemoryBudget> memory_;
  std::unique_ptr<Metrics> metrics_;
  RpcServer::ModelSource source_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<RpcServer> rpc_;  // destroyed before the engine
};

}  // namespace saccade::testing
