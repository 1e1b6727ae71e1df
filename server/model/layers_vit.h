#pragma once
// A pre-norm vision transformer of timm (DINOv2, SigLIP), as OpenVLA uses it: frames to the patch
// features of one block near the end, without the final norm and without the prefix tokens.
//   h = [cls | registers | patch_embed(x) + pos_embed]
//   h += ls1 * proj(attention(qkv(norm1 h)));  h += ls2 * fc2(act(fc1(norm2 h)))
// Sources: timm 0.9 models/vision_transformer.py; names as in a timm state dict.
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/layers_tap.h"
#include "model/layers_weights.h"
#include "model/model.h"
#include "tensor/ops.h"

namespace saccade {

struct VitSpec {
  std::string prefix;       // of the tensor names, with its dot
  std::string tap;          // of the stage names
  std::string pixels_tap;   // name of the stage of normalised pixels
  uint32_t image_size = 0;  // pixels, square
  uint32_t patch_size = 0;  // pixels
  uint32_t width = 0;
  uint32_t heads = 0;
  uint32_t mlp = 0;
  uint32_t depth = 0;         // blocks the tower has
  uint32_t blocks = 0;        // blocks that run, from the first
  uint32_t class_tokens = 0;  // 0 or 1
  uint32_t register_tokens = 0;
  bool layer_scale = false;
  Activation activation = Activation::kGeluErf;
  float epsilon = 1e-6F;        // of every LayerNorm
  std::array<float, 3> mean{};  // (x / 255 - mean) / std per channel
  std::array<float, 3> std{};

  uint32_t patches() const { return (image_size / patch_size) * (image_size / patch_size); }
  uint32_t prefix_tokens() const { return class_tokens + register_tokens; }
  uint32_t rows() const { return prefix_tokens() + patches(); }  // of one frame
  uint32_t patch_values() const { return 3 * patch_size * patch_size; }
  // What Load reads; blocks that never run are not in it.
  std::vector<TensorSpec> Tensors() const;
  // One per block that runs; the patches count with the first.
  std::vector<LayerCost> LayerCosts() const;
  // Of the residual stream between blocks.
  size_t ParkingBytes(uint32_t frames) const;
  // Arena bytes that Run needs for that many frames.
  size_t WorkspaceBytes(uint32_t frames, DType compute) const;
};

// Owns the tower's weights. Run only enqueues work.
class VitTower {
 public:
  static absl::StatusOr<VitTower> Load(WeightLoader& loader, const VitSpec& spec);

  const VitSpec& spec() const { return spec_; }
  // rgb [G, image_size, image_size, 3] U8 or F32 (device; see Ops::Patchify) to out [G * patches,
  // width] in the compute dtype, rows may be strided. Stages: pixels_tap [G * patches, 3 *
  // patch_size^2]; <tap>.patch_embed, .block0.{in,attn,mlp,out}; attn and mlp before layer scale
  // and residual. Runs blocks [begin, end) of it. The residual stream lies in `kept` from its first
  // block to its last, which writes `out`.
  absl::Status Run(ExecContext& ctx, StageTap& tap, Arena& kept, uint32_t begin, uint32_t end,
                   const TensorView& rgb, const TensorView& out) const;

 private:
  struct Block {
    std::unique_ptr<Buffer> norm1_gamma, norm1_beta, norm2_gamma, norm2_beta;
    std::unique_ptr<PackedWeight> qkv, proj, fc1, fc2;
    std::unique_ptr<Buffer> qkv_bias, proj_bias, fc1_bias, fc2_bias;
    std::unique_ptr<Buffer> scale1, scale2;  // null without layer scale
  };
  struct Scratch {
    TensorView h, norm, qkv, attention, mlp;
  };

  VitTower(const VitSpec& spec, DType compute) : spec_(spec), compute_(compute) {}
  absl::Status Embed(ExecContext& ctx, StageTap& tap, const TensorView& rgb,
                     const TensorView& h) const;
  absl::Status RunBlock(ExecContext& ctx, StageTap& tap, const Block& block, const Scratch& s,
                        bool tapped) const;
  TensorView Vec(const std::unique_ptr<Buffer>& buffer) const;

  VitSpec spec_;
  DType compute_;
  std::unique_ptr<PackedWeight> patch_weight_;
  std::unique_ptr<Buffer> patch_bias_;
  std::unique_ptr<Buffer> positions_;      // [patches, width]
  std::unique_ptr<Buffer> prefix_tokens_;  // [prefix_tokens, width]; null without
  std::vector<Block> blocks_;
};

}  // namespace saccade
