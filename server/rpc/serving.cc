#include "rpc/serving.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr std::chrono::milliseconds kMemoryRetry{100};
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

std::shared_ptr<const OfferedModel> ToOffered(const Catalog::ModelRef& model) {
  return std::static_pointer_cast<const OfferedModel>(model);  // this file makes no others
}

std::shared_ptr<const Settings> SettingsOf(const Config& config) {
  auto settings = std::make_shared<Settings>();
  settings->config = config;
  settings->limits = LimitsOf(config);
  const LimitsConfig& limits = config.limits;
  SessionLimits& session = settings->session;
  session.max_instruction_bytes = limits.max_instruction_bytes;
  session.max_instruction_tokens = limits.max_instruction_tokens;
  session.max_state_values = limits.max_state_values;
  session.acts_per_s = limits.acts_per_s;
  session.frames_per_s = limits.frames_per_s;
  session.pixels_per_s = limits.pixels_per_s;
  session.messages_per_s = limits.messages_per_s;
  ImageLimits& image = settings->image;
  image.max_bytes = limits.max_image_bytes;
  image.max_width = 65'535;
  image.max_height = 65'535;
  image.max_pixels = limits.max_pixels;
  return settings;
}

// What decoding a frame takes at most, beside its message: nothing for raw pixels; of an encoded
// one the coefficients of a progressive JPEG and a picture that has to be turned.
uint64_t DecodeBytes(const v1::VisionFrame& frame, uint64_t pixels) {
  return frame.has_raw() ? 0 : pixels * 9;
}

// A lock, let go of for a while.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>* lock) : lock_(lock) {
    if (lock_ != nullptr) lock_->unlock();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    if (lock_ != nullptr) lock_->lock();
  }

 private:
  std::unique_lock<std::mutex>* const lock_;
};

}  // namespace

Serving::Serving(const Config& config, Engine& engine, FairExecutor& decoding, const Clock& clock,
                 Metrics* metrics, MemoryBudget* memory)
    : engine_(engine),
      decoding_(decoding),
      clock_(clock),
      metrics_(metrics),
      memory_(memory),
      sessions_(std::make_unique<SessionManager>(config.server.max_sessions,
                                                 config.limits.sessions_per_peer, memory)),
      contents_(kMaxContents),
      settings_(SettingsOf(config)) {
  for (const LatencyClass& klass : engine.classes()) {
    class_names_.push_back(klass.name);
    classes_.push_back(LatencyClassOf(klass));
  }
  SetOfferedLocked({});
}

absl::StatusOr<std::shared_ptr<Serving>> Serving::Create(const Config& config, Engine& engine,
                                                         FairExecutor& decoding, const Clock& clock,
                                                         Metrics* metrics, MemoryBudget* memory) {
  auto service =
      std::shared_ptr<Serving>(new Serving(config, engine, decoding, clock, metrics, memory));
  for (const ModelRef& served : engine.models()) {
    const ModelConfig* model_config = FindConfig(config, served->name);
    if (model_config == nullptr) {
      return absl::FailedPreconditionError(
          StrCat("model \"", served->name, "\" is not in the configuration"));
    }
    RETURN_IF_ERROR(service->Offer(served, *model_config));
  }
  if (service->models().empty()) return absl::FailedPreconditionError("the engine serves no model");
  return service;
}

std::shared_ptr<const Settings> Serving::settings() const {
  const std::lock_guard lock(mu_);
  return settings_;
}

std::shared_ptr<const Catalog> Serving::catalog() const {
  const std::lock_guard lock(mu_);
  return catalog_;
}

void Serving::SetConfig(const Config& config) {
  std::shared_ptr<const Settings> settings = SettingsOf(config);
  {
    const std::lock_guard lock(mu_);
    settings_ = std::move(settings);
    settings_version_.fetch_add(1, std::memory_order_release);
  }
  sessions_->SetLimits(config.server.max_sessions, config.limits.sessions_per_peer);
  for (const ClassConfig& klass : config.classes) {
    const auto it = std::find(class_names_.begin(), class_names_.end(), klass.name);
    if (it == class_names_.end()) continue;
    engine_.SetMaxQueued(ClassId(static_cast<int32_t>(it - class_names_.begin())),
                         klass.max_queued);
  }
}

