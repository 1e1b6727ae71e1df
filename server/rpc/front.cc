#include "rpc/front.h"

#include "base/strings.h"

namespace saccade {
namespace {

// Connections whose one-shot calls are told apart at a time.
constexpr size_t kMaxAccounts = 4096;

}  // namespace

absl::Status Front::Authorize(std::string_view method,
                              std::span<const std::string_view> authorization,
                              std::string_view peer) {
  absl::Status status;
  if (authenticator_ != nullptr) {
    status = authenticator_->Check(method, authorization, PeerAddress(peer), clock_.Now());
  } else if (AccessOf(method) == Access::kAdmin && !IsOnThisHost(peer)) {
    ErrorInfo info;
    info.reason = Reason::kPermissionDenied;
    status = MakeError(absl::StatusCode::kPermissionDenied,
                       "without tokens (server.tokens_file) this call is for this host only", info);
  }
  if (!status.ok() && metrics_ != nullptr) metrics_->Refuse(GetErrorInfo(status).reason);
  return status;
}

absl::StatusOr<MemoryHold> Front::AdmitMessage(size_t bytes) const {
  ErrorInfo info;
  const std::shared_ptr<Serving> service = this->service();
  if (service != nullptr && bytes > service->settings()->limits.max_message_bytes()) {
    info.reason = Reason::kRateLimited;
    return MakeError(absl::StatusCode::kResourceExhausted,
                     StrCat("the message has ", bytes, " bytes, the limit is ",
                            service->settings()->limits.max_message_bytes()),
                     info);
  }
  absl::StatusOr<MemoryHold> hold = MemoryBudget::Hold(memory_, MemoryKind::kMessages, bytes);
  if (hold.ok()) return hold;
  info.reason = Reason::kOutOfMemory;
  info.retry_after = std::chrono::milliseconds(100);
  return MakeError(hold.status().code(), FromAbsl(hold.status().message()), info);
}

absl::Status Front::TakeCallPixels(std::string_view peer, uint64_t pixels, TimePoint now) {
  const std::shared_ptr<Serving> service = this->service();
  const double limit =
      service == nullptr ? config_.limits.pixels_per_s : service->settings()->limits.pixels_per_s();
  if (limit <= 0) return absl::OkStatus();
  const std::optional<Micros> wait =
      call_pixels_.Take(PeerAddress(peer), now, static_cast<double>(pixels));
  if (!wait) return absl::OkStatus();
  ErrorInfo info;
  info.reason = Reason::kRateLimited;
  info.retry_after = *wait;
  return MakeError(absl::StatusCode::kResourceExhausted,
                   StrCat("more than ", limit,
                          " pixels per second in Predict and Generate calls of one address"),
                   info);
}

absl::StatusOr<std::shared_ptr<Serving>> Front::Loaded() const {
  if (std::shared_ptr<Serving> service = this->service()) return service;
  ErrorInfo info;
  info.reason = Reason::kWorkerFailed;
  info.retry_after = std::chrono::seconds(1);
  return MakeError(absl::StatusCode::kUnavailable, "the server is loading its models", info);
}

absl::StatusOr<std::shared_ptr<Serving>> Front::Enter() const {
  if (!draining()) return Loaded();
  ErrorInfo info;
  info.reason = Reason::kDraining;
  return MakeError(absl::StatusCode::kUnavailable, "the server is shutting down", info);
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
  *status.mutable_limits() = service->settings()->limits;
  for (const auto& model : service->models()) status.add_models(model->name);
  for (const v1::LatencyClass& klass : service->classes()) *status.add_classes() = klass;
  return status;
}

absl::StatusOr<v1::LiveLimits> Front::SetLimits(const v1::LiveLimits& changes) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Serving> service, Loaded());
  const std::lock_guard lock(limits_mu_);
  Config config = service->settings()->config;
  RETURN_IF_ERROR(ApplyLimits(changes, config_, config));
  service->SetConfig(config);
  call_pixels_.SetRate(std::max(1.0, config.limits.pixels_per_s), clock_.Now());
  return LiveLimitsOf(config);
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
