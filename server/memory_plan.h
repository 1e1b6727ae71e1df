#pragma once
// What a configuration will hold of the memory budget, known before anything is allocated: what
// loading is refused by, and what check-config shows.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "config/config.h"
#include "engine/device_model.h"
#include "model/families/describe.h"

namespace saccade {

// One model on all its backends.
struct ModelMemory {
  uint64_t weights = 0;
  uint64_t loading = 0;  // beside them, while they are converted
  DeviceBytes device;    // without what a backend's layout adds
  uint64_t total() const {
    return weights + loading + device.kv + device.embeddings + device.scratch + device.staging;
  }
};
// Reads the folder's headers. An error when the folder cannot be read; all zero when its family is
// not known (loading says so).
absl::StatusOr<ModelMemory> PlanModel(const Config& config, const ModelConfig& model,
                                      size_t num_backends);
DeviceModelOptions ToDeviceOptions(const Config& config, const ModelConfig& model,
                                   uint32_t num_blocks);
// The largest step of a model that is served so.
DescribeLimits StepLimits(const ModelSpec& spec, const DeviceModelOptions& asked);
uint32_t MaxSequences(const Config& config);  // with action tokens at a time, per model and worker

// The plan as comment lines of YAML.
std::string PlanText(const Config& config);

}  // namespace saccade
