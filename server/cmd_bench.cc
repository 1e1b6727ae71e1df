#include "cmd_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
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

struct Times {
  double min_ms = 0;
  double median_ms = 0;
};

// One prompt on blocks of its own: what the scheduler would hand out, laid out by hand.
struct Bench {
  std::shared_ptr<const Timeline> timeline;
  std::vector<ContentRef> frames;  // by segment
  uint32_t blocks_per_sequence = 0;
  uint32_t block_tokens = 0;

  TrunkItem Item(uint32_t sequence, uint32_t begin, uint32_t count, uint32_t sample_index) const {
    TrunkItem item;
    item.request = RequestId(sequence);
    item.timeline = timeline;
    item.begin = begin;
    item.count = count;
    item.slot = SequenceSlot(static_cast<int32_t>(sequence));
    const auto base = static_cast<int32_t>(sequence * blocks_per_sequence);
    int32_t next = base;
    const uint32_t end = begin + count;
    for (const TimelineBlock& block : timeline->blocks()) {
      if (block.begin >= end) break;
      const auto len = static_cast<uint16_t>(std::min<uint32_t>(block.len, end - block.begin));
      item.pages.push_back({BlockId(next++), len, block.begin});
    }
    for (uint32_t t = timeline->num_tokens(); t < end; t += block_tokens) {
      item.pages.push_back(
          {BlockId(next++), static_cast<uint16_t>(std::min(block_tokens, end - t)), t});
    }
    for (size_t s = 0; s < timeline->segments().size(); ++s) {
      item.embeddings.push_back(
          timeline->segments()[s].modality == Modality::kVision ? EmbeddingId(0) : EmbeddingId());
    }
    item.samples.push_back({0, item.slot, sample_index, 0.0F, 0});
    return item;
  }
};

absl::StatusOr<nlohmann::json> Run(const BenchOptions& options) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, MakeBackend(options.backend));
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(options.model_dir));
  ModelOptions model_options;
  model_options.compute = options.dtype == ComputeType::kBf16 ? DType::kBf16 : DType::kF32;
  ASSIGN_OR_RETURN(const std::unique_ptr<Model> model,
                   LoadModel(checkpoint, *backend, model_options));
  const ModelSpec& spec = model->spec();

  Bench bench;
  bench.block_tokens = spec.kv.block_tokens;
  ASSIGN_OR_RETURN(const Prompt prompt,
                   model->BuildPrompt({"pick up the red block and place it in the bowl"}));
  TimelineBuilder builder(spec.fingerprint, spec.kv.block_tokens);
  std::vector<EncodeItem> encodes;
  const auto frame_of = [&](uint32_t index) -> ContentRef {
    const CameraSpec& camera = spec.cameras[index];
    auto frame = std::make_shared<Content>();
    frame->width = camera.width;
    frame->height = camera.height;
    frame->rgb = GrayImage(camera.width, camera.height, camera.dtype, 127).rgb;
    EncodeItem encode;
    encode.frame = frame;
    encode.camera = index;
    encode.slot = EmbeddingId(0);
    encodes.push_back(std::move(encode));
    return frame;
  };
  RETURN_IF_ERROR(AddPrompt(prompt, spec.vision_tokens, frame_of, builder));
  bench.timeline = builder.Build();
  const uint32_t prompt_tokens = bench.timeline->num_tokens();
  const uint32_t actions = spec.max_action_tokens;
  bench.blocks_per_sequence = static_cast<uint32_t>(bench.timeline->blocks().size()) +
                              (actions + bench.block_tokens - 1) / bench.block_tokens;

  DeviceModelOptions device_options;
  device_options.num_blocks = bench.blocks_per_sequence * kMaxSequences;
  device_options.embedding_slots = 1;
  device_options.sequence_slots = kMaxSequences;
  device_options.max_rows = prompt_tokens;
  device_options.max_frames = 1;
  device_options.max_logit_rows = kMaxSequences;
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend->NewStream());
  ASSIGN_OR_RETURN(const std::unique_ptr<DeviceModel> device,
                   DeviceModel::Create(*backend, *stream, *model, device_options, nullptr));

  nlohmann::json steps = nlohmann::json::array();
  CostModel costs;
  const auto run = [&](const StepPlan& plan) {
    StepResult result;
    return device->Run(plan, result);
  };
  // Times the step, and teaches the cost model what its shape takes.
  const auto measure = [&](StepPlan& plan, const StepShape& shape) -> absl::StatusOr<Times> {
    plan.shape = shape;
    RETURN_IF_ERROR(run(plan));  // not counted: pages memory in
    std::vector<double> ms;
    for (uint32_t i = 0; i < std::max(options.repetitions, 1u); ++i) {
      const auto begin = std::chrono::steady_clock::now();
      RETURN_IF_ERROR(run(plan));
      const auto took = std::chrono::steady_clock::now() - begin;
      costs.Observe(shape, ToMicros(took));
      ms.push_back(ToMillis(took));
    }
    std::sort(ms.begin(), ms.end());
    return Times{ms.front(), ms[ms.size() / 2]};
  };
  const auto add = [&](const char* stage, uint32_t rows, uint32_t sequences, const Times& times) {
    steps.push_back({{"stage", stage},
                     {"rows", rows},
                     {"sequences", sequences},
                     {"min_ms", times.min_ms},
                     {"median_ms", times.median_ms}});
  };

  StepPlan encode;
  encode.encodes = {encodes.front()};
  ASSIGN_OR_RETURN(const Times encode_times, measure(encode, {.frames = 1}));
  add("encode", 0, 1, encode_times);

  StepPlan prefill;
  for (uint32_t s = kMaxSequences;
       s-- > 0;) {  // every sequence needs its K/V for the decode below; the last is timed
    prefill.trunk = {bench.Item(s, 0, prompt_tokens, 0)};
    RETURN_IF_ERROR(run(prefill));
  }
  ASSIGN_OR_RETURN(const Times prefill_times, measure(prefill, {.prefill_rows = prompt_tokens}));
  add("prefill", prompt_tokens, 1, prefill_times);
  if (!options.profile.empty() && prompt_tokens > 4) {  // what a row costs beside the step itself
    StepPlan chunk;
    chunk.trunk = {bench.Item(0, 0, prompt_tokens / 4, 0)};
    chunk.trunk.front().samples.clear();
    ASSIGN_OR_RETURN(const Times times, measure(chunk, {.prefill_rows = prompt_tokens / 4}));
    add("prefill chunk", prompt_tokens / 4, 1, times);
  }

  if (actions > 1) {
    for (uint32_t sequences : {1u, 4u, kMaxSequences}) {
      StepPlan decode;
      for (uint32_t s = 0; s < sequences; ++s)
        decode.trunk.push_back(bench.Item(s, prompt_tokens, 1, 1));
      ASSIGN_OR_RETURN(const Times times, measure(decode, {.decode_rows = sequences}));
      add("decode", sequences, sequences, times);
    }
  }
  if (!options.profile.empty()) {
    absl::StatusOr<CostTable> table = LoadCostFile(options.profile);
    if (absl::IsNotFound(table.status())) table = CostTable();
    RETURN_IF_ERROR(table.status());
    table->insert_or_assign(CostKey(spec, *backend), costs);
    RETURN_IF_ERROR(SaveCostFile(options.profile, *table));
  }
  return nlohmann::json{{"model", options.model_dir},
                        {"family", spec.family},
                        {"dtype", std::string(Name(options.dtype))},
                        {"backend", backend->Describe()},
                        {"prompt_tokens", prompt_tokens},
                        {"action_tokens", actions},
                        {"steps", steps}};
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
