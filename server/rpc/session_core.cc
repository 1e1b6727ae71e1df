#include "rpc/session_core.h"

#include <algorithm>
#include <utility>

#include "base/logging.h"
#include "base/out_of_memory.h"
#include "base/strings.h"

namespace saccade {
namespace {

// A stream that is not opened by then, and one that cannot be ended politely by then, is ended.
constexpr Micros kOpenTimeout = std::chrono::seconds(10);
constexpr Micros kCloseTimeout = std::chrono::seconds(2);
// What a stream reads ahead of its handling.
constexpr size_t kReadAheadMessages = 16;
constexpr size_t kReadAheadBytes = 4 << 20;

bool IsKind(const absl::StatusOr<v1::SessionRequest>& message,
            v1::SessionRequest::MessageCase kind) {
  return message.ok() && message->message_case() == kind;
}

bool IsFrame(const absl::StatusOr<v1::SessionRequest>& message) {
  return IsKind(message, v1::SessionRequest::kVision);
}

absl::Status Failure(absl::StatusCode code, Reason reason, std::string_view field,
                     std::string_view message) {
  ErrorInfo info;
  info.reason = reason;
  info.field = std::string(field);
  return MakeError(code, message, info);
}

}  // namespace

// One act request in the engine. Holds the core, so that an answer after the end of the stream
// finds something to ask.
class SessionCore::Flight final : public ResponseSink {
 public:
  Flight(std::shared_ptr<SessionCore> core, ActInfo info, bool stream_tokens)
      : core_(std::move(core)), info_(std::move(info)), stream_tokens_(stream_tokens) {}
  void OnToken(RequestId, uint32_t sample, uint32_t index, int32_t token) override {
    if (stream_tokens_) core_->OnToken(info_, sample, index, token);
  }
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    core_->OnAnswer(info_, std::move(result));
  }

 private:
  const std::shared_ptr<SessionCore> core_;
  const ActInfo info_;
  const bool stream_tokens_;
};

SessionCore::SessionCore(std::shared_ptr<Serving> service, SessionLease lease,
                         TimePoint call_deadline)
    : service_(std::move(service)),
      call_deadline_(call_deadline),
      id_(lease.id()),
      account_(std::make_shared<FairExecutor::Account>()),
      settings_(service_->settings()),
      lease_(std::move(lease)),
      last_activity_(service_->clock().Now()) {}

SessionCore::~SessionCore() {
  if (push_timer_ != 0) service_->ticker().Stop(push_timer_);
}

void SessionCore::Start(StreamPort* port) {
  service_->SetStreamOpen(true);
  const std::lock_guard lock(mu_);
  port_ = port;
  PumpLocked();
}

// -----------------------------------------------------------------------------------------------------------
// read side

void SessionCore::OnMessage(absl::StatusOr<v1::SessionRequest> message, TimePoint received,
                            MemoryHold memory) {
  const size_t bytes = message.ok() ? message->ByteSizeLong() : 0;
  const uint64_t pixels = IsFrame(message) ? service_->PixelsToDecode(message->vision()) : 0;
  {
    const std::lock_guard lock(mu_);
    reading_ = false;
    last_activity_ = received;
    if (cancelled_ || closing_) return;
    inbox_.push_back(
        {++messages_read_, std::move(message), received, bytes, pixels, std::move(memory)});
    inbox_bytes_ += bytes;
    if (handling_) {
      DropSupersededLocked(received);
      PumpLocked();
      return;
    }
    handling_ = true;
  }
  HandleInbox(/*may_decode=*/false);
}

