#include "rpc/codec.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/strings.h"
#include "model/text_decoder.h"
#include "saccade/v1/error.pb.h"

namespace saccade {
namespace {

constexpr uint64_t kMaxMicros = 3'600'000'000;  // one hour
constexpr uint32_t kMaxRawSide = 65'535;        // pixels
constexpr int kMaxExecuted = 64;                // actions of one message
constexpr float kMinTemperature = 0.01F;
constexpr float kMaxTemperature = 10.0F;

// The wire's reasons are ours, number by number.
static_assert(static_cast<int>(v1::ERROR_REASON_INVALID_INPUT) ==
              static_cast<int>(Reason::kInvalidInput));
static_assert(static_cast<int>(v1::ERROR_REASON_NO_FRAME) == static_cast<int>(Reason::kNoFrame));
static_assert(static_cast<int>(v1::ERROR_REASON_DRAINING) == static_cast<int>(Reason::kDraining));
static_assert(static_cast<int>(v1::ERROR_REASON_WORKER_FAILED) ==
              static_cast<int>(Reason::kWorkerFailed));
static_assert(static_cast<int>(v1::ERROR_REASON_INTERNAL) == static_cast<int>(Reason::kInternal));
static_assert(static_cast<int>(v1::ERROR_REASON_MISSING_INPUT) ==
              static_cast<int>(Reason::kMissingInput));
static_assert(static_cast<int>(v1::ERROR_REASON_PERMISSION_DENIED) ==
              static_cast<int>(Reason::kPermissionDenied));
static_assert(v1::ErrorReason_ARRAYSIZE == kReasonCount);
// So are the sources, but for the wire's 0, "not stated".
static_assert(static_cast<int>(v1::TOKEN_SOURCE_COMPUTED) ==
              static_cast<int>(KvSource::kComputed) + 1);
static_assert(static_cast<int>(v1::TOKEN_SOURCE_EVICTED) ==
              static_cast<int>(KvSource::kEvicted) + 1);

uint64_t Positive(std::chrono::steady_clock::duration d) {
  return static_cast<uint64_t>(std::max<int64_t>(0, ToMicros(d).count()));
}

Reason ReasonOfCode(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kOutOfRange:
      return Reason::kInvalidInput;
    case absl::StatusCode::kCancelled:
      return Reason::kCancelled;
    case absl::StatusCode::kDeadlineExceeded:
      return Reason::kExpired;
    case absl::StatusCode::kResourceExhausted:
      return Reason::kRateLimited;
    default:
      return Reason::kInternal;
  }
}

std::string Hex(const Digest128& digest) {
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(digest.high),
                static_cast<unsigned long long>(digest.low));
  return text;
}

std::string Path(std::string_view prefix, std::string_view field) {
  return prefix.empty() ? std::string(field) : StrCat(prefix, ".", field);
}

// What every answer says of the frames, the prompt and the time.
template <class Answer, class Info>
void SetCommon(const Info& info, const ActResult& result, Answer& answer) {
  Micros decode{0};
  const Observation& observation = *info.observation;
  for (const Frame& frame : observation.frames) {
    v1::FrameUsed& used = *answer.add_frames();
    used.set_camera(info.spec->cameras[frame.camera].name);
    used.set_capture_time_ns(frame.capture_time_ns);
    used.set_age_us(Positive(result.finished - frame.captured));
    decode += frame.decode;
    for (const KvRun& run : result.frame_runs) {
      if (run.camera != frame.camera) continue;
      v1::TokenRun& tokens = *used.add_runs();
      tokens.set_source(static_cast<v1::TokenSource>(static_cast<int>(run.source) + 1));
      tokens.set_count(run.rows);
    }
  }
  SetTimings(result.timings, *answer.mutable_timings());
  answer.mutable_timings()->set_decode_us(Positive(decode));
  for (size_t m = 0; m < kModalities; ++m) {
    if (result.prompt_tokens[m] == 0) continue;
    v1::ModalityTokens& tokens = *answer.add_tokens();
    tokens.set_modality(static_cast<v1::Modality>(m + 1));  // the wire's 0 is "not stated"
    tokens.set_total(result.prompt_tokens[m]);
    tokens.set_cached(result.cached_tokens[m]);
  }
  answer.set_frames_cached(result.frame_cached);
  if (info.deadline != kNever) answer.set_deadline_us(Positive(info.deadline - info.arrival));
  const bool late = result.late || result.finished > info.deadline;
  answer.set_late(late);
  answer.set_deadline_met(!late);
  answer.set_latency_class(std::string(info.latency_class));
}

}  // namespace

