#include "session/session.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/strings.h"
#include "session/prompt_timeline.h"

namespace saccade {
namespace {

absl::Status RateLimited(std::string_view what, double per_second, Micros retry_after) {
  ErrorInfo info;
  info.reason = Reason::kRateLimited;
  info.retry_after = retry_after;
  return MakeError(absl::StatusCode::kResourceExhausted,
                   StrCat("more than ", per_second, " ", what, " per second in one session"), info);
}

absl::Status Missing(Reason reason, std::string_view field, std::string_view message) {
  ErrorInfo info;
  info.reason = reason;
  info.field = std::string(field);
  return MakeError(absl::StatusCode::kFailedPrecondition, message, info);
}

// The model's error under the name by which the client knows the field.
absl::Status UnderField(const absl::Status& status, std::string_view field) {
  ErrorInfo info = GetErrorInfo(status);
  std::string_view message = FromAbsl(status.message());
  if (const std::string own = StrCat(info.field, ": "); message.starts_with(own)) {
    message.remove_prefix(own.size());
  }
  info.field = std::string(field);
  return MakeError(status.code(), StrCat(field, ": ", message), info);
}

// Well-formed UTF-8 without overlong forms, surrogates or values past U+10FFFF.
bool IsUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x80) {
      ++i;
      continue;
    }
    const size_t extra = byte >= 0xF0 ? 3 : byte >= 0xE0 ? 2 : 1;
    if (byte < 0xC2 || byte > 0xF4 || text.size() - i <= extra) return false;
    uint32_t code = byte & (0x3Fu >> extra);
    for (size_t k = 1; k <= extra; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      if ((next & 0xC0) != 0x80) return false;
      code = code << 6 | (next & 0x3Fu);
    }
    if ((extra == 2 && code < 0x800) || (extra == 3 && code < 0x10000) || code > 0x10FFFF ||
        (code >= 0xD800 && code <= 0xDFFF)) {
      return false;
    }
    i += extra + 1;
  }
  return true;
}

}  // namespace

Session::Session(SessionId id, SessionParams params, const SessionLimits& limits, TimePoint now)
    : id_(id),
      params_(std::move(params)),
      limits_(limits),
      frame_bucket_(limits.frames_per_s, now),
      pixel_bucket_(limits.pixels_per_s, now),
      act_bucket_(limits.acts_per_s, now),
      message_bucket_(limits.messages_per_s, now),
      mailboxes_(params_.model->model->spec().cameras.size()) {}

void Session::SetLimits(const SessionLimits& limits, TimePoint now) {
  limits_ = limits;
  frame_bucket_.SetRate(limits.frames_per_s, now);
  pixel_bucket_.SetRate(limits.pixels_per_s, now);
  act_bucket_.SetRate(limits.acts_per_s, now);
  message_bucket_.SetRate(limits.messages_per_s, now);
}

absl::Status Session::TakeFrameToken(TimePoint now) {
  const std::optional<Micros> wait = frame_bucket_.Take(now);
  return wait ? RateLimited("frames", limits_.frames_per_s, *wait) : absl::OkStatus();
}

absl::Status Session::TakePixels(uint64_t pixels, TimePoint now) {
  if (limits_.pixels_per_s <= 0) return absl::OkStatus();
  const std::optional<Micros> wait = pixel_bucket_.Take(now, static_cast<double>(pixels));
  return wait ? RateLimited("pixels", limits_.pixels_per_s, *wait) : absl::OkStatus();
}

absl::Status Session::TakeActToken(TimePoint now) {
  const std::optional<Micros> wait = act_bucket_.Take(now);
  return wait ? RateLimited("act requests", limits_.acts_per_s, *wait) : absl::OkStatus();
}

absl::Status Session::TakeMessageToken(TimePoint now) {
  const std::optional<Micros> wait = message_bucket_.Take(now);
  return wait ? RateLimited("text, state, executed, reset and cancel messages",
                            limits_.messages_per_s, *wait)
              : absl::OkStatus();
}

absl::StatusOr<uint32_t> Session::FindCamera(std::string_view name, std::string_view field) const {
  return saccade::FindCamera(model().model->spec(), name, field);
}

bool Session::IsStale(uint32_t camera, int64_t capture_time_ns) const {
  const std::optional<Frame>& newest = mailboxes_[camera].frame;
  return newest && capture_time_ns < newest->capture_time_ns;
}

