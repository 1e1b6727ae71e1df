#pragma once
// A pre-norm vision transformer: frames to the patch features of one of its blocks, without the
// prefix tokens. Of timm (DINOv2, SigLIP; OpenVLA takes a block near the end, without a norm), or
// transformers' SigLIP (SmolVLA and pi take the last one behind post_layernorm).
//   h = [cls | registers | patch_embed(x) + pos_embed]
//   h += ls1 * proj(attention(qkv(norm1 h)));  h += ls2 * fc2(act(fc1(norm2 h)))
// Sources: timm 0.9 models/vision_transformer.py, transformers 4.57 models/siglip/
// modeling_siglip.py; names as in their state dicts.
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

enum class VitNames : uint8_t { kTimm, kSiglip };

struct VitSpec {
  VitNames names = VitNames::kTimm;  // kSiglip: no prefix tokens, no layer scale
  std::string prefix;                // of the tensor names, with its dot
  std::string tap;                   // of the stage names
  std::string pixels_tap;            // name of the stage of normalised pixels
  uint32_t image_size = 0;           // pixels, square
  uint32_t patch_size = 0;           // pixels
  uint32_t width = 0;
  uint32_t heads = 0;
  uint32_t mlp = 0;
  uint32_t depth = 0;         // blocks the tower has
  uint32_t blocks = 0;        // blocks that run, from the first
  uint32_t class_tokens = 0;  // 0 or 1
  uint32_t register_tokens = 0;
  bool layer_scale = false;
  bool final_norm = false;  // behind the last block that runs
  Activation activation = Activation::kGeluErf;
  float epsilon = 1e-6F;  // of every LayerNorm
  // Of each patch its row of the position table, which has `position_rows`; empty: one per patch.
  std::vector<uint32_t> positions;
  uint32_t position_rows = 0;
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
  // width] in the compute dtype or F32, rows may be strided. Stages: pixels_tap [G * patches, 3 *
  // patch_size^2]; <tap>.patch_embed, .block0.{in,attn,mlp,out}; attn and mlp before layer scale
  // and residual. Runs blocks [begin, end) of it. The residual stream lies in `kept` from its first
  // block to its last, which writes `out`.
  absl::Status Run(ExecContext& ctx, StageTap& tap, Arena& kept, uint32_t begin, uint32_t end,
                   const TensorView& rgb, const TensorView& out) const;

 private:
  struct Block {
    std::unique_ptr<Buffer> norm1_gamma, norm1_beta, norm2_gamma, norm2_beta;
    LinearLayer qkv, proj, fc1, fc2;
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
  std::unique_ptr<Buffer> positions_;                 // [patches, width]
  std::unique_ptr<Buffer> prefix_tokens_;             // [prefix_tokens, width]; null without
  std::unique_ptr<Buffer> final_gamma_, final_beta_;  // null without
  std::vector<Block> blocks_;
};

}  // namespace saccade
