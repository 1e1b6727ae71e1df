#include "cmd_serve.h"

#include <spdlog/spdlog.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "assembly.h"
#include "base/cores.h"
#include "base/logging.h"
#include "base/process.h"
#include "base/strings.h"
#include "config/memory.h"
#include "cost_keeper.h"
#include "memory_plan.h"
#include "rpc/grpc_log.h"
#include "rpc/health_probe.h"
#include "rpc/server.h"

namespace saccade {
namespace {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "saccade-server: %s\n", std::string(FromAbsl(status.message())).c_str());
  return 1;
}

// Ends the process once nothing of ours runs any more. The metrics endpoint's own threads would
// take up to two seconds to notice, past the time that a drain was promised to take.
[[noreturn]] void Leave(int exit_code) {
  spdlog::shutdown();
  std::fflush(nullptr);
  std::_Exit(exit_code);
}

absl::StatusOr<Config> LoadOrSay(const std::string& path) {
  absl::StatusOr<Config> config = LoadConfig(path);
  if (!config.ok()) Fail(config.status());
  return config;
}

}  // namespace

int RunCheckConfig(const std::string& config_path) {
  const absl::StatusOr<Config> config = LoadOrSay(config_path);
  if (!config.ok()) return 2;
  std::printf("%s%s", ToYaml(*config).c_str(), PlanText(*config).c_str());
  return 0;
}

int RunHealth(const std::string& address, const ProbeTls& tls) {
  const absl::Status status = ProbeHealth(address, tls, std::chrono::milliseconds(2000));
  return status.ok() ? 0 : Fail(status);
}

int RunServe(const std::string& config_path, std::string_view version, const StopSignals& signals) {
  std::signal(SIGPIPE, SIG_IGN);
  PreferShortSlices();  // all threads that answer inherit it
  KeepFreedMemory();
  const absl::StatusOr<Config> config = LoadOrSay(config_path);
  if (!config.ok()) return 2;
  if (const absl::Status status = InitLogging(config->server.log); !status.ok())
    return Fail(status);
  RouteGrpcLog();

  // Until there is an engine nothing needs draining: a stop signal ends the process at once.
  // Afterwards it wakes the main thread. One thread takes the signal in both cases.
  std::atomic<bool> loaded{false};
  std::atomic<int> stop{0};
  std::thread watcher([&loaded, &stop, &signals] {
    const int received = signals.Wait();
    if (!loaded.load(std::memory_order_acquire)) {
      LogInfo("stopped while loading");
      std::_Exit(0);
    }
    stop.store(received, std::memory_order_release);
    stop.notify_all();
  });
  watcher.detach();  // it may wait for a signal for ever

  const SteadyClock clock;
  MemoryBudget memory(BudgetBytes(*config));
  const absl::StatusOr<MemoryHold> process =
      memory.Hold(MemoryKind::kProcess, ProcessBytes(memory.limit()));
  if (!process.ok()) return Fail(process.status());
  MetricsOptions metrics_options = ToMetricsOptions(*config, std::string(version));
  metrics_options.memory = &memory;
  Metrics metrics(metrics_options);
  std::unique_ptr<MetricsExposer> exposer;
  if (!config->server.metrics_listen.empty()) {
    absl::StatusOr<std::unique_ptr<MetricsExposer>> started =
        MetricsExposer::Start(config->server.metrics_listen, metrics);
    if (!started.ok()) return Fail(started.status());
    exposer = *std::move(started);
  }
  absl::StatusOr<std::unique_ptr<RpcServer>> rpc = RpcServer::Start(
      *config, clock, &metrics, std::string(version),
      [&stop] {
        stop.store(SIGTERM, std::memory_order_release);
        stop.notify_all();
      },
      &memory);
  if (!rpc.ok()) {
    Fail(rpc.status());
    Leave(absl::IsInvalidArgument(rpc.status()) ? 2 : 1);  // as for the configuration's own faults
  }
  LogInfo("listening, loading models",
          {{"address", config->server.listen}, {"metrics", config->server.metrics_listen}});

  CostKeeper costs(config->scheduler.cost_file);
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      BuildEngine(*config, clock, &metrics, costs.known(), &memory);
  if (!engine.ok()) {
    rpc->reset();
    Leave(Fail(engine.status()));
  }
  const auto source = [&config, &engine, &memory](const ModelConfig& model) {
    return LoadServed(*config, model, (*engine)->backends(), &memory);
  };
  if (const absl::Status status = (*rpc)->Serve(**engine, source); !status.ok()) {
    rpc->reset();
    Leave(Fail(status));
  }
  costs.Start(**engine);
  loaded.store(true, std::memory_order_release);
  LogInfo("ready", {{"memory", memory.Sum()}});

  stop.wait(0, std::memory_order_acquire);
  const TimePoint until = clock.Now() + Micros(std::llround(config->server.drain_s * 1e6));
  LogInfo("draining", {{"signal", stop.load()}, {"drain_s", config->server.drain_s}});
  (*rpc)->BeginDrain();
  (*engine)->Drain(until);
  (*rpc)->Shutdown(until);
  if ((*rpc)->busy()) {
    LogInfo("stopped; a model was still being loaded");
    Leave(0);  // ends the process without waiting for it
  }
  rpc->reset();
  costs.Stop();
  if ((*engine)->stuck()) {
    LogError("stopped; a worker still hangs in a step");
    Leave(1);  // ends the process without waiting for it
  }
  engine->reset();
  LogInfo("stopped");
  Leave(0);
}

}  // namespace saccade
