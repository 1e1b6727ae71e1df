#pragma once
// SessionCore: one Session stream without its transport. Handles one message at a time while it
// reads the next ones, keeps one write outstanding, holds answers in a bounded outbox.
//
// Threads. Any thread may call anything. Messages are handled in order, one at a time: frames by
// the decode executor, a turn for each frame, and what waits behind a frame by the same thread;
// what does not wait for a frame by the transport thread that brought it. Turns of a push do not
// wait for frames: the ticker takes them while one waits for its turn or is decoded. `mu_` guards
// the stream's state and is never held while a message is handled. `session_mu_` guards the Session
// and is held by whoever handles something, but not while it decodes; it is taken before `mu_`.
//
// Frames that wait. A newer frame of the same camera takes the place of one that waits, before that
// is decoded, unless an act request between the two may still be answered in time.
//
// Slow readers. Reading pauses while half the outbox is taken, so a client that does not read stops
// being read. Token events are not queued any more from there on; when the outbox is full, queued
// ones are dropped, and when that is not enough the stream ends with RESOURCE_EXHAUSTED. If even
// that cannot be delivered, the call is aborted a little later.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "base/clock.h"
#include "base/fair_executor.h"
#include "base/status.h"
#include "rpc/codec.h"
#include "rpc/serving.h"

namespace saccade {

// The transport of one stream. Calls return at once; completions arrive as calls of SessionCore,
// from another stack frame.
class StreamPort {
 public:
  virtual ~StreamPort() = default;
  virtual void Read() = 0;
  virtual void Write(const std::string& bytes) = 0;
  virtual void Finish(const absl::Status& status) = 0;  // once
  virtual void Abort() = 0;  // resets the call; completions follow as failed
};

class SessionCore : public std::enable_shared_from_this<SessionCore> {
 public:
  // `call_deadline` bounds every request of the stream.
  SessionCore(std::shared_ptr<Serving> service, SessionLease lease, TimePoint call_deadline);
  ~SessionCore();

  void Start(StreamPort* port);
  // Answers Read: a whole message, or a status when the bytes were none. `received`: when it was
  // complete; deadlines and ages count from there. `memory` is what holds its bytes.
  void OnMessage(absl::StatusOr<v1::SessionRequest> message, TimePoint received,
                 MemoryHold memory = {});
  void OnReadsDone();
  void OnWriteDone(bool ok);
  void OnCancelled();
  // The transport is gone; nothing is sent from now on.
  void Detach();

  // A turn of a push is due. By the ticker's thread.
  void OnPush(TimePoint due);

  // Housekeeping, about every 50 ms.
  void Tick(TimePoint now);
  // The server begins to drain: tells the client.
  void NotifyDraining();
  // Ends the stream once what was accepted is answered and sent.
  void CloseWhenIdle(const absl::Status& status);
  // For a session of that model only; false when this is none.
  bool NotifyModel(ModelId id, v1::NoticeKind kind, std::string_view message);
  bool CloseModel(ModelId id, const absl::Status& status);
  bool Uses(ModelId id);

 private:
  class Flight;
  class RefreshFlight;
  struct Incoming {
    uint64_t number = 0;
    absl::StatusOr<v1::SessionRequest> message;
    TimePoint received{};
    size_t bytes = 0;
    uint64_t pixels = 0;  // of a frame
    MemoryHold memory;
  };
  struct Outgoing {
    std::string bytes;
    bool droppable = false;  // a token event
  };

