#pragma once
// pi0, pi0.5 and pi0-FAST (lerobot/pi0_base, pi05_base, pi0fast-base and fine-tunes): lerobot 0.6
// policies/pi0, policies/pi05, policies/pi0_fast. The sizes that tensors do not show (heads) follow
// from paligemma_variant and action_expert_variant, or stand in a tiny_dims.json of test
// checkpoints. The tokenizer, PaliGemma's, stands in the folder that policy_preprocessor.json names
// inside of the checkpoint's, or in "tokenizer"; that of FAST in the one that action_tokenizer_name
// names, or in "fast_tokenizer".
#include <memory>

#include "base/status.h"
#include "model/families/lerobot_policy.h"
#include "model/model.h"

namespace saccade {

bool IsPi0(const Checkpoint& checkpoint, const ModelOptions& options = {});
bool IsPi05(const Checkpoint& checkpoint, const ModelOptions& options = {});
bool IsPi0Fast(const Checkpoint& checkpoint, const ModelOptions& options = {});
absl::StatusOr<PolicyConfig> ReadPi(const Checkpoint& checkpoint);
absl::StatusOr<std::unique_ptr<Model>> LoadPi(const Checkpoint& checkpoint, Backend& backend,
                                              const ModelOptions& options);

}  // namespace saccade
