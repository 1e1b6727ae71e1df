#pragma once
// The parts of OpenVLA-OFT that stand beside the trunk. Each owns its weights; Run only enqueues
// work.
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/families/openvla_oft_config.h"
#include "model/layers_weights.h"
#include "model/model.h"

namespace saccade {

// fc2(gelu(fc1 s)): states to rows of the prompt.
class OftProprio {
 public:
  virtual ~OftProprio() = default;
  // states [S, state_dim] F32 to out [S, hidden] F32.
  virtual absl::Status Run(ExecContext& ctx, const TensorView& states,
                           const TensorView& out) const = 0;
};
absl::StatusOr<std::unique_ptr<OftProprio>> LoadProprio(WeightLoader& heads);

// Hidden states of the places of chunks to chunks.
class OftHead {
 public:
  virtual ~OftHead() = default;
  // hidden [chunks * read_rows, hidden] F32 to actions [chunks * chunk, action_dim] F32.
  virtual absl::Status Run(ExecContext& ctx, const TensorView& hidden,
                           const TensorView& actions) const = 0;
};

// Normalised actions: of each action's places together
//   x = relu(fc1(norm1 h));  x += relu(fc(norm x)), twice;  fc2(norm2 x)
absl::StatusOr<std::unique_ptr<OftHead>> LoadRegressionHead(WeightLoader& heads,
                                                            const OpenVlaOftConfig& config);
// The most likely id of each place, as a float; NaN where the logits held NaN or Inf.
absl::StatusOr<std::unique_ptr<OftHead>> LoadTokenHead(WeightLoader& checkpoint, Backend& backend,
                                                       Stream& stream,
                                                       const OpenVlaOftConfig& config);

}  // namespace saccade