Serving::Offered Serving::models() const {
  Offered offered;
  for (const Catalog::ModelRef& model : catalog()->models()) offered.push_back(ToOffered(model));
  return offered;
}

absl::StatusOr<std::shared_ptr<const OfferedModel>> Serving::FindModel(
    std::string_view name, std::string_view field) const {
  ASSIGN_OR_RETURN(const Catalog::ModelRef model, catalog()->FindModel(name, field));
  return ToOffered(model);
}

void Serving::SetOfferedLocked(const Offered& offered) {
  catalog_ = std::make_shared<const Catalog>(
      std::vector<Catalog::ModelRef>(offered.begin(), offered.end()), class_names_);
}

absl::Status Serving::Offer(ModelRef served, const ModelConfig& config) {
  auto model = std::make_shared<OfferedModel>();
  ASSIGN_OR_RETURN(model->proto, ModelOf(served->spec(), config));
  const auto klass = std::find(class_names_.begin(), class_names_.end(), config.default_class);
  if (klass == class_names_.end()) {
    return absl::FailedPreconditionError(
        StrCat("model \"", served->name, "\": no latency class \"", config.default_class, "\""));
  }
  model->id = served->id;
  model->name = served->name;
  model->model = served->instances.front().get();
  model->default_class = ClassId(static_cast<int32_t>(klass - class_names_.begin()));
  model->action_steps = config.action_space.value_or(ActionSpaceConfig{}).steps;
  model->max_sessions = config.max_sessions;
  model->new_timeline = [view = served.get()] { return view->NewTimeline(); };
  if (metrics_ != nullptr) model->metrics = &metrics_->model(served->name);
  model->served = std::move(served);
  const std::lock_guard lock(mu_);
  std::shared_ptr<ModelPlaces>& places = places_[model->name];
  if (places == nullptr) places = model->places;
  model->places = places;
  Offered offered;
  bool replaced = false;
  for (const Catalog::ModelRef& other : catalog_->models()) {
    const bool same = other->name == model->name;
    offered.push_back(same ? model : ToOffered(other));
    replaced = replaced || same;
  }
  if (!replaced) offered.push_back(std::move(model));
  SetOfferedLocked(offered);
  return absl::OkStatus();
}

void Serving::Withdraw(ModelId id) {
  const std::lock_guard lock(mu_);
  Offered offered;
  for (const Catalog::ModelRef& model : catalog_->models()) {
    if (model->id != id) offered.push_back(ToOffered(model));
  }
  SetOfferedLocked(offered);
}

bool Serving::Offers(ModelId id) const {
  const std::shared_ptr<const Catalog> catalog = this->catalog();
  return std::any_of(catalog->models().begin(), catalog->models().end(),
                     [id](const Catalog::ModelRef& model) { return model->id == id; });
}

absl::StatusOr<Serving::Target> Serving::Resolve(std::string_view model,
                                                 std::string_view statistics_key,
                                                 std::string_view latency_class,
                                                 std::string_view prefix) const {
  Target target;
  ASSIGN_OR_RETURN(target.model, FindModel(model, Path(prefix, "model")));
  const ModelSpec& spec = target.model->model->spec();
  ASSIGN_OR_RETURN(target.statistics,
                   FindStatistics(spec, statistics_key, Path(prefix, "statistics_key")));
  ASSIGN_OR_RETURN(target.klass, catalog()->FindClass(latency_class, target.model->default_class,
                                                      Path(prefix, "latency_class")));
  const auto set = target.statistics - spec.statistics.data();
  target.action_space = &target.model->proto.statistics(static_cast<int>(set)).action_space();
  return target;
}

