#pragma once
// SessionManager: how many sessions there may be, and their numbers. A lease is a place; it is
// given back with the object.
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "session/catalog.h"

namespace saccade {

class SessionManager;

// A place among the server's sessions, and from BindModel on among its model's. Movable; the
// manager outlives it.
class SessionLease {
 public:
  SessionLease() = default;
  SessionLease(SessionLease&& other) noexcept { *this = std::move(other); }
  SessionLease& operator=(SessionLease&& other) noexcept;
  ~SessionLease() { Release(); }

  SessionId id() const { return id_; }
  // RESOURCE_EXHAUSTED (kRateLimited) when the model has as many sessions as it may have. At most
  // once.
  absl::Status BindModel(const SessionModel& model);
  void Release();

 private:
  friend class SessionManager;
  SessionLease(SessionManager* manager, SessionId id, std::string peer)
      : manager_(manager), id_(id), peer_(std::move(peer)) {}
  SessionManager* manager_ = nullptr;
  SessionId id_;
  std::string peer_;
  ModelId model_;
};

// Any thread.
class SessionManager {
 public:
  // `max_per_peer` 0: no limit.
  SessionManager(uint32_t max_sessions, uint32_t max_per_peer, size_t num_models);
  SessionManager(const SessionManager&) = delete;
  SessionManager& operator=(const SessionManager&) = delete;

  // RESOURCE_EXHAUSTED (kRateLimited) when the server, or the peer, has as many sessions as it may
  // have. `peer` is what counts as one client.
  absl::StatusOr<SessionLease> Admit(std::string_view peer);
  uint32_t open() const { return open_.load(std::memory_order_relaxed); }
  uint32_t open(ModelId model) const {
    return per_model_[static_cast<size_t>(model.value())].load(std::memory_order_relaxed);
  }

 private:
  friend class SessionLease;
  bool TryTakePeer(const std::string& peer);
  void GiveBackPeer(const std::string& peer);

  const uint32_t max_sessions_;
  const uint32_t max_per_peer_;
  std::atomic<uint32_t> open_{0};
  std::vector<std::atomic<uint32_t>> per_model_;  // by ModelId
  std::atomic<uint64_t> next_id_{1};
  std::mutex mu_;
  // Peers with sessions, so at most max_sessions_ of them; empty without a limit.
  std::unordered_map<std::string, uint32_t> per_peer_;
};

}  // namespace saccade
