#include "rpc/serving.h"

#include <algorithm>
#include <utility>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr uint64_t kMaxAgeMicros = 3'600'000'000;
// Frames that can be told apart at a time: far above what caches and sessions hold.
constexpr size_t kMaxContents = 65'536;
// Frames up to the one take a few milliseconds, above the other many tens of them.
constexpr uint64_t kSmallPixels = 1 << 20;
constexpr uint64_t kMediumPixels = 1 << 22;

// Pixels a frame will make; none for a frame that is refused unseen.
uint64_t PixelsOf(const v1::VisionFrame& frame) {
  if (frame.has_raw()) return uint64_t{frame.raw().width()} * frame.raw().height();
  const std::string& bytes = frame.encoded();
  return PixelsInHeader({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}).value_or(0);
}

std::string Path(std::string_view prefix, std::string_view field) {
  return prefix.empty() ? std::string(field) : StrCat(prefix, ".", field);
}

const ModelConfig* FindConfig(const Config& config, std::string_view name) {
  const auto it = std::find_if(config.models.begin(), config.models.end(),
                               [&](const ModelConfig& model) { return model.name == name; });
  return it == config.models.end() ? nullptr : &*it;
}

}  // namespace

Serving::Serving(const Config& config, Engine& engine, FairExecutor& decoding, const Clock& clock,
                 Metrics* metrics)
    : config_(config),
      engine_(engine),
      decoding_(decoding),
      clock_(clock),
      metrics_(metrics),
      contents_(kMaxContents),
      limits_(LimitsOf(config)) {
  const LimitsConfig& limits = config_.limits;
  session_limits_.max_instruction_bytes = limits.max_instruction_bytes;
  session_limits_.max_instruction_tokens = limits.max_instruction_tokens;
  session_limits_.max_state_values = limits.max_state_values;
  session_limits_.acts_per_s = limits.acts_per_s;
  session_limits_.frames_per_s = limits.frames_per_s;
  session_limits_.pixels_per_s = limits.pixels_per_s;
  session_limits_.messages_per_s = limits.messages_per_s;
  image_limits_.max_bytes = limits.max_image_bytes;
  image_limits_.max_width = 65'535;
  image_limits_.max_height = 65'535;
  image_limits_.max_pixels = limits.max_pixels;
}

absl::StatusOr<std::shared_ptr<Serving>> Serving::Create(const Config& config, Engine& engine,
                                                         FairExecutor& decoding, const Clock& clock,
                                                         Metrics* metrics) {
  auto service = std::shared_ptr<Serving>(new Serving(config, engine, decoding, clock, metrics));
  std::vector<std::string> class_names;
  for (const LatencyClass& klass : engine.classes()) {
    class_names.push_back(klass.name);
    service->classes_.push_back(LatencyClassOf(klass));
  }
  std::vector<SessionModel> models;
  for (const ServedModel& served : engine.models()) {
    const ModelConfig* model_config = FindConfig(config, served.name);
    if (model_config == nullptr) {
      return absl::FailedPreconditionError(
          StrCat("model \"", served.name, "\" is not in the configuration"));
    }
    ASSIGN_OR_RETURN(v1::Model proto, ModelOf(served.spec(), *model_config));
    const auto klass =
        std::find(class_names.begin(), class_names.end(), model_config->default_class);
    if (klass == class_names.end()) {
      return absl::FailedPreconditionError(StrCat(
          "model \"", served.name, "\": no latency class \"", model_config->default_class, "\""));
    }
    SessionModel model;
    model.id = ModelId(static_cast<int32_t>(models.size()));
    model.name = served.name;
    model.model = served.instances.front().get();
    model.default_class = ClassId(static_cast<int32_t>(klass - class_names.begin()));
    model.action_steps = model_config->action_space.value_or(ActionSpaceConfig{}).steps;
    model.max_sessions = model_config->max_sessions;
    model.new_timeline = [&engine, id = model.id] { return engine.NewTimeline(id); };
    models.push_back(std::move(model));
    service->models_.push_back(std::move(proto));
  }
  if (models.empty()) return absl::FailedPreconditionError("the engine serves no model");
  service->sessions_ = std::make_unique<SessionManager>(
      config.server.max_sessions, config.limits.sessions_per_peer, models.size());
  service->catalog_ = std::make_unique<Catalog>(std::move(models), std::move(class_names));
  return service;
}