void SessionCore::HandleInbox(bool may_decode) {
  std::unique_lock lock(mu_);
  away_ = false;
  while (true) {
    if (cancelled_ || closing_ || finish_sent_) {
      inbox_.clear();
      inbox_bytes_ = 0;
      push_due_.reset();
      refreshed_.reset();
    }
    if (refreshed_ || push_due_) {
      const std::optional<Refreshed> refreshed = std::exchange(refreshed_, std::nullopt);
      const std::optional<TimePoint> due = std::exchange(push_due_, std::nullopt);
      lock.unlock();
      TakeTurns(refreshed, due);
      lock.lock();
      continue;
    }
    if (inbox_.empty()) {
      handling_ = false;
      PumpLocked();
      return;
    }
    if (!IsFrame(inbox_.front().message) || session_ == nullptr) {
      Incoming incoming = PopLocked();
      lock.unlock();
      Handle(incoming);
      lock.lock();
      continue;
    }
    DropSupersededLocked(service_->clock().Now());
    if (!IsFrame(inbox_.front().message)) continue;
    away_ = true;
    if (!may_decode) {
      const FairExecutor::Size size = Serving::DecodeSize(inbox_.front().pixels);
      PumpLocked();
      lock.unlock();
      service_->decoding().Run(account_, size,
                               [self = shared_from_this()] { self->HandleInbox(true); });
      return;
    }
    may_decode = false;
    Incoming incoming = PopLocked();
    PumpLocked();  // reads on meanwhile
    lock.unlock();
    Handle(incoming);
    lock.lock();
    away_ = false;
  }
}

void SessionCore::FollowSettings(TimePoint now) {
  const uint64_t version = service_->settings_version();
  if (version == settings_version_) return;
  settings_version_ = version;
  std::shared_ptr<const Settings> settings = service_->settings();
  if (session_ != nullptr) session_->SetLimits(settings->session, now);
  const std::lock_guard lock(mu_);
  settings_ = std::move(settings);
}

void SessionCore::Handle(const Incoming& incoming) {
  std::unique_lock touching(session_mu_);
  message_number_ = incoming.number;
  FollowSettings(incoming.received);
  const absl::Status status = incoming.message.ok()
                                  ? CatchOutOfMemory([&] { return Dispatch(incoming, touching); })
                                  : incoming.message.status();
  if (status.ok()) return;
  service_->CountRefused(status);
  if (session_ != nullptr) {
    v1::SessionResponse response;
    *response.mutable_error() = RequestErrorOf(status, message_number_);
    Send(response);
  } else {
    const std::lock_guard lock(mu_);
    CloseLocked(status);  // no session without a valid first message
  }
}

absl::Status SessionCore::Dispatch(const Incoming& incoming,
                                   std::unique_lock<std::mutex>& touching) {
  const v1::SessionRequest& message = *incoming.message;
  const TimePoint received = incoming.received;
  using Kind = v1::SessionRequest::MessageCase;
  const Kind kind = message.message_case();
  if (session_ == nullptr && kind != Kind::kOpen)
    return InvalidField("open", "must be the first message");
  switch (kind) {
    case Kind::kOpen:
      return HandleOpen(message.open(), received);
    case Kind::kVision:
      return HandleVision(message.vision(), incoming.pixels, received, touching);
    case Kind::kText:
      RETURN_IF_ERROR(session_->TakeMessageToken(received));
      RETURN_IF_ERROR(service_->SetText(*session_, message.text()));
      Refresh(received);
      return absl::OkStatus();
    case Kind::kState:
      RETURN_IF_ERROR(session_->TakeMessageToken(received));
      return service_->SetState(*session_, message.state());
    case Kind::kExecuted: {
      RETURN_IF_ERROR(session_->TakeMessageToken(received));
      ASSIGN_OR_RETURN(std::vector<ExecutedAction> actions, ReadExecuted(message.executed()));
      return session_->AddExecuted(std::move(actions));
    }
    case Kind::kAct:
      HandleAct(message.act(), received);
      return absl::OkStatus();
    case Kind::kReset:
      RETURN_IF_ERROR(session_->TakeMessageToken(received));
      session_->Reset(message.reset().keep_instruction());
      return absl::OkStatus();
    case Kind::kCancel:
      RETURN_IF_ERROR(session_->TakeMessageToken(received));
      return HandleCancel(message.cancel());
    case Kind::kPush:
      RETURN_IF_ERROR(session_->TakeMessageToken(received));
      return HandlePush(message.push());
    case Kind::MESSAGE_NOT_SET:
      break;
  }
  return InvalidField("message", "is empty, or of a kind this server does not know");
}

