#pragma once
// Front: what all calls share, from the first moment the port is open until the last stream is
// gone. Any thread.
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fair_executor.h"
#include "base/status.h"
#include "config/config.h"
#include "metrics/metrics.h"
#include "rpc/serving.h"
#include "rpc/session_core.h"

namespace saccade {

class Front {
 public:
  Front(const Config& config, const Clock& clock, Metrics* metrics, std::string version)
      : config_(config),
        clock_(clock),
        metrics_(metrics),
        version_(std::move(version)),
        started_(clock.Now()) {}

  const Config& config() const { return config_; }
  const Clock& clock() const { return clock_; }
  Metrics* metrics() const { return metrics_; }

  void SetService(std::shared_ptr<Serving> service) {
    const std::lock_guard lock(mu_);
    service_ = std::move(service);
  }
  // Null while models load.
  std::shared_ptr<Serving> service() const {
    const std::lock_guard lock(mu_);
    return service_;
  }
  // UNAVAILABLE while loading (kWorkerFailed, retry_after) and while draining (kDraining).
  absl::StatusOr<std::shared_ptr<Serving>> Enter() const;
  bool Ready() const;
  void SetDraining() { draining_.store(true, std::memory_order_release); }
  bool draining() const { return draining_.load(std::memory_order_acquire); }
  v1::GetStatusResponse Status() const;

  // The share of decoding time of one connection's one-shot calls; streams have their own.
  std::shared_ptr<FairExecutor::Account> AccountOf(const std::string& peer);

  // Streams that housekeeping looks after.
  void Add(const std::shared_ptr<SessionCore>& stream) {
    const std::lock_guard lock(mu_);
    streams_.emplace(stream.get(), stream);
  }
  void Remove(const SessionCore* stream) {
    const std::lock_guard lock(mu_);
    streams_.erase(stream);
  }
  std::vector<std::shared_ptr<SessionCore>> Streams() const;

 private:
  const Config config_;
  const Clock& clock_;
  Metrics* const metrics_;
  const std::string version_;
  const TimePoint started_;
  std::atomic<bool> draining_{false};
  mutable std::mutex mu_;
  std::shared_ptr<Serving> service_;
  std::unordered_map<const SessionCore*, std::weak_ptr<SessionCore>> streams_;
  std::unordered_map<std::string, std::shared_ptr<FairExecutor::Account>> accounts_;  // by peer
};

}  // namespace saccade
