#include "cmd_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "assembly.h"
#include "base/strings.h"
#include "engine/cost_table.h"
#include "engine/device_model.h"
#include "model/checkpoint.h"
#include "session/prompt_timeline.h"

namespace saccade {
namespace {

constexpr uint32_t kMaxSequences = 8;

// Sequences of one prompt, each on blocks of its own: what the scheduler would hand out, laid out
// by hand.
struct Sequences {
  const ModelSpec& spec;
  std::shared_ptr<const Timeline> timeline;
  std::vector<ContentRef> frames;  // by camera
  uint32_t blocks_per_sequence = 0;

  std::vector<PageRef> Pages(uint32_t sequence, uint32_t end) const {
    std::vector<PageRef> pages;
    auto next = static_cast<int32_t>(sequence * blocks_per_sequence);
    for (const TimelineBlock& block : timeline->blocks()) {
      if (block.begin >= end) break;
      const auto len = static_cast<uint16_t>(std::min<uint32_t>(block.len, end - block.begin));
      pages.push_back({BlockId(next++), len, block.begin});
    }
    for (uint32_t t = timeline->num_tokens(); t < end; t += spec.kv.block_tokens) {
      pages.push_back(
          {BlockId(next++), static_cast<uint16_t>(std::min(spec.kv.block_tokens, end - t)), t});
    }
    return pages;
  }
  SequenceSlot Slot(uint32_t sequence) const {
    return SequenceSlot(static_cast<int32_t>(sequence));
  }
  // Rows of the trunk. `sample`: the number of the token that their last row is for.
  TrunkItem Rows(uint32_t sequence, uint32_t begin, uint32_t count,
                 std::optional<uint32_t> sample) const {
    TrunkItem item;
    item.request = RequestId(sequence);
    item.timeline = timeline;
    item.begin = begin;
    item.count = count;
    item.slot = Slot(sequence);
    item.pages = Pages(sequence, begin + count);
    for (const Segment& segment : timeline->segments()) {
      item.embeddings.push_back(segment.modality == Modality::kVision
                                    ? EmbeddingId(static_cast<int32_t>(segment.camera))
                                    : EmbeddingId());
    }
    if (sample.has_value()) item.samples.push_back({0, item.slot, *sample, 0.0F, 0});
    return item;
  }
  TrunkItem Prompt(uint32_t sequence) const {
    const bool answers = spec.head.kind != HeadKind::kFlow;
    return Rows(sequence, 0, timeline->num_tokens(), answers ? std::optional(0u) : std::nullopt);
  }
  TrunkItem Decode(uint32_t sequence, uint32_t index) const {
    return Rows(sequence, timeline->num_tokens() + index, 1, index + 1);
  }
  FlowItem Denoise(uint32_t sequence, uint32_t index,
                   const std::shared_ptr<const FlowInput>& input) const {
    FlowItem item;
    item.request = RequestId(sequence);
    item.index = index;
    item.steps = spec.head.steps;
    item.slot = Slot(sequence);
    item.timeline = timeline;
    item.pages = Pages(sequence, timeline->num_tokens());
    item.seed = sequence;
    item.input = input;
    return item;
  }
  EncodeItem Encode(uint32_t camera) const {
    EncodeItem item;
    item.frame = frames[camera];
    item.camera = camera;
    item.slot = EmbeddingId(static_cast<int32_t>(camera));
    return item;
  }
};

// An example of what a robot sends: a gray frame of every camera, an instruction, a state of zeros.
absl::StatusOr<Sequences> MakeSequences(const Model& model) {
  const ModelSpec& spec = model.spec();
  Sequences sequences{.spec = spec, .timeline = nullptr, .frames = {}};
  for (const CameraSpec& camera : spec.cameras) {
    auto frame = std::make_shared<Content>();
    frame->width = camera.width;
    frame->height = camera.height;
    frame->rgb = GrayImage(camera.width, camera.height, camera.dtype, 127).rgb;
    sequences.frames.push_back(std::move(frame));
  }
  std::vector<float> state;
  if (spec.state_dim > 0) {
    const std::vector<float> zeros(spec.state_dim);
    ASSIGN_OR_RETURN(state, model.NormalizeState(zeros, spec.statistics.front().key));
  }
  ASSIGN_OR_RETURN(const Prompt prompt,
                   model.BuildPrompt({"pick up the red block and place it in the bowl", state}));
  TimelineBuilder builder(spec.fingerprint, spec.kv.block_tokens);
  RETURN_IF_ERROR(AddPrompt(
      prompt, spec, [&](uint32_t camera) { return sequences.frames[camera]; },
      std::make_shared<const std::vector<float>>(std::move(state)), builder));
  sequences.timeline = builder.Build();
  const uint32_t answer = spec.head.kind == HeadKind::kTokens ? spec.max_action_tokens : 0;
  sequences.blocks_per_sequence = static_cast<uint32_t>(sequences.timeline->blocks().size()) +
                                  (answer + spec.kv.block_tokens - 1) / spec.kv.block_tokens;
  return sequences;
}

// Runs steps, times them, and teaches the cost model what their shapes take.
class StepTimer {
 public:
  StepTimer(DeviceModel& device, uint32_t repetitions)
      : device_(device), repetitions_(std::max(repetitions, 1u)) {}