std::unique_ptr<Session> Serving::NewSession(SessionId id, const Target& target,
                                             TimePoint now) const {
  SessionParams params;
  params.model = target.model.get();
  params.statistics_key = target.statistics->key;
  params.action_dim = target.action_space->dim();
  params.klass = target.klass;
  return std::make_unique<Session>(id, std::move(params), settings()->session, now);
}

uint64_t Serving::PixelsToDecode(const v1::VisionFrame& frame) const {
  const uint64_t pixels = PixelsOf(frame);
  return pixels <= settings()->image.max_pixels ? pixels : 0;
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
  const absl::StatusOr<ActFields> fields =
      ReadActFields(act, settings()->config.limits.max_samples, "act");
  const absl::StatusOr<ClassId> klass =
      catalog()->FindClass(act.latency_class(), target.klass, "act.latency_class");
  if (!fields.ok() || !klass.ok()) return true;
  const LatencyClass& latency = engine_.classes()[static_cast<size_t>(klass->value())];
  return latency.on_late != OnLate::kRunLate &&
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

absl::Status Serving::EachFrame(const ModelSpec& spec,
                                const google::protobuf::RepeatedPtrField<v1::VisionFrame>& frames,
                                const ReadEach& read) {
  std::vector<bool> seen(spec.cameras.size(), false);
  if (static_cast<size_t>(frames.size()) > seen.size()) {
    return InvalidField("frames", StrCat("has ", frames.size(), " frames, the model has ",
                                         seen.size(), " cameras"));
  }
  for (int i = 0; i < frames.size(); ++i) {
    const std::string prefix = StrCat("frames[", i, "]");
    const std::string field = Path(prefix, "camera");
    ASSIGN_OR_RETURN(const uint32_t camera, FindCamera(spec, frames[i].camera(), field));
    if (seen[camera]) return InvalidField(field, StrCat("a second frame of camera ", camera));
    seen[camera] = true;
    RETURN_IF_ERROR(read(camera, frames[i], prefix));
  }
  return absl::OkStatus();
}

absl::StatusOr<Frame> Serving::ReadFrame(const SessionModel& model, uint32_t camera,
                                         const v1::VisionFrame& frame, TimePoint received,
                                         std::string_view prefix) {
  Frame out;
  out.camera = camera;
  out.capture_time_ns = frame.capture_time_ns();
  out.captured = received - Micros(frame.age_us());
  const TimePoint begin = clock_.Now();
  const CameraSpec& spec = model.model->spec().cameras[camera];
  // Both before a byte is decoded: what has no room costs nothing.
  absl::StatusOr<MemoryHold> kept =
      MemoryBudget::Hold(memory_, MemoryKind::kFrames, spec.FrameBytes());
  absl::StatusOr<MemoryHold> decoding =
      MemoryBudget::Hold(memory_, MemoryKind::kDecode, DecodeBytes(frame, PixelsToDecode(frame)));
  for (const absl::StatusOr<MemoryHold>* hold : {&kept, &decoding}) {
    if (hold->ok()) continue;
    engine_.ForgetIdle();  // frames that caches keep make room for new ones
    ErrorInfo info = GetErrorInfo(hold->status());
    info.retry_after = kMemoryRetry;
    info.field = std::string(prefix);
    return MakeError(hold->status().code(), FromAbsl(hold->status().message()), info);
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<ImageRows> rows,
                   OpenFrame(frame, settings()->image, prefix));
  absl::StatusOr<ModelImage> resized = model.model->Preprocess(camera, *rows);
  if (!resized.ok()) {
    if (GetErrorInfo(resized.status()).field != "image") return resized.status();
    return InvalidField(ImageField(frame, prefix), FromAbsl(resized.status().message()));
  }
  out.content =
      contents_.Intern(resized->width, resized->height, std::move(resized->rgb), *std::move(kept));
  out.decode = ToMicros(clock_.Now() - begin);
  return out;
}

absl::StatusOr<Session::Fate> Serving::PublishFrame(Session& session, const v1::VisionFrame& frame,
                                                    uint64_t pixels, TimePoint received,
                                                    std::string_view prefix,
                                                    std::unique_lock<std::mutex>* touching) {
  // Sessions are made here, for offered models.
  ModelMetrics* const metrics = static_cast<const OfferedModel&>(session.model()).metrics;
  absl::StatusOr<Session::Fate> fate = CountFrame(metrics, [&]() -> absl::StatusOr<Session::Fate> {
    RETURN_IF_ERROR(session.TakeFrameToken(received));
    ASSIGN_OR_RETURN(const uint32_t camera,
                     session.FindCamera(frame.camera(), Path(prefix, "camera")));
    RETURN_IF_ERROR(CheckFrame(frame, prefix));
    // Before decoding: a late frame costs nothing.
    if (session.IsStale(camera, frame.capture_time_ns())) return Session::Fate::kStale;
    RETURN_IF_ERROR(session.TakePixels(pixels, received));
    const SessionModel& model = session.model();
    ASSIGN_OR_RETURN(Frame ready, [&] {
      const Unlocked unlocked(touching);
      return ReadFrame(model, camera, frame, received, prefix);
    }());
    return session.Publish(camera, std::move(ready));
  });
  if (metrics == nullptr || !fate.ok()) return fate;
  if (*fate == Session::Fate::kStale) {
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
  return session.SetState({state.values().data(), static_cast<size_t>(state.values_size())},
                          state.capture_time_ns());
}

// What a flow is made from; null for other models. `state`: null while there is none.
absl::StatusOr<std::shared_ptr<const FlowInput>> Serving::ReadFlow(const Target& target,
                                                                   const v1::ActRequest& act,
                                                                   const ActFields& fields,
                                                                   const StateRef& state,
                                                                   std::string_view prefix) {
  const ActionHeadSpec& head = target.model->model->spec().head;
  if (head.kind != HeadKind::kFlow) {
    if (fields.flow_steps > 0) {
      return InvalidField(Path(prefix, "flow_steps"), "the model does not denoise");
    }
    if (fields.least_flow_steps > 0) {
      return InvalidField(Path(prefix, "least_flow_steps"), "the model does not denoise");
    }
    if (act.noise_size() > 0) return InvalidField(Path(prefix, "noise"), "the model takes none");
    if (act.has_committed()) {
      return InvalidField(Path(prefix, "committed"), "the model does not denoise");
    }
    if (head.kind == HeadKind::kOnePass && fields.temperature != 0) {
      return InvalidField(Path(prefix, "temperature"), "the model has none: must be 0");
    }
    return nullptr;
  }
  if (fields.temperature != 0) {
    return InvalidField(Path(prefix, "temperature"), "the model has none: must be 0");
  }
  FlowInput flow;
  if (head.state_row && state != nullptr) flow.state = *state;
  const uint64_t values = uint64_t{fields.samples} * head.horizon * head.width;
  if (act.noise_size() > 0) {
    if (static_cast<uint64_t>(act.noise_size()) != values) {
      return InvalidField(Path(prefix, "noise"),
                          StrCat("has ", act.noise_size(), " values, expected ", values));
    }
    flow.noise.assign(act.noise().begin(), act.noise().end());
    if (!std::all_of(flow.noise.begin(), flow.noise.end(),
                     [](float v) { return std::isfinite(v); })) {
      return InvalidField(Path(prefix, "noise"), "holds NaN or Inf");
    }
  }
  RETURN_IF_ERROR(ReadCommitted(target, act.committed(), Path(prefix, "committed"), flow));
  return std::make_shared<const FlowInput>(std::move(flow));
}

absl::Status Serving::ReadCommitted(const Target& target, const v1::CommittedActions& committed,
                                    const std::string& prefix, FlowInput& flow) {
  const ActionHeadSpec& head = target.model->model->spec().head;
  const auto values = static_cast<uint32_t>(committed.normalized_size());
  const uint32_t dim = target.statistics->action_dim;
  const std::string field = Path(prefix, "normalized");
  if (values > 0 && head.relative) {
    return InvalidField(field,
                        "the model's actions are relative to the state of their own "
                        "request: none of another can be committed");
  }
  if (values % dim != 0 || values / dim >= head.horizon) {
    return InvalidField(field, StrCat("has ", values, " values, expected a multiple of ", dim,
                                      " below ", head.horizon * dim));
  }
  if (!std::all_of(committed.normalized().begin(), committed.normalized().end(),
                   [](float v) { return std::isfinite(v); })) {
    return InvalidField(field, "holds NaN or Inf");
  }
  switch (committed.mode()) {
    case v1::COMMIT_MODE_UNSPECIFIED:
    case v1::COMMIT_MODE_INPAINT:
      flow.commit_mode = CommitMode::kInpaint;
      break;
    case v1::COMMIT_MODE_PER_ACTION_TIME:
      flow.commit_mode = CommitMode::kPerActionTime;
      break;
    default:
      return InvalidField(Path(prefix, "mode"), "is none that this server knows");
  }
  // Places of an action that the robot does not have are 0, as in training.
  flow.committed.assign(size_t{values / dim} * head.width, 0.0F);
  for (uint32_t k = 0; k < values; ++k) {
    flow.committed[size_t{k / dim} * head.width + k % dim] =
        committed.normalized(static_cast<int>(k));
  }
  return absl::OkStatus();
}

absl::Status Serving::CheckAct(const Target& target, const v1::ActRequest& act,
                               std::string_view prefix) const {
  ASSIGN_OR_RETURN(const ActFields fields,
                   ReadActFields(act, settings()->config.limits.max_samples, prefix));
  RETURN_IF_ERROR(
      FindClass(act.latency_class(), target.klass, Path(prefix, "latency_class")).status());
  return ReadFlow(target, act, fields, nullptr, prefix).status();
}

absl::StatusOr<ActRequest> Serving::PrepareAct(Session& session, const Target& target,
                                               const v1::ActRequest& act, TimePoint arrival,
                                               TimePoint call_deadline, std::string_view prefix,
                                               ActInfo& info) const {
  ASSIGN_OR_RETURN(const ActFields fields,
                   ReadActFields(act, settings()->config.limits.max_samples, prefix));
  ASSIGN_OR_RETURN(const ClassId klass, catalog()->FindClass(act.latency_class(), target.klass,
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
  request.state = observation->state;
  ASSIGN_OR_RETURN(request.flow, ReadFlow(target, act, fields, observation->normalized, prefix));
  request.flow_steps = fields.flow_steps;
  request.least_flow_steps = fields.least_flow_steps;

  info.act_id = act.id();
  info.arrival = arrival;
  info.deadline = deadline;
  info.latency_class = latency.name;
  info.statistics_key = target.statistics->key;
  info.action_space = target.action_space;
  info.observation = std::move(observation);
  info.spec = &target.model->model->spec();
  info.model = target.model;
  return request;
}

void Serving::CountSuperseded(const OfferedModel& model) {
  if (model.metrics == nullptr) return;
  model.metrics->frames_received->Increment();
  model.metrics->frames_superseded->Increment();
}

void Serving::CountRefused(const absl::Status& status) const {
  if (metrics_ != nullptr) metrics_->Refuse(static_cast<Reason>(ErrorDetailOf(status).reason()));
}

void Serving::SetSessionOpen(const OfferedModel& model, bool open) {
  if (model.metrics == nullptr) return;
  prometheus::Gauge& gauge = *model.metrics->sessions;
  open ? gauge.Increment() : gauge.Decrement();
}

void Serving::SetStreamOpen(bool open) const {
  if (metrics_ == nullptr) return;
  open ? metrics_->streams->Increment() : metrics_->streams->Decrement();
}

}  // namespace saccade
