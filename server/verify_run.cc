#include "verify_run.h"

#include <algorithm>
#include <future>
#include <utility>

#include "assembly.h"
#include "base/clock.h"
#include "base/strings.h"
#include "session/prompt_timeline.h"

namespace saccade {
namespace {

const SteadyClock kClock;

class WaitingSink final : public ResponseSink {
 public:
  void OnToken(RequestId, uint32_t, uint32_t, int32_t) override {}
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    done_.set_value(std::move(result));
  }
  absl::StatusOr<ActResult> Wait() { return done_.get_future().get(); }

 private:
  std::promise<absl::StatusOr<ActResult>> done_;
};

// One model on one backend with room for one request at a time; everything else as served.
absl::StatusOr<std::unique_ptr<Engine>> StartEngine(std::unique_ptr<Backend> backend,
                                                    std::unique_ptr<Model> model) {
  const Config defaults;
  const auto cameras = static_cast<uint32_t>(model->spec().cameras.size());
  ServedModel served;
  served.name = "verify";
  served.invalid_tokens = InvalidTokenPolicy::kClamp;  // as the reference that was recorded
  KvConfig kv;
  const uint32_t block_tokens = model->spec().kv.block_tokens;
  kv.blocks = 2 * (model->spec().max_positions + block_tokens) / block_tokens + 16;
  ASSIGN_OR_RETURN(served.kv, ToKvOptions(kv, model->spec().kv));
  served.embedding_slots = 4 + cameras;
  served.max_sequences = 4;
  served.instances.push_back(std::move(model));
  served.workers.emplace_back(0);

  EngineOptions options;
  LatencyClass klass;
  klass.name = "verify";
  klass.on_late = OnLate::kRunLate;
  options.classes.push_back(klass);
  options.max_rows = defaults.scheduler.max_batch_rows;
  // All in one step, so that stages have them in the order of cameras.
  options.max_frames = std::max(1u, cameras);
  options.max_logit_rows = 4;
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::move(backend));
  std::vector<ServedModel> models;
  models.push_back(std::move(served));
  return Engine::Start(options, std::move(backends), std::move(models), kClock, nullptr);
}

absl::StatusOr<ActionChunk> Act(Engine& engine, const std::shared_ptr<const Timeline>& timeline,
                                const VerifyInput& input, const VerifyOutput& out,
                                const std::string& key, std::shared_ptr<TapSink> tap) {
  auto sink = std::make_shared<WaitingSink>();
  ActRequest request;
  request.session = SessionId(1);
  request.model = ModelId(0);
  request.klass = ClassId(0);
  request.arrival = kClock.Now();
  request.timeline = timeline;
  request.statistics_key = key;
  request.state = input.state;
  if (engine.models().front()->spec().head.kind == HeadKind::kFlow) {
    request.flow = std::make_shared<const FlowInput>(FlowInput{out.normalized_state, input.noise});
  }
  request.sink = sink;
  request.tap = std::move(tap);
  ASSIGN_OR_RETURN(const RequestId id, engine.Submit(std::move(request)));
  (void)id;
  ASSIGN_OR_RETURN(ActResult result, sink->Wait());
  if (result.chunks.empty()) return absl::InternalError("the engine answered without a chunk");
  return std::move(result.chunks.front());
}

// Centres of the model's action ids as it decodes them, the highest id first.
absl::StatusOr<std::vector<double>> BinCentres(const Model& model) {
  std::vector<double> centres;
  const StatisticsSpec& statistics = model.spec().statistics.front();
  for (auto id = static_cast<int32_t>(model.spec().vocab_size) - 1; id >= 0; --id) {
    if (!model.IsActionToken(id)) continue;
    const std::vector<int32_t> tokens(statistics.action_dim, id);
    ASSIGN_OR_RETURN(const ActionChunk chunk,
                     model.DecodeActions(tokens, statistics.key, InvalidTokenPolicy::kFail));
    centres.push_back(chunk.normalized.front());
  }
  return centres;
}