v1::ErrorDetail ErrorDetailOf(const absl::Status& status) {
  const ErrorInfo info = GetErrorInfo(status);
  const Reason reason =
      info.reason == Reason::kUnspecified ? ReasonOfCode(status.code()) : info.reason;
  v1::ErrorDetail detail;
  detail.set_reason(static_cast<v1::ErrorReason>(reason));
  detail.set_field(info.field);
  if (info.retry_after) detail.set_retry_after_us(Positive(*info.retry_after));
  if (info.deadline) detail.set_deadline_us(Positive(*info.deadline));
  if (info.predicted_finish) detail.set_predicted_finish_us(Positive(*info.predicted_finish));
  return detail;
}

std::string StatusMessage(const absl::Status& status) {
  constexpr size_t kMost = 1500;
  constexpr std::string_view kCut = " ...";
  std::string_view message = FromAbsl(status.message());
  if (message.size() <= kMost) return std::string(message);
  size_t end = kMost - kCut.size();
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0) == 0x80) --end;
  return StrCat(message.substr(0, end), kCut);
}

std::string StatusDetails(const absl::Status& status) {
  v1::RpcStatus proto;
  proto.set_code(static_cast<int>(status.code()));
  proto.set_message(StatusMessage(status));
  proto.add_details()->PackFrom(ErrorDetailOf(status));
  return proto.SerializeAsString();
}

v1::RequestError RequestErrorOf(const absl::Status& status, uint64_t message_number) {
  v1::RequestError error;
  error.set_message_number(message_number);
  error.set_code(static_cast<int>(status.code()));
  error.set_message(std::string(FromAbsl(status.message())));
  *error.mutable_detail() = ErrorDetailOf(status);
  return error;
}

v1::Limits LimitsOf(const Config& config) {
  v1::Limits limits;
  limits.set_max_message_bytes(config.server.max_message_bytes);
  limits.set_max_image_bytes(config.limits.max_image_bytes);
  limits.set_max_pixels(config.limits.max_pixels);
  limits.set_max_instruction_bytes(config.limits.max_instruction_bytes);
  limits.set_max_instruction_tokens(config.limits.max_instruction_tokens);
  limits.set_acts_in_flight(config.limits.acts_in_flight);
  limits.set_acts_per_s(config.limits.acts_per_s);
  limits.set_frames_per_s(config.limits.frames_per_s);
  limits.set_max_samples(config.limits.max_samples);
  limits.set_session_idle_s(config.limits.session_idle_s);
  limits.set_outbox_messages(config.limits.outbox_messages);
  limits.set_messages_per_s(config.limits.messages_per_s);
  limits.set_pixels_per_s(config.limits.pixels_per_s);
  limits.set_sessions_per_peer(config.limits.sessions_per_peer);
  limits.set_max_new_tokens(config.limits.max_new_tokens);
  limits.set_max_beams(config.limits.max_beams);
  return limits;
}

v1::LatencyClass LatencyClassOf(const LatencyClass& klass) {
  v1::LatencyClass proto;
  proto.set_name(klass.name);
  proto.set_deadline_us(Positive(klass.deadline));
  proto.set_tier(klass.tier);
  proto.set_runs_late(klass.on_late == OnLate::kRunLate);
  proto.set_degrades(klass.on_late == OnLate::kDegrade);
  return proto;
}