  absl::Status Run(const StepPlan& plan) { return device_.Run(plan, result_); }

  absl::Status Add(const char* stage, StepPlan plan, const StepShape& shape) {
    plan.shape = shape;
    return AddAll(stage, {std::move(plan)}, [&](Micros took) { costs_.Observe(shape, took); });
  }
  // Several steps, one after another, as one time.
  absl::Status AddAnswer(const std::vector<StepPlan>& plans) {
    return AddAll("answer", plans, [](Micros) {});
  }
  const nlohmann::json& steps() const { return steps_; }
  const CostModel& costs() const { return costs_; }

 private:
  template <class Observe>
  absl::Status AddAll(const char* stage, const std::vector<StepPlan>& plans, Observe&& observe) {
    std::vector<double> ms;
    for (uint32_t i = 0; i <= repetitions_; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      for (const StepPlan& plan : plans) RETURN_IF_ERROR(Run(plan));
      const auto took = std::chrono::steady_clock::now() - begin;
      if (i == 0) continue;  // not counted: pages memory in
      observe(ToMicros(took));
      ms.push_back(ToMillis(took));
    }
    std::sort(ms.begin(), ms.end());
    uint64_t rows = 0;
    size_t frames = 0;
    size_t sequences = 0;
    for (const StepPlan& plan : plans) {
      for (const TrunkItem& item : plan.trunk) rows += item.count;
      frames += plan.encodes.size();
      sequences = std::max({sequences, plan.trunk.size(), plan.flows.size()});
    }
    steps_.push_back({{"stage", stage},
                      {"frames", frames},
                      {"rows", rows},
                      {"sequences", sequences},
                      {"min_ms", ms.front()},
                      {"median_ms", ms[ms.size() / 2]}});
    return absl::OkStatus();
  }