  // --- one message at a time ---
  // Handles what has been read, until there is nothing or a frame's turn has to come first.
  // `may_decode`: this is the turn of one frame.
  void HandleInbox(bool may_decode);
  void Handle(const Incoming& incoming);
  void FollowSettings(TimePoint now);
  // `touching` holds session_mu_.
  absl::Status Dispatch(const Incoming& incoming, std::unique_lock<std::mutex>& touching);
  absl::Status HandleOpen(const v1::Open& open, TimePoint received);
  absl::Status HandleVision(const v1::VisionFrame& frame, uint64_t pixels, TimePoint received,
                            std::unique_lock<std::mutex>& touching);
  void HandleAct(const v1::ActRequest& act, TimePoint received);
  void RefuseAct(const v1::ActRequest& act, const absl::Status& status);
  absl::Status SubmitAct(const v1::ActRequest& act, TimePoint received,
                         TimePoint next = kNever);  // when the session asks again
  absl::Status HandleCancel(const v1::Cancel& cancel);
  absl::Status HandlePush(const v1::Push& push);
  void PushAct(TimePoint due);
  // A prefix that was asked for and is done, or has failed.
  struct Refreshed {
    std::shared_ptr<const Observation> prefix;
    bool ok = false;
  };
  void TakeTurns(const std::optional<Refreshed>& refreshed, std::optional<TimePoint> push_due);
  void Refresh(TimePoint now);

  // --- any thread ---
  void OnToken(const ActInfo& info, uint32_t sample, uint32_t index, int32_t token);
  void OnAnswer(const ActInfo& info, absl::StatusOr<ActResult> result);
  void OnRefreshed(const std::shared_ptr<const Observation>& prefix, bool ok);
  void HandleRefreshed();
  void Send(const v1::SessionResponse& response);

  // --- under mu_ ---
  void DropSupersededLocked(TimePoint now);
  bool SupersededLocked(size_t frame, TimePoint now) const;  // `frame`: place in the inbox
  Incoming PopLocked();
  void PushLocked(std::string bytes, bool droppable);
  void PumpLocked();
  void CloseLocked(const absl::Status& status);
  size_t OutboxLimitLocked() const {
    return std::max<size_t>(2, settings_->config.limits.outbox_messages);
  }
  bool WritableLocked() const {
    return port_ != nullptr && !finish_sent_ && !cancelled_ && !dropped_;
  }

  const std::shared_ptr<Serving> service_;
  const TimePoint call_deadline_;
  const SessionId id_;

  const std::shared_ptr<FairExecutor::Account> account_;

  std::mutex session_mu_;             // guards the following
  uint64_t message_number_ = 0;       // of the one being handled
  Serving::Target target_;            // constant once opened
  std::unique_ptr<Session> session_;  // null until opened
  bool stream_tokens_ = false;        // constant once opened
  bool supersede_ = false;
  std::optional<ClassId> refresh_class_;  // constant once opened
  bool refreshing_ = false;               // a prefix is being computed
  v1::ActRequest push_act_;               // with the id of the next one
  uint64_t push_timer_ = 0;               // 0: none
  Micros push_period_{0};
  bool push_last_ok_ = true;
  Reason push_last_reason_ = Reason::kUnspecified;
  uint64_t settings_version_ = 0;  // that session_ follows

  std::mutex mu_;
  std::shared_ptr<const Settings> settings_;
  SessionLease lease_;
  StreamPort* port_ = nullptr;
  std::deque<Outgoing> outbox_;  // the front is the write in progress while writing_
  std::unordered_map<uint64_t, RequestId> acts_;  // unanswered, by the client's id
  TimePoint last_activity_;
  std::optional<absl::Status> closing_;
  TimePoint closing_since_{};
  bool opened_ = false;
  ModelId model_;               // valid once opened
  std::deque<Incoming> inbox_;  // read, in order; handled once it is their turn
  size_t inbox_bytes_ = 0;
  uint64_t messages_read_ = 0;
  bool reading_ = false;   // a read is outstanding
  bool handling_ = false;  // a message is being handled, or waits for its frame's turn
  bool away_ = false;  // who handles waits for a turn, or decodes: the session is free meanwhile
  // Handled before messages.
  std::optional<Refreshed> refreshed_;
  std::optional<TimePoint> push_due_;
  uint64_t push_id_ = 0;    // of the newest push's request,
  bool push_open_ = false;  // which is not answered
  bool reads_done_ = false;
  bool writing_ = false;
  bool cancelled_ = false;  // the client is gone, or the call's deadline passed
  bool dropped_ = false;    // the outbox overflowed
  bool aborted_ = false;
  bool finish_sent_ = false;
  uint64_t tokens_dropped_ = 0;
};

}  // namespace saccade
