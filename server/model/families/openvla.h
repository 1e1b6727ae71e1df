#pragma once
// OpenVLA (openvla/openvla-7b, openvla-v01 and fine-tunes): a fused DINOv2 + SigLIP or a single
// vision tower, an MLP projector, a Llama trunk, and actions as the last ids of its vocabulary.
// Source: github.com/openvla/openvla, prismatic/extern/hf/modeling_prismatic.py at c8f03f4.
#include <memory>

#include "base/status.h"
#include "model/model.h"

namespace saccade {

// INVALID_ARGUMENT names the file and the key, tensor or setting that cannot be served exactly.
absl::StatusOr<std::unique_ptr<Model>> LoadOpenVla(const Checkpoint& checkpoint, Backend& backend,
                                                   const ModelOptions& options);

}  // namespace saccade
