#pragma once
// OpenVLA-OFT: OpenVLA with several images and the robot's state in its prompt, full attention over
// all of it, and a chunk of actions out of one pass: by an L1 regression head over the hidden
// states of the chunk's places, or, without that, as the most likely ids of these places.
// Source: github.com/moojink/openvla-oft at 213c5ff, prismatic/extern/hf/modeling_prismatic.py
// (predict_action), prismatic/models/action_heads.py, projectors.py.
#include <memory>

#include "base/status.h"
#include "model/model.h"

namespace saccade {

// INVALID_ARGUMENT or UNIMPLEMENTED names the file and the key, tensor or setting that cannot be
// served exactly.
absl::StatusOr<std::unique_ptr<Model>> LoadOpenVlaOft(const Checkpoint& checkpoint,
                                                      Backend& backend,
                                                      const ModelOptions& options);

}  // namespace saccade