absl::StatusOr<std::vector<std::string>> KeysOf(const ModelSpec& spec, const VerifyInput& input) {
  if (!input.statistics_keys.empty()) return input.statistics_keys;
  if (spec.statistics.size() == 1) return std::vector{spec.statistics.front().key};
  return absl::InvalidArgumentError(
      StrCat("the model has ", spec.statistics.size(),
             " sets of statistics, and the record does not say which one it is of"));
}

// The prompt of the input, with its frames.
absl::StatusOr<std::shared_ptr<const Timeline>> TimelineOf(const Model& model,
                                                           const VerifyInput& input,
                                                           VerifyOutput& out) {
  const ModelSpec& spec = model.spec();
  PromptInput prompt_input;
  prompt_input.instruction = input.instruction;
  prompt_input.state = out.normalized_state;
  std::vector<ContentRef> frames;
  for (uint32_t camera = 0; camera < spec.cameras.size(); ++camera) {
    const absl::StatusOr<Rgb8Image> image = input.frame_of(camera, spec.cameras[camera].name);
    if (absl::IsNotFound(image.status()) && spec.cameras[camera].optional) {
      prompt_input.missing_cameras |= uint64_t{1} << camera;
      frames.push_back(nullptr);
      continue;
    }
    RETURN_IF_ERROR(image.status());
    PixelRows rows(*image);
    ASSIGN_OR_RETURN(ModelImage frame, model.Preprocess(camera, rows));
    auto content = std::make_shared<Content>();
    content->width = frame.width;
    content->height = frame.height;
    content->digest = DigestBytes("frame.v1", frame.rgb);
    content->rgb = std::move(frame.rgb);
    frames.push_back(std::move(content));
  }
  ASSIGN_OR_RETURN(const Prompt prompt,
                   input.text_ids
                       ? model.BuildPromptFromTokens(*input.text_ids, prompt_input.missing_cameras)
                       : model.BuildPrompt(prompt_input));
  for (const PromptSegment& segment : prompt.segments) {
    out.prompt_ids.insert(out.prompt_ids.end(), segment.tokens.begin(), segment.tokens.end());
  }
  TimelineBuilder builder = out.engine->models().front()->NewTimeline();
  RETURN_IF_ERROR(AddPrompt(
      prompt, spec, [&](uint32_t camera) { return frames[camera]; },
      std::make_shared<const std::vector<float>>(out.normalized_state), builder));
  return builder.Build();
}

}  // namespace

absl::StatusOr<VerifyOutput> RunVerifyInput(const Checkpoint& checkpoint,
                                            const BackendConfig& backend_config,
                                            const VerifyInput& input) {
  ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, MakeBackend(backend_config));
  ASSIGN_OR_RETURN(
      std::unique_ptr<Model> loaded,
      input.load ? input.load(*backend) : LoadModel(checkpoint, *backend, input.options));
  const Model& model = *loaded;
  const ModelSpec& spec = model.spec();

  VerifyOutput out;
  out.tap = std::make_shared<RecordingTap>(*backend, input.stages);
  ASSIGN_OR_RETURN(out.engine, StartEngine(std::move(backend), std::move(loaded)));
  if (spec.head.kind == HeadKind::kTokens && spec.head.stop_tokens.empty()) {
    ASSIGN_OR_RETURN(out.bin_centres, BinCentres(model));
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> keys, KeysOf(spec, input));
  out.tapped_key = keys.front();
  if (spec.state_dim > 0) {
    ASSIGN_OR_RETURN(out.normalized_state, model.NormalizeState(input.state, out.tapped_key));
  }
  ASSIGN_OR_RETURN(out.timeline, TimelineOf(model, input, out));
  for (const std::string& key : keys) {
    absl::StatusOr<ActionChunk> chunk =
        Act(*out.engine, out.timeline, input, out, key,
            key == out.tapped_key ? out.tap : std::shared_ptr<TapSink>());
    if (!chunk.ok()) {
      return absl::Status(
          chunk.status().code(),
          ToAbsl(StrCat("actions.", key, ": ", FromAbsl(chunk.status().message()))));
    }
    out.chunks.emplace(key, *std::move(chunk));
  }
  RETURN_IF_ERROR(out.engine->CheckInvariants());
  return out;
}

}  // namespace saccade
