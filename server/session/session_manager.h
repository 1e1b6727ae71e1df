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

#include "base/ids.h"
#include "base/memory_budget.h"
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
  SessionLease(SessionManager* manager, SessionId id, std::string peer, MemoryHold memory)
      : manager_(manager), id_(id), peer_(std::move(peer)), memory_(std::move(memory)) {}
  SessionManager* manager_ = nullptr;
  SessionId id_;
  std::string peer_;
  std::shared_ptr<ModelPlaces> model_;  // null until it is bound
  MemoryHold memory_;
};

// Any thread.
class SessionManager {
 public:
  // `max_per_peer` 0: no limit.
  // `memory` may be null.
  SessionManager(uint32_t max_sessions, uint32_t max_per_peer, MemoryBudget* memory = nullptr)
      : max_sessions_(max_sessions), max_per_peer_(max_per_peer), memory_(memory) {}
  SessionManager(const SessionManager&) = delete;
  SessionManager& operator=(const SessionManager&) = delete;

  // What a session holds of the memory budget: its history, its prompt, unread answers and the
  // transport's state of its stream.
  static constexpr uint64_t kSessionBytes = 256 << 10;

  // RESOURCE_EXHAUSTED when the server, or the peer, has as many sessions as it may have
  // (kRateLimited), or when the memory budget has no room for one (kOutOfMemory). `peer` is what
  // counts as one client.
  absl::StatusOr<SessionLease> Admit(std::string_view peer);
  uint32_t open() const { return open_.load(std::memory_order_relaxed); }
  // From now on; sessions above a limit stay.
  void SetLimits(uint32_t max_sessions, uint32_t max_per_peer) {
    max_sessions_.store(max_sessions, std::memory_order_relaxed);
    max_per_peer_.store(max_per_peer, std::memory_order_relaxed);
  }

 private:
  friend class SessionLease;
  bool TryTakePeer(const std::string& peer, uint32_t limit);
  void GiveBackPeer(const std::string& peer);

  std::atomic<uint32_t> max_sessions_;
  std::atomic<uint32_t> max_per_peer_;
  MemoryBudget* const memory_;
  std::atomic<uint32_t> open_{0};
  std::atomic<uint64_t> next_id_{1};
  std::mutex mu_;
  // Peers with sessions, so at most as many.
  std::unordered_map<std::string, uint32_t> per_peer_;
};

}  // namespace saccade
