#pragma once
// Front: what all calls share, from the first moment the port is open until the last stream is
// gone. Any thread.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fair_executor.h"
#include "base/status.h"
#include "config/config.h"
#include "metrics/metrics.h"
#include "rpc/auth.h"
#include "rpc/live_limits.h"
#include "rpc/peer.h"
#include "rpc/serving.h"
#include "rpc/session_core.h"

namespace saccade {

class ModelAdmin;

class Front {
 public:
  // `authenticator` null: every call is allowed.
  // `metrics` and `memory` may be null.
  Front(const Config& config, std::unique_ptr<Authenticator> authenticator, const Clock& clock,
        Metrics* metrics, MemoryBudget* memory, std::string version)
      : config_(config),
        authenticator_(std::move(authenticator)),
        clock_(clock),
        metrics_(metrics),
        memory_(memory),
        version_(std::move(version)),
        started_(clock.Now()),
        call_pixels_(std::max(1.0, config.limits.pixels_per_s),
                     std::max(1.0, config.limits.pixels_per_s)) {}

  const Config& config() const { return config_; }  // as the server was started
  const Clock& clock() const { return clock_; }
  Metrics* metrics() const { return metrics_; }
  MemoryBudget* memory() const { return memory_; }

  // Whether calls need a token at all.
  bool asks_for_tokens() const { return authenticator_ != nullptr; }
  // Whether the call may go on; as Authenticator::Check. A refusal is counted. `peer` as gRPC names
  // it.
  absl::Status Authorize(std::string_view method, std::span<const std::string_view> authorization,
                         std::string_view peer);
  // Room for a message of so many bytes until it is handled. RESOURCE_EXHAUSTED: it is larger than
  // messages may be now (kRateLimited), or the memory budget has no room (kOutOfMemory).
  absl::StatusOr<MemoryHold> AdmitMessage(size_t bytes) const;
  // limits.pixels_per_s for what comes without a session: by address.
  absl::Status TakeCallPixels(std::string_view peer, uint64_t pixels, TimePoint now);

  void SetService(std::shared_ptr<Serving> service) {
    const std::lock_guard lock(mu_);
    service_ = std::move(service);
  }
  // Null where nothing can be loaded.
  std::shared_ptr<ModelAdmin> model_admin() const {
    const std::lock_guard lock(mu_);
    return model_admin_;
  }
  void SetModelAdmin(std::shared_ptr<ModelAdmin> admin) {
    const std::lock_guard lock(mu_);
    model_admin_ = std::move(admin);
  }
  // Null while models load.
  std::shared_ptr<Serving> service() const {
    const std::lock_guard lock(mu_);
    return service_;
  }
  // UNAVAILABLE while models load (kWorkerFailed, retry_after).
  absl::StatusOr<std::shared_ptr<Serving>> Loaded() const;
  // UNAVAILABLE while loading (kWorkerFailed, retry_after) and while draining (kDraining).
  absl::StatusOr<std::shared_ptr<Serving>> Enter() const;
  bool Ready() const;
  void SetDraining() { draining_.store(true, std::memory_order_release); }
  bool draining() const { return draining_.load(std::memory_order_acquire); }
  v1::GetStatusResponse Status() const;
  TimePoint started() const { return started_; }

  // Changes limits as the configuration allows; INVALID_ARGUMENT names the key. Returns all of
  // them.
  absl::StatusOr<v1::LiveLimits> SetLimits(const v1::LiveLimits& changes);

  // What a client may ask for: the end of the process. Set once, before the port is open.
  void SetOnDrain(std::function<void()> on_drain) { on_drain_ = std::move(on_drain); }
  void RequestDrain() const {
    if (on_drain_) on_drain_();
  }

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
  const std::unique_ptr<Authenticator> authenticator_;
  const Clock& clock_;
  Metrics* const metrics_;
  MemoryBudget* const memory_;
  std::mutex limits_mu_;  // one change at a time
  const std::string version_;
  const TimePoint started_;
  std::function<void()> on_drain_;
  PeerBuckets call_pixels_;
  std::atomic<bool> draining_{false};
  mutable std::mutex mu_;
  std::shared_ptr<Serving> service_;
  std::shared_ptr<ModelAdmin> model_admin_;
  std::unordered_map<const SessionCore*, std::weak_ptr<SessionCore>> streams_;
  std::unordered_map<std::string, std::shared_ptr<FairExecutor::Account>> accounts_;  // by peer
};

}  // namespace saccade