absl::StatusOr<Serving::Target> Serving::Resolve(std::string_view model,
                                                 std::string_view statistics_key,
                                                 std::string_view latency_class,
                                                 std::string_view prefix) const {
  Target target;
  ASSIGN_OR_RETURN(target.model, catalog_->FindModel(model, Path(prefix, "model")));
  const ModelSpec& spec = target.model->model->spec();
  ASSIGN_OR_RETURN(target.statistics,
                   FindStatistics(spec, statistics_key, Path(prefix, "statistics_key")));
  ASSIGN_OR_RETURN(target.klass, catalog_->FindClass(latency_class, target.model->default_class,
                                                     Path(prefix, "latency_class")));
  const auto set = target.statistics - spec.statistics.data();
  target.action_space = &models_[static_cast<size_t>(target.model->id.value())]
                             .statistics(static_cast<int>(set))
                             .action_space();
  return target;
}

std::unique_ptr<Session> Serving::NewSession(SessionId id, const Target& target,
                                             TimePoint now) const {
  SessionParams params;
  params.model = target.model;
  params.statistics_key = target.statistics->key;
  params.action_dim = target.action_space->dim();
  params.klass = target.klass;
  return std::make_unique<Session>(id, std::move(params), session_limits_, now);
}

uint64_t Serving::PixelsToDecode(const v1::VisionFrame& frame) const {
  const uint64_t pixels = PixelsOf(frame);
  return pixels <= image_limits_.max_pixels ? pixels : 0;
}

FairExecutor::Size Serving::DecodeSize(uint64_t pixels) {
  if (pixels <= kSmallPixels) return FairExecutor::Size::kSmall;
  return pixels <= kMediumPixels ? FairExecutor::Size::kMedium : FairExecutor::Size::kLarge;
}

TimePoint Serving::DeadlineOf(const LatencyClass& latency, const ActFields& fields,
                              TimePoint arrival, TimePoint call_deadline) {
  const Micros own = fields.deadline.value_or(latency.deadline);
  return std::min(own.count() > 0 ? arrival + own : kNever, call_deadline);
}

bool Serving::IsTooLate(const Target& target, const v1::ActRequest& act, TimePoint arrival,
                        TimePoint call_deadline, TimePoint now) const {
  const absl::StatusOr<ActFields> fields = ReadActFields(act, config_.limits.max_samples, "act");
  const absl::StatusOr<ClassId> klass =
      catalog_->FindClass(act.latency_class(), target.klass, "act.latency_class");
  if (!fields.ok() || !klass.ok()) return true;
  const LatencyClass& latency = engine_.classes()[static_cast<size_t>(klass->value())];
  return latency.on_late == OnLate::kReject &&
         DeadlineOf(latency, *fields, arrival, call_deadline) <= now;
}

absl::Status Serving::CheckFrame(const v1::VisionFrame& frame, std::string_view prefix) {
  if (frame.capture_time_ns() < 0) {
    return InvalidField(Path(prefix, "capture_time_ns"), "is negative");
  }
  if (frame.age_us() > kMaxAgeMicros) {
    return InvalidField(Path(prefix, "age_us"), StrCat("is above ", kMaxAgeMicros));
  }
  return absl::OkStatus();
}

absl::StatusOr<Frame> Serving::ReadFrame(const SessionModel& model, uint32_t camera,
                                         const v1::VisionFrame& frame, TimePoint received,
                                         std::string_view prefix) {
  Frame out;
  out.capture_time_ns = frame.capture_time_ns();
  out.captured = received - Micros(frame.age_us());
  const TimePoint begin = clock_.Now();
  ASSIGN_OR_RETURN(const Rgb8Image image, ReadImage(frame, image_limits_, prefix));
  ASSIGN_OR_RETURN(Rgb8Image resized, model.model->Preprocess(camera, image));
  out.content = contents_.Intern(resized.width, resized.height, std::move(resized.rgb));
  out.decode = ToMicros(clock_.Now() - begin);
  return out;
}