absl::Status SessionCore::HandleOpen(const v1::Open& open, TimePoint received) {
  if (session_ != nullptr) return InvalidField("open", "the session is open already");
  if (service_->engine().draining()) {
    return Failure(absl::StatusCode::kUnavailable, Reason::kDraining, "",
                   "the server is shutting down");
  }
  ASSIGN_OR_RETURN(target_, service_->Resolve(open.model(), open.statistics_key(),
                                              open.latency_class(), "open"));
  const std::vector<std::string> cameras(open.cameras().begin(), open.cameras().end());
  RETURN_IF_ERROR(FindCameras(target_.model->model->spec(), cameras, "open.cameras").status());
  if (!open.options().refresh_class().empty()) {
    const ModelSpec& spec = target_.model->model->spec();
    constexpr std::string_view kField = "open.options.refresh_class";
    if (spec.state_in_text || spec.head.kind == HeadKind::kOnePass) {
      return InvalidField(
          kField, spec.state_in_text
                      ? "this model writes the state into its text: no prefix outlives a state"
                      : "this model answers in the pass over its prompt: there is no prefix");
    }
    ASSIGN_OR_RETURN(refresh_class_,
                     service_->FindClass(open.options().refresh_class(), target_.klass, kField));
  }
  std::unique_ptr<Session> session = service_->NewSession(id_, target_, received);
  if (!open.instruction().empty()) {
    RETURN_IF_ERROR(session->SetInstruction(open.instruction(), "open.instruction"));
  }
  {
    const std::lock_guard lock(mu_);
    RETURN_IF_ERROR(lease_.BindModel(*target_.model));
    opened_ = true;
    model_ = target_.model->id;
  }
  Serving::SetSessionOpen(*target_.model, true);
  // Whoever unloads a model withdraws it first and looks at the streams then: one of the two sees
  // the other.
  if (!service_->Offers(target_.model->id)) {
    return Failure(absl::StatusCode::kUnavailable, Reason::kModelUnloaded, "open.model",
                   "the model was unloaded");
  }
  session_ = std::move(session);
  stream_tokens_ = open.options().stream_tokens();
  supersede_ = open.options().supersede();

  v1::SessionResponse response;
  v1::Opened& opened = *response.mutable_opened();
  opened.set_session_id(id_.value());
  *opened.mutable_model() = target_.model->proto;
  opened.set_statistics_key(target_.statistics->key);
  *opened.mutable_action_space() = *target_.action_space;
  *opened.mutable_latency_class() = service_->classes()[static_cast<size_t>(target_.klass.value())];
  *opened.mutable_limits() = service_->settings()->limits;
  Send(response);
  LogInfo("session opened", {LogField(id_), {"model", target_.model->name}});
  return absl::OkStatus();
}

absl::Status SessionCore::HandleVision(const v1::VisionFrame& frame, uint64_t pixels,
                                       TimePoint received, std::unique_lock<std::mutex>& touching) {
  ASSIGN_OR_RETURN(const Session::Fate fate,
                   service_->PublishFrame(*session_, frame, pixels, received, "vision", &touching));
  if (fate != Session::Fate::kStale) {
    Refresh(received);
    return absl::OkStatus();
  }
  v1::SessionResponse response;
  v1::Notice& notice = *response.mutable_notice();
  notice.set_kind(v1::NOTICE_KIND_STALE_FRAME);
  notice.set_message("a newer frame of this camera is there; the frame was dropped");
  notice.set_camera(frame.camera());
  notice.set_capture_time_ns(frame.capture_time_ns());
  notice.set_message_number(message_number_);
  Send(response);
  return absl::OkStatus();
}

void SessionCore::HandleAct(const v1::ActRequest& act, TimePoint received) {
  const absl::Status status = SubmitAct(act, received);
  if (!status.ok()) RefuseAct(act, status);
}

void SessionCore::RefuseAct(const v1::ActRequest& act, const absl::Status& status) {
  service_->CountRefused(status);
  if (LogEnabled(LogLevel::kDebug)) {
    LogDebug("act refused",
             {LogField(id_), {"act", act.id()}, {"error", FromAbsl(status.message())}});
  }
  v1::SessionResponse response;
  v1::RequestError& error = *response.mutable_error();
  error = RequestErrorOf(status, message_number_);
  // A number in use belongs to the request that has it; this error is known by its message number.
  if (GetErrorInfo(status).field != "act.id") error.set_act_id(act.id());
  Send(response);
}

