#pragma once
// Turns a configuration into running parts: backends, models, engine. Used by serve, verify and
// bench alike.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "config/config.h"
#include "engine/engine.h"
#include "metrics/metrics.h"

namespace saccade {

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const BackendConfig& config);

std::vector<LatencyClass> ToClasses(const Config& config);
EngineOptions ToEngineOptions(const Config& config);
MetricsOptions ToMetricsOptions(const Config& config, std::string version);

// K/V blocks and partition quotas of one model on one backend. INVALID_ARGUMENT when the memory
// holds less than one block.
ModelOptions ToModelOptions(const ModelConfig& m);
absl::StatusOr<KvCacheOptions> ToKvOptions(const KvConfig& config, const KvGeometry& geometry);

// Makes every backend, loads every model on each of its backends, starts and warms up the engine.
// Takes seconds to minutes, with the size of the weights. Errors name the model or backend.
// `costs`: step times of earlier runs. `memory` (may be null) holds what they need.
absl::StatusOr<std::unique_ptr<Engine>> BuildEngine(const Config& config, const Clock& clock,
                                                    Metrics* metrics, const CostTable& costs = {},
                                                    MemoryBudget* memory = nullptr);

// One model on each of its backends, ready for Engine::Load. `backends` are those of the
// configuration, in its order; steps may run on them meanwhile. RESOURCE_EXHAUSTED (kOutOfMemory)
// with the sum when it does not fit.
absl::StatusOr<ServedModel> LoadServed(const Config& config, const ModelConfig& model,
                                       std::span<Backend* const> backends, MemoryBudget* memory);

}  // namespace saccade