Session::Fate Session::Publish(uint32_t camera, Frame frame) {
  if (IsStale(camera, frame.capture_time_ns)) return Fate::kStale;
  Mailbox& mailbox = mailboxes_[camera];
  const bool replaced_unused = mailbox.frame && !mailbox.used;
  if (!mailbox.frame || mailbox.frame->content != frame.content) {
    same_content_ = false;
  }
  view_ = nullptr;
  observation_ = nullptr;
  frame.camera = camera;
  mailbox.frame = std::move(frame);
  ++mailbox.fresh;
  mailbox.used = false;
  return replaced_unused ? Fate::kReplacedUnused : Fate::kKept;
}

size_t Session::NumFrames() const {
  return static_cast<size_t>(
      std::count_if(mailboxes_.begin(), mailboxes_.end(),
                    [](const Mailbox& mailbox) { return mailbox.frame.has_value(); }));
}

// Before the first frame none is missing: a text is judged as if all were there.
uint64_t Session::MissingCameras() const {
  if (NumFrames() == 0) return 0;
  uint64_t missing = 0;
  for (size_t i = 0; i < mailboxes_.size(); ++i) {
    if (!mailboxes_[i].frame && model().model->spec().cameras[i].optional) missing |= 1ull << i;
  }
  return missing;
}

// Without a state as if every value were the mean: for the text to be judged before one comes.
absl::StatusOr<Prompt> Session::BuildPrompt(const Text& text) const {
  const Model& model = *this->model().model;
  if (!text.ids.empty()) return model.BuildPromptFromTokens(text.ids, MissingCameras());
  PromptInput input;
  input.instruction = text.instruction;
  input.missing_cameras = MissingCameras();
  const std::vector<float> unknown(normalized_ == nullptr ? model.spec().state_width : 0);
  input.state = normalized_ == nullptr ? unknown : *normalized_;
  return model.BuildPrompt(input);
}

absl::Status Session::SetText(Text text) {
  absl::StatusOr<Prompt> prompt = BuildPrompt(text);
  if (!prompt.ok()) return UnderField(prompt.status(), text.field);
  text_ = std::move(text);
  prompt_ = *std::move(prompt);
  prompt_missing_ = MissingCameras();
  ++text_version_;
  same_content_ = false;
  view_ = nullptr;
  observation_ = nullptr;
  return absl::OkStatus();
}

absl::Status Session::SetInstruction(std::string_view instruction, std::string_view field) {
  if (instruction.empty()) return InvalidField(field, "is empty");
  if (instruction.size() > limits_.max_instruction_bytes) {
    return InvalidField(field, StrCat("has ", instruction.size(), " bytes, the limit is ",
                                      limits_.max_instruction_bytes));
  }
  if (!IsUtf8(instruction)) return InvalidField(field, "is not UTF-8");
  return SetText({std::string(instruction), {}, std::string(field)});
}

absl::Status Session::SetPromptTokens(std::span<const int32_t> ids) {
  constexpr std::string_view kField = "text.token_ids";
  if (ids.empty()) return InvalidField(kField, "is empty");
  if (ids.size() > limits_.max_instruction_tokens) {
    return InvalidField(
        kField, StrCat("has ", ids.size(), " ids, the limit is ", limits_.max_instruction_tokens));
  }
  return SetText({{}, {ids.begin(), ids.end()}, std::string(kField)});
}

absl::Status Session::SetState(std::span<const float> values, int64_t capture_time_ns) {
  constexpr std::string_view kField = "state.values";
  const uint32_t expected = model().model->spec().state_dim;
  if (expected == 0)
    return InvalidField(kField, StrCat("model \"", model().name, "\" takes no state"));
  if (values.size() != expected) {
    return InvalidField(kField,
                        StrCat("has ", values.size(), " values, the model takes ", expected));
  }
  if (!std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); })) {
    return InvalidField(kField, "holds NaN or Inf");
  }
  absl::StatusOr<std::vector<float>> normalized =
      model().model->NormalizeState(values, params_.statistics_key);
  if (!normalized.ok()) return UnderField(normalized.status(), kField);
  state_.assign(values.begin(), values.end());
  state_capture_time_ns_ = capture_time_ns;
  // The same state again changes nothing that was made of it.
  if (normalized_ == nullptr || *normalized_ != *normalized) {
    normalized_ = std::make_shared<const std::vector<float>>(*std::move(normalized));
    if (model().model->spec().state_in_text) {
      prompt_.reset();
      same_content_ = false;
      view_ = nullptr;
    }
  }
  observation_ = nullptr;
  return absl::OkStatus();
}

