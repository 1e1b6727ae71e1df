#include "rpc/front.h"

namespace saccade {
namespace {

// Connections whose one-shot calls are told apart at a time.
constexpr size_t kMaxAccounts = 4096;

}  // namespace

absl::StatusOr<std::shared_ptr<Serving>> Front::Enter() const {
  ErrorInfo info;
  if (draining()) {
    info.reason = Reason::kDraining;
    return MakeError(absl::StatusCode::kUnavailable, "the server is shutting down", info);
  }
  std::shared_ptr<Serving> service = this->service();
  if (service == nullptr) {
    info.reason = Reason::kWorkerFailed;
    info.retry_after = std::chrono::seconds(1);
    return MakeError(absl::StatusCode::kUnavailable, "the server is loading its models", info);
  }
  return service;
}

bool Front::Ready() const {
  if (draining()) return false;
  const std::shared_ptr<Serving> service = this->service();
  return service != nullptr && service->engine().Ready();
}

v1::GetStatusResponse Front::Status() const {
  v1::GetStatusResponse status;
  status.set_version(version_);
  status.set_uptime_us(static_cast<uint64_t>(ToMicros(clock_.Now() - started_).count()));
  status.set_ready(Ready());
  status.set_draining(draining());
  *status.mutable_limits() = LimitsOf(config_);
  const std::shared_ptr<Serving> service = this->service();
  if (service == nullptr) return status;
  status.set_sessions(service->sessions().open());
  for (const v1::Model& model : service->models()) status.add_models(model.name());
  for (const v1::LatencyClass& klass : service->classes()) *status.add_classes() = klass;
  return status;
}

std::shared_ptr<FairExecutor::Account> Front::AccountOf(const std::string& peer) {
  const std::lock_guard lock(mu_);
  if (accounts_.size() >= kMaxAccounts && !accounts_.contains(peer)) {
    // Those of calls under way live on with them.
    accounts_.clear();
  }
  std::shared_ptr<FairExecutor::Account>& account = accounts_[peer];
  if (account == nullptr) account = std::make_shared<FairExecutor::Account>();
  return account;
}

std::vector<std::shared_ptr<SessionCore>> Front::Streams() const {
  std::vector<std::shared_ptr<SessionCore>> streams;
  const std::lock_guard lock(mu_);
  streams.reserve(streams_.size());
  for (const auto& [key, weak] : streams_) {
    if (std::shared_ptr<SessionCore> stream = weak.lock()) streams.push_back(std::move(stream));
  }
  return streams;
}

}  // namespace saccade
