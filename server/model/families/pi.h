#pragma once
// pi0 and pi0.5 (lerobot/pi0_base, lerobot/pi05_base and fine-tunes): lerobot 0.6 policies/pi0 and
// policies/pi05. The sizes that tensors do not show (heads) follow from paligemma_variant and
// action_expert_variant, or stand in a tiny_dims.json of test checkpoints. The tokenizer,
// PaliGemma's, stands in the folder that policy_preprocessor.json names inside of the
// checkpoint's, or in "tokenizer".
#include <memory>

#include "base/status.h"
#include "model/families/flow_policy.h"
#include "model/model.h"

namespace saccade {

bool IsPi0(const Checkpoint& checkpoint);
bool IsPi05(const Checkpoint& checkpoint);
absl::StatusOr<FlowConfig> ReadPi(const Checkpoint& checkpoint);
absl::StatusOr<std::unique_ptr<Model>> LoadPi(const Checkpoint& checkpoint, Backend& backend,
                                              const ModelOptions& options);

}  // namespace saccade
