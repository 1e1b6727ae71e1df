#pragma once
// Session: what one client has told us so far. The newest frame of each camera, the instruction,
// the state and the executed actions; a snapshot of them is an immutable observation. One stream
// owns it and calls it from one thread at a time.
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/content.h"
#include "base/ids.h"
#include "base/status.h"
#include "kv/timeline.h"
#include "session/catalog.h"
#include "session/prompt_timeline.h"
#include "session/token_bucket.h"

namespace saccade {

// What one client message or session may hold. From the configuration's `limits`.
struct SessionLimits {
  uint32_t max_instruction_bytes = 4096;
  uint32_t max_instruction_tokens = 1024;
  uint32_t max_state_values = 256;
  uint32_t executed_history = 256;  // actions kept
  double acts_per_s = 200;
  double frames_per_s = 480;
  double pixels_per_s = 0;       // of frames; 0: no limit
  double messages_per_s = 1000;  // text, state, executed, reset and cancel together
};

// A frame ready for the model.
struct Frame {
  uint32_t camera = 0;          // of the model
  ContentRef content;           // [camera height, camera width, 3]
  int64_t capture_time_ns = 0;  // the client's own clock; echoed, never compared with ours
  TimePoint captured{};         // on our clock: receipt minus the age the client stated
  Micros decode{0};             // spent on decoding and resizing
};

struct ExecutedAction {
  std::vector<double> values;  // [action_dim] in the robot's units
  int64_t time_ns = 0;         // the client's own clock
};

// One observation, fixed. Shared by the requests made from it.
struct Observation {
  std::shared_ptr<const Timeline> timeline;
  std::vector<Frame> frames;  // in the order of the model's cameras, of those that sent one
  std::vector<float> state;   // [state_dim]; empty for a model without state
  StateRef normalized;        // the same for the model, [state_width]; null without
  int64_t state_capture_time_ns = 0;
  uint64_t version = 0;         // of its frames, text and cameras
  TimePoint oldest_captured{};  // of `frames`; zero when there are none
};

struct SessionParams {
  const SessionModel* model = nullptr;
  std::string statistics_key;
  uint32_t action_dim = 0;  // values of one action of a chunk
  ClassId klass;            // of requests that name none
};

class Session {
 public:
  Session(SessionId id, SessionParams params, const SessionLimits& limits, TimePoint now);

  // Other limits from now on. A rate that grows is not saved up for the past.
  void SetLimits(const SessionLimits& limits, TimePoint now);

  SessionId id() const { return id_; }
  const SessionModel& model() const { return *params_.model; }
  const SessionParams& params() const { return params_; }

  // RESOURCE_EXHAUSTED (kRateLimited, retry_after) beyond the session's rate.
  absl::Status TakeFrameToken(TimePoint now);
  // For a frame of so many pixels, before it is decoded.
  absl::Status TakePixels(uint64_t pixels, TimePoint now);
  absl::Status TakeActToken(TimePoint now);
  // For text, state, executed, reset and cancel messages.
  absl::Status TakeMessageToken(TimePoint now);

  // Index of the camera; empty is the only one. INVALID_ARGUMENT lists the names.
  absl::StatusOr<uint32_t> FindCamera(std::string_view name, std::string_view field) const;
  // True when a newer frame of the camera is there: ask before spending time on decoding.
  bool IsStale(uint32_t camera, int64_t capture_time_ns) const;
  // What became of a frame.
  enum class Fate : uint8_t {
    kKept,
    kReplacedUnused,  // kept, and the frame before it had not been used by any snapshot
    kStale,           // dropped: older than the newest
  };
  Fate Publish(uint32_t camera, Frame frame);

  // INVALID_ARGUMENT names `field` or "text.token_ids", whatever the model calls it: kInvalidInput,
  // or kNeverFits when it is too long for the model. The earlier prompt stays then.
  absl::Status SetInstruction(std::string_view instruction, std::string_view field);
  absl::Status SetPromptTokens(std::span<const int32_t> ids);
  // INVALID_ARGUMENT names "state.values": wrong count, not finite, or the model takes none.
  absl::Status SetState(std::span<const float> values, int64_t capture_time_ns);
  // All or none. INVALID_ARGUMENT names "executed.actions".
  absl::Status AddExecuted(std::vector<ExecutedAction> actions);
  const std::deque<ExecutedAction>& executed() const { return executed_; }
  void Reset(bool keep_instruction);

