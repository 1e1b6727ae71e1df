#pragma once
// OpenVLA's eyes: the towers side by side and the projector. Shared by the families whose frames
// become embeddings in this way.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "model/families/openvla_config.h"
#include "model/layers_tap.h"
#include "model/layers_vit.h"
#include "model/layers_weights.h"
#include "model/model.h"

namespace saccade {

// Owns the weights. Encode only enqueues work.
class OpenVlaVision {
 public:
  static absl::StatusOr<OpenVlaVision> Load(WeightLoader& loader, const OpenVlaConfig& config);

  // As Model::Encode; its layers are OpenVlaConfig::VisionLayers. Stages: those of the towers,
  // vision.features and vision.projected, frame after frame. `backend` is the one `ctx` runs on.
  absl::Status Encode(ExecContext& ctx, Backend& backend, const EncodeBatch& batch) const;

 private:
  struct ProjectorLayer {
    std::unique_ptr<PackedWeight> weight;
    std::unique_ptr<Buffer> bias;
  };

  explicit OpenVlaVision(DType compute) : compute_(compute) {}
  absl::Status Project(ExecContext& ctx, Arena& kept, uint32_t begin, uint32_t end,
                       const TensorView& features, std::span<const TensorView> out) const;

  DType compute_;
  uint32_t image_size_ = 0;
  uint32_t patches_ = 0;
  uint32_t features_ = 0;
  std::vector<VitTower> towers_;
  std::vector<ProjectorLayer> projector_;
};

}  // namespace saccade
