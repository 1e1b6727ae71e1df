#pragma once
// What an OpenVLA-OFT folder says about itself, checked, and what it leaves to its code: chunk
// length, number of images and the bounds of its statistics were constants of the platform it was
// trained for (prismatic/vla/constants.py). Nothing is loaded.
#include <cstdint>
#include <string>
#include <vector>

#include "base/policy.h"
#include "base/status.h"
#include "model/adapters.h"
#include "model/families/openvla_config.h"
#include "model/families/openvla_oft_heads.h"
#include "model/model.h"

namespace saccade {

struct OftStatistics {
  std::string key;
  Normalizer action;
  Normalizer state;  // no dimensions: the model takes no state
};

struct OpenVlaOftConfig {
  OpenVlaConfig base;                           // its trunk without an LM head
  std::string lm_head;                          // the tensor that is one, maybe the embedding table
  OftPlatform platform = OftPlatform::kLibero;  // never kAuto
  std::vector<std::string> cameras;
  uint32_t chunk = 0;       // actions
  uint32_t action_dim = 0;  // of one
  uint32_t state_dim = 0;   // 0: no proprio projector
  // Of the L1 head; without one the actions are ids, as OpenVLA's.
  bool regression = false;
  uint32_t head_width = 0;
  uint32_t head_blocks = 0;
  std::vector<OftStatistics> statistics;  // that fit the model, sorted by key
  // Sets of the file that do not, and why.
  std::vector<std::pair<std::string, std::string>> unfit;

  // Rows of the prompt whose hidden states are the answer.
  uint32_t read_rows() const { return chunk * action_dim; }
  // Tensors that are read from the files beside the checkpoint, and from the checkpoint beside
  // base.Tensors().
  std::vector<TensorSpec> HeadTensors() const;
  std::vector<TensorSpec> TokenHeadTensors() const;
  // The matrix that logits are made with; of a tied one the embedding table.
  size_t WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows, DType compute) const;
  size_t ParkingBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows, DType compute) const {
    return base.ParkingBytes(frames, rows, logit_rows, compute);
  }
};

// True for an OpenVLA folder with a part of OpenVLA-OFT beside it, or when the options say so.
bool IsOpenVlaOft(const Checkpoint& checkpoint, const ModelOptions& options);

// Everything but the statistics; and these.
absl::StatusOr<OpenVlaOftConfig> ReadOpenVlaOftSizes(const Checkpoint& checkpoint,
                                                     const OftHeads& heads,
                                                     const Preprocessor& preprocessor,
                                                     const OftOptions& options);
absl::Status ReadOpenVlaOftStatistics(const Checkpoint& checkpoint, OpenVlaOftConfig& config);

// One line per tensor that is absent, mis-shaped or not part of the architecture, here or there.
std::vector<std::string> OftTensorProblems(const Checkpoint& checkpoint, const OftHeads& heads,
                                           const OpenVlaOftConfig& config);

// As OpenVlaSpec.
ModelSpec OpenVlaOftSpec(const Checkpoint& checkpoint, const OpenVlaOftConfig& config);

}  // namespace saccade
