#include "rpc/model_admin.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/logging.h"
#include "base/strings.h"

namespace saccade {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::milliseconds kPoll{5};
// What holds a model after its sessions were ended: a stream that cannot be ended politely is reset
// after two seconds, an answer on its way takes less.
constexpr std::chrono::seconds kFreeing{10};
constexpr double kMaxGraceSeconds = 3600;
// Loading computes beside the threads that answer: it must not take their cores.
constexpr int kNice = 10;

absl::Status Unloaded(std::string_view name, std::string_view how) {
  ErrorInfo info;
  info.reason = Reason::kModelUnloaded;
  return MakeError(absl::StatusCode::kUnavailable, StrCat("model \"", name, "\" ", how), info);
}

absl::Status Draining() {
  ErrorInfo info;
  info.reason = Reason::kDraining;
  return MakeError(absl::StatusCode::kUnavailable, "the server is shutting down", info);
}

}  // namespace

ModelAdmin::ModelAdmin(std::shared_ptr<Front> front, std::shared_ptr<Serving> service,
                       Source source)
    : front_(std::move(front)), service_(std::move(service)), source_(std::move(source)) {
  for (const ModelConfig& model : front_->config().models) configs_.emplace(model.name, model);
  thread_ = std::thread([this] { Loop(); });
}

ModelAdmin::~ModelAdmin() {
  Stop();
  thread_.join();
}

void ModelAdmin::Load(v1::LoadModelRequest request, Done done) {
  Put({[this, request = std::move(request)] { return RunLoad(request); }, std::move(done)});
}

void ModelAdmin::Unload(v1::UnloadModelRequest request, Done done) {
  Put({[this, request = std::move(request)]() -> absl::StatusOr<v1::Model> {
         RETURN_IF_ERROR(RunUnload(request));
         return v1::Model();
       },
       std::move(done)});
}

void ModelAdmin::Reload(v1::ReloadModelRequest request, Done done) {
  Put({[this, request = std::move(request)] { return RunReload(request); }, std::move(done)});
}

void ModelAdmin::Put(Job job) {
  absl::Status refused;
  {
    const std::lock_guard lock(mu_);
    if (stopping_) {
      refused = Draining();
    } else if (jobs_.size() >= kMaxWaiting) {
      ErrorInfo info;
      info.reason = Reason::kQueueFull;
      refused = MakeError(absl::StatusCode::kResourceExhausted,
                          StrCat(kMaxWaiting, " loads and unloads wait already"), info);
    }
    if (refused.ok()) {
      jobs_.push_back(std::move(job));
      wake_.notify_all();
      return;
    }
  }
  job.done(refused);
}

void ModelAdmin::Stop() {
  std::vector<Done> unanswered;
  {
    const std::lock_guard lock(mu_);
    stopping_ = true;
    for (Job& job : jobs_) unanswered.push_back(std::move(job.done));
    jobs_.clear();
    if (current_) unanswered.push_back(std::exchange(current_, nullptr));
  }
  wake_.notify_all();
  for (const Done& done : unanswered) done(Draining());
}

bool ModelAdmin::busy() const {
  const std::lock_guard lock(mu_);
  return busy_;
}

bool ModelAdmin::stopping() const {
  const std::lock_guard lock(mu_);
  return stopping_;
}

void ModelAdmin::Loop() {
  pthread_setname_np(pthread_self(), "saccade-models");
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);  // of this thread; may fail
  std::unique_lock lock(mu_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    current_ = std::move(job.done);
    busy_ = true;
    lock.unlock();
    const absl::StatusOr<v1::Model> result = job.run();
    if (!result.ok()) {
      LogWarn("a model was not loaded, unloaded or reloaded",
              {{"error", FromAbsl(result.status().message())}});
    }
    lock.lock();
    busy_ = false;
    if (Done done = std::exchange(current_, nullptr)) {
      lock.unlock();
      done(result);
      lock.lock();
    }
  }
}

// ------------------------------------------------------------------------------- the thread's own