  DeviceModel& device_;
  const uint32_t repetitions_;
  StepResult result_;
  nlohmann::json steps_ = nlohmann::json::array();
  CostModel costs_;
};

// Every stage of the model by itself, then all of an answer in order.
absl::Status TimeStages(const Sequences& sequences, bool for_profile, StepTimer& timer) {
  const ModelSpec& spec = sequences.spec;
  const uint32_t prompt_tokens = sequences.timeline->num_tokens();
  const auto num_frames = static_cast<uint32_t>(sequences.frames.size());

  StepPlan encode;
  for (uint32_t camera = 0; camera < num_frames; ++camera) {
    encode.encodes.push_back(sequences.Encode(camera));
  }
  RETURN_IF_ERROR(timer.Run(encode));  // prompts read all of them
  StepPlan one_frame;
  one_frame.encodes = {sequences.Encode(0)};
  RETURN_IF_ERROR(timer.Add("encode", std::move(one_frame), {.frames = 1}));

  StepPlan prefill;
  for (uint32_t s = kMaxSequences; s-- > 0;) {  // each needs its K/V below; the last is timed
    prefill.trunk = {sequences.Prompt(s)};
    RETURN_IF_ERROR(timer.Run(prefill));
  }
  RETURN_IF_ERROR(timer.Add("prefill", prefill, {.prefill_rows = prompt_tokens}));
  const uint32_t group = sequences.timeline->group_tokens();
  // What a row costs beside the step itself; a group is not cut by rows.
  if (for_profile && spec.head.kind == HeadKind::kTokens && group == 0 && prompt_tokens > 4) {
    StepPlan chunk;
    chunk.trunk = {sequences.Rows(0, 0, prompt_tokens / 4, std::nullopt)};
    RETURN_IF_ERROR(
        timer.Add("prefill chunk", std::move(chunk), {.prefill_rows = prompt_tokens / 4}));
  }

  auto input = std::make_shared<FlowInput>();
  input->state.resize(spec.state_width);
  const auto step = [&](uint32_t count, uint32_t index) {
    StepPlan plan;
    for (uint32_t s = 0; s < count; ++s) {
      if (spec.head.kind == HeadKind::kFlow) {
        plan.flows.push_back(sequences.Denoise(s, index, input));
      } else {
        plan.trunk.push_back(sequences.Decode(s, index));
      }
    }
    return plan;
  };
  uint32_t answer_steps = 0;  // behind the prefill
  if (spec.head.kind == HeadKind::kFlow) answer_steps = spec.head.steps;
  if (spec.head.kind == HeadKind::kTokens) answer_steps = spec.max_action_tokens - 1;
  if (answer_steps > 0) {
    const char* const stage = spec.head.kind == HeadKind::kFlow ? "denoise" : "decode";
    for (const uint32_t count : {1u, 4u, kMaxSequences}) {
      RETURN_IF_ERROR(timer.Add(stage, step(count, 0), {.decode_rows = count}));
    }
  }
  // The model of an answer with a stop token chooses how long it is.
  if (!spec.head.stop_tokens.empty()) return absl::OkStatus();
  std::vector<StepPlan> answer{std::move(encode), std::move(prefill)};
  for (uint32_t i = 0; i < answer_steps; ++i) answer.push_back(step(1, i));
  return timer.AddAnswer(answer);
}

absl::StatusOr<nlohmann::json> Run(const BenchOptions& options) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, MakeBackend(options.backend));
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(options.model_dir));
  ModelOptions model_options;
  model_options.compute = options.dtype == ComputeType::kBf16 ? DType::kBf16 : DType::kF32;
  ASSIGN_OR_RETURN(const std::unique_ptr<Model> model,
                   LoadModel(checkpoint, *backend, model_options));
  const ModelSpec& spec = model->spec();
  ASSIGN_OR_RETURN(const Sequences sequences, MakeSequences(*model));
  const uint32_t prompt_tokens = sequences.timeline->num_tokens();

  DeviceModelOptions device_options;
  device_options.num_blocks = sequences.blocks_per_sequence * kMaxSequences;
  device_options.embedding_slots = std::max(1u, static_cast<uint32_t>(spec.cameras.size()));
  device_options.sequence_slots = kMaxSequences;
  device_options.max_rows = std::max(prompt_tokens, kMaxSequences * spec.head.suffix_rows());
  device_options.max_frames = device_options.embedding_slots;
  device_options.max_logit_rows = kMaxSequences;
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend->NewStream());
  ASSIGN_OR_RETURN(const std::unique_ptr<DeviceModel> device,
                   DeviceModel::Create(*backend, *stream, *model, device_options, nullptr));

  StepTimer timer(*device, options.repetitions);
  RETURN_IF_ERROR(TimeStages(sequences, !options.profile.empty(), timer));
  if (!options.profile.empty()) {
    absl::StatusOr<CostTable> table = LoadCostFile(options.profile);
    if (absl::IsNotFound(table.status())) table = CostTable();
    RETURN_IF_ERROR(table.status());
    table->insert_or_assign(CostKey(spec, *backend), timer.costs());
    RETURN_IF_ERROR(SaveCostFile(options.profile, *table));
  }
  return nlohmann::json{
      {"model", options.model_dir},
      {"family", spec.family},
      {"dtype", std::string(Name(options.dtype))},
      {"backend", backend->Describe()},
      {"prompt_tokens", prompt_tokens},
      {"frames", spec.cameras.size()},
      {"action_tokens", spec.head.kind == HeadKind::kTokens ? spec.max_action_tokens : 0},
      {"denoise_steps", spec.head.steps},
      {"steps", timer.steps()}};
}

}  // namespace

int RunBench(const BenchOptions& options) {
  const absl::StatusOr<nlohmann::json> result = Run(options);
  if (!result.ok()) {
    std::fprintf(stderr, "saccade-server bench: %s\n",
                 std::string(FromAbsl(result.status().message())).c_str());
    return 1;
  }
  std::printf("%s\n", result->dump(2).c_str());
  return 0;
}

}  // namespace saccade
