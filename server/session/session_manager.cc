#include "session/session_manager.h"

#include <utility>

#include "base/strings.h"

namespace saccade {
namespace {

absl::Status Full(std::string_view whose, uint32_t limit) {
  ErrorInfo info;
  info.reason = Reason::kRateLimited;
  info.retry_after = std::chrono::seconds(1);
  return MakeError(absl::StatusCode::kResourceExhausted,
                   StrCat(whose, " has ", limit, " sessions, its limit"), info);
}

// Takes one of `limit` places.
bool TryTake(std::atomic<uint32_t>& count, uint32_t limit) {
  uint32_t seen = count.load(std::memory_order_relaxed);
  while (seen < limit) {
    if (count.compare_exchange_weak(seen, seen + 1, std::memory_order_relaxed)) return true;
  }
  return false;
}

}  // namespace

SessionLease& SessionLease::operator=(SessionLease&& other) noexcept {
  if (this != &other) {
    Release();
    manager_ = std::exchange(other.manager_, nullptr);
    id_ = std::exchange(other.id_, SessionId());
    peer_ = std::move(other.peer_);
    model_ = std::move(other.model_);
    memory_ = std::move(other.memory_);
  }
  return *this;
}

absl::Status SessionLease::BindModel(const SessionModel& model) {
  if (!TryTake(model.places->open, model.max_sessions == 0 ? UINT32_MAX : model.max_sessions)) {
    return Full(StrCat("model \"", model.name, "\""), model.max_sessions);
  }
  model_ = model.places;
  return absl::OkStatus();
}

void SessionLease::Release() {
  if (manager_ == nullptr) return;
  if (model_ != nullptr) model_->open.fetch_sub(1, std::memory_order_relaxed);
  manager_->GiveBackPeer(peer_);
  manager_->open_.fetch_sub(1, std::memory_order_relaxed);
  manager_ = nullptr;
  model_ = nullptr;
  memory_.Release();
}

absl::StatusOr<SessionLease> SessionManager::Admit(std::string_view peer) {
  ASSIGN_OR_RETURN(MemoryHold memory,
                   MemoryBudget::Hold(memory_, MemoryKind::kSessions, kSessionBytes));
  const uint32_t limit = max_sessions_.load(std::memory_order_relaxed);
  if (!TryTake(open_, limit)) return Full("the server", limit);
  std::string key(peer);
  const uint32_t per_peer = max_per_peer_.load(std::memory_order_relaxed);
  if (!TryTakePeer(key, per_peer)) {
    open_.fetch_sub(1, std::memory_order_relaxed);
    return Full("this address", per_peer);
  }
  return SessionLease(this, SessionId(next_id_.fetch_add(1, std::memory_order_relaxed)),
                      std::move(key), std::move(memory));
}

bool SessionManager::TryTakePeer(const std::string& peer, uint32_t limit) {
  const std::lock_guard lock(mu_);
  uint32_t& count = per_peer_[peer];  // above zero when it is there already
  if (limit != 0 && count >= limit) return false;
  ++count;
  return true;
}

void SessionManager::GiveBackPeer(const std::string& peer) {
  const std::lock_guard lock(mu_);
  const auto it = per_peer_.find(peer);
  if (--it->second == 0) per_peer_.erase(it);
}

}  // namespace saccade
