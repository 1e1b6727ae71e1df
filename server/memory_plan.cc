#include "memory_plan.h"

#include <algorithm>

#include "assembly.h"
#include "base/memory_budget.h"
#include "base/strings.h"
#include "config/memory.h"
#include "model/checkpoint.h"
#include "model/families/describe.h"

namespace saccade {
namespace {

size_t BackendsOf(const Config& config, const ModelConfig& model) {
  return model.backends.empty() ? config.backends.size() : model.backends.size();
}

// Converting a tensor takes one copy of it, at most as F32.
uint64_t LargestTensor(const Checkpoint& checkpoint) {
  uint64_t largest = 0;
  for (const std::string& name : checkpoint.names()) {
    const absl::StatusOr<TensorView> tensor = checkpoint.Tensor(name);
    if (!tensor.ok()) continue;
    largest = std::max(largest, static_cast<uint64_t>(tensor->numel()) * sizeof(float));
  }
  return largest;
}

}  // namespace

uint32_t MaxSequences(const Config& config) {
  return std::max<uint32_t>(2 * config.scheduler.max_batch_sequences, 16);
}

DeviceModelOptions ToDeviceOptions(const Config& config, const ModelConfig& model,
                                   uint32_t num_blocks) {
  DeviceModelOptions options;
  options.num_blocks = num_blocks;
  options.embedding_slots = model.vision_cache_frames;
  options.sequence_slots = MaxSequences(config);
  options.max_rows = config.scheduler.max_batch_rows;
  options.max_frames = config.scheduler.max_batch_frames;
  options.max_logit_rows = config.scheduler.max_batch_sequences;
  if (config.scheduler.step_ceiling_ms > 0)
    options.parking_places = ParkingPlaces(ToClasses(config));
  return options;
}

DescribeLimits StepLimits(const ModelSpec& spec, const DeviceModelOptions& asked) {
  const DeviceModelOptions options = FitToModel(spec, asked);
  return {options.max_frames, options.max_rows, HeadRows(spec, options), options.max_logit_rows};
}

absl::StatusOr<ModelMemory> PlanModel(const Config& config, const ModelConfig& model,
                                      size_t num_backends) {
  const DType compute = model.dtype == ComputeType::kBf16 ? DType::kBf16 : DType::kF32;
  ASSIGN_OR_RETURN(const FolderDescription folder,
                   DescribeFolder(model.path, ToModelOptions(model), [&](const ModelSpec& spec) {
                     return StepLimits(spec, ToDeviceOptions(config, model, /*num_blocks=*/1));
                   }));
  ModelMemory memory;
  const auto sizes = std::find_if(folder.memory.begin(), folder.memory.end(),
                                  [&](const auto& m) { return m.compute == compute; });
  if (!folder.known_sizes || sizes == folder.memory.end()) return memory;
  KvGeometry geometry = folder.spec.kv;
  geometry.dtype = compute;
  geometry.block_tokens = model.kv.block_tokens;
  ASSIGN_OR_RETURN(const KvCacheOptions kv, ToKvOptions(model.kv, geometry));
  ModelSpec spec = folder.spec;
  spec.kv = geometry;
  const DeviceModelOptions options =
      FitToModel(spec, ToDeviceOptions(config, model, kv.num_blocks));
  memory.device =
      PlanDeviceBytes(spec, options,
                      uint64_t{kv.num_blocks + ScratchBlocks(spec, options)} *
                          geometry.block_tokens * geometry.BytesPerToken(),
                      std::max(sizes->workspace, sizes->denoise_workspace), sizes->parking);
  for (uint64_t* bytes : {&memory.device.kv, &memory.device.embeddings, &memory.device.scratch,
                          &memory.device.staging})
    *bytes *= num_backends;
  memory.weights = sizes->weights * num_backends;
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(model.path));
  memory.loading = LargestTensor(checkpoint);
  return memory;
}

std::string PlanText(const Config& config) {
  const uint64_t budget = BudgetBytes(config);
  uint64_t sum = ProcessBytes(budget) + TransportBytes(config, budget);
  std::string text = StrCat("# Memory, MiB: budget ", Mebibytes(budget), "\n#   process ",
                            Mebibytes(ProcessBytes(budget)), ", transport ",
                            Mebibytes(TransportBytes(config, budget)), "\n");
  for (const ModelConfig& model : config.models) {
    const absl::StatusOr<ModelMemory> plan = PlanModel(config, model, BackendsOf(config, model));
    StrAppend(&text, "#   model ", model.name, ": ");
    if (!plan.ok()) {
      StrAppend(&text, "cannot be read, so nothing is known of it\n");
      continue;
    }
    sum += plan->total() - plan->loading;
    StrAppend(&text, "weights ", Mebibytes(plan->weights), ", kv_cache ",
              Mebibytes(plan->device.kv), ", embeddings ", Mebibytes(plan->device.embeddings),
              ", scratch ", Mebibytes(plan->device.scratch), ", staging ",
              Mebibytes(plan->device.staging), "; ", Mebibytes(plan->loading),
              " more while it is loaded\n");
  }
  StrAppend(&text, "#   together ", Mebibytes(sum), sum > budget ? ": TOO MUCH" : "");
  if (sum <= budget)
    StrAppend(&text, ", leaving ", Mebibytes(budget - sum), " for sessions, frames and messages");
  return text + "\n";
}

}  // namespace saccade