absl::StatusOr<Session::Fate> Serving::PublishFrame(Session& session, const v1::VisionFrame& frame,
                                                    uint64_t pixels, TimePoint received,
                                                    std::string_view prefix) {
  ModelMetrics* metrics = metrics_ == nullptr ? nullptr : &metrics_->model(session.model().id);
  if (metrics != nullptr) metrics->frames_received->Increment();
  const auto publish = [&]() -> absl::StatusOr<Session::Fate> {
    RETURN_IF_ERROR(session.TakeFrameToken(received));
    ASSIGN_OR_RETURN(const uint32_t camera,
                     session.FindCamera(frame.camera(), Path(prefix, "camera")));
    RETURN_IF_ERROR(CheckFrame(frame, prefix));
    // Before decoding: a late frame costs nothing.
    if (session.IsStale(camera, frame.capture_time_ns())) return Session::Fate::kStale;
    RETURN_IF_ERROR(session.TakePixels(pixels, received));
    ASSIGN_OR_RETURN(Frame ready, ReadFrame(session.model(), camera, frame, received, prefix));
    return session.Publish(camera, std::move(ready));
  };
  absl::StatusOr<Session::Fate> fate = publish();
  if (metrics == nullptr) return fate;
  if (!fate.ok()) {
    metrics->RejectFrame(static_cast<Reason>(ErrorDetailOf(fate.status()).reason()));
  } else if (*fate == Session::Fate::kStale) {
    metrics->frames_stale->Increment();
  } else if (*fate == Session::Fate::kReplacedUnused) {
    metrics->frames_superseded->Increment();
  }
  return fate;
}

absl::Status Serving::SetText(Session& session, const v1::TextInput& text) const {
  switch (text.content_case()) {
    case v1::TextInput::kInstruction:
      return session.SetInstruction(text.instruction(), "text.instruction");
    case v1::TextInput::kTokenIds:
      return session.SetPromptTokens(
          {text.token_ids().ids().data(), static_cast<size_t>(text.token_ids().ids_size())});
    case v1::TextInput::CONTENT_NOT_SET:
      break;
  }
  return InvalidField("text", "holds neither an instruction nor token ids");
}

absl::Status Serving::SetState(Session& session, const v1::StateInput& state) const {
  if (state.capture_time_ns() < 0) return InvalidField("state.capture_time_ns", "is negative");
  return session.SetState({state.values().data(), static_cast<size_t>(state.values_size())});
}

absl::StatusOr<ActRequest> Serving::PrepareAct(Session& session, const Target& target,
                                               const v1::ActRequest& act, TimePoint arrival,
                                               TimePoint call_deadline, std::string_view prefix,
                                               ActInfo& info) const {
  ASSIGN_OR_RETURN(const ActFields fields, ReadActFields(act, config_.limits.max_samples, prefix));
  ASSIGN_OR_RETURN(const ClassId klass, catalog_->FindClass(act.latency_class(), target.klass,
                                                            Path(prefix, "latency_class")));
  const LatencyClass& latency = engine_.classes()[static_cast<size_t>(klass.value())];
  const TimePoint deadline = DeadlineOf(latency, fields, arrival, call_deadline);
  ASSIGN_OR_RETURN(std::shared_ptr<const Observation> observation,
                   session.Snapshot(arrival, fields.max_frame_age));

  ActRequest request;
  request.session = session.id();
  request.model = target.model->id;
  request.klass = klass;
  request.arrival = arrival;
  request.deadline = deadline;
  request.timeline = observation->timeline;
  request.statistics_key = target.statistics->key;
  request.samples = fields.samples;
  request.temperature = fields.temperature;
  request.seed = act.seed();
  request.frame_captured = observation->oldest_captured;

  info.act_id = act.id();
  info.arrival = arrival;
  info.deadline = deadline;
  info.latency_class = latency.name;
  info.statistics_key = target.statistics->key;
  info.action_space = target.action_space;
  info.observation = std::move(observation);
  info.spec = &target.model->model->spec();
  return request;
}

void Serving::CountSuperseded(ModelId model) const {
  if (metrics_ == nullptr) return;
  ModelMetrics& metrics = metrics_->model(model);
  metrics.frames_received->Increment();
  metrics.frames_superseded->Increment();
}

void Serving::CountRefused(const absl::Status& status) const {
  if (metrics_ != nullptr) metrics_->Refuse(static_cast<Reason>(ErrorDetailOf(status).reason()));
}

void Serving::SetSessionOpen(ModelId model, bool open) const {
  if (metrics_ == nullptr) return;
  prometheus::Gauge& gauge = *metrics_->model(model).sessions;
  open ? gauge.Increment() : gauge.Decrement();
}

void Serving::SetStreamOpen(bool open) const {
  if (metrics_ == nullptr) return;
  open ? metrics_->streams->Increment() : metrics_->streams->Decrement();
}

}  // namespace saccade
