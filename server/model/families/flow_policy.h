#pragma once
// A policy of lerobot with a flow head (SmolVLA, pi0, pi0.5): frames through a SigLIP tower and a
// projector, a prompt of frames, text and maybe state that fills the cache, and an action expert
// that denoises a chunk over it. A family reads its config.json into a FlowConfig; the rest is one
// model.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/adapters.h"
#include "model/checkpoint.h"
#include "model/layers_decoder.h"
#include "model/layers_expert.h"
#include "model/layers_vit.h"
#include "model/model.h"
#include "model/resize_with_pad.h"

namespace saccade {

// What stands in the prompt for an instruction.
enum class FlowPrompt : uint8_t {
  kLine,          // the instruction and a newline (SmolVLA, pi0)
  kLineAndState,  // "Task: ..., State: 12 200 ...;\nAction: " (pi0.5)
};

struct FlowConfig {
  std::string family;
  std::vector<CameraSpec> cameras;  // in prompt order
  // Frames that the policy adds in place of missing ones, at most; they are masked, so that only
  // special tokens around them count.
  uint32_t empty_cameras = 0;
  PadSide pad_side = PadSide::kLeftTop;

  VitSpec tower;
  uint32_t shuffle = 1;   // patches of a side of the square that one token is made of
  std::string projector;  // name of the layer from the tower to the trunk
  bool projector_bias = false;
  float vision_scale = 1;  // of what it makes

  DecoderSpec trunk;
  ExpertSpec expert;
  SuffixMask mask = SuffixMask::kCausal;
  uint32_t steps = 0;
  uint32_t served_actions = 0;  // of a chunk, from its first one
  double min_period = 0;        // of the sinusoids of a flow time
  double max_period = 0;

  FlowPrompt prompt = FlowPrompt::kLine;
  std::string tokenizer_dir;
  uint32_t max_text = 0;  // tokens
  // Around every frame; ids of the trunk that embed without a scale. Empty: nothing is.
  std::vector<int32_t> before_frame;
  std::vector<int32_t> after_frame;

  std::vector<PolicyAdapters> adapters;  // at least one
  uint32_t state_width = 0;              // of a state on the device

  uint32_t state_dim() const { return static_cast<uint32_t>(adapters.front().state.dim()); }
  uint32_t action_dim() const { return static_cast<uint32_t>(adapters.front().action.dim()); }
  bool state_in_prompt() const { return !trunk.state.empty(); }
  uint32_t vision_tokens() const { return tower.patches() / (shuffle * shuffle); }
  std::vector<TensorSpec> Tensors() const;
  size_t WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows, DType compute) const;
  size_t ParkingBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows) const;
};

// Everything of the spec but fingerprint, compute and weight_bytes.
ModelSpec FlowSpec(const Checkpoint& checkpoint, const FlowConfig& config);

// One line per tensor that is absent, mis-shaped, or not part of such a model.
std::vector<std::string> FlowTensorProblems(const Checkpoint& checkpoint, const FlowConfig& config);

// Tokens of text in a prompt for `instruction`, with a state of zeros.
absl::StatusOr<uint32_t> FlowTextTokens(const FlowConfig& config, std::string_view instruction);

absl::StatusOr<std::unique_ptr<Model>> LoadFlowPolicy(const Checkpoint& checkpoint,
                                                      Backend& backend, const ModelOptions& options,
                                                      FlowConfig config);

}  // namespace saccade