absl::Status Session::AddExecuted(std::vector<ExecutedAction> actions) {
  constexpr std::string_view kField = "executed.actions";
  if (actions.empty()) return InvalidField(kField, "is empty");
  for (const ExecutedAction& action : actions) {
    if (action.values.size() != params_.action_dim) {
      return InvalidField(kField, StrCat("an action has ", action.values.size(),
                                         " values, the model's have ", params_.action_dim));
    }
    if (!std::all_of(action.values.begin(), action.values.end(),
                     [](double v) { return std::isfinite(v); })) {
      return InvalidField(kField, "holds NaN or Inf");
    }
    if (action.time_ns < 0) return InvalidField(kField, "a time is negative");
  }
  for (ExecutedAction& action : actions) executed_.push_back(std::move(action));
  while (executed_.size() > limits_.executed_history) executed_.pop_front();
  return absl::OkStatus();
}

void Session::Reset(bool keep_instruction) {
  for (Mailbox& mailbox : mailboxes_) mailbox = {};
  state_.clear();
  normalized_ = nullptr;
  executed_.clear();
  prompt_.reset();
  if (!keep_instruction) text_.reset();
  view_ = prefix_view_ = committed_ = observed_ = nullptr;
  same_content_ = false;
  prefix_ = observation_ = nullptr;
}

absl::StatusOr<std::shared_ptr<const Timeline>> Session::BuildTimeline(const View& view,
                                                                       PromptPart part) const {
  const ModelSpec& spec = model().model->spec();
  TimelineBuilder builder = model().new_timeline();
  const auto frame_of = [&view](uint32_t camera) -> absl::StatusOr<ContentRef> {
    for (const Frame& frame : view.frames) {
      if (frame.camera == camera) return frame.content;
    }
    return absl::InternalError("a prompt has a camera without a frame");
  };
  RETURN_IF_ERROR(AddPrompt(view.prompt, spec, frame_of, normalized_, builder, part));
  std::shared_ptr<const Timeline> timeline = builder.Build();
  const uint64_t tokens = timeline->num_tokens();
  uint64_t answer = 0;  // of one pass: its places are in the prompt
  if (spec.head.kind == HeadKind::kFlow) answer = spec.head.suffix_rows();
  if (spec.head.kind == HeadKind::kTokens) {
    answer = spec.head.stop_tokens.empty() ? uint64_t{params_.action_dim} * model().action_steps
                                           : spec.max_action_tokens;
  }
  if (tokens + answer > spec.max_positions) {
    ErrorInfo info;
    info.reason = Reason::kNeverFits;
    info.field = text_->field;
    return MakeError(absl::StatusCode::kInvalidArgument,
                     StrCat(text_->field, ": a prompt of ", tokens, " tokens and an answer of ",
                            answer, " do not fit the model's ", spec.max_positions),
                     info);
  }
  return timeline;
}

absl::Status Session::CheckInputs() const {
  const ModelSpec& spec = model().model->spec();
  if (!text_) return Missing(Reason::kMissingInput, "text", "text: no instruction has been sent");
  for (size_t i = 0; i < mailboxes_.size(); ++i) {
    const CameraSpec& camera = spec.cameras[i];
    if (mailboxes_[i].frame || camera.optional) continue;
    return Missing(Reason::kNoFrame, camera.name,
                   StrCat("camera \"", camera.name, "\" has sent no frame"));
  }
  if (!spec.cameras.empty() && NumFrames() == 0) {
    std::string names;
    for (const CameraSpec& camera : spec.cameras) {
      StrAppend(&names, names.empty() ? "" : ", ", camera.name);
    }
    return Missing(Reason::kNoFrame, spec.cameras.front().name,
                   StrCat("no camera has sent a frame, the model needs one of: ", names));
  }
  if (spec.state_dim != 0 && state_.empty()) {
    return Missing(Reason::kMissingInput, "state",
                   "state: the model needs a state and none has been sent");
  }
  return absl::OkStatus();
}