absl::Status SessionCore::SubmitAct(const v1::ActRequest& act, TimePoint received, TimePoint next) {
  std::vector<RequestId> older;
  {
    const std::lock_guard lock(mu_);
    if (acts_.contains(act.id()))
      return InvalidField("act.id", StrCat(act.id(), " is not answered yet"));
    if (acts_.size() >= settings_->config.limits.acts_in_flight) {
      return Failure(
          absl::StatusCode::kResourceExhausted, Reason::kQueueFull, "act",
          StrCat("the session has ", acts_.size(), " unanswered act requests, its limit"));
    }
    if (supersede_) {
      for (const auto& [id, request] : acts_) older.push_back(request);
    }
  }
  RETURN_IF_ERROR(session_->TakeActToken(received));
  ActInfo info;
  info.message_number = message_number_;
  ASSIGN_OR_RETURN(ActRequest request, service_->PrepareAct(*session_, target_, act, received,
                                                            call_deadline_, "act", info));
  request.next_arrival = next;
  request.sink = std::make_shared<Flight>(shared_from_this(), std::move(info), stream_tokens_);
  {
    const std::lock_guard lock(mu_);
    acts_.emplace(act.id(), RequestId());  // before the answer can come
  }
  const absl::StatusOr<RequestId> id = service_->engine().Submit(std::move(request));
  if (id.ok() && LogEnabled(LogLevel::kDebug)) {
    LogDebug("act accepted", {LogField(id_), LogField(*id), {"act", act.id()}});
  }
  const std::lock_guard lock(mu_);
  if (!id.ok()) {
    acts_.erase(act.id());
    return id.status();
  }
  const auto it = acts_.find(act.id());
  if (it != acts_.end()) it->second = *id;
  // The client may have gone while this was under way; its CancelSession came too early for this
  // request.
  if (cancelled_ || dropped_) service_->engine().Cancel(*id);
  for (const RequestId replaced : older) service_->engine().Supersede(replaced);
  return absl::OkStatus();
}

absl::Status SessionCore::HandleCancel(const v1::Cancel& cancel) {
  std::vector<RequestId> requests;
  switch (cancel.target_case()) {
    case v1::Cancel::kActId: {
      const std::lock_guard lock(mu_);
      const auto it = acts_.find(cancel.act_id());
      if (it != acts_.end()) requests.push_back(it->second);
      break;
    }
    case v1::Cancel::kAll: {
      if (!cancel.all()) return InvalidField("cancel.all", "must be true");
      const std::lock_guard lock(mu_);
      for (const auto& [id, request] : acts_) requests.push_back(request);
      break;
    }
    case v1::Cancel::TARGET_NOT_SET:
      return InvalidField("cancel", "names no request");
  }
  for (const RequestId id : requests) service_->engine().Cancel(id);
  return absl::OkStatus();
}

void SessionCore::OnReadsDone() {
  const std::lock_guard lock(mu_);
  reading_ = false;
  reads_done_ = true;
  PumpLocked();
}

// ----------------------------------------------------------------------------------------------------------
// any thread

void SessionCore::OnToken(const ActInfo& info, uint32_t sample, uint32_t index, int32_t token) {
  v1::SessionResponse response;
  v1::ActionToken& event = *response.mutable_token();
  event.set_act_id(info.act_id);
  event.set_sample(sample);
  event.set_index(index);
  event.set_token(token);
  std::string bytes = response.SerializeAsString();
  const std::lock_guard lock(mu_);
  PushLocked(std::move(bytes), true);
}

void SessionCore::OnAnswer(const ActInfo& info, absl::StatusOr<ActResult> result) {
  v1::SessionResponse response;
  if (result.ok()) {
    *response.mutable_chunk() = ActionChunkOf(info, *result);
  } else {
    v1::RequestError& error = *response.mutable_error();
    error = RequestErrorOf(result.status(), info.message_number);
    error.set_act_id(info.act_id);
  }
  std::string bytes = response.SerializeAsString();
  const std::lock_guard lock(mu_);
  acts_.erase(info.act_id);
  if (info.act_id == push_id_) push_open_ = false;
  PushLocked(std::move(bytes), false);
  PumpLocked();
}