absl::StatusOr<std::string> ModelAdmin::PathOf(const std::string& folder) const {
  const std::string& root = front_->config().admin.models_root;
  if (root.empty()) {
    return InvalidField("folder", "the server has no admin.models_root, so no folder can be named");
  }
  if (!IsConfigName(folder)) {
    return InvalidField(
        "folder",
        "must be one plain name: letters, digits and _ . -, at most 63, a letter or "
        "digit first");
  }
  std::error_code error;
  const fs::path whole_root = fs::canonical(root, error);
  if (error) return absl::FailedPreconditionError("admin.models_root cannot be read");
  const fs::path path = fs::canonical(whole_root / folder, error);
  if (error || !fs::is_directory(path, error)) {
    ErrorInfo info;
    info.reason = Reason::kInvalidInput;
    info.field = "folder";
    return MakeError(absl::StatusCode::kNotFound,
                     StrCat("folder: no folder \"", folder, "\" below admin.models_root"), info);
  }
  // A link may lead on inside the root, never out of it.
  const auto [end, rest] =
      std::mismatch(whole_root.begin(), whole_root.end(), path.begin(), path.end());
  if (end != whole_root.end() || rest == path.end()) {
    return InvalidField("folder", "leads out of admin.models_root");
  }
  return path.string();
}

absl::StatusOr<ModelConfig> ModelAdmin::ConfigOf(const std::string& name, const std::string& folder,
                                                 const std::string& like) {
  if (!IsConfigName(name)) {
    return InvalidField("name",
                        "must be letters, digits and _ . -, at most 63, a letter or digit first");
  }
  const auto known = configs_.find(name);
  ModelConfig config;
  if (known != configs_.end()) {
    config = known->second;
  } else {
    if (configs_.size() >= kMaxNames) {
      return InvalidField("name", StrCat("is new, and there were ", kMaxNames, " names already"));
    }
    if (folder.empty()) return InvalidField("folder", "is empty, and the name is not configured");
    const auto model =
        like.empty() && configs_.size() == 1 ? configs_.begin() : configs_.find(like);
    if (model == configs_.end()) {
      return InvalidField("like", like.empty() ? "name the model whose settings it takes"
                                               : "no model of that name was configured or loaded");
    }
    config = model->second;
    config.name = name;
  }
  if (!folder.empty()) {
    ASSIGN_OR_RETURN(config.path, PathOf(folder));
  }
  return config;
}

absl::StatusOr<Micros> ModelAdmin::Grace(bool given, double grace_s) const {
  const double seconds = given ? grace_s : front_->config().server.drain_s;
  if (!(seconds >= 0 && seconds <= kMaxGraceSeconds)) {
    return InvalidField("grace_s", StrCat("must be from 0 to ", kMaxGraceSeconds));
  }
  return Micros(std::llround(seconds * 1e6));
}

absl::StatusOr<v1::Model> ModelAdmin::Bring(const ModelConfig& config) {
  Engine& engine = service_->engine();
  ASSIGN_OR_RETURN(ServedModel made, source_(config));
  // What does not go with the configuration is found before it takes memory and time.
  RETURN_IF_ERROR(ModelOf(made.spec(), config).status());
  ASSIGN_OR_RETURN(ModelRef served, engine.Load(std::move(made)));
  const ModelId id = served->id;
  if (const absl::Status offered = service_->Offer(std::move(served), config); !offered.ok()) {
    RETURN_IF_ERROR(engine.Unload(id, front_->clock().Now(), offered));
    return offered;
  }
  configs_.insert_or_assign(config.name, config);
  ASSIGN_OR_RETURN(const std::shared_ptr<const OfferedModel> model,
                   service_->FindModel(config.name, "name"));
  return model->proto;
}