absl::Status Session::CheckAge(TimePoint now, Micros max_frame_age) const {
  if (max_frame_age.count() == 0) return absl::OkStatus();
  for (size_t i = 0; i < mailboxes_.size(); ++i) {
    const std::optional<Frame>& frame = mailboxes_[i].frame;
    if (!frame) continue;
    const Micros age = ToMicros(now - frame->captured);
    if (age <= max_frame_age) continue;
    const std::string& camera = model().model->spec().cameras[i].name;
    return Missing(Reason::kStaleFrame, camera,
                   StrCat("the newest frame of camera \"", camera, "\" is ", age.count(),
                          " us old, the request allows ", max_frame_age.count()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Session::View>> Session::NewestView() {
  if (view_ != nullptr) return view_;
  if (!prompt_ || prompt_missing_ != MissingCameras()) {
    absl::StatusOr<Prompt> prompt = BuildPrompt(*text_);
    if (!prompt.ok()) return UnderField(prompt.status(), text_->field);
    prompt_ = *std::move(prompt);
    prompt_missing_ = MissingCameras();
  }
  auto view = std::make_shared<View>();
  for (const Mailbox& mailbox : mailboxes_) {
    if (!mailbox.frame) continue;
    view->frames.push_back(*mailbox.frame);
    const TimePoint captured = mailbox.frame->captured;
    if (view->frames.size() == 1 || captured < view->oldest) view->oldest = captured;
  }
  view->prompt = *prompt_;
  view->version = same_content_ ? version_ : ++version_;
  same_content_ = true;
  view->text_version = text_version_;
  view_ = std::move(view);
  return view_;
}

absl::StatusOr<std::shared_ptr<const Observation>> Session::Observe(const View& view,
                                                                    PromptPart part) {
  auto observation = std::make_shared<Observation>();
  if (part == PromptPart::kPrefix) {
    ASSIGN_OR_RETURN(observation->timeline, BuildTimeline(view, part));
  } else {
    // Frames with the same pixels at other times make the same timeline.
    if (timeline_ == nullptr || timeline_version_ != view.version ||
        timeline_state_ != normalized_) {
      ASSIGN_OR_RETURN(timeline_, BuildTimeline(view, part));
      timeline_version_ = view.version;
      timeline_state_ = normalized_;
    }
    observation->timeline = timeline_;
  }
  observation->frames = view.frames;
  observation->oldest_captured = view.oldest;
  observation->state = state_;
  observation->normalized = normalized_;
  observation->state_capture_time_ns = state_capture_time_ns_;
  observation->version = view.version;
  return observation;
}

absl::StatusOr<std::shared_ptr<const Observation>> Session::Snapshot(TimePoint now,
                                                                     Micros max_frame_age) {
  RETURN_IF_ERROR(CheckInputs());
  const bool committed =
      committed_ != nullptr && committed_->text_version == text_version_ &&
      committed_->frames.size() == NumFrames() &&  // no camera has come since
      (max_frame_age.count() == 0 || ToMicros(now - committed_->oldest) <= max_frame_age);
  if (!committed) RETURN_IF_ERROR(CheckAge(now, max_frame_age));
  for (Mailbox& mailbox : mailboxes_) mailbox.used = true;
  std::shared_ptr<const View> view = committed_;
  if (!committed) {
    ASSIGN_OR_RETURN(view, NewestView());
  }
  if (observation_ != nullptr && observed_ == view) return observation_;
  ASSIGN_OR_RETURN(observation_, Observe(*view, PromptPart::kAll));
  observed_ = std::move(view);
  return observation_;
}

// Since the newest prefix every camera has sent a frame, or one has sent two: then the others are
// slower. What has another text or other cameras waits for nothing.
bool Session::FramesAreASet() const {
  if (prefix_view_ == nullptr || prefix_view_->text_version != text_version_) return true;
  bool all = true;
  size_t present = 0;
  for (const Mailbox& mailbox : mailboxes_) {
    if (!mailbox.frame) continue;
    ++present;
    if (mailbox.fresh > 1) return true;
    all = all && mailbox.fresh > 0;
  }
  return all || present != prefix_view_->frames.size();
}

absl::StatusOr<std::shared_ptr<const Observation>> Session::SnapshotPrefix() {
  RETURN_IF_ERROR(CheckInputs());
  if (!FramesAreASet()) return nullptr;
  ASSIGN_OR_RETURN(std::shared_ptr<const View> view, NewestView());
  if (view == prefix_view_) return nullptr;
  for (Mailbox& mailbox : mailboxes_) {
    mailbox.used = true;
    mailbox.fresh = 0;
  }
  ASSIGN_OR_RETURN(prefix_, Observe(*view, PromptPart::kPrefix));
  prefix_view_ = std::move(view);
  return prefix_;
}

void Session::CommitPrefix(const std::shared_ptr<const Observation>& prefix) {
  if (prefix == nullptr || prefix != prefix_) return;
  committed_ = prefix_view_;
  observation_ = nullptr;
}

}  // namespace saccade