void SessionCore::Send(const v1::SessionResponse& response) {
  std::string bytes = response.SerializeAsString();
  const std::lock_guard lock(mu_);
  PushLocked(std::move(bytes), false);
}

void SessionCore::OnWriteDone(bool ok) {
  const std::lock_guard lock(mu_);
  writing_ = false;
  outbox_.pop_front();
  if (ok) {
    last_activity_ = service_->clock().Now();
  } else {
    outbox_.clear();
  }
  PumpLocked();
}

void SessionCore::OnCancelled() {
  const std::lock_guard lock(mu_);
  cancelled_ = true;
  outbox_.resize(std::min<size_t>(outbox_.size(), writing_ ? 1 : 0));
  service_->engine().CancelSession(id_);
  PumpLocked();
}

void SessionCore::Detach() {
  bool opened = false;
  uint64_t dropped = 0;
  uint64_t messages = 0;
  {
    const std::lock_guard lock(mu_);
    port_ = nullptr;
    lease_.Release();
    opened = opened_;
    dropped = tokens_dropped_;
    messages = messages_read_;
  }
  service_->SetStreamOpen(false);
  if (!opened) return;
  if (refresh_class_) service_->engine().CancelSession(id_);  // a prefix that nobody will read
  Serving::SetSessionOpen(*target_.model, false);
  LogInfo("session ended",
          {LogField(id_), {"messages", messages}, {"token_events_dropped", dropped}});
}

void SessionCore::Tick(TimePoint now) {
  const double idle_s = service_->settings()->config.limits.session_idle_s;
  const std::lock_guard lock(mu_);
  if (port_ == nullptr || cancelled_) return;
  const std::chrono::duration<double> quiet = now - last_activity_;
  if (closing_) {
    if (!finish_sent_ && !aborted_ && acts_.empty() && now - closing_since_ > kCloseTimeout) {
      aborted_ = true;
      port_->Abort();
    }
  } else if (!opened_ && now - last_activity_ > kOpenTimeout) {
    CloseLocked(Failure(absl::StatusCode::kDeadlineExceeded, Reason::kExpired, "open",
                        "open: nothing was sent"));
  } else if (quiet.count() > idle_s && !outbox_.empty()) {
    dropped_ = true;
    outbox_.resize(writing_ ? 1 : 0);
    CloseLocked(Failure(absl::StatusCode::kResourceExhausted, Reason::kRateLimited, "",
                        StrCat("answers were not read for ", idle_s, " s")));
  } else if (quiet.count() > idle_s && acts_.empty()) {
    CloseLocked(Failure(absl::StatusCode::kDeadlineExceeded, Reason::kExpired, "",
                        StrCat("no message for ", idle_s, " s")));
  }
}

void SessionCore::NotifyDraining() {
  v1::SessionResponse response;
  v1::Notice& notice = *response.mutable_notice();
  notice.set_kind(v1::NOTICE_KIND_DRAINING);
  notice.set_message("the server is shutting down");
  std::string bytes = response.SerializeAsString();
  const std::lock_guard lock(mu_);
  if (opened_) PushLocked(std::move(bytes), false);
}

void SessionCore::CloseWhenIdle(const absl::Status& status) {
  const std::lock_guard lock(mu_);
  CloseLocked(status);
}

bool SessionCore::NotifyModel(ModelId id, v1::NoticeKind kind, std::string_view message) {
  v1::SessionResponse response;
  response.mutable_notice()->set_kind(kind);
  response.mutable_notice()->set_message(std::string(message));
  std::string bytes = response.SerializeAsString();
  const std::lock_guard lock(mu_);
  if (model_ != id || port_ == nullptr) return false;
  PushLocked(std::move(bytes), false);
  return true;
}

bool SessionCore::CloseModel(ModelId id, const absl::Status& status) {
  const std::lock_guard lock(mu_);
  if (model_ != id || port_ == nullptr) return false;
  CloseLocked(status);
  return true;
}