absl::StatusOr<v1::Model> ModelAdmin::RunLoad(const v1::LoadModelRequest& request) {
  ASSIGN_OR_RETURN(const ModelConfig config,
                   ConfigOf(request.name(), request.folder(), request.like()));
  if (service_->FindModel(config.name, "name").ok()) {
    ErrorInfo info;
    info.reason = Reason::kInvalidInput;
    info.field = "name";
    return MakeError(absl::StatusCode::kAlreadyExists,
                     StrCat("name: model \"", config.name, "\" is served; reload it"), info);
  }
  ASSIGN_OR_RETURN(v1::Model model, Bring(config));
  LogInfo("model loaded on request", {{"model", config.name}, {"path", config.path}});
  return model;
}

absl::Status ModelAdmin::RunUnload(const v1::UnloadModelRequest& request) {
  ASSIGN_OR_RETURN(const Micros grace, Grace(request.has_grace_s(), request.grace_s()));
  if (request.name().empty()) return InvalidField("name", "is empty");
  ModelId id;
  std::weak_ptr<const ServedModel> served;
  {
    ASSIGN_OR_RETURN(const std::shared_ptr<const OfferedModel> model,
                     service_->FindModel(request.name(), "name"));
    id = model->id;
    served = model->served;
  }
  service_->Withdraw(id);
  for (const std::shared_ptr<SessionCore>& stream : front_->Streams()) {
    stream->NotifyModel(id, v1::NOTICE_KIND_MODEL_UNLOADING, "the model is being unloaded");
  }
  RETURN_IF_ERROR(
      Retire(served, id, front_->clock().Now() + grace, Unloaded(request.name(), "was unloaded")));
  LogInfo("model unloaded on request", {{"model", request.name()}});
  return absl::OkStatus();
}

absl::StatusOr<v1::Model> ModelAdmin::RunReload(const v1::ReloadModelRequest& request) {
  ASSIGN_OR_RETURN(const Micros grace, Grace(request.has_grace_s(), request.grace_s()));
  if (request.name().empty()) return InvalidField("name", "is empty");
  ModelId id;
  std::weak_ptr<const ServedModel> served;
  {
    ASSIGN_OR_RETURN(const std::shared_ptr<const OfferedModel> model,
                     service_->FindModel(request.name(), "name"));
    id = model->id;
    served = model->served;
  }
  ASSIGN_OR_RETURN(const ModelConfig config, ConfigOf(request.name(), request.folder(), ""));
  ASSIGN_OR_RETURN(v1::Model model, Bring(config));
  for (const std::shared_ptr<SessionCore>& stream : front_->Streams()) {
    stream->NotifyModel(id, v1::NOTICE_KIND_MODEL_REPLACED,
                        "the model was loaded anew; a new session gets the new one");
  }
  const TimePoint until = front_->clock().Now() + grace;
  while (front_->clock().Now() < until && !stopping()) {
    const std::vector<std::shared_ptr<SessionCore>> streams = front_->Streams();
    if (std::none_of(streams.begin(), streams.end(),
                     [id](const auto& stream) { return stream->Uses(id); })) {
      break;
    }
    std::this_thread::sleep_for(kPoll);
  }
  RETURN_IF_ERROR(
      Retire(served, id, until, Unloaded(request.name(), "was replaced by a new load")));
  LogInfo("model reloaded on request", {{"model", config.name}, {"path", config.path}});
  return model;
}

absl::Status ModelAdmin::Retire(const std::weak_ptr<const ServedModel>& model, ModelId id,
                                TimePoint until, const absl::Status& why) {
  for (const std::shared_ptr<SessionCore>& stream : front_->Streams()) stream->CloseModel(id, why);
  RETURN_IF_ERROR(service_->engine().Unload(id, stopping() ? front_->clock().Now() : until, why));
  const TimePoint give_up = front_->clock().Now() + kFreeing;
  while (!model.expired()) {
    if (stopping()) return Draining();
    if (front_->clock().Now() > give_up) {
      return absl::DeadlineExceededError(
          "the model takes no requests any more, but a call still holds its memory");
    }
    std::this_thread::sleep_for(kPoll);
  }
  return absl::OkStatus();
}

}  // namespace saccade
