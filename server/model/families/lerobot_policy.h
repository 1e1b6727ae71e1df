#pragma once
// A policy of lerobot: frames through a SigLIP tower and a projector, a prompt of frames, text and
// maybe state, and an answer over it: an action expert that denoises a chunk (SmolVLA, pi0, pi0.5),
// or FAST tokens that the trunk writes (pi0-FAST). A family reads its config.json into a
// PolicyConfig; the rest is one model.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
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
enum class PromptStyle : uint8_t {
  kLine,          // the instruction and a newline (SmolVLA, pi0)
  kTaskAndState,  // "Task: ..., State: 12 200 ...;\n", and `prompt_end` (pi0.5, pi0-FAST)
};

// Whose joints and grippers are turned between ALOHA and pi: the robot's own values, or those that
// are normalised (later releases).
enum class AlohaStage : uint8_t { kNever, kRobot, kNormalised };

// An answer in FAST tokens.
struct FastSpec {
  std::string dir;          // of the FAST tokenizer
  uint32_t vocabulary = 0;  // of the text tokenizer's model: what FAST ids count down from
  uint32_t skipped = 0;     // ids at its end
  uint32_t max_tokens = 0;  // of an answer
};

struct PolicyConfig {
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
  uint32_t horizon = 0;  // actions of a chunk
  // One of the two.
  std::optional<ExpertSpec> expert;
  std::optional<FastSpec> fast;
  SuffixMask mask = SuffixMask::kCausal;
  uint32_t action_width = 0;  // of a latent
  uint32_t steps = 0;
  uint32_t served_actions = 0;  // of a chunk, from its first one
  double min_period = 0;        // of the sinusoids of a flow time
  double max_period = 0;

  PromptStyle prompt = PromptStyle::kLine;
  std::string prompt_end;
  bool second_bos = false;  // behind the text
  std::string tokenizer_dir;
  uint32_t max_text = 0;  // tokens
  // Around every frame; ids of the trunk that embed without a scale. Empty: nothing is.
  std::vector<int32_t> before_frame;
  std::vector<int32_t> after_frame;

  std::vector<PolicyAdapters> adapters;   // at least one
  AlohaStage aloha = AlohaStage::kNever;  // else states and actions have kAlohaDim values or more
  uint32_t state_width = 0;               // of a state on the device

  uint32_t state_dim() const { return static_cast<uint32_t>(adapters.front().state.dim()); }
  uint32_t action_dim() const { return static_cast<uint32_t>(adapters.front().action.dim()); }
  bool state_in_prompt() const { return !trunk.state.empty(); }
  uint32_t vision_tokens() const { return tower.patches() / (shuffle * shuffle); }
  std::vector<TensorSpec> Tensors() const;
  size_t WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows, DType compute) const;
  size_t ParkingBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows) const;
  size_t DenoiseBytes(uint32_t items, DType compute) const {
    return expert ? expert->WorkspaceBytes(items, compute) : 0;
  }
  size_t DenoiseParkingBytes(uint32_t items) const {
    return expert ? expert->ParkingBytes(items) : 0;
  }
};

// Everything of the spec but fingerprint, compute and weight_bytes.
ModelSpec PolicySpec(const Checkpoint& checkpoint, const PolicyConfig& config);

// One line per tensor that is absent, mis-shaped, or not part of such a model.
std::vector<std::string> PolicyTensorProblems(const Checkpoint& checkpoint,
                                              const PolicyConfig& config);

// The words of a prompt for `instruction` and a normalised state. INVALID_ARGUMENT (field "state").
absl::StatusOr<std::string> PolicyText(const PolicyConfig& config, std::string_view instruction,
                                       std::span<const float> state);

// Tokens of text in a prompt for `instruction`, with a state of zeros.
absl::StatusOr<uint32_t> PolicyTextTokens(const PolicyConfig& config, std::string_view instruction);

absl::StatusOr<std::unique_ptr<Model>> LoadLerobotPolicy(const Checkpoint& checkpoint,
                                                         Backend& backend,
                                                         const ModelOptions& options,
                                                         PolicyConfig config);

}  // namespace saccade
