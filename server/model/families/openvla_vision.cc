#include "model/families/openvla_vision.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/strings.h"
#include "model/layers_scope.h"

namespace saccade {

absl::StatusOr<OpenVlaVision> OpenVlaVision::Load(WeightLoader& loader,
                                                  const OpenVlaConfig& config) {
  OpenVlaVision vision(loader.compute());
  vision.image_size_ = config.towers.front().image_size;
  vision.patches_ = config.vision_tokens();
  vision.features_ = config.features;
  for (const VitSpec& spec : config.towers) {
    ASSIGN_OR_RETURN(VitTower tower, VitTower::Load(loader, spec));
    vision.towers_.push_back(std::move(tower));
  }
  for (size_t i = 1; i < config.projector_widths().size(); ++i) {
    ProjectorLayer layer;
    ASSIGN_OR_RETURN(layer.weight, loader.Linear({StrCat("projector.fc", i, ".weight")}));
    ASSIGN_OR_RETURN(layer.bias, loader.Vector({StrCat("projector.fc", i, ".bias")}));
    vision.projector_.push_back(std::move(layer));
  }
  return vision;
}

// Layers [begin, end) of the projector.
absl::Status OpenVlaVision::Project(ExecContext& ctx, Arena& kept, uint32_t begin, uint32_t end,
                                    const TensorView& features,
                                    std::span<const TensorView> out) const {
  const int64_t patches = patches_;
  TensorView x = features;
  for (uint32_t i = 0; i < end; ++i) {
    const ProjectorLayer& layer = projector_[i];
    LinearArgs args;
    args.weight = layer.weight.get();
    args.bias = layer.bias->View(DType::kF32, {layer.weight->n()});
    if (i + 1 < projector_.size()) {
      ASSIGN_OR_RETURN(args.y, kept.New(compute_, {x.dim(0), layer.weight->n()}));
      args.x = x;
      args.activation = Activation::kGeluErf;
      if (i >= begin) RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, args));
      x = args.y;
      continue;
    }
    for (size_t g = 0; g < out.size(); ++g) {
      const auto first = static_cast<int64_t>(g) * patches;
      args.x = x.Rows(first, first + patches);
      args.y = out[g];
      RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, args));
    }
  }
  return absl::OkStatus();
}

absl::Status OpenVlaVision::Encode(ExecContext& ctx, Backend& backend,
                                   const EncodeBatch& batch) const {
  const auto frames = static_cast<int64_t>(batch.out.size());
  if (frames == 0) return absl::OkStatus();
  if (batch.rgb.rank != 4 || batch.rgb.dim(0) != frames || batch.rgb.dim(1) != image_size_ ||
      batch.rgb.dim(2) != image_size_) {
    return absl::InvalidArgumentError(
        StrCat("openvla: ", frames, " frames do not fit ", batch.rgb.DebugString()));
  }
  const ArenaScope scope(ctx.arena);
  StageTap tap(ctx, backend);
  const LayerRange& run = batch.layers;
  // What a later slice goes on with: laid out alike by every slice.
  std::optional<Arena> parked;
  if (run.parked != nullptr) parked.emplace(*run.parked);
  Arena& kept = parked.has_value() ? *parked : ctx.arena;
  ASSIGN_OR_RETURN(const TensorView features, kept.New(compute_, {frames * patches_, features_}));
  // The part of the range that lies in the next `count` layers.
  uint32_t first = 0;
  const auto part = [&](size_t count) {
    const auto until = first + static_cast<uint32_t>(count);
    const std::pair range(std::clamp(run.begin, first, until) - first,
                          std::clamp(run.end, first, until) - first);
    first = until;
    return range;
  };
  int64_t column = 0;
  for (const VitTower& tower : towers_) {
    const auto [begin, end] = part(tower.spec().blocks);
    const int64_t next = column + tower.spec().width;
    if (begin < end) {
      RETURN_IF_ERROR(
          tower.Run(ctx, tap, kept, begin, end, batch.rgb, features.Columns(column, next)));
    }
    column = next;
  }
  const auto [begin, end] = part(projector_.size());
  if (begin == end) return tap.Finish();
  if (begin == 0) RETURN_IF_ERROR(tap.Record("vision.features", features));
  RETURN_IF_ERROR(Project(ctx, kept, begin, end, features, batch.out));
  if (end < projector_.size()) return tap.Finish();
  for (const TensorView& out : batch.out) RETURN_IF_ERROR(tap.Record("vision.projected", out));
  return tap.Finish();
}

}  // namespace saccade