absl::StatusOr<v1::Model> ModelOf(const ModelSpec& spec, const ModelConfig& config) {
  v1::Model proto;
  proto.set_name(config.name);
  proto.set_family(spec.family);
  for (const CameraSpec& camera : spec.cameras) {
    v1::Camera& c = *proto.add_cameras();
    c.set_name(camera.name);
    c.set_width(camera.width);
    c.set_height(camera.height);
    c.set_required(!camera.optional);
  }
  const ActionSpaceConfig stated = config.action_space.value_or(ActionSpaceConfig{});
  for (const StatisticsSpec& statistics : spec.statistics) {
    const uint32_t horizon = spec.head.actions();
    const uint32_t divided = stated.steps == 0 ? 0 : statistics.action_dim / stated.steps;
    const uint32_t dim = horizon > 0 ? statistics.action_dim : divided;
    const bool fits = horizon > 0 ? !config.action_space || stated.steps == horizon
                                  : dim * stated.steps == statistics.action_dim;
    if (dim == 0 || !fits || (!stated.dims.empty() && stated.dims.size() != dim)) {
      return absl::FailedPreconditionError(StrCat("model \"", config.name, "\": action_space says ",
                                                  stated.steps, " steps of ", stated.dims.size(),
                                                  " values, but statistics \"", statistics.key,
                                                  "\" have ", statistics.action_dim, " values"));
    }
    v1::StatisticsSet& set = *proto.add_statistics();
    set.set_key(statistics.key);
    v1::ActionSpace& space = *set.mutable_action_space();
    space.set_steps(horizon > 0 ? horizon : stated.steps);
    space.set_dim(dim);
    if (config.action_space) {
      space.set_dt_s(stated.dt_s);
      space.set_reference(stated.relative ? v1::ACTION_REFERENCE_RELATIVE
                                          : v1::ACTION_REFERENCE_ABSOLUTE);
    }
    if (spec.relative_actions) {
      space.set_reference(*spec.relative_actions ? v1::ACTION_REFERENCE_RELATIVE
                                                 : v1::ACTION_REFERENCE_ABSOLUTE);
    }
    for (const ActionDimConfig& d : stated.dims) {
      v1::ActionDimension& dimension = *space.add_dimensions();
      dimension.set_name(d.name);
      dimension.set_unit(d.unit);
    }
  }
  proto.set_state_dim(spec.state_dim);
  proto.set_default_class(config.default_class);
  proto.set_vision_tokens(spec.vision_tokens);
  proto.set_max_positions(spec.max_positions);
  const std::string_view compute = DTypeName(spec.compute);
  proto.set_compute_type(std::string(compute));
  proto.set_parameters(spec.parameters);
  proto.set_weight_bytes(spec.weight_bytes);
  proto.set_kv_bytes_per_token(spec.kv.BytesPerToken());
  proto.set_fingerprint(Hex(spec.fingerprint));
  if (spec.head.kind == HeadKind::kFlow) {
    proto.set_flow_steps(spec.head.steps);
    proto.set_flow_width(spec.head.width);
    proto.set_flow_actions(spec.head.horizon);
  }
  return proto;
}

void SetTimings(const Timings& timings, v1::Timings& out) {
  out.set_queue_us(Positive(timings.queue));
  out.set_encode_us(Positive(timings.encode));
  out.set_prefill_us(Positive(timings.prefill));
  out.set_act_us(Positive(timings.act));
  out.set_total_us(Positive(timings.total));
}

v1::ActionChunk ActionChunkOf(const ActInfo& info, const ActResult& result) {
  v1::ActionChunk chunk;
  chunk.set_act_id(info.act_id);
  for (const ActionChunk& sample : result.chunks) {
    v1::ActionSample& proto = *chunk.add_samples();
    proto.mutable_values()->Assign(sample.values.begin(), sample.values.end());
    proto.mutable_normalized()->Assign(sample.normalized.begin(), sample.normalized.end());
    proto.mutable_token_ids()->Assign(sample.tokens.begin(), sample.tokens.end());
  }
  *chunk.mutable_action_space() = *info.action_space;
  SetCommon(info, result, chunk);
  chunk.set_statistics_key(std::string(info.statistics_key));
  const Observation& observation = *info.observation;
  chunk.set_observation_version(observation.version);
  chunk.set_flow_steps(result.denoise_steps);
  if (result.degraded) chunk.add_degradation(v1::DEGRADATION_FEWER_FLOW_STEPS);
  chunk.mutable_state()->Assign(observation.state.begin(), observation.state.end());
  chunk.set_state_capture_time_ns(observation.state_capture_time_ns);
  return chunk;
}

v1::GenerateResult GenerateResultOf(const TextInfo& info, const ActResult& result) {
  v1::GenerateResult out;
  for (const Outcome::Answer& answer : result.answers) {
    v1::GeneratedSequence& sequence = *out.add_sequences();
    std::span<const int32_t> written = answer.tokens;
    sequence.mutable_token_ids()->Assign(written.begin(), written.end());
    if (answer.stopped) written = written.first(written.size() - 1);
    sequence.set_text(TextDecoder::Decode(*info.tokenizer, written));
    sequence.set_finish_reason(answer.stopped ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH);
    sequence.set_log_probability(answer.log_prob);
    sequence.set_score(answer.score);
  }
  SetCommon(info, result, out);
  return out;
}

