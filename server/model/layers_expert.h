#pragma once
// The action expert of a flow head: one denoise step for samples that each have a prefix of their
// own in the cache, from latents at a flow time to latents at the next one.
//   a = action_in(x), mixed with the embedding of the time (SmolVLA, pi0) or modulated by it
//   (pi0.5) h = decoder layers over [state row of pi0 | a]; x += dt * action_out(norm(h))
// A layer attends either to the prefix and the step's own rows, whose K and V go to scratch pages
// behind it in the same cache layer, or, with q alone, to a layer of the cache that the trunk has
// derived from the prefix. The residual stream and the ends (state, action, time) are F32.
// Sources: lerobot 0.6 policies/smolvla/smolvlm_with_expert.py, policies/pi0/modeling_pi0.py,
// policies/pi05/modeling_pi05.py; names as in their state dicts.
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

struct ExpertSpec {
  std::string prefix;    // of the names of layers and final norm, with its dot
  std::string ends;      // of action_in_proj, action_out_proj, state_proj, with its dot
  std::string time_mlp;  // what the time's two layers are called before "_in" and "_out"
  uint32_t hidden = 0;
  uint32_t layers = 0;
  uint32_t heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t intermediate = 0;
  double rope_theta = 10000.0;
  float epsilon = 1e-6F;   // of every RMSNorm
  bool unit_norm = false;  // a norm's gamma is 1 + its weight
  bool adaptive = false;   // norms take scale, shift and gate from the time; else it is mixed in
  Activation activation = Activation::kSilu;
  uint32_t horizon = 0;       // actions of a sample
  uint32_t action_width = 0;  // of a latent
  uint32_t state_width = 0;   // of the state of the row before the actions; 0: there is none
  // Per layer: -1, or the layer of the cache that holds the K and V of its prefix rows.
  std::vector<int32_t> cross;

  uint32_t rows() const { return horizon + (state_width > 0 ? 1 : 0); }  // of a sample
  std::vector<TensorSpec> Tensors() const;
  // One per layer; the ends count with the first and the last.
  std::vector<LayerCost> LayerCosts() const;
  // Of what a step that is cut keeps between layers.
  size_t ParkingBytes(uint32_t items) const;
  // Arena bytes that Denoise needs for that many samples, at no more flow times.
  size_t WorkspaceBytes(uint32_t items, DType compute) const;
};

// Owns the expert's weights. Denoise only enqueues work.
class ActionExpert {
 public:
  static absl::StatusOr<ActionExpert> Load(WeightLoader& loader, const ExpertSpec& spec);

  const ExpertSpec& spec() const { return spec_; }
  // Stages: step.x_t, step.v_t [A, action_width]; step.time_emb, step.adarms_cond [T, hidden];
  // step.suffix_embs [M, hidden]; step.suffix_out [A, hidden].
  absl::Status Denoise(ExecContext& ctx, StageTap& tap, const DenoiseBatch& batch) const;

 private:
  // The norm before a branch of a layer, and what the branch is multiplied with.
  struct Norm {
    std::unique_ptr<Buffer> gamma;  // null: adaptive
    LinearLayer dense;              // adaptive: time to [scale | shift | gate]
  };
  struct Layer {
    Norm norm1, norm2;
    std::unique_ptr<PackedWeight> qkv;  // q alone where the layer reads the prefix alone
    std::unique_ptr<PackedWeight> o, gate_up, down;
  };
  struct Scratch {
    TensorView h;           // [M, hidden] F32, kept between slices
    TensorView cond;        // [T, hidden] F32, kept between slices; adaptive only
    TensorView modulation;  // [T, 3 * hidden] F32; adaptive only
    TensorView branch;      // [M, hidden] F32; adaptive only
    TensorView norm, q, attention, mlp;
  };

  ActionExpert(const ExpertSpec& spec, DType compute) : spec_(spec), compute_(compute) {}
  absl::StatusOr<Norm> LoadNorm(WeightLoader& loader, const std::string& name) const;
  absl::Status Embed(ExecContext& ctx, StageTap& tap, const DenoiseBatch& batch,
                     const Scratch& s) const;
  // y = norm(x), whose rows are at the times row_time.
  absl::Status Normalize(ExecContext& ctx, const Norm& norm, const Scratch& s, const TensorView& x,
                         const TensorView& row_time, const TensorView& y) const;
  // h += branch(x), gated where the layer's norm (the last one normalised) says so.
  absl::Status AddBranch(ExecContext& ctx, const PackedWeight& weight, const TensorView& x,
                         const DenoiseBatch& batch, const Scratch& s) const;
  absl::Status RunLayer(ExecContext& ctx, uint32_t n, const DenoiseBatch& batch,
                        const Scratch& s) const;
  absl::Status Move(ExecContext& ctx, StageTap& tap, const DenoiseBatch& batch,
                    const Scratch& s) const;

  ExpertSpec spec_;
  DType compute_;
  LinearLayer action_in_, action_out_, time_in_, time_out_, state_;
  std::vector<Layer> layers_;
  Norm final_norm_;
};

}  // namespace saccade
