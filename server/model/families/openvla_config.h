#pragma once
// What an OpenVLA folder says about itself, checked: config.json, preprocessor_config.json, dataset
// statistics and the shapes of the weights. Nothing is loaded. A setting this server would not
// follow exactly is an error that names its key; unknown keys are ignored.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/adapters.h"
#include "model/checkpoint.h"
#include "model/families/openvla_actions.h"
#include "model/layers_decoder.h"
#include "model/layers_vit.h"
#include "model/model.h"
#include "model/preprocess.h"

namespace saccade {

// How a normalised action becomes a command.
struct OpenVlaStatistics {
  std::string key;
  Normalizer action;  // between q01 and q99
};

struct OpenVlaConfig {
  std::vector<VitSpec> towers;  // in channel order of the features
  DecoderSpec llama;
  uint32_t features = 0;         // width of all towers together
  bool fused_projector = false;  // fc1 gelu fc2 gelu fc3; else fc1 gelu fc2
  uint32_t max_positions = 0;
  ActionBins bins;
  bool vicuna_prompt = false;
  std::vector<int32_t> stop_tokens;           // that end a text
  std::vector<OpenVlaStatistics> statistics;  // sorted by key
  uint32_t max_action_dim = 0;

  uint32_t vision_tokens() const { return towers.front().patches(); }
  // Widths between the projector's layers: features, then the output of each.
  std::vector<uint32_t> projector_widths() const;
  // Every tensor that is read.
  std::vector<TensorSpec> Tensors() const;
  size_t EncodeWorkspaceBytes(uint32_t frames, DType compute) const;
  size_t WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows, DType compute) const;
  size_t ParkingBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows, DType compute) const;
};

// True for an OpenVLA folder, be it of OpenVLA-OFT or not.
bool IsOpenVlaFolder(const Checkpoint& checkpoint);

// Everything but the statistics; and the statistics, from dataset_statistics.json, which replaces
// config.norm_stats entirely, or from there.
absl::StatusOr<OpenVlaConfig> ReadOpenVlaSizes(const Checkpoint& checkpoint,
                                               const Preprocessor& preprocessor);
absl::Status ReadOpenVlaStatistics(const Checkpoint& checkpoint, OpenVlaConfig& config);
// Calls `read` with each set of that file, in the order of their keys.
absl::Status ForEachOpenVlaStatistics(
    const Checkpoint& checkpoint,
    const std::function<absl::Status(const std::string& key, const JsonView& set)>& read);
// Both.
absl::StatusOr<OpenVlaConfig> ReadOpenVlaConfig(const Checkpoint& checkpoint,
                                                const Preprocessor& preprocessor);

// One line per tensor that is absent, mis-shaped or not part of the architecture.
std::vector<std::string> TensorProblems(const Checkpoint& checkpoint, const OpenVlaConfig& config);
// An error that shows the first of them; OK without any.
absl::Status RefuseTensors(const Checkpoint& checkpoint, const std::vector<std::string>& problems);

// What the K/V bytes of a model depend on: weights and config.json, the compute dtype, and how
// frames are normalised.
void AddOpenVlaIdentity(const Checkpoint& checkpoint, const OpenVlaConfig& config, DType compute,
                        DigestBuilder& digest);

// What a model of this configuration tells about itself, but for its compute dtype, weight_bytes
// and fingerprint.
ModelSpec OpenVlaSpec(const Checkpoint& checkpoint, const OpenVlaConfig& config);

}  // namespace saccade