  // FAILED_PRECONDITION when something the model needs has not been sent (kMissingInput names
  // "text" or "state", kNoFrame the camera), or a frame is older than `max_frame_age` (kStaleFrame;
  // zero: any age). INVALID_ARGUMENT (kNeverFits) when the prompt is longer than the model. The
  // timeline is built once and reused until a frame's pixels or the prompt change.
  // With prefixes of their own (below) it has the frames of the newest committed one, where that is
  // young enough and still of this text and these cameras; else the newest frames.
  absl::StatusOr<std::shared_ptr<const Observation>> Snapshot(TimePoint now, Micros max_frame_age);

  // Vision at its own rate: what a prefix is to be computed from, the newest frames and the text.
  // Null: nothing is new, or the frames are a part of a set: those of some cameras have come, one
  // each, and others' are on their way. Errors as Snapshot.
  absl::StatusOr<std::shared_ptr<const Observation>> SnapshotPrefix();
  // It was computed: from now on snapshots are of its frames. Nothing when it is not the newest.
  void CommitPrefix(const std::shared_ptr<const Observation>& prefix);

 private:
  struct Mailbox {
    std::optional<Frame> frame;
    bool used = false;
    uint32_t fresh = 0;  // frames since the newest SnapshotPrefix
  };
  // The whole text of a prompt; `ids` in place of an instruction where they are not empty.
  struct Text {
    std::string instruction;
    std::vector<int32_t> ids;
    std::string field;  // that brought it
  };
  absl::Status SetText(Text text);
  absl::StatusOr<Prompt> BuildPrompt(const Text& text) const;
  size_t NumFrames() const;
  uint64_t MissingCameras() const;
  // What a snapshot has beside the state. Immutable.
  struct View {
    std::vector<Frame> frames;
    Prompt prompt;
    uint64_t version = 0;
    uint64_t text_version = 0;
    TimePoint oldest{};  // capture of `frames`; zero when there are none
  };
  absl::Status CheckInputs() const;
  bool FramesAreASet() const;
  absl::Status CheckAge(TimePoint now, Micros max_frame_age) const;
  absl::StatusOr<std::shared_ptr<const View>> NewestView();
  absl::StatusOr<std::shared_ptr<const Observation>> Observe(const View& view, PromptPart part);
  absl::StatusOr<std::shared_ptr<const Timeline>> BuildTimeline(const View& view,
                                                                PromptPart part) const;

  const SessionId id_;
  const SessionParams params_;
  SessionLimits limits_;
  TokenBucket frame_bucket_;
  TokenBucket pixel_bucket_;
  TokenBucket act_bucket_;
  TokenBucket message_bucket_;
  std::vector<Mailbox> mailboxes_;  // by camera
  std::optional<Text> text_;
  std::optional<Prompt> prompt_;  // absent: build it at the next snapshot
  uint64_t prompt_missing_ = 0;   // cameras that had sent nothing when it was built
  std::vector<float> state_;
  StateRef normalized_;
  int64_t state_capture_time_ns_ = 0;
  std::deque<ExecutedAction> executed_;
  uint64_t text_version_ = 0;
  uint64_t version_ = 0;              // of the newest view
  std::shared_ptr<const View> view_;  // of the newest inputs; null: they changed
  bool same_content_ = false;         // frames with the pixels of the newest view, and its text
  std::shared_ptr<const Timeline> timeline_;        // the last one of a whole prompt,
  uint64_t timeline_version_ = 0;                   // of this view
  StateRef timeline_state_;                         // and this state
  std::shared_ptr<const Observation> observation_;  // the last snapshot; null: something changed
  std::shared_ptr<const View> observed_;            // what it was of
  std::shared_ptr<const View> prefix_view_;         // of the newest SnapshotPrefix
  std::shared_ptr<const Observation> prefix_;       // what that gave
  std::shared_ptr<const View> committed_;           // null: no prefix was computed yet
};

}  // namespace saccade
