// Engine: models that come and go: the making of one, its warm-up, and its end. Any thread.
#include <algorithm>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "base/strings.h"
#include "engine/engine_impl.h"
#include "session/prompt_timeline.h"

namespace saccade {
namespace {

// Loads whose names are kept for what is told of the past.
constexpr size_t kNames = 1024;
constexpr std::chrono::hours kWarmUpPatience{1};
constexpr int kWarmUpAttempts = 1000;  // 10 ms apart, against a full class

// Numbers of weights stand for time: what matters is how the layers compare.
std::vector<LayerShare> SharesOf(const std::vector<LayerCost>& layers) {
  std::vector<LayerShare> shares;
  for (const LayerCost& layer : layers) {
    shares.push_back({static_cast<double>(layer.weights), static_cast<double>(layer.row_weights)});
  }
  return shares;
}

class WarmUpSink final : public ResponseSink {
 public:
  void OnToken(RequestId, uint32_t, uint32_t, int32_t) override {}
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    done_.set_value(result.status());
  }
  std::future<absl::Status> future() { return done_.get_future(); }

 private:
  std::promise<absl::Status> done_;
};

}  // namespace

TimelineBuilder ServedModel::NewTimeline() const {
  const Digest128 salt = DigestBuilder("kv.salt.v1").Field(name).Field(spec().fingerprint).Finish();
  return TimelineBuilder(salt, kv.block_tokens);
}

// Everything of a model that can be made without the engine thread.
absl::StatusOr<Engine::Impl::Loaded> Engine::Impl::Prepare(ServedModel model) {
  if (model.instances.empty() || model.instances.size() != model.workers.size()) {
    return absl::InvalidArgumentError(
        StrCat("model ", model.name, ": one instance per worker is needed"));
  }
  model.id = ModelId(next_model_.fetch_add(1, std::memory_order_relaxed));
  Loaded loaded;
  loaded.served = std::make_shared<const ServedModel>(std::move(model));
  const ServedModel& served = *loaded.served;
  for (size_t i = 0; i < served.instances.size(); ++i) {
    const auto worker = static_cast<size_t>(served.workers[i].value());
    if (worker >= workers_.size()) {
      return absl::InvalidArgumentError(StrCat("model ", served.name, ": no such worker"));
    }
    const ModelSpec& spec = served.spec();
    DeviceModelOptions device;
    device.num_blocks = served.kv.num_blocks;
    device.embedding_slots = served.embedding_slots;
    device.sequence_slots = served.max_sequences;
    device.max_rows = options_.max_rows;
    device.max_frames = options_.max_frames;
    device.max_logit_rows = options_.max_logit_rows;
    device.check_pages = options_.check_pages;
    if (options_.step_ceiling.count() > 0) {
      device.parking_places = ParkingPlaces(options_.classes);
    }
    device = FitToModel(spec, device);
    ASSIGN_OR_RETURN(std::unique_ptr<DeviceModel> made,
                     DeviceModel::Create(*backends_[worker], workers_[worker].worker->stream(),
                                         *served.instances[i], device, options_.memory));
    // A step that hangs keeps its device side, and that its model.
    auto kept = std::make_shared<std::pair<ModelRef, std::unique_ptr<DeviceModel>>>(
        loaded.served, std::move(made));
    loaded.devices.emplace_back(kept, kept->second.get());
    LaneOptions lane;
    lane.worker = served.workers[i];
    lane.model = served.id;
    lane.kv = served.kv;
    lane.embedding_slots = served.embedding_slots;
    lane.sequence_slots = served.max_sequences;
    lane.max_action_tokens = std::max(spec.max_action_tokens, options_.max_new_tokens);
    lane.denoises = spec.head.kind == HeadKind::kFlow;
    if (lane.denoises) lane.max_action_tokens = kMaxFlowSteps;
    lane.max_rows = device.max_rows;
    lane.max_frames = device.max_frames;
    lane.max_logit_rows = device.max_logit_rows;
    lane.vision_layers = SharesOf(spec.vision_layers);
    lane.trunk_layers = SharesOf(spec.trunk_layers);
    const auto costs = options_.costs.find(CostKey(spec, *backends_[worker]));
    if (costs != options_.costs.end()) lane.cost = costs->second;
    ASSIGN_OR_RETURN(std::shared_ptr<Lane> made_lane,
                     Scheduler::MakeLane(lane, ParkingPlaces(options_.classes)));
    loaded.lanes.push_back(std::move(made_lane));
  }
  return loaded;
}

