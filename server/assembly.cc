#include "assembly.h"

#include <algorithm>
#include <cmath>

#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#include "base/logging.h"
#include "base/strings.h"
#include "memory_plan.h"
#include "model/checkpoint.h"

namespace saccade {
namespace {

Isa ToIsa(IsaLevel level) {
  switch (level) {
    case IsaLevel::kAuto:
      return Isa::kAuto;
    case IsaLevel::kAvx2:
      return Isa::kAvx2;
    case IsaLevel::kAvx512:
      return Isa::kAvx512;
    case IsaLevel::kAvx512Bf16:
      return Isa::kAvx512Bf16;
    case IsaLevel::kAmxBf16:
      return Isa::kAmxBf16;
  }
  return Isa::kAuto;
}

absl::Status Prefixed(std::string_view what, const absl::Status& status) {
  return MakeError(status.code(), StrCat(what, ": ", FromAbsl(status.message())),
                   GetErrorInfo(status));
}

Micros FromMillis(double ms) { return Micros(std::llround(ms * 1000)); }

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const BackendConfig& config) {
  switch (config.kind) {
    case BackendKind::kCpu: {
      CpuOptions options;
      options.threads = static_cast<int>(config.threads);
      options.isa = ToIsa(config.isa);
      return MakeCpuBackend(options);
    }
    case BackendKind::kRef: {
      RefOptions options;
      options.guarded = config.guarded;
      return MakeRefBackend(options);
    }
  }
  return absl::InvalidArgumentError("unknown backend kind");
}

std::vector<LatencyClass> ToClasses(const Config& config) {
  std::vector<LatencyClass> classes;
  for (const ClassConfig& c : config.classes) {
    classes.push_back({c.name, FromMillis(c.deadline_ms), c.tier, c.preferred, c.shares, c.on_late,
                       c.max_queued});
  }
  return classes;
}

EngineOptions ToEngineOptions(const Config& config) {
  const SchedulerConfig& scheduler = config.scheduler;
  EngineOptions options;
  options.classes = ToClasses(config);
  options.step_ceiling = FromMillis(scheduler.step_ceiling_ms);
  options.pipeline_depth = scheduler.pipeline_depth;
  options.max_wait = FromMillis(scheduler.max_wait_ms);
  options.ageing_share = scheduler.ageing_share;
  options.step_timeout = FromMillis(scheduler.step_timeout_s * 1000);
  options.probe_after = FromMillis(scheduler.probe_after_ms);
  options.max_rows = scheduler.max_batch_rows;
  options.max_logit_rows = scheduler.max_batch_sequences;
  options.max_frames = scheduler.max_batch_frames;
  options.max_new_tokens = config.limits.max_new_tokens;
  return options;
}

MetricsOptions ToMetricsOptions(const Config& config, std::string version) {
  MetricsOptions options;
  options.version = std::move(version);
  for (const ClassConfig& c : config.classes) {
    options.classes.push_back(c.name);
    options.class_deadlines_s.push_back(c.deadline_ms / 1000);
  }
  for (const ModelConfig& m : config.models) options.models.push_back(m.name);
  for (const BackendConfig& b : config.backends) options.backends.push_back(b.name);
  return options;
}

absl::StatusOr<KvCacheOptions> ToKvOptions(const KvConfig& config, const KvGeometry& geometry) {
  KvCacheOptions options;
  options.block_tokens = geometry.block_tokens;
  const uint64_t block_bytes = uint64_t{geometry.block_tokens} * geometry.BytesPerToken();
  uint64_t blocks = config.blocks;
  if (blocks == 0) blocks = (uint64_t{config.memory_mb} << 20) / block_bytes;
  if (blocks == 0) {
    return absl::InvalidArgumentError(absl::StrCat("kv.memory_mb: ", config.memory_mb,
                                                   " MB hold no block of ", block_bytes, " bytes"));
  }
  options.num_blocks = static_cast<uint32_t>(std::min<uint64_t>(blocks, 1u << 20));
  options.headroom = static_cast<uint32_t>(config.headroom * options.num_blocks);
  for (size_t i = 0; i < kModalities; ++i) {
    const double n = options.num_blocks;
    options.partitions[i].floor = static_cast<uint32_t>(config.partitions[i].floor * n);
    options.partitions[i].cap = static_cast<uint32_t>(std::ceil(config.partitions[i].cap * n));
  }
  return options;
}

ModelOptions ToModelOptions(const ModelConfig& m) {
  ModelOptions options;
  options.compute = m.dtype == ComputeType::kBf16 ? DType::kBf16 : DType::kF32;
  options.block_tokens = m.kv.block_tokens;
  options.invalid_tokens = m.invalid_action_tokens == InvalidActionTokens::kClamp
                               ? InvalidTokenPolicy::kClamp
                               : InvalidTokenPolicy::kFail;
  if (m.oft) options.oft = OftOptions{m.oft->platform, m.oft->chunk, m.oft->cameras};
  return options;
}

absl::StatusOr<ServedModel> LoadServed(const Config& config, const ModelConfig& m,
                                       std::span<Backend* const> backends, MemoryBudget* memory) {
  const std::string what = StrCat("model ", m.name, " (", m.path, ")");
  const auto runs_on = [&m](const BackendConfig& backend) {
    return m.backends.empty() ||
           std::find(m.backends.begin(), m.backends.end(), backend.name) != m.backends.end();
  };
  const auto count =
      static_cast<size_t>(std::count_if(config.backends.begin(), config.backends.end(), runs_on));
  if (count == 0) return absl::InvalidArgumentError(StrCat(what, ": no backend"));
  const absl::StatusOr<ModelMemory> plan = PlanModel(config, m, count);
  if (!plan.ok()) return Prefixed(what, plan.status());
  ServedModel served;
  // First all of it, so that what cannot fit is refused before the work; then what loading takes.
  absl::StatusOr<MemoryHold> hold = MemoryBudget::Hold(memory, MemoryKind::kWeights, plan->total());
  if (!hold.ok()) return Prefixed(what, hold.status());
  RETURN_IF_ERROR(hold->Resize(plan->weights + plan->loading));
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(m.path);
  if (!checkpoint.ok()) return Prefixed(what, checkpoint.status());
  served.name = m.name;
  served.invalid_tokens = ToModelOptions(m).invalid_tokens;
  served.least_flow_steps = m.least_flow_steps;
  served.embedding_slots = m.vision_cache_frames;
  served.max_sequences = MaxSequences(config);
  const ModelOptions options = ToModelOptions(m);
  uint64_t weights = 0;
  for (size_t i = 0; i < config.backends.size(); ++i) {
    if (!runs_on(config.backends[i])) continue;
    absl::StatusOr<std::unique_ptr<Model>> model = LoadModel(*checkpoint, *backends[i], options);
    if (!model.ok()) return Prefixed(what, model.status());
    weights += (*model)->spec().weight_bytes;
    served.instances.push_back(*std::move(model));
    served.workers.emplace_back(static_cast<int32_t>(i));
  }
  if (const absl::Status fits = hold->Resize(weights); !fits.ok()) return Prefixed(what, fits);
  served.weights = *std::move(hold);
  const absl::StatusOr<KvCacheOptions> kv = ToKvOptions(m.kv, served.spec().kv);
  if (!kv.ok()) return Prefixed(what, kv.status());
  served.kv = *kv;
  LogInfo("model loaded", {{"model", m.name},
                           {"family", served.spec().family},
                           {"parameters", served.spec().parameters},
                           {"kv_blocks", served.kv.num_blocks}});
  return served;
}

absl::StatusOr<std::unique_ptr<Engine>> BuildEngine(const Config& config, const Clock& clock,
                                                    Metrics* metrics, const CostTable& costs,
                                                    MemoryBudget* memory) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (size_t i = 0; i < config.backends.size(); ++i) {
    absl::StatusOr<std::unique_ptr<Backend>> backend = MakeBackend(config.backends[i]);
    if (!backend.ok())
      return Prefixed(StrCat("backend ", config.backends[i].name), backend.status());
    const std::string description = (*backend)->Describe();
    LogInfo("backend ready", {{"backend", config.backends[i].name}, {"device", description}});
    if (metrics != nullptr) {
      metrics->SetBackendInfo(WorkerId(static_cast<int32_t>(i)), (*backend)->kind(), description);
    }
    backends.push_back(*std::move(backend));
  }

  std::vector<Backend*> views;
  for (const std::unique_ptr<Backend>& backend : backends) views.push_back(backend.get());
  std::vector<ServedModel> models;
  for (const ModelConfig& m : config.models) {
    ASSIGN_OR_RETURN(ServedModel model, LoadServed(config, m, views, memory));
    models.push_back(std::move(model));
  }
  EngineOptions options = ToEngineOptions(config);
  options.memory = memory;
  options.costs = costs;
  return Engine::Start(options, std::move(backends), std::move(models), clock, metrics);
}

}  // namespace saccade