absl::StatusOr<ActFields> ReadActFields(const v1::ActRequest& act, uint32_t max_samples,
                                        std::string_view prefix) {
  ActFields fields;
  if (act.deadline_us() > kMaxMicros) {
    return InvalidField(Path(prefix, "deadline_us"), StrCat("is above ", kMaxMicros));
  }
  if (act.deadline_us() != 0) fields.deadline = Micros(act.deadline_us());
  if (act.max_frame_age_us() > kMaxMicros) {
    return InvalidField(Path(prefix, "max_frame_age_us"), StrCat("is above ", kMaxMicros));
  }
  fields.max_frame_age = Micros(act.max_frame_age_us());
  if (act.samples() > max_samples) {
    return InvalidField(Path(prefix, "samples"),
                        StrCat("is ", act.samples(), ", the limit is ", max_samples));
  }
  fields.samples = std::max(1U, act.samples());
  const float temperature = act.temperature();
  // Written so that NaN fails.
  if (temperature != 0 && !(temperature >= kMinTemperature && temperature <= kMaxTemperature)) {
    return InvalidField(Path(prefix, "temperature"),
                        StrCat("must be 0 or from ", kMinTemperature, " to ", kMaxTemperature));
  }
  fields.temperature = temperature;
  if (act.flow_steps() > kMaxFlowSteps) {
    return InvalidField(Path(prefix, "flow_steps"), StrCat("is above ", kMaxFlowSteps));
  }
  fields.flow_steps = act.flow_steps();
  if (act.least_flow_steps() > kMaxFlowSteps) {
    return InvalidField(Path(prefix, "least_flow_steps"), StrCat("is above ", kMaxFlowSteps));
  }
  fields.least_flow_steps = act.least_flow_steps();
  return fields;
}

absl::StatusOr<std::vector<ExecutedAction>> ReadExecuted(const v1::ExecutedActions& executed) {
  if (executed.actions_size() > kMaxExecuted) {
    return InvalidField("executed.actions", StrCat("has ", executed.actions_size(),
                                                   " actions, the limit is ", kMaxExecuted));
  }
  std::vector<ExecutedAction> actions;
  for (const v1::ExecutedAction& action : executed.actions()) {
    actions.push_back({{action.values().begin(), action.values().end()}, action.time_ns()});
  }
  return actions;
}

std::string ImageField(const v1::VisionFrame& frame, std::string_view prefix) {
  return Path(prefix, frame.image_case() == v1::VisionFrame::kRaw ? "raw.data" : "encoded");
}

absl::StatusOr<std::unique_ptr<ImageRows>> OpenFrame(const v1::VisionFrame& frame,
                                                     const ImageLimits& limits,
                                                     std::string_view prefix) {
  switch (frame.image_case()) {
    case v1::VisionFrame::kEncoded: {
      const std::string& bytes = frame.encoded();
      absl::StatusOr<std::unique_ptr<ImageRows>> rows =
          OpenImage({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, limits);
      if (GetErrorInfo(rows.status()).field == "image") {
        return InvalidField(ImageField(frame, prefix), FromAbsl(rows.status().message()));
      }
      return rows;
    }
    case v1::VisionFrame::kRaw: {
      const v1::RawImage& raw = frame.raw();
      if (raw.pixel_format() != v1::PIXEL_FORMAT_RGB8) {
        return InvalidField(
            Path(prefix, "raw.pixel_format"),
            raw.pixel_format() == v1::PIXEL_FORMAT_UNSPECIFIED
                ? std::string("is not given")
                : StrCat("is ", static_cast<int>(raw.pixel_format()), ", only RGB8 (1) is known"));
      }
      if (raw.width() > kMaxRawSide || raw.height() > kMaxRawSide) {
        return InvalidField(Path(prefix, raw.width() > kMaxRawSide ? "raw.width" : "raw.height"),
                            StrCat("is above ", kMaxRawSide));
      }
      if (raw.data().size() > limits.max_bytes) {
        return InvalidField(
            Path(prefix, "raw.data"),
            StrCat("has ", raw.data().size(), " bytes, the limit is ", limits.max_bytes));
      }
      const absl::Status fits = CheckRawRgb8(raw.width(), raw.height(), raw.data().size(), limits);
      if (!fits.ok()) {
        return InvalidField(Path(prefix, StrCat("raw.", GetErrorInfo(fits).field)),
                            FromAbsl(fits.message()));
      }
      const auto* pixels = reinterpret_cast<const uint8_t*>(raw.data().data());
      return std::make_unique<PixelRows>(raw.width(), raw.height(),
                                         std::span(pixels, raw.data().size()));
    }
    case v1::VisionFrame::IMAGE_NOT_SET:
      break;
  }
  return InvalidField(prefix, "holds no image");
}

}  // namespace saccade
