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
    model_ = std::exchange(other.model_, ModelId());
  }
  return *this;
}

absl::Status SessionLease::BindModel(const SessionModel& model) {
  auto& count = manager_->per_model_[static_cast<size_t>(model.id.value())];
  if (!TryTake(count, model.max_sessions == 0 ? UINT32_MAX : model.max_sessions)) {
    return Full(StrCat("model \"", model.name, "\""), model.max_sessions);
  }
  model_ = model.id;
  return absl::OkStatus();
}

void SessionLease::Release() {
  if (manager_ == nullptr) return;
  if (model_.valid())
    manager_->per_model_[static_cast<size_t>(model_.value())].fetch_sub(1,
                                                                        std::memory_order_relaxed);
  manager_->GiveBackPeer(peer_);
  manager_->open_.fetch_sub(1, std::memory_order_relaxed);
  manager_ = nullptr;
  model_ = ModelId();
}

SessionManager::SessionManager(uint32_t max_sessions, uint32_t max_per_peer, size_t num_models)
    : max_sessions_(max_sessions), max_per_peer_(max_per_peer), per_model_(num_models) {}

absl::StatusOr<SessionLease> SessionManager::Admit(std::string_view peer) {
  if (!TryTake(open_, max_sessions_)) return Full("the server", max_sessions_);
  std::string key(peer);
  if (!TryTakePeer(key)) {
    open_.fetch_sub(1, std::memory_order_relaxed);
    return Full("this address", max_per_peer_);
  }
  return SessionLease(this, SessionId(next_id_.fetch_add(1, std::memory_order_relaxed)),
                      std::move(key));
}

bool SessionManager::TryTakePeer(const std::string& peer) {
  if (max_per_peer_ == 0) return true;
  const std::lock_guard lock(mu_);
  uint32_t& count = per_peer_[peer];
  if (count >= max_per_peer_) return false;
  ++count;
  return true;
}

void SessionManager::GiveBackPeer(const std::string& peer) {
  if (max_per_peer_ == 0) return;
  const std::lock_guard lock(mu_);
  const auto it = per_peer_.find(peer);
  if (--it->second == 0) per_peer_.erase(it);
}

}  // namespace saccade
