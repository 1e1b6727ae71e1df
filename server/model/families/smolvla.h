#pragma once
// SmolVLA (lerobot/smolvla_base and fine-tunes): lerobot 0.6 policies/smolvla. The checkpoint's own
// folder holds weights and statistics; sizes that tensors do not show and the tokenizer belong to
// the VLM it was made from, whose config.json and tokenizer.json stand in a folder inside of it:
// the one that vlm_model_name names, or "vlm". Without that config.json the sizes are
// SmolVLM2-500M's.
#include <memory>

#include "base/status.h"
#include "model/families/lerobot_policy.h"
#include "model/model.h"

namespace saccade {

bool IsSmolVla(const Checkpoint& checkpoint, const ModelOptions& options = {});
absl::StatusOr<PolicyConfig> ReadSmolVla(const Checkpoint& checkpoint);
// What add_image_special_tokens of config.json asks for: special tokens around every frame.
absl::Status AddImageTokens(PolicyConfig& config);
absl::StatusOr<std::unique_ptr<Model>> LoadSmolVla(const Checkpoint& checkpoint, Backend& backend,
                                                   const ModelOptions& options);

}  // namespace saccade