bool SessionCore::Uses(ModelId id) {
  const std::lock_guard lock(mu_);
  return model_ == id && port_ != nullptr;
}

// ----------------------------------------------------------------------------------------------------------
// under mu_

SessionCore::Incoming SessionCore::PopLocked() {
  Incoming incoming = std::move(inbox_.front());
  inbox_.pop_front();
  inbox_bytes_ -= incoming.bytes;
  return incoming;
}

void SessionCore::DropSupersededLocked(TimePoint now) {
  if (!opened_) return;
  for (size_t i = 0; i < inbox_.size();) {
    if (!IsFrame(inbox_[i].message) || !SupersededLocked(i, now)) {
      ++i;
      continue;
    }
    Serving::CountSuperseded(*target_.model);
    inbox_bytes_ -= inbox_[i].bytes;
    inbox_.erase(inbox_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

bool SessionCore::SupersededLocked(size_t frame, TimePoint now) const {
  const v1::VisionFrame& vision = inbox_[frame].message->vision();
  for (size_t i = frame + 1; i < inbox_.size(); ++i) {
    const Incoming& later = inbox_[i];
    if (IsFrame(later.message)) {
      const v1::VisionFrame& other = later.message->vision();
      if (other.camera() == vision.camera() && other.capture_time_ns() >= vision.capture_time_ns())
        return true;
    } else if (IsKind(later.message, v1::SessionRequest::kReset)) {
      return false;
    } else if (IsKind(later.message, v1::SessionRequest::kAct) &&
               !service_->IsTooLate(target_, later.message->act(), later.received, call_deadline_,
                                    now)) {
      return false;
    }
  }
  return false;
}

void SessionCore::CloseLocked(const absl::Status& status) {
  if (closing_) return;
  closing_ = status;
  closing_since_ = service_->clock().Now();
  PumpLocked();
}

void SessionCore::PushLocked(std::string bytes, bool droppable) {
  if (!WritableLocked()) return;
  const size_t limit = OutboxLimitLocked();
  if (droppable && outbox_.size() >= limit / 2) {
    ++tokens_dropped_;
    return;
  }
  if (outbox_.size() >= limit) {
    const auto first = outbox_.begin() + (writing_ ? 1 : 0);
    const auto kept =
        std::remove_if(first, outbox_.end(), [](const Outgoing& item) { return item.droppable; });
    tokens_dropped_ += static_cast<uint64_t>(outbox_.end() - kept);
    outbox_.erase(kept, outbox_.end());
  }
  if (outbox_.size() >= limit) {
    dropped_ = true;
    outbox_.resize(writing_ ? 1 : 0);
    service_->engine().CancelSession(id_);
    CloseLocked(Failure(absl::StatusCode::kResourceExhausted, Reason::kRateLimited, "",
                        StrCat("more than ", limit, " answers were not read")));
    return;
  }
  outbox_.push_back({std::move(bytes), droppable});
  PumpLocked();
}

void SessionCore::PumpLocked() {
  if (port_ == nullptr || finish_sent_) return;
  if (!writing_ && !outbox_.empty()) {
    writing_ = true;
    port_->Write(outbox_.front().bytes);
  }
  const size_t limit = OutboxLimitLocked();
  // Each message that was read may have an answer of its own.
  const bool room = inbox_.size() < kReadAheadMessages && inbox_bytes_ < kReadAheadBytes &&
                    outbox_.size() + inbox_.size() < std::max<size_t>(1, limit / 2);
  if (room && !reading_ && !reads_done_ && !cancelled_ && !closing_) {
    reading_ = true;
    port_->Read();
  }
  if (writing_ || !outbox_.empty()) return;
  if (cancelled_) {
    finish_sent_ = true;
    port_->Finish(absl::CancelledError("the call was cancelled"));
  } else if (closing_ && (acts_.empty() || dropped_)) {
    finish_sent_ = true;
    port_->Finish(*closing_);
  } else if (reads_done_ && !handling_ && acts_.empty()) {
    finish_sent_ = true;
    port_->Finish(absl::OkStatus());
  }
}

}  // namespace saccade
