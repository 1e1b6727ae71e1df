// SessionCore: vision at its own rate, and acts that the server asks for itself. What comes of
// either is handled like a message, by whoever handles those, and before them. Turns of a push are
// taken by the ticker where nothing but a frame is being handled.
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/out_of_memory.h"
#include "base/strings.h"
#include "rpc/session_core.h"

namespace saccade {

// A prefix in the engine.
class SessionCore::RefreshFlight final : public ResponseSink {
 public:
  RefreshFlight(std::shared_ptr<SessionCore> core, std::shared_ptr<const Observation> prefix)
      : core_(std::move(core)), prefix_(std::move(prefix)) {}
  void OnToken(RequestId, uint32_t, uint32_t, int32_t) override {}
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    core_->OnRefreshed(prefix_, result.ok());
  }

 private:
  const std::shared_ptr<SessionCore> core_;
  const std::shared_ptr<const Observation> prefix_;
};

void SessionCore::Refresh(TimePoint now) {
  if (!refresh_class_ || refreshing_) return;
  const absl::StatusOr<std::shared_ptr<const Observation>> prefix = session_->SnapshotPrefix();
  if (!prefix.ok() || *prefix == nullptr) return;  // something is missing yet; or nothing is new
  ActRequest request;
  request.session = id_;
  request.model = target_.model->id;
  request.klass = *refresh_class_;
  request.arrival = now;
  request.timeline = (*prefix)->timeline;
  request.statistics_key = target_.statistics->key;
  request.prefix_only = true;
  request.frame_captured = (*prefix)->oldest_captured;
  request.sink = std::make_shared<RefreshFlight>(shared_from_this(), *prefix);
  refreshing_ = true;
  const absl::StatusOr<RequestId> id = service_->engine().Submit(std::move(request));
  if (!id.ok()) {
    refreshing_ = false;
    return;
  }
  // As for an act: what ended the stream may have come too early for this request.
  const std::lock_guard lock(mu_);
  if (port_ == nullptr || cancelled_ || dropped_) service_->engine().Cancel(*id);
}

void SessionCore::OnRefreshed(const std::shared_ptr<const Observation>& prefix, bool ok) {
  {
    const std::lock_guard lock(mu_);
    refreshed_ = {prefix, ok};
    if (port_ == nullptr || finish_sent_ || handling_) return;
  }
  // Not here: this is a turn of the engine. A message or a turn of a push that comes before does
  // it.
  service_->decoding().Run(account_, FairExecutor::Size::kMedium,
                           [self = shared_from_this()] { self->HandleRefreshed(); });
}

void SessionCore::HandleRefreshed() {
  {
    const std::lock_guard lock(mu_);
    if (!refreshed_ || handling_) return;
    handling_ = true;
  }
  HandleInbox(/*may_decode=*/false);
}

void SessionCore::TakeTurns(const std::optional<Refreshed>& refreshed,
                            std::optional<TimePoint> push_due) {
  const std::lock_guard touching(session_mu_);
  if (refreshed) {
    refreshing_ = false;
    if (refreshed->ok) session_->CommitPrefix(refreshed->prefix);
  }
  if (push_due) PushAct(*push_due);
  if (refreshed) Refresh(service_->clock().Now());  // of what has come meanwhile
}

absl::Status SessionCore::HandlePush(const v1::Push& push) {
  constexpr double kSlowest = 0.1;
  constexpr double kFastest = 200;
  const LimitsConfig& limits = service_->settings()->config.limits;
  const double fastest = std::min(kFastest, limits.acts_per_s);
  if (push.hz() != 0 && fastest < kSlowest) {
    return InvalidField("push.hz", "this server's limits.acts_per_s leaves no room for a push");
  }
  // Written so that NaN fails.
  if (push.hz() != 0 && !(push.hz() >= kSlowest && push.hz() <= fastest)) {
    return InvalidField("push.hz", StrCat("must be 0 or from ", kSlowest, " to ", fastest));
  }
  // It is kept: nothing that the model does not take, and of noise and actions no more than it
  // does.
  RETURN_IF_ERROR(service_->CheckAct(target_, push.act(), "push.act"));
  if (push_timer_ != 0) service_->ticker().Stop(std::exchange(push_timer_, 0));
  if (push.hz() == 0) return absl::OkStatus();
  push_act_ = push.act();
  push_last_ok_ = true;
  push_period_ = Micros(std::llround(1e6 / push.hz()));
  push_timer_ = service_->ticker().Start(push_period_, [weak = weak_from_this()](TimePoint due) {
    const std::shared_ptr<SessionCore> core = weak.lock();
    if (core == nullptr) return false;
    core->OnPush(due);
    return true;
  });
  return absl::OkStatus();
}

void SessionCore::OnPush(TimePoint due) {
  std::optional<Refreshed> refreshed;
  {
    const std::lock_guard lock(mu_);
    if (port_ == nullptr || cancelled_ || closing_ || dropped_ || reads_done_ || push_open_) return;
    // A client that does not read has no use for more, and must not lose its stream by it.
    if (outbox_.size() >= OutboxLimitLocked() / 2) return;
    if (handling_ && !away_) {
      push_due_ = due;  // who handles takes it next
      return;
    }
    push_due_.reset();
    refreshed = std::exchange(refreshed_, std::nullopt);
  }
  TakeTurns(refreshed, due);
}

void SessionCore::PushAct(TimePoint due) {
  if (push_timer_ == 0) return;  // stopped meanwhile
  FollowSettings(due);
  {
    const std::lock_guard lock(mu_);
    if (push_open_) return;
    push_id_ = push_act_.id();
    push_open_ = true;
  }
  const absl::Status status =
      CatchOutOfMemory([&] { return SubmitAct(push_act_, due, due + push_period_); });
  if (!status.ok()) {
    {
      const std::lock_guard lock(mu_);
      push_open_ = false;
    }
    const Reason reason = GetErrorInfo(status).reason;
    if (push_last_ok_ || push_last_reason_ != reason) RefuseAct(push_act_, status);
    push_last_reason_ = reason;
  }
  push_last_ok_ = status.ok();
  push_act_.set_id(push_act_.id() + 1);
}

}  // namespace saccade