absl::StatusOr<ModelRef> Engine::Impl::Load(ServedModel model) {
  if (draining()) return Draining();
  ASSIGN_OR_RETURN(Loaded loaded, Prepare(std::move(model)));
  const ModelRef served = loaded.served;
  ModelMetrics* const metrics = registry_ == nullptr ? nullptr : &registry_->model(served->name);
  {
    const std::lock_guard lock(table_mu_);
    names_.emplace_back(served->id, served->name);
    if (names_.size() > kNames) names_.pop_front();
  }
  absl::Status status;
  const bool asked = AskEngineThread([&] {
    for (std::shared_ptr<Lane>& lane : loaded.lanes) {
      if (status.ok()) status = scheduler_->AddLane(std::move(lane));
    }
    loaded.lanes.clear();
    metrics_.AddModel(served->id, metrics);
    models_.emplace(served->id, std::move(loaded));
    stats_dirty_ = true;
  });
  if (!asked) return Stopped();
  if (status.ok()) status = WarmUp(*served);
  if (!status.ok()) {
    RETURN_IF_ERROR(Unload(served->id, clock_.Now(), status));
    return status;
  }
  AskEngineThread([&] {
    models_.at(served->id).warm = true;
    metrics_.StartCounting(served->id, scheduler_->stats());
  });
  const std::lock_guard lock(table_mu_);
  table_.push_back(served);
  if (metrics != nullptr) metrics->loads->Increment();
  return served;
}

absl::Status Engine::Impl::Unload(ModelId id, TimePoint until, absl::Status why) {
  {
    const std::lock_guard lock(table_mu_);
    const auto it = std::find_if(table_.begin(), table_.end(),
                                 [id](const ModelRef& model) { return model->id == id; });
    if (it != table_.end()) {
      if (registry_ != nullptr) registry_->model((*it)->name).loads->Decrement();
      table_.erase(it);
    }
  }
  bool known = false;
  if (!AskEngineThread([&] {
        const auto it = models_.find(id);
        known = it != models_.end() && !it->second.closing;
        if (known) it->second.closing = true;
      })) {
    return Stopped();
  }
  if (!known) return absl::NotFoundError("the model is not loaded");
  UnloadMessage message{id, until, std::move(why), {}};
  std::future<Loaded> done = message.done.get_future();
  Put(std::move(message));
  const Loaded rest = done.get();  // destroyed here: pools of memory take their time
  return absl::OkStatus();
}

std::string Engine::Impl::ModelName(ModelId id) const {
  const std::lock_guard lock(table_mu_);
  const auto it = std::find_if(names_.begin(), names_.end(),
                               [id](const auto& entry) { return entry.first == id; });
  return it == names_.end() ? StrCat("model ", id.value()) : it->second;
}

// Runs the model's whole path a few times on each worker before anybody may ask: pages weights in,
// fills lazily made tables, and gives the cost model its first observations. Answers do not matter
// here; a device that fails does.
absl::Status Engine::Impl::WarmUp(const ServedModel& model) {
  constexpr int kRuns = 3;
  ClassId klass(0);
  for (size_t c = 0; c < options_.classes.size(); ++c) {  // the most patient class
    if (options_.classes[c].tier >= options_.classes[static_cast<size_t>(klass.value())].tier) {
      klass = ClassId(static_cast<int32_t>(c));
    }
  }
  const ModelSpec& spec = model.spec();
  const auto state = std::make_shared<const std::vector<float>>(spec.state_width, 0.0F);
  ASSIGN_OR_RETURN(const Prompt prompt, model.instances.front()->BuildPrompt({"warm up", *state}));
  for (size_t run = 0, attempts = 0; run < kRuns * model.instances.size();) {
    TimelineBuilder builder(
        DigestBuilder("kv.salt.v1").Field("warm up").Field(uint64_t{run}).Finish(),
        model.kv.block_tokens);
    const auto frame_of = [&](uint32_t camera) -> ContentRef {
      const CameraSpec& shape = spec.cameras[camera];
      auto frame = std::make_shared<Content>();
      frame->width = shape.width;
      frame->height = shape.height;
      frame->rgb = GrayImage(shape.width, shape.height, shape.dtype, static_cast<uint8_t>(run)).rgb;
      frame->digest = DigestBytes("frame.warmup", frame->rgb);
      return frame;
    };
    RETURN_IF_ERROR(AddPrompt(prompt, spec, frame_of, state, builder));
    auto sink = std::make_shared<WarmUpSink>();
    std::future<absl::Status> done = sink->future();
    ActRequest request;
    request.session = SessionId(0);
    request.model = model.id;
    request.klass = klass;
    request.arrival = clock_.Now();
    request.deadline = request.arrival + kWarmUpPatience;
    request.timeline = builder.Build();
    request.statistics_key = spec.statistics.front().key;
    request.state.assign(spec.state_dim, 0.0F);
    if (spec.head.kind == HeadKind::kFlow) {
      request.flow = std::make_shared<const FlowInput>(FlowInput{*state, {}});
    }
    request.sink = std::move(sink);
    const absl::Status submitted = Submit(std::move(request)).status();
    const absl::Status status = submitted.ok() ? done.get() : submitted;
    const Reason reason = GetErrorInfo(status).reason;
    if (status.ok() || reason == Reason::kInvalidActionToken || reason == Reason::kNonFinite) {
      ++run;
    } else if (reason == Reason::kQueueFull && ++attempts < kWarmUpAttempts) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // others fill the class
    } else {
      return absl::Status(status.code(),
                          StrCat("warm-up of model ", model.name, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace saccade
